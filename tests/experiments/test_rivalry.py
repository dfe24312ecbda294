"""Schemata that compete for clips: who wins, what is learned of it, and how clips are moved."""

import warnings
from dataclasses import replace

import pytest
import torch

from scoff.experiments.dynamics import Config, DynamicsTask, divide
from scoff.experiments.evaluate import load
from scoff.experiments.rivalry import compete, miss, move, share_out, shift
from scoff.pretrained import find
from scoff.training.errors import UsageError
from scoff.training.run import Run
from scoff.worlds.dynamics import three_dynamics

CPU = torch.device("cpu")
SMALL = Config(hidden_size=12, features=8, frames=10, context=6, valid_clips=3, rivalry=0.01)


@pytest.mark.parametrize(("counts", "right"), [((16, 10, 6), 1.0), ((20, 8, 4), 0.85)])
def test_who_predicts_best_wins_though_shares_differ(counts, right):
    """Where schemata differ clearly, one may well win more clips of a batch than another."""
    torch.manual_seed(0)
    truth = torch.arange(3).repeat_interleave(torch.tensor(counts))
    errors = torch.where(truth == torch.arange(3)[:, None], 0.1, 0.3) + 0.01 * torch.rand(3, 32)
    assert (share_out(errors) == truth).float().mean() >= right


