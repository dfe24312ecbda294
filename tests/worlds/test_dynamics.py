import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoff.worlds.dynamics import (
    ACCELERATE,
    BULBS,
    CONSTANT,
    DISTANCE,
    FLOOR,
    HORIZONTAL,
    LIT,
    PIXELS,
    RADIUS,
    RANDOM_WALK,
    SPEED,
    UNLIT,
    VERTICAL,
    stack_frames,
    switching_dynamics,
    switching_trajectories,
    three_dynamics,
    three_trajectories,
)

from .test_adding import SPLITS, OnDevice
from .test_balls import kolmogorov, pick, same
from .test_random import deviation

WORLDS = {"three": three_dynamics, "switching": switching_dynamics}
TRUTH = {"three": three_trajectories, "switching": switching_trajectories}
CLIPS = {name: world(0, torch.arange(60)) for name, world in WORLDS.items()}
MANY = torch.arange(3000)


# --- both


def change(truth):
    """The first frame that is left by the second dynamics  [N]"""
    return (truth.dynamics != truth.dynamics[:, :1]).int().argmax(1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=9), st.sampled_from(list(WORLDS)))
def test_a_clip_depends_on_its_index_alone(chosen, name):
    assert same(WORLDS[name](0, torch.tensor(chosen)), pick(CLIPS[name], chosen))


@pytest.mark.parametrize("name", WORLDS)
def test_splits_and_seeds_share_no_clip(name):
    world = TRUTH[name]
    starts = [world(0, MANY[:900], 3, split) for split in SPLITS] + [world(1, MANY[:900], 3)]
    first = torch.cat([clips.position[:, 0] for clips in starts])
    assert first.unique(dim=0).shape[0] == 3600


def digest(frames):
    pictures = frames.mul(255).round().byte()
    return hashlib.sha256(pictures.numpy().tobytes()).hexdigest()[:16]


def test_clips_stay_what_they_are():
    # runs of an earlier version must stay comparable
    golden = {"three": "317ea8434f3b7b12", "switching": "69524f828e2e8833"}
    for name, expected in golden.items():
        assert digest(CLIPS[name].frames[:6]) == expected, name


def test_up_to_the_change_clips_are_what_they_were_when_it_led_elsewhere():
    clips = CLIPS["switching"]
    is_before = torch.arange(51) <= change(clips)[:, None]
    assert digest((clips.frames * is_before[..., None, None, None])[:6]) == "f2903cd51ba23999"


@pytest.mark.parametrize(("name", "low"), [("three", PIXELS), ("switching", FLOOR)])
def test_pictures_match_the_state(name, low):
    clips = CLIPS[name]
    assert clips.frames.dtype == torch.float32
    assert clips.frames.min() == 0
    assert clips.frames.max() == 1
    picture = clips.frames[:, :, 0, : int(low)]  # above the bulbs
    axis = torch.arange(PIXELS) + 0.5
    mass = picture.sum((2, 3))
    assert mass.mean().item() == pytest.approx(math.pi * RADIUS**2, rel=5e-3)
    assert (mass / (math.pi * RADIUS**2) - 1).abs().max() < 0.02
    x = (picture * axis).sum((2, 3)) / mass
    y = (picture * axis[: int(low), None]).sum((2, 3)) / mass
    # a ball at the edge of the picture loses the half pixel of its rim that is outside
    assert (torch.stack([x, y], -1) - clips.position).abs().max() < 0.06
    shown = clips.identity.float()
    assert (shown.sum((2, 3)) / (math.pi * RADIUS**2) - 1).abs().max() < 0.1
    assert torch.equal(clips.identity[:, :, : int(low)] > 0, picture > 0.5)
    assert shown[:, :, int(low) :].sum() == 0


@pytest.mark.parametrize("name", WORLDS)
def test_balls_stay_in_the_picture(name):
    position = TRUTH[name](1, MANY).position
    assert position.min() >= RADIUS - 1e-4
    assert position[..., 0].max() <= PIXELS - RADIUS + 1e-4
    assert position[..., 1].max() <= (FLOOR if name == "switching" else PIXELS) - RADIUS + 1e-4


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_goes_through_the_host(name):
    with OnDevice():
        clips = WORLDS[name](0, torch.arange(6, device="meta"))
        stack_frames(clips.frames)


@pytest.mark.parametrize("name", WORLDS)
def test_errors_name_the_argument(name):
    with pytest.raises(ValueError, match="frames: got 2, wants an integer of at least 3"):
        WORLDS[name](0, MANY, 2)
    with pytest.raises(ValueError, match="split: got 'dev', wants one of 'train', 'valid', 'test'"):
        WORLDS[name](0, MANY, split="dev")  # pyright: ignore
    with pytest.raises(ValueError, match="seed: got -1"):
        WORLDS[name](-1, MANY)


