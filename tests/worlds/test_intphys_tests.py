"""Quadruplets: that they are what they say, and that nothing but memory tells them apart."""

import pytest
import torch

from scoff.worlds.intphys import BLOCKS, VISIBILITIES, QuadrupletError, quadruplets
from scoff.worlds.intphys.metrics import relative_errors
from scoff.worlds.intphys.oracles import (
    copy_scores,
    frame_scores,
    state_scores,
    track_scores,
)
from scoff.worlds.intphys.quadruplets import MIN_HIDDEN
from scoff.worlds.intphys.scenes import FIRST_ELEMENT

CELLS = [(block, visibility) for block in BLOCKS for visibility in VISIBILITIES]


@pytest.fixture(scope="module")
def tests():
    """Three of each kind: static, dynamic 1 and dynamic 2"""
    index = torch.arange(3)
    return {
        (block, visibility): quadruplets(0, index, block, visibility, depth=True)
        for block, visibility in CELLS
    }


@pytest.fixture(scope="module")
def movies(tests):
    return {cell: test.movies() for cell, test in tests.items()}


def error(scores, test):
    return float(relative_errors(scores, test.possible).mean())


occluded = pytest.mark.parametrize("cell", [(block, "occluded") for block in BLOCKS])
every = pytest.mark.parametrize("cell", CELLS)


@every
def test_all_four_have_the_same_frames_at_the_same_times(tests, movies, cell):
    test, clips = tests[cell], movies[cell]
    for part in clips:
        for n in range(len(test.number)):
            good, bad = part[n][test.possible[n]], part[n][~test.possible[n]]
            straight = (good[0] == bad[0]).flatten(1).all(1) & (good[1] == bad[1]).flatten(1).all(1)
            crossed = (good[0] == bad[1]).flatten(1).all(1) & (good[1] == bad[0]).flatten(1).all(1)
            assert (straight | crossed).all()
            assert not straight.all()
            assert not crossed.all()


@every
def test_each_impossible_movie_starts_as_one_that_is_possible(tests, movies, cell):
    test, frames = tests[cell], movies[cell].frames
    for n in range(len(test.number)):
        for i in range(4):
            for j in range(4):
                until = int(test.cuts[n, 0])
                alike = torch.equal(frames[n, i, :until], frames[n, j, :until])
                assert alike == bool(test.start[n, i] == test.start[n, j])


@occluded
def test_cuts_are_where_both_runs_are_the_same(tests, cell):
    test = tests[cell]
    alike = test.runs
    same = (alike.frames[0] == alike.frames[1]).flatten(2).all(2)
    same &= (alike.identity[0] == alike.identity[1]).flatten(2).all(2)
    same &= (alike.depth[0] == alike.depth[1]).flatten(2).all(2)
    for n, (cuts, hidden) in enumerate(zip(test.cuts.tolist(), test.hidden.tolist(), strict=True)):
        times = [(cut, length) for cut, length in zip(cuts, hidden, strict=True) if cut]
        assert len(times) == (2 if test.movement[n] == 2 else 1)
        for cut, length in times:
            assert length >= MIN_HIDDEN
            assert same[n, cut - 1]
            assert same[n, cut]
            first = last = cut
            while same[n, first - 1]:
                first -= 1
            while same[n, last + 1]:
                last += 1
            assert last - first + 1 == length
            seen = (alike.identity[0, n] == FIRST_ELEMENT + test.magic[n]).flatten(1).any(1)
            assert seen[:first].any()
            assert not seen[first : last + 1].any()
            assert seen[last + 1 :].any()


@every
def test_single_frames_tell_nothing(tests, movies, cell):
    assert error(frame_scores(movies[cell].frames), tests[cell]) == 0.5


@occluded
@pytest.mark.parametrize("lag", [1, 2, MIN_HIDDEN])
def test_pairs_of_frames_tell_nothing_when_occluded(tests, movies, cell, lag):
    scores = copy_scores(movies[cell].frames, lag)
    assert (relative_errors(scores, tests[cell].possible, tolerance=0) == 0.5).all()


