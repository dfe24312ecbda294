"""What all runs share, however they learn: progress, records, validation, checkpoints, stopping."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from scoff.training import checkpoint
from scoff.training.devices import collect_random, gather
from scoff.training.errors import DivergedError, StoppedError
from scoff.training.logs import Logs, Progress, ProgressStyle, Tracker
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.signals import StopRequest
from scoff.training.step import not_finite


class Validated(Protocol):
    """What the loop asks of a task."""

    def validate(self, model: nn.Module) -> Mapping[str, float]: ...


class Reporting(Protocol):
    """Where a run tells how it goes; see `Runtime`."""

    @property
    def tensorboard(self) -> bool: ...

    @property
    def tracker(self) -> Tracker: ...

    @property
    def progress(self) -> ProgressStyle: ...


@dataclass
class Meter:
    """Sums since the last record, and the time spent in training. Part of a checkpoint, so that
    records do not depend on where a run was stopped."""

    sums: list[float] = field(default_factory=list)
    count: int = 0
    seconds: float = 0.0

    def add(self, values: list[float]) -> None:
        old = self.sums or [0.0] * len(values)
        self.sums = [a + b for a, b in zip(old, values, strict=True)]
        self.count += 1

    def take(self) -> list[float]:
        means = [total / self.count for total in self.sums]
        self.sums, self.count = [], 0
        return means

    def collect(self, fabric: Fabric) -> dict[str, Any]:
        """Each process has sums of its own."""
        sums = gather(fabric, torch.tensor(self.sums, dtype=torch.float64))
        return {**asdict(self), "sums": [own.tolist() for own in sums]}

    @classmethod
    def restore(cls, state: Mapping[str, Any], fabric: Fabric) -> "Meter":
        sums = state["sums"]
        if len(sums) == fabric.world_size:
            own = sums[fabric.global_rank]
        else:  # another number of processes
            own = [sum(column) / len(sums) for column in zip(*sums, strict=True)]
        return cls(own, state["count"], state["seconds"])


@dataclass
class Loop:
    """Subclasses say what a step is and what of it a checkpoint has to hold."""

    fabric: Fabric
    task: Validated
    weights: nn.Module
    settings: Settings
    run: Run
    meter: Meter
    start: int

    # --- what subclasses say

    def set_lr(self, value: float) -> None:
        raise NotImplementedError

    def advance(self, number: int) -> list[float]:
        """Makes one step; returns numbers whose means are recorded, and raises DivergedError if it
        comes to numbers that are not finite."""
        raise NotImplementedError

    def shown(self, values: list[float]) -> Mapping[str, float]:
        """Of what a step returned, what the progress tells"""
        raise NotImplementedError

    def means(self) -> Mapping[str, float]:
        """Of the steps since the last record; all processes call it"""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What changes, besides weights and random numbers"""
        raise NotImplementedError

    def make_progress(self, label: str, style: ProgressStyle) -> Progress:
        return Progress(self.settings.steps, self.start, label, style)

    # --- what they share

    def train(self, reporting: Reporting, label: str, stop: StopRequest) -> None:
        settings, fabric, start = self.settings, self.fabric, self.start
        first = fabric.is_global_zero
        logs = None
        if first:
            config = asdict(settings)
            logs = Logs(self.run, start, config, reporting.tensorboard, reporting.tracker)
            self.run.evaluation_path.unlink(missing_ok=True)  # of an earlier step
            if reporting.progress != "off":
                count = sum(weight.numel() for weight in self.weights.parameters())
                print(f"{label}: {count:,} parameters", file=sys.stderr, flush=True)
        progress = self.make_progress(label, reporting.progress if first else "off")
        clock = time.monotonic()
        try:
            for number in range(start, settings.steps):
                values = self.one_step(number)
                done = number + 1
                last = done == settings.steps
                self.meter.add(values)
                progress.update(done, self.shown(values))
                if done % settings.log_every == 0 or last:
                    self.record(done, logs)
                if done % settings.validate_every == 0 or last:
                    self.validate(done, logs)
                stopping = self.is_stopping(stop, done)
                if done % settings.checkpoint_every == 0 or last or stopping:
                    now = time.monotonic()
                    self.meter.seconds += now - clock
                    clock = now
                    self.save(done, logs)
                if stopping and not last:
                    raise StoppedError(
                        f"stopped at step {done:,} of {settings.steps:,}; go on with: "
                        f"scoff train --resume {self.run.path}",
                        by_keyboard=stop.signal == signal.SIGINT,
                    )
            if first:
                self.run.write_weights(self.weights, settings.steps, self.meter.seconds)
            fabric.barrier()
        finally:
            progress.close()
            if logs is not None:
                logs.close()

    def one_step(self, number: int) -> list[float]:
        self.set_lr(self.settings.lr_at(number))
        return self.advance(number)

    def record(self, done: int, logs: Logs | None) -> None:
        means = self.means()
        if logs is not None:
            values = {f"train/{name}": value for name, value in means.items()}
            logs.write(done, {**values, "train/lr": self.settings.lr_at(done - 1)})

    def validate(self, done: int, logs: Logs | None) -> None:
        if logs is None:
            return
        self.weights.eval()
        with torch.no_grad(), self.fabric.autocast():
            values: Mapping[str, float] = self.task.validate(self.weights)
        self.weights.train()
        logs.write(done, {f"valid/{name}": value for name, value in values.items()})

    def is_stopping(self, stop: StopRequest, done: int) -> bool:
        """Whether all processes are to stop after this step."""
        if self.fabric.world_size == 1:
            return stop.signal is not None
        if done % self.settings.log_every:  # asking each other costs time
            return False
        asked = torch.tensor(float(stop.signal is not None), device=self.fabric.device)
        return bool(cast(Tensor, self.fabric.all_reduce(asked, reduce_op="sum")) > 0)

    def save(self, done: int, logs: Logs | None) -> None:
        # an update can overflow though loss and gradients were finite
        if found := not_finite((), self.weights):
            last = checkpoint.last_good(self.run.checkpoints)
            raise DivergedError(f"after step {done}: not finite: {some(found)}; {last}")
        random, meter = collect_random(self.fabric), self.meter.collect(self.fabric)
        if logs is not None:
            logs.flush()  # a checkpoint does not outlive the records before it
            state = {
                "model": self.weights.state_dict(),
                **self.state(),
                "random": random,
                "meter": meter,
            }
            checkpoint.save(self.run.checkpoints, done, state)


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class ForeignStateError(ValueError):
    """A checkpoint does not fit the model."""


@contextmanager
def loading() -> Iterator[None]:
    """Around all that is restored from a checkpoint"""
    try:
        yield
    except (RuntimeError, ValueError, LookupError) as error:
        raise ForeignStateError(str(error)) from error
