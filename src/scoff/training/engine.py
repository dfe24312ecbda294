"""The way from a task to a trained run.

    fit(make_task, settings, run, runtime)

What happens at step t is a function of the settings and t alone: the batch (see `data`), the
learning rate, and the noise, whose generators' states are part of a checkpoint. So a run that was
stopped anywhere and resumed gives the same bits as one that was not.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_fabric import Fabric
from torch import nn

from scoff.training import checkpoint
from scoff.training.batch_loop import BatchLoop
from scoff.training.data import seed_for
from scoff.training.devices import (
    gather,
    make_fabric,
    pick_device,
    restore_random,
    world_size,
)
from scoff.training.errors import StorageError, UsageError
from scoff.training.logs import ProgressStyle, Tracker, check_packages
from scoff.training.loop import ForeignStateError, Loop, Meter
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.signals import catch_signals
from scoff.training.step import Task

log = logging.getLogger(__name__)

ON_GPU = ("fused", "wide")  # of SCOFF's backends


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
    backend = getattr(settings, "backend", "auto")
    chooses = getattr(settings, "model", "scoff").startswith("scoff")  # Triton kernels are of SCOFF
    if chooses and backend in ON_GPU and device.type != "cuda":
        raise UsageError(f"--backend: got {backend}, which runs on a GPU, not on --device {device}")
    if settings.acceleration == "graph" and (device.type != "cuda" or world > 1):
        raise UsageError("--acceleration graph: wants a single GPU")
    check_packages(runtime.tensorboard, runtime.tracker)


@runtime_checkable
class OwnLoop(Protocol):
    """A task that is not learned from batches, and so brings a loop of its own."""

    @property
    def model(self) -> nn.Module: ...

    def begin(
        self,
        settings: Any,
        run: Run,
        fabric: Fabric,
        start: int,
        state: Mapping[str, Any] | None,
    ) -> Loop:
        """`state` is that of a checkpoint, if there is one, of step `start`. Random numbers are
        none of its business."""
        ...


def fit(
    make_task: Callable[[torch.device], Task | OwnLoop],
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
    make_task: Callable[[torch.device], Task | OwnLoop],
    settings: Settings,
    run: Run,
    fabric: Fabric,
) -> Loop:
    """Model, optimiser and random numbers as the newest checkpoint has them, or new ones."""
    torch.manual_seed(seed_for(settings.seed, "weights"))
    task = make_task(fabric.device)
    task.model.to(fabric.device)
    torch.manual_seed(seed_for(settings.seed, "noise", fabric.global_rank))
    if fabric.is_global_zero:
        checkpoint.remove_left_overs(run.path)
        checkpoint.remove_left_overs(run.checkpoints)
    start, state, path = checkpoint.load_newest(run.checkpoints) or (0, None, None)
    if state is None and settings.weights_from is not None:
        load_weights(task.model, Run.open(Path(settings.weights_from)))
    try:
        if isinstance(task, OwnLoop):
            loop = task.begin(settings, run, fabric, start, state)
        else:
            loop = BatchLoop.begin(task, settings, run, fabric, start, state)
    except ForeignStateError as error:
        raise StorageError(f"{path} is not of the run in config.json: {error}") from error
    if path is not None and fabric.is_global_zero:
        log.info("going on from %s", path)
    if len({int(step) for step in gather(fabric, torch.tensor(start))}) > 1:
        raise StorageError(f"not all processes find the same checkpoints in {run.checkpoints}")
    if state is not None:
        restore_random(state["random"], fabric, seed_for(settings.seed, "noise", start))
        loop.meter = Meter.restore(state["meter"], fabric)
    return loop


def load_weights(model: nn.Module, run: Run) -> None:
    try:
        model.load_state_dict(run.read_weights())
    except RuntimeError as error:
        raise UsageError(f"--weights-from: those of {run.path} are of another model") from error