def test_frames_far_apart_tell_it_when_nothing_moves(tests, movies):
    for block in BLOCKS:
        test, clips = tests[block, "occluded"], movies[block, "occluded"]
        still = test.movement == 0
        errors = relative_errors(copy_scores(clips.frames, 64), test.possible)
        assert (errors[still] == 0).all()


def test_a_jump_that_is_seen_is_seen_between_two_frames(tests, movies):
    for block in BLOCKS:
        assert error(copy_scores(movies[block, "visible"].frames), tests[block, "visible"]) == 0


@every
def test_who_knows_the_truth_is_never_wrong(tests, cell):
    scores = state_scores(tests[cell])
    assert (relative_errors(scores, tests[cell].possible) == 0).all()
    assert (scores[tests[cell].possible] == 0).all()
    assert (scores[~tests[cell].possible] < 0).all()


def test_who_follows_objects_is_seldom_wrong_and_without_memory_no_better_than_chance(
    tests, movies
):
    errors = []
    for cell, test in tests.items():
        errors.append(error(track_scores(movies[cell].identity, memory=100), test))
        if cell[1] == "occluded":
            shorter = int(test.hidden[test.hidden > 0].min()) - 1
            scores = track_scores(movies[cell].identity, memory=shorter)
            assert (relative_errors(scores, test.possible) == 0.5).all()
    assert sum(errors) / len(errors) < 0.1


@occluded
def test_noise_that_a_run_keeps_would_be_found(tests, cell):
    """One grey level, the same in all frames of a run: what real renders have, and what leaks."""
    test = tests[cell]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-1, 2, (2, 1, 1, *test.runs.frames.shape[3:]), generator=generator)
    noisy = (test.runs.frames.int() + noise).clamp(0, 255).to(torch.uint8)
    scores = copy_scores(test.splice(noisy))
    assert (relative_errors(scores, test.possible) == 0).all()


# --- as functions


def test_the_same_numbers_give_the_same_tests(tests):
    test = tests["O2", "occluded"]
    again = quadruplets(0, torch.tensor([2, 1]), "O2")
    for place, number in enumerate([2, 1]):
        assert torch.equal(again.runs.frames[:, place], test.runs.frames[:, number])
        assert torch.equal(again.source[place], test.source[number])
    assert again.runs.depth is None
    other = quadruplets(0, torch.tensor([1]), "O2", split="valid")
    assert not torch.equal(other.runs.frames[:, 0], test.runs.frames[:, 1])


def test_min_hidden_makes_it_harder():
    hard = quadruplets(0, torch.arange(3), "O1", min_hidden=12, pixels=32)
    assert (hard.hidden[hard.cuts > 0] >= 12).all()


def test_folders_tell_nothing():
    order = quadruplets(1, torch.arange(0, 150, 3), "O3", "visible", pixels=8, frames=40).possible
    share = order.float().mean(0)
    assert ((share > 0.3) & (share < 0.7)).all()


def test_what_cannot_be_made_is_refused():
    with pytest.raises(QuadrupletError, match="dynamic_1 scene of O1 hides its object for 90"):
        quadruplets(0, torch.tensor([1]), "O1", min_hidden=90, pixels=8)
    with pytest.raises(ValueError, match="block: got 'O4', wants one of 'O1'"):
        quadruplets(0, torch.tensor([0]), "O4")
    with pytest.raises(ValueError, match="min_hidden: got 1, wants an integer of at least 4"):
        quadruplets(0, torch.tensor([0]), "O1", min_hidden=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every
def test_a_gpu_makes_the_same_tests(tests, cell):
    test = tests[cell]
    there = quadruplets(0, test.number.cuda(), *cell, depth=True)
    for one, other in zip(test.runs, there.runs, strict=True):
        assert torch.equal(one, other.cpu())
    assert torch.equal(test.source, there.source.cpu())
