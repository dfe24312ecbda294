"""Terms of the loss that make schemata divide: what they reward, and what not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import scoff
from scoff.experiments.division import information, persistence
from scoff.experiments.switching import Config, SwitchingTask
from scoff.training.errors import UsageError
from scoff.training.step import Timed
from scoff.worlds.dynamics import switching_trajectories

LAG = 12
SMALL = Config(
    hidden_size=12, features=8, frames=14, stack=3, context=8, valid_clips=3, test_clips=4
)


def certain(schema):
    """[N, T] or [N, T, F]"""
    schema = schema if schema.ndim == 3 else schema[..., None]
    return F.one_hot(schema.long(), 2).double()


@pytest.fixture(scope="module")
def truth():
    return switching_trajectories(0, torch.arange(400), 51)


def test_no_other_choice_lasts_as_the_dynamics_do(truth):
    """Not where the ball is or whither it goes, which are as easy to tell."""
    x, y = truth.position.unbind(-1)
    others = {
        "left or right": x > 32,
        "up or down": y > 28,
        "diagonal": x + y > 60,
        "other diagonal": x - y > 4,
        "near the middle": (x - 32) ** 2 + (y - 28) ** 2 > 400,
        "direction": truth.velocity.sum(-1) > 0,
    }
    dynamics = persistence(certain(truth.dynamics), LAG)
    assert dynamics > 0.2
    for name, other in others.items():
        assert persistence(certain(other), LAG) < 0.75 * dynamics, name


def test_what_is_always_the_same_does_not_count_as_lasting():
    n, steps, files = 8, 40, 4
    by_clip = (torch.arange(n) % 2)[:, None].expand(n, steps)
    by_file = (torch.arange(files) % 2).expand(n, steps, files)
    for constant in (by_clip, by_file, torch.zeros(n, steps)):
        assert persistence(certain(constant), LAG).abs() < 1e-9


def test_clocks_do_not_count():
    """All clips choosing alike at the same time: turn by turn, or first the one, then the other"""
    time = torch.arange(40).expand(8, 40)
    for clock in (time % 2, time // 20):
        assert persistence(certain(clock), LAG).abs() < 1e-9
        assert information(certain(clock), 4).abs() < 1e-9
    # nor does it help that some clips are out of step
    shifted = (time + torch.arange(8)[:, None] % 2) % 2
    for lag in (3, 5, 6, LAG, 18):
        assert persistence(certain(shifted), lag).abs() < 0.05
    assert information(certain(shifted), 4).abs() < 1e-9


def test_a_longer_window_sees_through_slower_turns():
    time = torch.arange(40) + 4 * torch.arange(8)[:, None]
    turns = certain(time // 4 % 2)  # half of the clips begin with the other schema
    assert information(turns, 4) > 0.1
    assert information(turns, 8).abs() < 1e-9


def test_information_is_that_of_certain_and_equal_choices():
    even = certain((torch.arange(8) % 2)[:, None].expand(8, 5))
    assert information(even, 4).item() == pytest.approx(1)
    assert information(torch.full((8, 5, 1, 2), 0.5), 4).item() == pytest.approx(0, abs=1e-6)
    assert information(even / 2 + 0.25, 4).item() == pytest.approx(1 - 0.8112781, abs=1e-6)


def test_exchangeable():
    """Neither object files nor schemata have names here."""
    torch.manual_seed(0)
    probs = torch.randn(6, 30, 3, 4, dtype=torch.float64).softmax(-1)
    files, schemata = torch.randperm(3), torch.randperm(4)
    for term in (lambda p: persistence(p, 6), lambda p: information(p, 4)):
        torch.testing.assert_close(term(probs[:, :, files][..., schemata]), term(probs))


@pytest.mark.parametrize("certainty", [0.0, 1.0])
def test_gradients_are_finite(certainty):
    probs = (1 - certainty) * torch.full((4, 20, 1, 2), 0.5) + certainty * certain(
        torch.randint(2, (4, 20))
    ).float()
    probs.requires_grad_()
    (persistence(probs, 6) + information(probs, 4)).backward()
    assert probs.grad.isfinite().all()


# --- in training


@pytest.mark.parametrize("object_files", [1, 3])
def test_choices_are_those_that_the_layer_makes(object_files):
    task = SwitchingTask(replace(SMALL, object_files=object_files), torch.device("cpu"))
    model = task.model.eval()
    (frames,) = task.batch(torch.arange(3))
    with torch.no_grad():
        told = model(frames, tell_choices=True)
        trace = model.trace(frames).layer
        torch.testing.assert_close(told.choices, trace.schema_probs)
        assert torch.equal(told.choices.argmax(-1), trace.schema)
        torch.testing.assert_close(told.logits, model(frames).logits)


def test_the_terms_are_part_of_the_loss():
    config = replace(SMALL, persistence=2.0, persistence_lag=4, information=3.0)
    task = SwitchingTask(config, torch.device("cpu"))
    model = task.model.eval()
    batch = task.batch(torch.arange(4))
    loss, more = task.loss(model, batch)
    told = model(batch[0][:, :-1], tell_choices=True)
    lasts, tells = persistence(told.choices, 4), information(told.choices, 4)
    torch.testing.assert_close(loss, model.loss(batch[0]) - 2 * lasts - 3 * tells)
    assert set(more) == {"nll", "persistence", "information"}
    plain, _ = SwitchingTask(SMALL, torch.device("cpu")).loss(model, batch)
    torch.testing.assert_close(plain, more["nll"])
    (loss - plain).backward()
    cell = model.rnn.cells[0]
    assert cell.schema_key.grad.abs().sum() > 0


def test_persistence_counts_less_and_less():
    task = SwitchingTask(replace(SMALL, persistence=2.0, persistence_lag=4), torch.device("cpu"))
    assert isinstance(task, Timed)  # or the engine would not tell it
    batch = task.batch(torch.arange(4))
    for share in (0.0, 0.75, 1.0):
        task.set_progress(share)
        loss, more = task.loss(task.model.eval(), batch)
        torch.testing.assert_close(loss, more["nll"] - 2 * (1 - share) * more["persistence"])


def test_choices_that_change_halfway_count_for_more_than_the_dynamics(truth):
    """Whenever the dynamics do: that is why persistence is not asked for to the end."""
    halfway = torch.where(torch.arange(51) < 25, truth.dynamics[:, :1], 1 - truth.dynamics[:, :1])
    assert persistence(certain(halfway), LAG) > persistence(certain(truth.dynamics), LAG) + 0.01


def test_a_term_without_weight_asks_nothing_of_the_clip():
    # of 11 steps, which is less than the other's lag or window
    for used, unused in (("persistence", "information"), ("information", "persistence")):
        changes = {used: 2.0, "persistence_lag": 4, "information_window": 4}
        changes["persistence_lag" if used == "information" else "information_window"] = 99
        task = SwitchingTask(replace(SMALL, **changes), torch.device("cpu"))
        loss, more = task.loss(task.model, task.batch(torch.arange(4)))
        torch.testing.assert_close(loss, more["nll"] - 2 * more[used])
        assert unused not in more


def test_layers_without_schemata_are_trained_as_before():
    config = replace(SMALL, model="gru", persistence=1.0, persistence_lag=4)
    task = SwitchingTask(config, torch.device("cpu"))
    loss, more = task.loss(task.model, task.batch(torch.arange(2)))
    assert loss.isfinite()
    assert more == {}


def test_a_lag_beyond_the_clip_is_refused():
    with pytest.raises(UsageError, match="--persistence-lag: got 12, wants less than 11"):
        replace(SMALL, persistence=1.0, persistence_lag=12)
    with pytest.raises(UsageError, match="--information-window: got 4, wants at most 3"):
        replace(SMALL, train_frames=6, information=1.0)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_probabilities_of_one_step(cell):
    one = scoff.SCOFFCell(5, 12, num_object_files=3, num_schemata=2, cell=cell).double().eval()
    layer = scoff.SCOFF(5, 12, num_object_files=3, num_schemata=2, cell=cell, batch_first=True)
    layer = layer.double().eval()
    layer.cells[0].load_state_dict(one.state_dict())
    x, start = torch.randn(4, 1, 7, 5, dtype=torch.float64), layer.initial_state(4)
    hx = start[0] if cell == "gru" else (start[0][0], start[1][0])
    expected = layer.trace(x, start).schema_probs[:, 0]
    torch.testing.assert_close(one.schema_probs(x[:, 0], hx), expected)
    with pytest.raises(ValueError, match="input: got 4 axes"):
        one.schema_probs(x, hx)
