"""Training that starts from the weights of another run."""

from dataclasses import replace

import pytest
import torch

from scoff.cli import main
from scoff.training.errors import StoppedError, UsageError
from scoff.training.run import Run
from tests.training.helpers import CONFIG, outcome, stop_at, train

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
    train(tmp_path / "stopped", config)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_other_sizes_are_refused(tmp_path):
    train(tmp_path / "trained", STILL)
    config = replace(STILL, weights_from=str(tmp_path / "trained"), hidden_size=12)
    with pytest.raises(UsageError, match=r"--weights-from: those of .* are of another model"):
        train(tmp_path / "run", config)


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_a_folder_without_a_run_is_refused_before_anything_is_written(command, tmp_path, capsys):
    args = [command, "adding", "--weights-from", tmp_path / "nothing", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    assert end.value.code == 2
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_reproduce_starts_each_run_from_the_one_with_its_name(tmp_path):
    sizes = "--steps 2 --train-sequences 8 --valid-sequences 4 --test-sequences 4 --length 6"
    sizes += " --test-lengths 6 --operands 2 --test-operands 2 --hidden-size 8 --object-files 2"
    sizes += " --active 1 --embedding 4 --input-heads 1 --batch-size 4 --no-tensorboard"
    common = ["reproduce", "adding", *sizes.split(), "--models", "gru", "--seeds", "1"]
    common += ["--device", "cpu", "--progress", "off"]
    for more in (
        ["--out", tmp_path / "first"],
        ["--out", tmp_path / "then", "--weights-from", tmp_path / "first", "--lr", "1e-30"],
    ):
        with pytest.raises(SystemExit) as end:
            main(list(map(str, [*common, *more])))
        assert end.value.code == 0
    first, then = (Run.open(tmp_path / x / "gru-0").read_weights() for x in ("first", "then"))
    for key, x in then.items():
        torch.testing.assert_close(x, first[key])