def test_nobody_wins_all_by_being_better_at_all():
    generator = torch.Generator().manual_seed(0)
    errors = 0.1 * (0.5 * torch.rand(3, 60, generator=generator)).exp()
    errors[0] /= 100  # better by far more than clips differ
    winner = share_out(errors)
    assert winner.bincount(minlength=3).min() >= 15
    # what each wins are the clips at which it is best, compared with its mean
    relative = errors.log() - errors.log().mean(1, keepdim=True)
    assert relative.gather(0, winner[None]).mean() < relative.mean() - 0.05


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([[79, 48, 199], [49, 47, 460], [196, 72, 174]], [1, 0, 2]),
        ([[48, 50, 1508], [65, 60, 206], [128, 109, 174]], [0, 1, 2]),
    ],
)
def test_who_is_bad_at_one_thing_does_not_win_all_others(kinds, expected):
    """Errors like those of runs in which one schema won the first two kinds of clips."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(48) % 3
    errors = torch.tensor(kinds)[:, kind] * (1 + 0.01 * torch.randn(3, 48, generator=generator))
    assert torch.equal(share_out(errors), torch.tensor(expected)[kind])


def test_equal_errors_are_shared_out_without_harm():
    """Clips at which schemata differ are won as if the others were not there."""
    errors = torch.full((3, 7), 0.2)
    errors[2, 0] = 0.1
    winner = share_out(errors)
    assert winner[0] == 2
    assert share_out(errors[:, 1:]).unique().numel() == 1  # all alike: whoever it is


def test_scale_and_names_do_not_matter():
    errors = torch.rand(4, 30, dtype=torch.float64)
    winner = share_out(errors)
    assert torch.equal(share_out(1e-3 * errors), winner)
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


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_the_loss_is_that_of_own_choices_of_winners_and_of_what_was_missed(stack):
    torch.manual_seed(0)
    task = DynamicsTask(replace(SMALL, stack=stack, schema_scale=8.0), CPU)
    model = task.model.eval()  # without noise
    (frames,) = task.batch(torch.arange(6))
    torch.manual_seed(1)
    loss, parts = task.loss(model, (frames,))
    expected = 0.1 * parts["nll"] + parts["won"] + 0.01 * parts["missed"]
    torch.testing.assert_close(loss, expected)
    # the same by hand: each clip, as it is and moved, by one schema after the other
    torch.manual_seed(1)
    moved = move(frames)
    runs = {}
    for schema in (None, 0, 1, 2):
        for image, clips in enumerate((frames, moved)):
            for clip in range(6):
                one = clips[clip, None]
                taken = torch.full((1, 10 - stack, 1), schema or 0)
                choice = None if schema is None else taken
                told = model(one[:, :-1], targets=one[:, stack:], tell_choices=True, choice=choice)
                # a choice counts once three frames have been seen
                choices = told.choices[0, max(0, 3 - stack) :, 0]
                runs[schema, image, clip] = told.errors.mean(), choices
    errors = torch.stack(
        [
            torch.stack([(runs[k, 0, n][0] + runs[k, 1, n][0]) / 2 for n in range(6)])
            for k in range(3)
        ]
    )
    winner = share_out(errors)
    assert len(set(winner.tolist())) > 1
    torch.testing.assert_close(parts["won"], errors.gather(0, winner[None]).mean())
    own = [runs[None, image, n][0] for image in (0, 1) for n in range(6)]
    torch.testing.assert_close(parts["nll"], torch.stack(own).mean())

    def missed(schemata):
        said = [
            -runs[k, image, n][1][:, winner[n]].log().mean()
            for k in schemata
            for image in (0, 1)
            for n in range(6)
        ]
        return torch.stack(said).mean()

    torch.testing.assert_close(parts["missed"], (missed([None]) + missed([0, 1, 2])) / 2)


def test_all_schemata_learn_to_predict_and_to_be_chosen():
    task = DynamicsTask(SMALL, CPU)
    _, parts = task.loss(task.model, task.batch(torch.arange(12)))
    cell = task.model.rnn.cells[0]
    (won,) = torch.autograd.grad(parts["won"], cell.weight_hh, retain_graph=True)
    assert (won.abs().sum((1, 2)) > 0).all()
    # what is missed teaches the choice, and states to tell of the dynamics
    learned = cell.schema_query, cell.schema_key, cell.weight_hh, task.model.encoder.code
    for part in torch.autograd.grad(parts["missed"], learned):
        assert part.abs().sum() > 0


@pytest.mark.parametrize("changes", [{"model": "gru"}, {"schemata": 1}])
def test_other_layers_do_not_compete_and_learn_from_the_same_clips(changes):
    task = DynamicsTask(replace(SMALL, **changes), CPU)
    model = task.model.eval()
    (frames,) = task.batch(torch.arange(2))
    torch.manual_seed(1)
    loss, parts = task.loss(model, (frames,))
    assert parts == {}
    torch.manual_seed(1)
    expected = (model.loss(frames) + model.loss(move(frames))) / 2
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rivalry": -1.0}, "--rivalry: got -1.0, wants at least 0"),
        ({"cell": "lstm"}, "--cell: got lstm, wants gru with --rivalry"),
        ({"free_frames": 2}, "--free-frames: got 2, wants 0 with --rivalry"),
        ({"information": 0.1}, "--information: got 0.1, wants 0 with --rivalry"),
        ({"surprise": 0.1}, "--surprise: got 0.1, wants 0 with --rivalry"),
        ({"train_frames": 3}, "--train-frames: got 3, wants at least 4 with --rivalry"),
        ({"frames": 6, "context": 5, "stack": 5, "train_frames": 5}, "--train-frames: got 5"),
    ],
)
def test_bad_settings_are_refused(changes, told):
    with pytest.raises(UsageError, match=told):
        replace(SMALL, **changes)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    config = replace(divide("scoff"), batch_size=6)
    device = torch.device("cuda")
    task = DynamicsTask(config, device)
    model = task.model.to(device)
    frames = three_dynamics(0, torch.arange(6, device=device)).frames
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        clips = torch.cat([frames, move(frames)])
        contest = compete(model, clips, config.stack, 1, 3)
        (contest.errors.mean() + contest.won + contest.missed).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert contest.errors.isfinite().all()


def test_the_trained_model_in_the_package_tells_the_dynamics():
    (path,) = find("dynamics").iterdir()
    _, config, model = load(Run.open(path), CPU)
    clips = three_dynamics(config.data_seed, torch.arange(12), config.frames, "test")
    with torch.no_grad():
        chosen = model.trace(clips.frames[:, :-1]).layer.schema[:, 4:, 0]
    assert (chosen == chosen[:, :1]).all()  # each clip has one
    assert torch.equal(chosen[:, 0], chosen[:3, 0].repeat(4))  # that of its dynamics
    assert chosen[:3, 0].unique().numel() == 3
