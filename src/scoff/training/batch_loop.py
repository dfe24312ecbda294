"""Learning from batches: the loop of every supervised experiment."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor

from scoff.training import checkpoint
from scoff.training.data import batch_indices
from scoff.training.errors import DivergedError
from scoff.training.loop import Loop, Meter, loading, some
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.step import EagerStep, GraphStep, Task, Timed, not_finite


@dataclass
class BatchLoop(Loop):
    batches: Task
    optimiser: torch.optim.Optimizer
    step: EagerStep

    @classmethod
    def begin(
        cls,
        task: Task,
        settings: Settings,
        run: Run,
        fabric: Fabric,
        start: int,
        state: Mapping[str, Any] | None,
    ) -> "BatchLoop":
        """`state` is that of a checkpoint, if there is one."""
        weights = task.model
        alone_on_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
        graph = alone_on_gpu and settings.acceleration in ("graph", "auto")
        optimiser = torch.optim.AdamW(
            weights.parameters(),
            lr=torch.tensor(settings.lr) if graph else settings.lr,
            weight_decay=settings.weight_decay,
            capturable=graph,
        )
        if state is not None:
            with loading():
                weights.load_state_dict(state["model"])
                for group in state["optimiser"]["param_groups"]:
                    group["capturable"] = graph  # may have been saved on another device
                optimiser.load_state_dict(state["optimiser"])
        compiled = torch.compile(weights) if settings.acceleration == "compile" else weights
        model = fabric.setup_module(compiled)  # pyright: ignore[reportArgumentType]
        model.train()
        if graph:
            step = GraphStep(fabric, task, model, optimiser, settings.clip, settings.batch_size)
        else:
            step = EagerStep(fabric, task, model, fabric.setup_optimizers(optimiser), settings.clip)
        return cls(fabric, task, weights, settings, run, Meter(), start, task, optimiser, step)

    def set_lr(self, value: float) -> None:
        self.step.set_lr(value)

    def advance(self, number: int) -> list[float]:
        """Loss, norm of the gradient, and so on."""
        settings, fabric = self.settings, self.fabric
        index = batch_indices(
            settings.seed,
            number,
            settings.batch_size,
            self.batches.train_size,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )
        if isinstance(self.batches, Timed):
            self.batches.set_progress(number / settings.steps)
        values = self.step.gradients(index)
        if not (math.isfinite(values[0]) and math.isfinite(values[1])):
            self.complain(number, index, values)
        self.step.update()
        return values

    def shown(self, values: list[float]) -> Mapping[str, float]:
        return {"loss": values[0]}

    def means(self) -> Mapping[str, float]:
        means = torch.tensor(self.meter.take(), device=self.fabric.device, dtype=torch.float64)
        if self.fabric.world_size > 1:
            means = cast(Tensor, self.fabric.all_reduce(means, reduce_op="mean"))
        return dict(zip(self.step.names, means.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        return {"optimiser": self.optimiser.state_dict()}

    def complain(self, number: int, index: Tensor, values: list[float]) -> None:
        found = not_finite(self.batches.batch(index.to(self.fabric.device)), self.weights)
        alone = "the norm alone" if math.isfinite(values[0]) else "the loss alone"
        raise DivergedError(
            f"step {number + 1}: the loss is {values[0]:.4g} and the gradient's norm "
            f"{values[1]:.4g}; not finite: {some(found) or alone}; "
            + checkpoint.last_good(self.run.checkpoints)
        )
