"""Schemata that compete for clips: who wins, how clips are moved, and that it makes them divide."""

import warnings
from dataclasses import replace

import pytest
import torch

from scoff.experiments.dynamics import Config, DynamicsTask, divide
from scoff.experiments.rivalry import compete, miss, move, share_out, shift
from scoff.training.errors import UsageError
from scoff.worlds.dynamics import three_dynamics

CPU = torch.device("cpu")
SMALL = Config(hidden_size=12, features=8, frames=10, context=6, valid_clips=3, rivalry=0.01)


def test_who_predicts_best_wins_whatever_the_shares():
    """Where schemata differ clearly, one may well win more clips of a batch than another."""
    truth = torch.tensor([0] * 20 + [1] * 8 + [2] * 4)
    errors = torch.where(truth == torch.arange(3)[:, None], 0.1, 0.3) + 0.01 * torch.rand(3, 32)
    assert torch.equal(share_out(errors), truth)


def test_nobody_wins_all_by_being_better_at_all():
    generator = torch.Generator().manual_seed(0)
    errors = 0.05 * torch.rand(3, 60, generator=generator)
    errors[0] -= 0.1  # better by more than clips differ
    shares = share_out(errors).bincount(minlength=3)
    assert shares.min() >= 5
    # what each wins are the clips at which it is best, compared with its mean
    relative = errors - errors.mean(1, keepdim=True)
    won = relative.gather(0, share_out(errors)[None]).mean()
    assert won < relative.mean() - 0.005


def test_equal_errors_are_shared_out_without_harm():
    assert share_out(torch.full((3, 6), 0.2)).shape == (6,)


def test_scale_and_names_do_not_matter():
    errors = torch.rand(4, 30, dtype=torch.float64)
    winner = share_out(errors)
    assert torch.equal(share_out(1e-3 * errors + 5), winner)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(order[share_out(errors[order])], winner)


def test_clips_are_turned_as_a_whole_in_all_eight_ways():
    torch.manual_seed(0)
    picture = torch.arange(1, 10.0).view(1, 1, 1, 3, 3)  # lit all over: there is no room for shifts
    seen = move(picture.expand(200, 2, 1, 3, 3))
    assert torch.equal(seen[:, 0], seen[:, 1])
    found = {tuple(clip.flatten().tolist()) for clip in seen[:, 0]}
    square = picture[0, 0, 0]
    ways = {
        tuple(x.rot90(k, (-2, -1)).flatten().tolist())
        for k in range(4)
        for x in (square, square.mT)
    }
    assert found == ways
    assert len(ways) == 8


def test_clips_are_shifted_wherever_nothing_leaves_the_picture():
    torch.manual_seed(0)
    clip = torch.zeros(1, 2, 1, 5, 6)
    clip[0, 0, 0, 1, 2], clip[0, 1, 0, 2, 2] = 0.5, 1.0  # moves by a row
    places = set()
    for seen in shift(clip.expand(200, -1, -1, -1, -1)):
        (where,) = seen[0, 0].nonzero().tolist()
        assert seen[1, 0].nonzero().tolist() == [[where[0] + 1, where[1]]]
        assert seen.sum() == clip.sum()
        places.add(tuple(where))
    assert places == {(row, 2) for row in range(4)}


def test_a_ball_stays_a_ball_and_keeps_its_way_to_move():
    frames = three_dynamics(0, torch.arange(12)).frames
    torch.manual_seed(0)
    seen = move(frames)
    torch.testing.assert_close(seen.sum((2, 3, 4)), frames.sum((2, 3, 4)))

    def steps(clips):
        """How far the ball goes from frame to frame"""
        light = clips[:, :, 0]
        at = torch.arange(64.0)
        centre = torch.stack([(light.sum(axis) * at).sum(-1) for axis in (-2, -1)], -1)
        return (centre / light.sum((-2, -1))[..., None]).diff(dim=1).norm(dim=-1)

    torch.testing.assert_close(steps(seen), steps(frames), atol=1e-3, rtol=0)
    assert not torch.equal(seen, frames)


def test_dark_clips_stay_dark():
    assert move(torch.zeros(3, 2, 1, 4, 4)).eq(0).all()


def test_what_is_missed_is_the_winner():
    choices = torch.tensor([0.5, 0.25, 0.25]).expand(4, 6, 1, 3)
    winner = torch.tensor([0, 0, 1, 2])
    expected = -torch.tensor([0.5, 0.5, 0.25, 0.25]).log().mean()
    torch.testing.assert_close(miss(choices, winner), expected)


@pytest.mark.parametrize("changes", [{}, {"stack": 3}])
def test_the_loss_is_that_of_own_choices_of_winners_and_of_what_was_missed(changes):
    task = DynamicsTask(replace(SMALL, **changes), CPU)
    model = task.model.eval()  # without noise
    batch = task.batch(torch.arange(6))
    torch.manual_seed(1)
    loss, parts = task.loss(model, batch)
    expected = 0.1 * parts["nll"] + parts["won"] + 0.01 * parts["missed"]
    torch.testing.assert_close(loss, expected)
    # the same by hand: each clip, as it is and turned, by one schema after the other
    torch.manual_seed(1)
    stack, frames = task.config.stack, torch.cat([batch[0], move(batch[0])])
    errors = []
    for schema in range(3):
        choice = torch.full((12, frames.shape[1] - stack, 1), schema)
        told = model(frames[:, :-1], targets=frames[:, stack:], choice=choice)
        errors.append(told.errors.mean(1).view(2, 6).mean(0))
    errors = torch.stack(errors)
    won = errors.gather(0, share_out(errors)[None]).mean()
    torch.testing.assert_close(parts["won"], won)
    own = model(frames[:, :-1], targets=frames[:, stack:]).errors.mean()
    torch.testing.assert_close(parts["nll"], own)


def test_all_schemata_learn_to_predict_and_to_be_chosen():
    task = DynamicsTask(SMALL, CPU)
    loss, _ = task.loss(task.model, task.batch(torch.arange(12)))
    loss.backward()
    cell = task.model.rnn.cells[0]
    for schema in range(3):
        assert cell.weight_hh.grad[schema].abs().sum() > 0
    assert cell.schema_query.grad.abs().sum() > 0
    assert cell.schema_key.grad.abs().sum() > 0


def test_other_layers_do_not_compete():
    for changes in ({"model": "gru"}, {"schemata": 1}):
        task = DynamicsTask(replace(SMALL, **changes), CPU)
        assert task.loss(task.model, task.batch(torch.arange(2)))[1] == {}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rivalry": -1.0}, "--rivalry: got -1.0, wants at least 0"),
        ({"cell": "lstm"}, "--cell: got lstm, wants gru with --rivalry"),
        ({"free_frames": 2}, "--free-frames: got 2, wants 0 with --rivalry"),
        ({"information": 0.1}, "--information: got 0.1, wants 0 with --rivalry"),
    ],
)
def test_bad_settings_are_refused(changes, told):
    with pytest.raises(UsageError, match=told):
        replace(SMALL, **changes)


@pytest.mark.gpu
def test_competing_is_one_graph():
    """Nothing waits for the GPU."""
    config = replace(divide("scoff"), batch_size=6)
    device = torch.device("cuda")
    task = DynamicsTask(config, device)
    model = task.model.to(device)
    frames = three_dynamics(0, torch.arange(6, device=device)).frames
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        errors, rivals = compete(model, frames, config.stack, 1, 3)
        (errors.mean() + rivals.won + rivals.missed).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert errors.isfinite().all()
