"""Where numbers go while a run trains: metrics.jsonl, TensorBoard, trackers, the terminal."""

import importlib
import importlib.util
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from tqdm import tqdm

from scoff.training.checkpoint import write_atomic
from scoff.training.errors import StorageError, UsageError
from scoff.training.run import Run, read_records

Tracker = Literal["none", "wandb", "trackio"]
ProgressStyle = Literal["auto", "bar", "lines", "off"]

SECONDS_BETWEEN_LINES = 10.0


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, cut back to the step that the run goes on from."""

    def __init__(self, run: Run, step: int):
        records = [r for r in read_records(run.metrics_path) if r["step"] <= step]
        write_atomic(run.metrics_path, "".join(map(as_line, records)).encode())
        self.file = open(run.metrics_path, "a")  # noqa: SIM115

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(as_line({"step": step, **values}))
        self.file.flush()

    def flush(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, run: Run, step: int):
        module = importlib.import_module("torch.utils.tensorboard")
        self.writer = module.SummaryWriter(run.path / "tensorboard", purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Tracked:
    """wandb, or trackio, which has the same interface."""

    def __init__(self, tracker: str, run: Run, config: Mapping[str, Any]):
        self.module = importlib.import_module(tracker)
        # A resumed run goes on with the same tracked run. Not so one of the same name, be it
        # in another folder or in this one after it was emptied.
        identity_path = run.path / "tracker-id"
        if not identity_path.exists():
            write_atomic(identity_path, secrets.token_hex(8).encode())
        identity, name = identity_path.read_text(), run.path.resolve().name
        if tracker == "wandb":
            options = {"id": identity, "name": name, "dir": str(run.path)}
        else:  # trackio knows a run by its name
            options = {"name": f"{name}-{identity}"}
        self.module.init(project="scoff", config=dict(config), resume="allow", **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.module.finish()


class Logs:
    """Writes each record to all of its sinks."""

    def __init__(
        self, run: Run, step: int, config: Mapping[str, Any], tensorboard: bool, tracker: Tracker
    ):
        self.run = run
        self.sinks: list[Sink] = []
        try:
            with storing(run.path):
                self.sinks.append(JsonLines(run, step))
                if tensorboard:
                    self.sinks.append(TensorBoard(run, step))
                if tracker != "none":
                    self.sinks.append(Tracked(tracker, run, config))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with storing(self.run.path):
            for sink in self.sinks:
                sink.write(step, values)

    def flush(self) -> None:
        with storing(self.run.path):
            for sink in self.sinks:
                sink.flush()

    def close(self) -> None:
        with storing(self.run.path), ExitStack() as stack:  # all, whatever one of them raises
            for sink in self.sinks:
                stack.callback(sink.close)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write the logs of {path}: {reason}") from error


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere.

    `unit` is what is counted for the rate, so many to a step.
    """

    def __init__(
        self,
        total: int,
        start: int,
        label: str,
        style: ProgressStyle,
        unit: str = "step",
        per_step: int = 1,
    ):
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "lines"
        self.total, self.start, self.label, self.style = total, start, label, style
        self.unit, self.per_step = unit, per_step
        self.began = self.told = time.monotonic()
        self.smooth: dict[str, float] = {}
        self.bar = None
        if style == "bar":
            self.bar = tqdm(
                total=total * per_step,
                initial=start * per_step,
                desc=label,
                unit=unit if per_step == 1 else f" {unit}s",
                unit_scale=per_step > 1,
                smoothing=0.1,
            )

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """After a step, or several; of the values running means are shown, but for unknown ones."""
        for name, value in values.items():
            if not math.isnan(value):
                self.smooth[name] = 0.95 * self.smooth.get(name, value) + 0.05 * value
        shown = {name: f"{value:.4g}" for name, value in self.smooth.items()}
        if self.bar is not None:
            if self.bar.update(step * self.per_step - self.bar.n):
                self.bar.set_postfix(shown, refresh=False)
        elif self.style == "lines":
            now = time.monotonic()
            if now - self.told >= SECONDS_BETWEEN_LINES or step == self.total:
                self.told = now
                rate = (step - self.start) / max(now - self.began, 1e-9)
                left = (self.total - step) / rate
                counted = self.unit if self.per_step == 1 else "step"
                words = [f"{self.label}: {counted} {step:,}/{self.total:,}"]
                words += [f"{name} {value}" for name, value in shown.items()]
                words += [f"{rate * self.per_step:,.1f} {self.unit}s/s", f"{clock(left)} left"]
                print("  ".join(words), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def clock(seconds: float) -> str:
    return tqdm.format_interval(seconds)


def as_line(record: Mapping[str, Any]) -> str:
    """JSON has no NaN: it is null."""
    known = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return json.dumps(known) + "\n"


def check_packages(tensorboard: bool, tracker: Tracker) -> None:
    wanted = {"tensorboard": "--no-tensorboard does without"} if tensorboard else {}
    if tracker != "none":
        wanted[tracker] = f"or leave --tracker {tracker} away"
    for package, otherwise in wanted.items():
        spec = importlib.util.find_spec(package)
        # without an origin it is a mere folder, such as the one that wandb writes into
        if spec is None or spec.origin is None:
            raise UsageError(
                f"the package {package} is not installed: pip install {package}, {otherwise}"
            )
