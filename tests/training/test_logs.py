"""What a run tells while it trains: the same after any stop."""

import contextlib
import errno
import json
import math
import os
import pty
import subprocess
import sys
import termios
import time
from dataclasses import replace
from itertools import count

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from scoff.training import logs
from scoff.training.engine import Runtime, check
from scoff.training.errors import StoppedError, StorageError, UsageError
from scoff.training.logs import JsonLines, Logs, Progress, as_line
from scoff.training.run import Run
from scoff.training.settings import Settings
from tests.training.helpers import (
    QUIET,
    Toy,
    content,
    ended,
    fit_toy,
    outcome,
    records,
    start,
    stop_at,
    train,
)

SETTINGS = Settings(steps=9, batch_size=4, log_every=2, validate_every=4, checkpoint_every=4)
BOARD = replace(QUIET, tensorboard=True)


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", "toy", "quick", SETTINGS)


# --- metrics.jsonl


def test_records_are_means_since_the_last(tmp_path):
    run = fit_toy(tmp_path / "all", replace(SETTINGS, log_every=1))
    each = [r for r in run.read_metrics() if "train/loss" in r]
    run = fit_toy(tmp_path / "some", SETTINGS)
    some = [r for r in run.read_metrics() if "train/loss" in r]
    assert [r["step"] for r in each] == list(range(1, 10))
    assert [r["step"] for r in some] == [2, 4, 6, 8, 9]
    for i, record in enumerate(some[:-1]):
        pair = each[2 * i : 2 * i + 2]
        for name in ("train/loss", "train/grad_norm", "train/size"):
            assert record[name] == pytest.approx(sum(r[name] for r in pair) / 2, rel=1e-12)
    assert [r["step"] for r in run.read_metrics() if "valid/loss" in r] == [4, 8, 9]


def test_what_was_written_after_the_checkpoint_is_cut_off(run):
    lines = [{"step": s, "train/loss": 1.0 / s} for s in (1, 2, 3, 4)]
    run.metrics_path.write_text("".join(map(as_line, lines)) + '{"step": 5, "train/lo')
    sink = JsonLines(run, 3)
    assert records(run.path) == lines[:3]
    sink.write(4, {"train/loss": 7.0})
    sink.close()
    assert records(run.path) == [*lines[:3], {"step": 4, "train/loss": 7.0}]


