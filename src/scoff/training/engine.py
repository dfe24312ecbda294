"""The training loop of every supervised experiment.

    fit(make_task, settings, run, runtime)

What happens at step t is a function of the settings and t alone: the batch (see `data`), the
learning rate, and the noise, whose generators' states are part of a checkpoint. So a run that was
stopped anywhere and resumed gives the same bits as one that was not.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from scoff.training import checkpoint
from scoff.training.data import batch_indices, seed_for
from scoff.training.devices import (
    collect_random,
    gather,
    make_fabric,
    pick_device,
    restore_random,
    world_size,
)
from scoff.training.errors import DivergedError, StoppedError, StorageError, UsageError
from scoff.training.logs import Logs, Progress, ProgressStyle, Tracker, check_packages
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.step import EagerStep, GraphStep, Task, not_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """Where and how a run is carried out; what it computes depends on these by rounding alone."""

    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one. Several GPUs or machines: torchrun."""
    threads: int = 1
    """CPU threads of each process. Small recurrent steps are far slower with more than one."""
    tensorboard: bool = True
    """Also log to TensorBoard, in the run's folder."""
    tracker: Tracker = "none"
    """Also log to wandb or trackio; needs the package."""
    progress: ProgressStyle = "auto"
    """auto: a bar on a terminal, else lines."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"--threads: got {self.threads}, wants at least 1")


def check(settings: Settings, runtime: Runtime) -> None:
    """Refuses what cannot be done here, before anything is written."""
    device, world = pick_device(runtime.device), world_size()
    if settings.batch_size % world:
        raise UsageError(
            f"--batch-size: got {settings.batch_size}, wants a multiple of the {world} processes"
        )
    if settings.acceleration == "graph" and (device.type != "cuda" or world > 1):
        raise UsageError("--acceleration graph: wants a single GPU")
    check_packages(runtime.tensorboard, runtime.tracker)


def fit(
    make_task: Callable[[torch.device], Task],
    settings: Settings,
    run: Run,
    runtime: Runtime,
    label: str = "train",
) -> None:
    """Trains from the run's newest checkpoint, or from the start, to the last step."""
    check(settings, runtime)
    torch.set_num_threads(runtime.threads)
    fabric = make_fabric(pick_device(runtime.device), settings.precision)
    with run.locked() if fabric.is_global_zero else nullcontext(), catch_signals() as stop:
        prepare(make_task, settings, run, fabric).train(runtime, label, stop)


