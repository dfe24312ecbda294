"""Training that starts from the weights of another run."""

import shutil
from dataclasses import replace

import pytest
import torch

from scoff.cli import main
from scoff.experiments import find_experiment, reproduce
from scoff.training.errors import StoppedError, UsageError
from tests.training.helpers import CONFIG, options, outcome, stop_at, train

STILL = replace(CONFIG, lr=1e-30, steps=2)  # weights stay as they are


def test_weights_are_those_of_the_other_run(tmp_path):
    trained = train(tmp_path / "trained").read_weights()
    fresh = train(tmp_path / "fresh", STILL).read_weights()
    config = replace(STILL, weights_from=str(tmp_path / "trained"), seed=5)
    for name, x in train(tmp_path / "run", config).read_weights().items():
        torch.testing.assert_close(x, trained[name])
    assert any(not torch.equal(x, trained[name]) for name, x in fresh.items())


def test_a_resumed_run_goes_on_from_its_own(tmp_path, monkeypatch):
    train(tmp_path / "trained")
    config = replace(CONFIG, weights_from=str(tmp_path / "trained"))
    train(tmp_path / "whole", config)
    with pytest.raises(StoppedError):
        stop_at(tmp_path / "stopped", 14, monkeypatch, config=config)
    shutil.rmtree(tmp_path / "trained")  # is needed no more
    with pytest.raises(SystemExit) as end:
        main(["train", "--resume", str(tmp_path / "stopped"), "--device", "cpu"])
    assert end.value.code == 0
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_other_sizes_are_refused(tmp_path):
    train(tmp_path / "trained", STILL)
    config = replace(STILL, weights_from=str(tmp_path / "trained"), hidden_size=12)
    with pytest.raises(UsageError, match=r"--weights-from: those of .* are of another model"):
        train(tmp_path / "run", config)


def test_the_command_refuses_them_before_anything_is_written(tmp_path, capsys):
    train(tmp_path / "trained", STILL)
    config = replace(STILL, hidden_size=12, weights_from=str(tmp_path / "trained"))
    with pytest.raises(SystemExit) as end:
        main(["train", "adding", *options(config), "--out", str(tmp_path / "run")])
    assert end.value.code == 2
    assert "are of another model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_a_folder_without_a_run_is_refused_before_anything_is_written(command, tmp_path, capsys):
    args = [command, "adding", "--weights-from", tmp_path / "nothing", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    assert end.value.code == 2
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_reproduce_starts_each_run_from_the_one_with_its_name(tmp_path, monkeypatch):
    for model in ("gru", "lstm"):
        quick = find_experiment("adding").preset("quick", model)
        train(tmp_path / f"{model}-0", replace(quick, steps=1, batch_size=2, valid_sequences=2))
    plans = []
    monkeypatch.setattr(reproduce, "reproduce", lambda _, found, *__: plans.extend(found))
    args = ["reproduce", "adding", "--models", "gru", "lstm", "--seeds", "1", "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        main([*args, "--preset", "quick", "--weights-from", str(tmp_path)])
    assert end.value.code == 0
    assert [plan.config.weights_from for plan in plans] == [
        str(tmp_path / "gru-0"),
        str(tmp_path / "lstm-0"),
    ]