# --- three dynamics


def test_each_kind_moves_as_it_should():
    truth = three_trajectories(2, MANY)
    position = truth.position.double()
    step = position.diff(dim=1)  # [N, T - 1, 2]
    assert torch.equal(truth.dynamics, (MANY % 3)[:, None].expand(-1, 20))
    assert truth.markers.shape == (3000, 20, 0)

    accelerated = step[ACCELERATE::3]
    change = accelerated.diff(dim=1)
    assert (change - change.mean(1, keepdim=True)).abs().max() < 1e-4  # of float32
    assert change.norm(dim=-1).min() > 0.1
    # from rest: half a step's acceleration in the first
    assert (accelerated[:, 0] - change.mean(1) / 2).abs().max() < 1e-4
    assert truth.velocity[ACCELERATE::3, 0].abs().max() == 0

    constant = step[CONSTANT::3]
    assert constant.diff(dim=1).abs().max() < 1e-4
    assert (truth.velocity[CONSTANT::3, :-1] - constant).abs().max() < 1e-4

    walk = step[RANDOM_WALK::3]
    length = walk.norm(dim=-1)
    assert (length - length[:, :1]).abs().max() < 1e-4
    assert (truth.velocity[RANDOM_WALK::3, :-1] - walk).abs().max() < 1e-4
    turn = (walk[:, 1:] * walk[:, :-1]).sum(-1) / length[:, 1:] ** 2
    assert abs(turn.mean()) < 0.05  # a step says nothing about the next, but near walls
    angle = torch.atan2(walk[..., 1], walk[..., 0]).flatten()
    assert abs(deviation(((angle / math.pi + 1) * 8).long().clamp(0, 15).bincount())) < 4


def test_velocity_is_that_of_the_motion():
    truth = three_trajectories(2, MANY)
    between = (truth.velocity[:, 1:] + truth.velocity[:, :-1])[ACCELERATE::3] / 2
    assert (between - truth.position.diff(dim=1)[ACCELERATE::3]).abs().max() < 1e-4


def test_only_the_motion_tells_the_kinds_apart():
    truth = three_trajectories(3, torch.arange(9000))
    path = truth.position.diff(dim=1).norm(dim=-1).sum(1)
    low, high = DISTANCE
    assert path.min() > low - 1e-3
    assert path.max() < high + 1e-3
    for kind in (ACCELERATE, CONSTANT, RANDOM_WALK):
        sample = path[kind::3].sort().values
        assert kolmogorov(sample, (sample - low) / (high - low)) < 1.95
        where = truth.position[kind::3, 0]
        assert (where.mean(0) - PIXELS / 2).abs().max() < 1.2  # four standard errors
        assert (where.std(0) - truth.position[:, 0].std(0)).abs().max() < 1.0


def test_any_number_of_frames():
    for frames in (3, 7, 100):
        assert three_dynamics(0, MANY[:9], frames).frames.shape == (9, frames, 1, 64, 64)
        step = three_trajectories(0, MANY, frames).position.diff(dim=1).norm(dim=-1)[RANDOM_WALK::3]
        assert (step - step[:, :1]).abs().max() < 1e-3


# --- switching dynamics


def test_one_axis_moves_at_a_time_and_changes_once_near_the_middle():
    truth = switching_trajectories(1, MANY)
    assert truth.position.shape == (3000, 51, 2)
    changed = truth.dynamics.diff(dim=1) != 0
    assert (changed.sum(1) == 1).all()
    switch = change(truth)
    assert abs(deviation(switch.bincount()[20:])) < 4
    assert (switch.min().item(), switch.max().item()) == (20, 30)
    assert torch.equal(truth.dynamics[:, 0], MANY % 2)
    step = truth.position.diff(dim=1)
    axis = truth.dynamics[:, :-1]
    idle = step.gather(2, 1 - axis[..., None])
    assert idle.abs().max() == 0
    moving = step.gather(2, axis[..., None])
    assert moving.abs().min(1).values.max() > 1  # it does move