def test_what_is_not_finite_is_null(run):
    sink = JsonLines(run, 0)
    sink.write(1, {"x": math.nan, "y": math.inf, "z": 2.0})
    sink.close()

    def strict(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = run.metrics_path.read_text()
    assert json.loads(text, parse_constant=strict) == {"step": 1, "x": None, "y": None, "z": 2.0}
    again = JsonLines(run, 1)
    again.close()
    assert run.metrics_path.read_text() == text
    assert math.isnan(run.read_metrics()[0]["x"])


def test_records_reach_the_disk_before_the_checkpoint_after_them(tmp_path, monkeypatch):
    synced, original = [], os.fsync

    def fsync(file):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        return original(file)

    monkeypatch.setattr(os, "fsync", fsync)
    fit_toy(tmp_path / "run", SETTINGS)
    places = [i for i, name in enumerate(synced) if name.startswith(".step-")]
    assert len(places) == 3
    assert all(synced[i - 1] == "metrics.jsonl" for i in places)


def test_records_are_there_at_once(run):
    sink = JsonLines(run, 0)
    sink.write(1, {"x": 1.0})
    assert records(run.path) == [{"step": 1, "x": 1.0}]
    sink.close()


# --- TensorBoard


def events(path):
    board = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {
        name: [(e.step, e.value) for e in board.Scalars(name)] for name in board.Tags()["scalars"]
    }


def assert_same_as_lines(path):
    shown = events(path)
    lines: dict[str, list] = {}
    for record in records(path):
        for name, value in record.items():
            if name != "step":
                lines.setdefault(name, []).append((record["step"], pytest.approx(value, rel=1e-6)))
    assert shown == lines


def die_after(path, step, runtime):
    def spoil(number, *_):
        if number == step:
            os.kill(os.getpid(), 9)

    fit_toy(path, SETTINGS, Toy(spoil), runtime)


def test_tensorboard_shows_each_record_once(tmp_path):
    path = tmp_path / "run"
    # records of step 6 are after the checkpoint of step 4: made again, and to be shown once
    assert ended(start(die_after, path, 8, BOARD)) == -9
    assert records(path)[-1]["step"] == 6
    assert events(path)["train/loss"][1][0] == 4  # written out with the checkpoint
    time.sleep(1.1)  # TensorBoard reads files in the order of the seconds in their names
    fit_toy(path, SETTINGS, runtime=BOARD)
    assert_same_as_lines(path)
    assert [step for step, _ in events(path)["train/loss"]] == [2, 4, 6, 8, 9]


def test_tensorboard_is_the_default_and_can_be_left_away(tmp_path):
    assert Runtime().tensorboard
    fit_toy(tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run" / "tensorboard").exists()


# --- trackers

FAKE = """
calls = []
def init(**options): calls.append(("init", options))
def log(values, step): calls.append(("log", step, values))
def finish(): calls.append(("finish",))
"""


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / f"{request.param}.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield request.param
    sys.modules.pop(request.param, None)


def test_a_tracker_gets_every_record(tmp_path, tracker):
    path = tmp_path / "run"
    fit_toy(path, SETTINGS)
    assert tracker not in sys.modules  # not asked for
    fit_toy(tmp_path / "tracked", SETTINGS, runtime=replace(QUIET, tracker=tracker))
    calls = sys.modules[tracker].calls
    assert [call[0] for call in calls] == ["init", *["log"] * 8, "finish"]
    logged = [{"step": step, **values} for _, step, values in calls[1:-1]]
    assert logged == records(tmp_path / "tracked") == records(path)
    options = calls[0][1]
    assert options["project"] == "scoff"
    assert options["config"]["steps"] == 9


def test_a_run_keeps_its_identity_and_shares_it_with_none(tmp_path, tracker):
    def identity(path):
        fit_toy(path, SETTINGS, runtime=replace(QUIET, tracker=tracker))
        (options,) = [call[1] for call in sys.modules[tracker].calls if call[0] == "init"]
        sys.modules[tracker].calls.clear()
        assert options["resume"] == "allow"
        assert options["name"].startswith("run")
        return options.get("id") or options["name"]

    first = identity(tmp_path / "a" / "run")
    (tmp_path / "a" / "run" / "weights.safetensors").unlink()
    (tmp_path / "a").rename(tmp_path / "b")
    assert identity(tmp_path / "b" / "run") == first
    assert identity(tmp_path / "a" / "run") != first


@pytest.mark.parametrize("package", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_told_before_anything_is_written(tmp_path, monkeypatch, package):
    (tmp_path / package).mkdir()  # where wandb was, it leaves a folder of its name
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    runtime = BOARD if package == "tensorboard" else replace(QUIET, tracker=package)
    with pytest.raises(UsageError, match=f"{package} is not installed: pip install") as error:
        check(SETTINGS, runtime)
    assert "\n" not in str(error.value)


# --- a full disk


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_metrics(tmp_path, undisturbed, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setattr(logs, "open", lambda *_: open("/dev/full", "a"), raising=False)  # noqa: SIM115
    with pytest.raises(StorageError, match=f"cannot write the logs of {path}: No space left"):
        train(path)
    monkeypatch.undo()
    train(path)
    assert outcome(path) == undisturbed


@pytest.mark.parametrize(("call", "whole"), [("__init__", 0), ("add_event", 5), ("flush", 1)])
def test_a_full_disk_under_tensorboard(tmp_path, monkeypatch, call, whole):
    path, calls = tmp_path / "run", count()
    original = getattr(EventFileWriter, call)

    def until_full(*args):
        return original(*args) if next(calls) < whole else full()

    with monkeypatch.context() as patch:
        patch.setattr(EventFileWriter, call, until_full)
        with pytest.raises(StorageError, match=f"cannot write the logs of {path}: No space left"):
            fit_toy(path, SETTINGS, runtime=BOARD)
    fit_toy(path, SETTINGS, runtime=BOARD)
    assert records(path)[-1]["step"] == 9


def test_a_full_disk_under_the_final_weights(tmp_path, undisturbed, monkeypatch):
    path, original = tmp_path / "run", os.replace

    def replace_file(source, target):
        return full() if target.name == "weights.safetensors" else original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_file)
        with pytest.raises(StorageError, match=r"weights\.safetensors: No space left on device"):
            train(path)
    assert not (path / "weights.safetensors").exists()
    train(path)
    assert outcome(path) == undisturbed


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("may not mount")
    except FileNotFoundError:
        pytest.skip("no mount")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("board", [False, True], ids=["lines", "tensorboard"])
@pytest.mark.parametrize("pages", [0, 1, 3, 12])
def test_a_disk_that_is_really_full(small_disk, undisturbed, monkeypatch, pages, board):
    path, runtime = small_disk / "run", BOARD if board else QUIET
    with pytest.raises(StoppedError):
        stop_at(path, 16, monkeypatch)
    before = content(path / "checkpoints")
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    (small_disk / "ballast").write_bytes(bytes(free - pages * 4096))
    with pytest.raises(StorageError, match=r"cannot write .*: No space left on device"):
        train(path, runtime=runtime)
    assert content(path / "checkpoints") == before
    (small_disk / "ballast").unlink()
    train(path)
    assert outcome(path) == undisturbed


def test_sinks_are_closed_when_one_cannot_be_opened(run, monkeypatch):
    closed = []
    monkeypatch.setattr(JsonLines, "close", lambda self: (closed.append(1), self.file.close()))
    monkeypatch.setattr(logs, "TensorBoard", full)
    with pytest.raises(StorageError):
        Logs(run, 0, {}, True, "none")
    assert closed == [1]


# --- progress


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(1000, 100, "adding gru 0", "auto")
    for step in range(101, 1001):
        now[0] += 0.5
        progress.update(step, {"loss": 1 / step})
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 900 * 0.5 // 10
    assert lines[0] == "adding gru 0: step 120/1,000  loss 0.009283  2.0 steps/s  07:20 left"
    assert lines[-1].startswith("adding gru 0: step 1,000/1,000  loss 0.00102")
    assert lines[-1].endswith("2.0 steps/s  00:00 left")


def test_several_at_once(capsys):
    progress = Progress(10, 0, "set", "bar", "movie")
    progress.update(4, {})
    progress.update(10, {})
    progress.close()
    assert "10/10" in capsys.readouterr().err
    progress = Progress(10, 0, "set", "lines", "movie")
    progress.update(10, {})
    assert capsys.readouterr().err.startswith("set: movie 10/10")


def test_a_bar_on_a_terminal(tmp_path, monkeypatch):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fit_toy(
            tmp_path / "run", replace(SETTINGS, steps=300), runtime=replace(QUIET, progress="auto")
        )
        os.set_blocking(ours, False)
        said = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                said += os.read(ours, 4096)
    os.close(ours)
    text = said.decode()
    assert text.count("\r") > 2
    last = text.strip().split("\r")[-1]
    assert "300/300" in last
    assert "loss=" in last
    assert "step/s" in last
    assert "<00:00" in last


def test_nothing_when_it_is_off(capsys, tmp_path):
    fit_toy(tmp_path / "run", SETTINGS)
    said = capsys.readouterr()
    assert said.out + said.err == ""
