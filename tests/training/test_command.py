"""The command itself, in an interpreter of its own."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from scoff.cli import main
from scoff.training.run import Run
from tests.training.helpers import (
    CONFIG,
    content,
    ended,
    environment,
    options,
    outcome,
    start,
    train,
    wait_for,
)

# long enough to be caught in the middle of it
LONG = replace(CONFIG, steps=120, checkpoint_every=9, log_every=6, validate_every=50)


class Command:
    """`python -m scoff ...`"""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scoff", *map(str, args)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(CUDA_VISIBLE_DEVICES=""),
        )

    def send(self, number, run):
        """Once it has made a new checkpoint"""
        before = run.step()
        wait_for(lambda: run.step() > before or self.process.poll() is not None)
        self.process.send_signal(number)

    def end(self):
        """Exit code and what it said"""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


def test_a_run_that_is_killed_stopped_and_interrupted(tmp_path):
    path = tmp_path / "run"
    run = Run(path)
    train(tmp_path / "undisturbed", LONG)

    command = Command("train", "adding", *options(LONG), "--out", path)
    command.send(signal.SIGKILL, run)
    assert command.end()[0] == -signal.SIGKILL
    step = run.step()
    assert 0 < step < LONG.steps

    command = Command("train", "--resume", path)
    command.send(signal.SIGTERM, run)
    code, said = command.end()
    assert code == 75, said
    assert f"go on with: scoff train --resume {path}" in said
    assert "Traceback" not in said
    assert step < run.step() < LONG.steps
    step = run.step()

    command = Command("train", "--resume", path)
    command.send(signal.SIGINT, run)
    code, said = command.end()
    assert code == 130, said
    assert "Traceback" not in said
    assert step < run.step() < LONG.steps

    code, said = Command("train", "--resume", path).end()
    assert code == 0, said
    assert "going on from" in said
    assert f"step {LONG.steps}/{LONG.steps}  loss" in said
    assert "Warning" not in said
    assert outcome(path) == outcome(tmp_path / "undisturbed")
    assert list((path / "tensorboard").iterdir())


def test_foreign_weights_are_refused_in_a_line(tmp_path, capsys):
    path, ran = tmp_path / "run", tmp_path / "ran"
    train(path)

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    torch.save({"x": Payload()}, path / "weights.safetensors")
    before = content(path)
    with pytest.raises(SystemExit) as end:
        main(["eval", str(path), "--device", "cpu"])
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.count("\n") == 1
    assert "weights.safetensors is damaged" in said
    assert not ran.exists()
    assert content(path) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_before_the_first_step_leaves_what_can_be_resumed(tmp_path, undisturbed, number):
    path = tmp_path / "run"
    command = ["train", "adding", *options(CONFIG), "--device", "cpu", "--out", str(path)]
    child = start(main, command)
    wait_for(lambda: (path / "config.json").exists() or not child.is_alive())
    os.kill(child.pid, number)
    assert ended(child) in (75, 130, -signal.SIGTERM)
    train(path)
    assert outcome(path) == undisturbed