def test_the_ball_goes_to_and_fro_at_one_speed():
    truth = switching_trajectories(1, MANY)
    along = truth.dynamics[..., None]
    speed = truth.velocity.gather(2, along)[..., 0].abs()
    assert (speed - speed[:, :1]).abs().max() < 1e-5
    assert truth.velocity.gather(2, 1 - along).abs().max() == 0
    sample = speed[:, 0].sort().values
    assert kolmogorov(sample, (sample - SPEED[0]) / (SPEED[1] - SPEED[0])) < 1.95
    # literally: one step after another, turned at the walls
    high = torch.tensor([PIXELS - RADIUS, FLOOR - RADIUS]).double()
    position, velocity = truth.position.double(), truth.velocity.double()
    there = position[:, :-1] + velocity[:, :-1]
    beyond = torch.maximum(there - high, RADIUS - there).amax(-1)
    there = torch.where(there > high, 2 * high - there, there)
    there = torch.where(there < RADIUS, 2 * RADIUS - there, there)
    assert (there - position[:, 1:]).abs().max() < 1e-4
    sure = beyond.abs() > 1e-4  # of float32, as they are told
    assert torch.equal(truth.bounces[:, 1:][sure], (beyond > 0).long()[sure])
    assert truth.bounces[:, 0].max() == 0 < truth.bounces.max()


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 120), st.sampled_from(SPLITS))
def test_at_the_change_it_turns_to_the_same_side_and_keeps_its_speed(seed, frames, split):
    truth = switching_trajectories(seed, MANY[:500], frames, split)
    clip, at = MANY[:500], change(truth)
    before, after = truth.velocity[clip, at - 1], truth.velocity[clip, at]
    assert (before * after).sum(-1).abs().max() == 0  # a right angle
    assert torch.equal(after, before.abs().flip(-1))  # downwards or to the right


def test_a_wall_next_to_the_change_turns_the_ball_back():
    truth = switching_trajectories(1, MANY)
    at = change(truth)
    here, there, velocity = (
        part[MANY, number].double().gather(1, truth.dynamics[MANY, at, None])[:, 0]
        for part, number in ((truth.position, at), (truth.position, at + 1), (truth.velocity, at))
    )
    next_velocity = truth.velocity[MANY, at + 1].sum(-1)
    wall = torch.where(truth.dynamics[MANY, at] == HORIZONTAL, PIXELS, FLOOR) - RADIUS
    meets = here + velocity > wall
    assert meets.sum() > 100
    assert (there - (2 * wall - here - velocity))[meets].abs().max() < 1e-4
    assert (next_velocity + velocity)[meets].abs().max() == 0
    assert (there - here - velocity)[~meets].abs().max() < 1e-4
    assert (next_velocity - velocity)[~meets].abs().max() == 0


def test_the_bulb_of_what_is_in_force_is_lit():
    clips = CLIPS["switching"]
    assert torch.equal(clips.markers.int().argmax(-1), clips.dynamics)
    assert (clips.markers.sum(-1) == 1).all()
    for kind in (HORIZONTAL, VERTICAL):
        x, y = map(int, BULBS[kind])
        assert x < PIXELS / 4
        assert y > 3 * PIXELS / 4
        light = clips.frames[:, :, 0, y - 1 : y + 1, x - 1 : x + 1]
        expected = torch.where(clips.dynamics == kind, LIT, UNLIT)[..., None, None]
        assert torch.equal(light, expected.expand_as(light))
    below = clips.frames[:, :, 0, int(FLOOR) :]
    assert (below > 0).sum() == 60 * 51 * 2 * 32  # two bulbs of 32 pixels, and nothing else


def test_stacked_frames_are_the_last_ones():
    frames = CLIPS["switching"].frames
    stacked = stack_frames(frames, 5)
    assert stacked.shape == (60, 47, 5, 64, 64)
    for last in (4, 30, 50):
        assert torch.equal(stacked[:, last - 4], frames[:, last - 4 : last + 1, 0])
    coloured = torch.rand(2, 6, 3, 4, 4)
    expected = torch.cat([coloured[:, 1], coloured[:, 2]], 1)
    assert torch.equal(stack_frames(coloured, 2)[:, 1], expected)
    for count in (0, 52):
        with pytest.raises(ValueError, match=f"count: got {count}, wants from 1 to 51"):
            stack_frames(frames, count)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORLDS)
def test_the_gpu_makes_the_same_clips(name):
    index = MANY[:500]
    expected, got = WORLDS[name](9, index), WORLDS[name](9, index.cuda())
    for a, b in zip(got, expected, strict=True):
        assert a.is_cuda
        if b.is_floating_point():
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-5)
        elif b.dtype != torch.uint8:
            assert torch.equal(a.cpu(), b)
    assert (got.identity.cpu() != expected.identity).float().mean() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORLDS)
def test_a_cuda_graph_makes_the_same_clips(name):
    world, index = WORLDS[name], torch.arange(16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        world(9, index)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clips = world(9, index)
    index.copy_(torch.arange(1000, 1016))
    graph.replay()
    assert same(clips, world(9, index.clone()))
