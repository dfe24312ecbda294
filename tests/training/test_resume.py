"""A run that was stopped anywhere ends with the same bits as one that was not."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from random import Random

import pytest
import torch

from scoff.training import checkpoint, engine
from scoff.training.engine import Runtime
from scoff.training.errors import StoppedError, StorageError
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.signals import catch_signals
from tests.training.helpers import (
    CONFIG,
    Toy,
    content,
    ended,
    fit_toy,
    outcome,
    start,
    stop_at,
    train,
    train_and_die,
)


def test_the_same_settings_give_the_same_bits(tmp_path, undisturbed):
    torch.manual_seed(123)  # whatever was drawn before
    torch.rand(7)
    train(tmp_path / "run")
    assert outcome(tmp_path / "run") == undisturbed


def test_noise_matters_to_these_tests(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr(engine, "restore_random", lambda *_: None)
    with pytest.raises(StoppedError):
        stop_at(tmp_path / "run", 14, monkeypatch)
    train(tmp_path / "run")
    assert outcome(tmp_path / "run")["weights"] != undisturbed["weights"]


def test_kill_9_at_ten_random_moments(tmp_path, undisturbed):
    random = Random(0)
    assert ended(start(train, tmp_path / "warm-up")) == 0
    began = time.monotonic()
    assert ended(start(train, tmp_path / "timed")) == 0
    duration = time.monotonic() - began
    kills = runs = 0
    while kills < 10:
        path = tmp_path / str(runs)
        child = start(train, path)
        child.join(random.uniform(0, duration))
        child.kill()
        kills += ended(child) == -signal.SIGKILL
        if child.exitcode == 0:  # it was done before: disturb another
            assert outcome(path) == undisturbed
            runs += 1
    train(path)
    assert outcome(path) == undisturbed


def test_kill_9_at_ten_random_writes(tmp_path, undisturbed):
    random = Random(1)
    path, kills = tmp_path / "run", 0
    while kills < 10:
        # a run has some 110 of them, of which a dozen for each checkpoint
        code = ended(start(train_and_die, path, random.randint(1, 50)))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if code == 0:
            assert outcome(path) == undisturbed
            path = tmp_path / f"run-{kills}"
    train(path)
    assert outcome(path) == undisturbed
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_saves_at_the_end_of_its_step(tmp_path, undisturbed, monkeypatch, number, code):
    path = tmp_path / "run"
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for step in (0, 5, 6, 19):  # the last of them with a record and a validation
        with pytest.raises(StoppedError, match=f"step {step + 1} of 30; go on with: .*{path}") as e:
            stop_at(path, step, monkeypatch, number)
        assert e.value.exit_code == code
        assert Run(path).step() == step + 1
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    train(path)
    assert outcome(path) == undisturbed


def test_a_signal_in_the_last_step_changes_nothing(tmp_path, undisturbed, monkeypatch):
    stop_at(tmp_path / "run", 29, monkeypatch)
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_a_signal_in_the_middle_of_a_save(tmp_path, undisturbed, monkeypatch, call):
    path, original = tmp_path / "run", getattr(os, call)

    def interrupted(target, *rest, **more):
        if (path / "checkpoints").exists() and checkpoint.find(path / "checkpoints"):
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(os, call, original)
        return original(target, *rest, **more)

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(StoppedError):
        train(path)
    train(path)
    assert outcome(path) == undisturbed


def two_signals(path, first, second):
    def hang(step, *_):
        if step == 3:
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), second)
            time.sleep(60)

    fit_toy(path, Settings(steps=5, batch_size=4), Toy(hang))


@pytest.mark.parametrize(
    ("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")]
)
def test_a_second_signal_ends_it_at_once(tmp_path, first, second):
    first, second = getattr(signal, first), getattr(signal, second)
    code = ended(start(two_signals, tmp_path / "run", first, second), 20)
    assert code == (-signal.SIGTERM if second == signal.SIGTERM else 1)  # KeyboardInterrupt
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_training_in_another_thread_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    worker = threading.Thread(target=fit_toy, args=(tmp_path / "run", Settings(steps=2)))
    worker.start()
    worker.join()
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_foreign_handler_is_put_back():
    def handler(*_):
        raise AssertionError("not this one")

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with catch_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
            assert signal.getsignal(signal.SIGTERM) is handler
        with catch_signals():
            assert signal.getsignal(signal.SIGTERM) is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_weights_that_are_missing_are_written_again(tmp_path, undisturbed):
    path = tmp_path / "run"
    train(path)
    (path / "weights.safetensors").unlink()
    train(path)
    assert outcome(path) == undisturbed


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_the_checkpoint_before_a_damaged_one_is_used(
    tmp_path, undisturbed, monkeypatch, caplog, damage
):
    path = tmp_path / "run"
    with pytest.raises(StoppedError):
        stop_at(path, 16, monkeypatch)
    newest, previous = checkpoint.find(path / "checkpoints")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes({"flip": data, "cut": data[:-1], "empty": b""}[damage])
    with caplog.at_level(logging.INFO):
        train(path)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("scoff")]
    assert str(newest) in said[0]
    assert "damaged" in said[0]
    assert caplog.records[0].levelno == logging.WARNING
    assert said[1] == f"going on from {previous}"
    assert outcome(path) == undisturbed
    assert not newest.exists()


def test_all_damaged_is_an_error_that_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(StoppedError):
        stop_at(path, 16, monkeypatch)
    for file in checkpoint.find(path / "checkpoints"):
        file.write_bytes(file.read_bytes()[:-9])
    before = content(path)
    with pytest.raises(StorageError, match=f"all checkpoints in {path}.* are damaged"):
        train(path)
    assert content(path) == before


def test_a_checkpoint_of_another_model_is_told_in_a_line(tmp_path):
    path = tmp_path / "run"
    train(path)
    with pytest.raises(StorageError, match=r"step-00000030.* is not of the run in config.json"):
        train(path, replace(CONFIG, hidden_size=12))


def test_a_checkpoint_of_a_cuda_graph_goes_on_elsewhere(tmp_path, caplog):
    # on the GPU the learning rate is a tensor, Adam "capturable" and there is one more generator
    path, settings = tmp_path / "run", Settings(steps=8, checkpoint_every=4, batch_size=4)
    fit_toy(path, settings)
    (path / "weights.safetensors").unlink()
    last, before = checkpoint.find(path / "checkpoints")
    last.unlink()
    step, state = checkpoint.load(before)
    before.unlink()
    for group in state["optimiser"]["param_groups"]:
        group |= {"capturable": True, "lr": torch.tensor(group["lr"])}
    state["random"][0]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    checkpoint.save(path / "checkpoints", step, state)
    fit_toy(path, settings)
    assert "goes on with 1 processes on cpu instead of 1: noise will differ" in caplog.text
    fit_toy(tmp_path / "other", settings)
    ours, other = ((tmp_path / name).joinpath("metrics.jsonl") for name in ("run", "other"))
    assert ours.read_bytes() == other.read_bytes()  # this model draws no noise


def test_time_adds_up_over_pieces(tmp_path, monkeypatch):
    path = tmp_path / "run"
    began = time.monotonic()
    with pytest.raises(StoppedError):
        stop_at(path, 10, monkeypatch)
    first = Run(path).seconds()
    time.sleep(0.3)  # not training
    train(path)
    assert 0 < first < Run(path).seconds() < time.monotonic() - began - 0.25


def test_a_run_of_steps_that_nothing_divides(tmp_path):
    settings = Settings(steps=5, batch_size=4, log_every=3, validate_every=4, checkpoint_every=100)
    run = fit_toy(tmp_path / "run", settings)
    steps = [(r["step"], "valid/loss" in r) for r in run.read_metrics()]
    assert steps == [(3, False), (4, True), (5, False), (5, True)]
    assert run.step() == 5


def test_a_bad_number_of_threads_is_refused():
    with pytest.raises(engine.UsageError, match="--threads: got 0, wants at least 1"):
        Runtime(threads=0)
