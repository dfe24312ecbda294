"""The adding experiment: what is measured is what is said to be measured."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import scoff
from scoff.experiments import find_experiment
from scoff.experiments.adding import (
    MODELS,
    AddingTask,
    Config,
    evaluate,
    is_lstm,
    make_model,
    quick,
    schema_use,
    start_keeping,
)
from scoff.experiments.adding_report import PAPER, trivial
from scoff.models.regressor import SequenceRegressor
from scoff.training.engine import Runtime, fit
from scoff.training.errors import UsageError
from scoff.training.run import Run
from scoff.worlds.adding import additions

CPU = torch.device("cpu")
SMALL = Config(
    hidden_size=20,
    embedding=4,
    length=10,
    test_lengths=(12, 20),
    test_operands=(2, 5),
    test_sequences=300,
    valid_sequences=200,
    input_heads=1,
)


class Oracle(nn.Module):
    """Adds what is marked, and then something."""

    def __init__(self, off: float = 0.0):
        super().__init__()
        self.off = off

    def forward(self, x):
        return (x[..., 0] * x[..., 1]).sum(1, keepdim=True) + self.off


def test_the_papers_table():
    text = "0.0005, 0.0007, 0.0013, 0.0030, 0.0191, 0.0379, 0.0539"
    assert list(PAPER["SCOFF"].values()) == [float(x) for x in text.split(", ")]
    assert (
        list(PAPER["SCOFF"]) == list(PAPER["RIMs"]) == list(PAPER["LSTM"]) == [2, 3, 4, 5, 8, 9, 10]
    )
    for line in ("RIMs", "LSTM"):
        assert all(PAPER[line][n] > PAPER["SCOFF"][n] for n in PAPER["SCOFF"])


@pytest.mark.parametrize("preset", ["quick", "paper", "tuned"])
@pytest.mark.parametrize("model", list(MODELS))
def test_every_preset_has_every_model(preset, model):
    config = find_experiment("adding").preset(preset, model)
    assert config.model == model
    x = torch.rand(2, 4, 2)
    assert make_model(config)(x).shape == (2, 1)


def test_the_papers_hyper_parameters():
    config = find_experiment("adding").preset("paper", "scoff")
    rnn = make_model(config).rnn
    assert (rnn.hidden_size, rnn.num_object_files, rnn.num_schemata) == (300, 5, 2)
    cell = rnn.cells[0]
    assert cell.input_query.shape == (4, 64, 60)  # heads, keys, size of an object file
    assert cell.input_value.shape == (60, 64)
    assert cell.comm_query.shape == cell.comm_value.shape == (4, 32, 60)
    assert (cell.input_dropout, cell.comm_dropout) == (0.1, 0.1)
    assert (config.batch_size, config.lr, config.length, config.operands) == (64, 1e-3, 50, (2, 4))
    assert config.train_sequences == 2 * 50_000
    assert config.steps == 100 * config.train_sequences // config.batch_size
    assert (config.test_sequences, config.test_lengths[0]) == (20_000, 200)
    assert config.test_operands == tuple(PAPER["SCOFF"])


def test_sparse_differs_from_dense_in_who_is_updated_alone():
    dense, sparse = (
        make_model(replace(SMALL, model=name)).rnn for name in ("scoff", "scoff-sparse")
    )
    assert (dense.active_object_files, sparse.active_object_files) == (5, SMALL.active)


def test_errors_are_mean_squares_over_the_test_set():
    task = AddingTask(SMALL, CPU)
    task.model = Oracle()
    exact = evaluate_oracle(0.0)
    assert exact["valid"]["mse"] < 1e-12
    off = evaluate_oracle(0.5)
    assert set(off["errors"]) == {12, 20}
    for row in (*off["errors"].values(), off["valid"]):
        assert all(value == pytest.approx(0.25, rel=1e-4) for value in row.values())


def evaluate_oracle(off):
    model = make_model(SMALL)
    model.forward = Oracle(off).forward
    result = evaluate(SMALL, model.eval(), CPU)
    return {"errors": result["errors"], "valid": result["valid"]}


def test_validation_is_in_distribution_unless_told_otherwise():
    seen = []

    class Spy(Oracle):
        def forward(self, x):
            seen.append((x.shape[1], sorted(set(x[..., 1].sum(1).int().tolist()))))
            return super().forward(x)

    AddingTask(SMALL, CPU).validate(Spy())
    assert set(map(str, seen)) == {"(10, [2, 4])"}
    seen.clear()
    other = replace(SMALL, valid_length=16, valid_operands=(3,))
    assert AddingTask(other, CPU).validate(Spy()).keys() == {"mse", "mse_3"}
    assert set(map(str, seen)) == {"(16, [3])"}


def test_trivial_predictors():
    known = trivial(SMALL)
    for n in SMALL.test_operands:
        target = additions(1, torch.arange(40_000), 12, (n,), "test").target
        for name, guess in (
            ("mean of training targets", 1.5),
            ("half the number of operands", n / 2),
        ):
            seen = (target - guess).square().mean().item()
            assert known[name][n] == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize(("told", "share"), [(True, 1.0), (False, 0.0)])
def test_information_of_a_choice_that_is_known(monkeypatch, told, share):
    model = make_model(replace(SMALL, model="scoff-sparse")).eval()
    trace = scoff.SCOFF.trace

    def chosen(self, x):
        marked = model_input[-1][..., 1].long()[..., None]
        real = trace(self, x)
        schema = marked.expand_as(real.schema) if told else torch.zeros_like(real.schema)
        return real._replace(schema=schema, active=torch.ones_like(real.active))

    model_input = []
    model.embed.register_forward_hook(lambda _m, args, _out: model_input.append(args[0]))
    monkeypatch.setattr(scoff.SCOFF, "trace", chosen)
    use = schema_use(SMALL, model, CPU)
    assert use["bits"] / use["bits_at_most"] == pytest.approx(share, abs=1e-9)
    assert use["pattern_bits"] / use["pattern_bits_at_most"] == pytest.approx(share, abs=1e-9)
    if told:
        assert use["use_elsewhere"] == [1, 0]
        assert use["use_at_operands"] == [0, 1]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_keep_slows_forgetting(model, cell):
    """With the gates open a layer holds on to its state; without, it does not."""
    config = replace(SMALL, model=model, cell=cell, communication="none")
    rnn = make_model(config).rnn.eval()
    x = torch.zeros(1, 1, 4)
    h = 0.5 * torch.ones(1, 1, 20)
    state = (h, h) if is_lstm(rnn) else h

    def moved():
        out = rnn(x, state)[1]
        return (out[1] - h if is_lstm(rnn) else out - h).abs().mean().item()

    before = moved()
    start_keeping(rnn, (20.0,), additive=False)
    if model == "rmc":  # adds what it takes in, whatever it keeps
        assert rnn.cells[0].forget_gate_bias.item() > 19
    elif is_lstm(rnn):
        assert moved() < before  # still adds its input
    else:
        assert moved() < 0.02 * before


def test_a_configuration_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="operands"):
        replace(SMALL, operands=(2, 11))
    with pytest.raises(UsageError, match=re.escape("among 12 numbers")):
        replace(SMALL, test_operands=(13,))
    with pytest.raises(UsageError, match="--train-sequences"):
        replace(SMALL, train_sequences=0)


def test_the_quick_preset_learns_to_tell_operands(tmp_path):
    """A quarter of the demo's steps: far from done, but clearly under way."""
    config = replace(quick("scoff-sparse"), steps=400, valid_sequences=400, test_sequences=50)
    run = Run.create(tmp_path / "run", "adding", "quick", config)
    runtime = Runtime("cpu", tensorboard=False, progress="off")
    fit(lambda device: AddingTask(config, device), config, run, runtime)
    model = make_model(config)
    model.load_state_dict(run.read_weights())
    result = evaluate(config, model.eval(), CPU)
    assert result["valid"]["mse"] < 0.1  # the mean of the targets: 0.5
    use = result["schemata"]
    assert use["pattern_bits"] > 0.2 * use["pattern_bits_at_most"]
    with torch.no_grad():
        files = model.rnn(model.embed(torch.rand(50, 30, 2)))[0][:, -1].unflatten(-1, (5, -1))
    spread = (files - files.mean(1, keepdim=True)).norm(dim=-1) / files.norm(dim=-1)
    assert spread.mean() > 0.1  # object files that start alike would stay alike


def test_readouts():
    rnn = nn.GRU(4, 20, batch_first=True)
    for readout in ("change", "linear", "sum", "attention"):
        model = SequenceRegressor(2, 1, rnn, 5, readout)
        files = torch.randn(3, 5, 4)
        shuffled = files[:, torch.randperm(5)]
        torch.testing.assert_close(model.read(files.flatten(1)), model.read(shuffled.flatten(1)))
