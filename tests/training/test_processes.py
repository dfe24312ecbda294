"""Several processes compute what one does, and survive the loss of one of them."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scoff.training.engine import Loop
from scoff.training.errors import ScoffError
from scoff.training.run import Run
from tests.training.helpers import (
    CONFIG,
    QUIET,
    ended,
    environment,
    options,
    outcome,
    records,
    start,
    train,
    wait_for,
)

GRU = replace(CONFIG, model="gru", steps=12, log_every=1, checkpoint_every=5)
LONG = replace(CONFIG, steps=80, checkpoint_every=9, log_every=6, validate_every=50)


def torchrun(path: Path, config, *more: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "scoff", "train", "adding", *options(config), "--out", str(path)]
    return subprocess.Popen(
        [*launcher, "--nproc-per-node", "2", *more, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(CUDA_VISIBLE_DEVICES=""),
    )


def work_as(rank: int, world: int, port: int, path: Path, config, runtime, step) -> None:
    """One of the processes that torchrun would start; asks itself to stop at a step."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    if step is not None:
        original = Loop.one_step

        def one_step(self, number):
            if number == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, number)

        Loop.one_step = one_step
    try:
        if rank == 0 and not path.exists():
            Run.create(path, "adding", "quick", config)
        wait_for((path / "config.json").exists)
        train(path, config, runtime)
    except ScoffError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(path: Path, config=CONFIG, runtime=QUIET, step=None, world=2) -> list[int]:
    """Exit codes of both; `step` is where the second asks to stop"""
    port = free_port()
    ranks = [
        start(work_as, rank, world, port, path, config, runtime, step if rank else None)
        for rank in range(world)
    ]
    return [ended(rank) for rank in ranks]


@pytest.fixture(scope="module")
def undisturbed_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "run"
    assert together(path) == [0, 0]
    return outcome(path)


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "run"
    assert together(path, LONG) == [0, 0]
    return outcome(path)


def assert_same_losses(path, other):
    ours, theirs = records(path), records(other)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-5)


def test_two_processes_under_torchrun_give_the_losses_of_one(tmp_path):
    train(tmp_path / "one", GRU)
    process = torchrun(tmp_path / "two", GRU)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Warning" not in said
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    steps = [r["step"] for r in records(tmp_path / "two") if "train/loss" in r]
    assert steps == list(range(1, 13))
    # a wrong share of the batch would show
    train(tmp_path / "half", replace(GRU, batch_size=2))
    first, second = (records(tmp_path / name)[0]["train/loss"] for name in ("one", "half"))
    assert abs(first - second) > 1e-3


def test_three_processes_too(tmp_path):
    config = replace(GRU, batch_size=6, log_every=5)
    train(tmp_path / "one", config)
    assert together(tmp_path / "three", config, world=3) == [0, 0, 0]
    assert_same_losses(tmp_path / "three", tmp_path / "one")


def test_a_killed_worker_comes_back(tmp_path, undisturbed_long):
    path = tmp_path / "run"
    process = torchrun(path, LONG, "--max-restarts", "1")
    wait_for(lambda: Run(path).step() > 0 or process.poll() is not None)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (worker,) = [pid for pid in map(int, children) if rank_of(pid) == "1"]
    os.kill(worker, signal.SIGKILL)
    step = Run(path).step()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert step < LONG.steps
    assert said.count("going on from") == 1, said
    assert outcome(path) == undisturbed_long


def rank_of(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return dict(word.split(b"=", 1) for word in words if word).get(b"RANK", b"").decode()


def test_sigterm_to_torchrun_saves(tmp_path, undisturbed_long):
    path = tmp_path / "run"
    process = torchrun(path, LONG)
    wait_for(lambda: Run(path).step() > 0 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert "go on with: scoff train --resume" in said
    assert Run(path).step() < LONG.steps
    assert Run(path).step() % LONG.log_every == 0  # when they ask each other
    assert together(path, LONG) == [0, 0]
    assert outcome(path) == undisturbed_long


@pytest.mark.parametrize("step", [2, 13])
def test_one_that_is_asked_to_stop_stops_all(tmp_path, undisturbed_two, step):
    path = tmp_path / "run"
    assert together(path, step=step) == [75, 75]
    assert Run(path).step() in (4, 16)  # when they ask each other
    assert together(path) == [0, 0]
    assert outcome(path) == undisturbed_two


def test_resuming_between_two_records(tmp_path, undisturbed_two):
    path = tmp_path / "run"
    assert together(path, step=13) == [75, 75]
    newest, before = sorted((path / "checkpoints").iterdir(), reverse=True)
    assert before.name.startswith("step-00000014")
    newest.unlink()
    assert together(path) == [0, 0]
    assert outcome(path) == undisturbed_two


def test_another_number_of_processes_goes_on_too(tmp_path, caplog):
    path, config = tmp_path / "run", replace(GRU, log_every=4)
    assert together(path, config, step=2) == [75, 75]
    train(path, config)
    assert "goes on with 1 processes on cpu instead of 2: noise will differ" in caplog.text
    train(tmp_path / "one", config)
    assert_same_losses(path, tmp_path / "one")


def test_a_batch_that_does_not_divide_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ScoffError, match="--batch-size: got 4, wants a multiple of the 3 proc"):
        train(tmp_path / "run")