def prepare(
    make_task: Callable[[torch.device], Task], settings: Settings, run: Run, fabric: Fabric
) -> "Loop":
    """Model, optimiser and random numbers as the newest checkpoint has them, or new ones."""
    torch.manual_seed(seed_for(settings.seed, "weights"))
    task = make_task(fabric.device)
    weights = task.model.to(fabric.device)
    torch.manual_seed(seed_for(settings.seed, "noise", fabric.global_rank))

    alone_on_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
    graph = alone_on_gpu and settings.acceleration in ("graph", "auto")
    optimiser = torch.optim.AdamW(
        weights.parameters(),
        lr=torch.tensor(settings.lr) if graph else settings.lr,
        weight_decay=settings.weight_decay,
        capturable=graph,
    )
    if fabric.is_global_zero:
        checkpoint.remove_left_overs(run.path)
        checkpoint.remove_left_overs(run.checkpoints)
    start, state = 0, None
    newest = checkpoint.load_newest(run.checkpoints)
    if newest is not None:
        start, state, path = newest
        try:
            weights.load_state_dict(state["model"])
            for group in state["optimiser"]["param_groups"]:
                group["capturable"] = graph  # may have been saved on another device
            optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError, LookupError) as error:
            raise StorageError(f"{path} is not of the run in config.json: {error}") from error
        if fabric.is_global_zero:
            log.info("going on from %s", path)
    if len({int(step) for step in gather(fabric, torch.tensor(start))}) > 1:
        raise StorageError(f"not all processes find the same checkpoints in {run.checkpoints}")

    compiled = torch.compile(weights) if settings.acceleration == "compile" else weights
    model = fabric.setup_module(compiled)  # pyright: ignore[reportArgumentType]
    model.train()
    if graph:
        step = GraphStep(fabric, task, model, optimiser, settings.clip, settings.batch_size)
    else:
        step = EagerStep(fabric, task, model, fabric.setup_optimizers(optimiser), settings.clip)
    meter = Meter()
    if state is not None:
        restore_random(state["random"], fabric, seed_for(settings.seed, "noise", start))
        meter = Meter.restore(state["meter"], fabric)

    return Loop(fabric, task, model, weights, optimiser, step, settings, run, meter, start)


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
    fabric: Fabric
    task: Task
    model: nn.Module  # as set up by Fabric
    weights: nn.Module  # the same, bare
    optimiser: torch.optim.Optimizer
    step: EagerStep
    settings: Settings
    run: Run
    meter: Meter
    start: int

    def train(self, runtime: Runtime, label: str, stop: "StopRequest") -> None:
        settings, fabric, start = self.settings, self.fabric, self.start
        first = fabric.is_global_zero
        logs = None
        if first:
            config = asdict(settings)
            logs = Logs(self.run, start, config, runtime.tensorboard, runtime.tracker)
            self.run.evaluation_path.unlink(missing_ok=True)  # of an earlier step
        style = runtime.progress if first else "off"
        progress = Progress(settings.steps, start, label, style)
        clock = time.monotonic()
        try:
            for number in range(start, settings.steps):
                values = self.one_step(number)
                done = number + 1
                last = done == settings.steps
                self.meter.add(values)
                progress.update(done, values[0])
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
        """Loss, norm of the gradient, and so on."""
        settings, fabric = self.settings, self.fabric
        index = batch_indices(
            settings.seed,
            number,
            settings.batch_size,
            self.task.train_size,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )
        self.step.set_lr(settings.lr_at(number))
        values = self.step.gradients(index)
        if not (math.isfinite(values[0]) and math.isfinite(values[1])):
            self.complain(number, index, values)
        self.step.update()
        return values

    def complain(self, number: int, index: Tensor, values: list[float]) -> None:
        found = not_finite(self.task.batch(index.to(self.fabric.device)), self.weights)
        alone = "the norm alone" if math.isfinite(values[0]) else "the loss alone"
        raise DivergedError(
            f"step {number + 1}: the loss is {values[0]:.4g} and the gradient's norm "
            f"{values[1]:.4g}; not finite: {some(found) or alone}; "
            + checkpoint.last_good(self.run.checkpoints)
        )

    def record(self, done: int, logs: Logs | None) -> None:
        means = torch.tensor(self.meter.take(), device=self.fabric.device, dtype=torch.float64)
        if self.fabric.world_size > 1:
            means = cast(Tensor, self.fabric.all_reduce(means, reduce_op="mean"))
        if logs is not None:
            names = [f"train/{name}" for name in self.step.names]
            values = dict(zip(names, means.tolist(), strict=True))
            logs.write(done, {**values, "train/lr": self.settings.lr_at(done - 1)})

    def validate(self, done: int, logs: Logs | None) -> None:
        if logs is None:
            return
        self.weights.eval()
        with torch.no_grad(), self.fabric.autocast():
            values: Mapping[str, float] = self.task.validate(self.weights)
        self.weights.train()
        logs.write(done, {f"valid/{name}": value for name, value in values.items()})

    def is_stopping(self, stop: "StopRequest", done: int) -> bool:
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
                "optimiser": self.optimiser.state_dict(),
                "random": random,
                "meter": meter,
            }
            checkpoint.save(self.run.checkpoints, done, state)


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass
class StopRequest:
    signal: int | None = None


def stop_signals() -> list[int]:
    """Those that there are and that are not ignored on purpose, as nohup does."""
    names = ("SIGTERM", "SIGINT", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """These end the run after the step under way; a second one ends it at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # signals are not for it
        yield request
        return
    # None: a handler that Python does not know and could not put back
    before = {n: signal.getsignal(n) or signal.SIG_DFL for n in stop_signals()}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        request.signal = number
        put_back()

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        put_back()
