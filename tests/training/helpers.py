"""Tiny runs, and ways to disturb them."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scoff.experiments.adding import AddingTask, Config
from scoff.training import checkpoint
from scoff.training.engine import Loop, Runtime, fit
from scoff.training.run import Run
from scoff.training.settings import Settings

# Its training draws random numbers at every step. Records, validations and checkpoints fall on
# different steps, so that the sums between two records matter too.
CONFIG = Config(
    model="scoff-sparse",
    steps=30,
    batch_size=4,
    warmup=0.2,
    decay="cosine",
    length=6,
    operands=(2,),
    train_sequences=50,
    valid_sequences=8,
    hidden_size=8,
    embedding=4,
    object_files=2,
    active=1,
    input_heads=1,
    input_dropout=0.2,
    comm_dropout=0.2,
    log_every=4,
    validate_every=10,
    checkpoint_every=7,
)
QUIET = Runtime(device="cpu", progress="off", tensorboard=False)


def train(path: Path, config: Config = CONFIG, runtime: Runtime = QUIET) -> Run:
    """As the command does: from the start, or from where it was stopped."""
    if (path / "config.json").exists():
        run = Run.open(path)
    else:
        run = Run.create(path, "adding", "quick", config)
    fit(lambda device: AddingTask(config, device), config, run, runtime)
    return run


@contextmanager
def signalled(step: int, monkeypatch: Any, number: int = signal.SIGTERM) -> Iterator[None]:
    """Whatever trains in here sends itself a signal during this step, counted from 0."""
    original = Loop.one_step

    def one_step(self: Loop, current: int) -> list[float]:
        if current == step:
            os.kill(os.getpid(), number)
        return original(self, current)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "one_step", one_step)
        yield


def stop_at(
    path: Path,
    step: int,
    monkeypatch: Any,
    number: int = signal.SIGTERM,
    config: Config = CONFIG,
    runtime: Runtime = QUIET,
) -> None:
    with signalled(step, monkeypatch, number):
        train(path, config, runtime)


def outcome(path: Path) -> dict[str, Any]:
    """All that two runs of the same settings must have in common, to the last bit."""
    found = checkpoint.load_newest(Run(path).checkpoints)
    assert found is not None
    step, state, _ = found
    del state["meter"]["seconds"]
    return {
        "step": step,
        "state": as_bytes(state),
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "weights": (path / "weights.safetensors").read_bytes(),
    }


def as_bytes(value: Any) -> Any:
    """Tensors in a form that == compares to the last bit."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {k: as_bytes(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(as_bytes, value)]
    return value


def content(folder: Path) -> dict[str, bytes]:
    """Every file in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def options(config: Config) -> list[str]:
    """Of the command that trains with this config."""
    words = ["--preset", "quick"]
    for name, value in vars(config).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


# --- a task of two layers that can be told to go wrong


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())[:, 0]


class Toy:
    """`spoil` gets the step, from 1, the model and the input, and may return another loss."""

    def __init__(self, spoil: Callable[[int, Any, Tensor], Tensor | None] | None = None):
        self.model, self.spoil = Net(), spoil
        self.train_size = None

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        x = torch.sin(index[:, None] * torch.tensor([1.0, 2.0, 3.0], device=index.device))
        return x, x.sum(1), index

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        x, y, index = batch
        loss = (model(x) - y).square().mean()
        if self.spoil is not None and model.training:
            # samples are numbered without end: the first of a batch of 4 tells the step
            other = self.spoil(int(index[0]) // 4 + 1, self.model, x)
            loss = loss if other is None else other
        return loss, {"size": y.abs().mean()}

    def validate(self, model: nn.Module) -> Mapping[str, float]:
        device = next(model.parameters()).device
        return {"loss": self.loss(model, self.batch(torch.arange(4, device=device)))[0].item()}


def fit_toy(
    path: Path, settings: Settings, task: Toy | None = None, runtime: Runtime = QUIET
) -> Run:
    run = Run.open(path) if path.exists() else Run.create(path, "toy", "", settings)

    def make(_: torch.device) -> Toy:
        return Toy() if task is None else task

    fit(make, settings, run, runtime)
    return run


# --- other processes

# Forks of a process that has imported everything and computed nothing (autograd does not survive
# a fork of one that has).
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.training.helpers", "torch.utils.tensorboard", "scoff.cli", "pytest", "hypothesis"]
)


def start(work: Callable[..., Any], *args: Any) -> Any:
    child = FORKS.Process(target=work, args=args, daemon=True)
    child.start()
    return child


def ended(child: Any, seconds: float = 60) -> int:
    """Its exit code; -9 where it was killed."""
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"still at work after {seconds} s")
    return child.exitcode


STORAGE_CALLS = {
    "open", "write", "flush", "fsync", "close", "__exit__", "replace", "unlink", "mkdir"
}  # fmt: skip


def die_at(number: int) -> None:
    """Kills this process at the call with this number, from 1, that could change the disk."""
    calls = count(1)

    def watch(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in STORAGE_CALLS:
            module = frame.f_globals["__name__"]
            ours = module.startswith("scoff.training")
            ours |= module == "pathlib" and function.__name__ in ("mkdir", "unlink")
            if ours and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def train_and_die(path: Path, number: int) -> None:
    die_at(number)
    train(path)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.005)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
