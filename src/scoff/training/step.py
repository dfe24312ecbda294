"""One training step in two halves: gradients of a batch, then the update.

Between them the engine looks at the loss, so that weights are never updated by what is not finite.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn


class Task(Protocol):
    """What an experiment hands to the engine."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def train_size(self) -> int | None:
        """Samples in the training set. None: there is no end of fresh ones."""
        ...

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        """The training samples with these numbers, on the device of `index`, a function of the
        task's seed and of `index` alone."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Of the batch, or of the part of it that this process has, and more numbers to log."""
        ...

    def validate(self, model: nn.Module) -> Mapping[str, float]:
        """Numbers on data like that of training, for a model in evaluation mode."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A task whose loss changes as training goes on."""

    def set_progress(self, share: float) -> None:
        """Called before each step with the share of all steps that are done. What the loss makes of
        it has to be in a tensor that is filled anew, for the step may be a CUDA graph."""
        ...


@runtime_checkable
class ChecksNew(Protocol):
    """A task that refuses what earlier runs may have, which are gone on with and tested all the
    same."""

    def check_new(self) -> None: ...


class EagerStep:
    def __init__(
        self,
        fabric: Fabric,
        task: Task,
        model: nn.Module,
        optimiser: Any,
        clip: float | None,
    ):
        self.fabric, self.task, self.model = fabric, task, model
        self.optimiser, self.clip = optimiser, clip
        self.names: tuple[str, ...] = ()

    def gradients(self, index: Tensor) -> list[float]:
        """Loss, norm of the gradient and what else the task tells; see `names`."""
        self.optimiser.zero_grad()
        return self._gradients(index.to(self.fabric.device)).tolist()

    def update(self) -> None:
        self._update()

    def set_lr(self, value: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = value

    def _gradients(self, index: Tensor) -> Tensor:
        batch = self.task.batch(index)
        loss, more = self.task.loss(self.model, batch)
        self.fabric.backward(loss)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = nn.utils.get_total_norm(gradients)
        self.names = ("loss", "grad_norm", *more)
        values = [loss.detach(), self.norm, *(value.detach() for value in more.values())]
        return torch.stack([value.float() for value in values])

    def _update(self) -> None:
        # not before the norm was looked at: one NaN would spread to all gradients
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, self.norm)
        self.optimiser.step()


class GraphStep(EagerStep):
    """Both halves replayed from CUDA graphs: no launch of a kernel costs time on the CPU."""

    def __init__(
        self,
        fabric: Fabric,
        task: Task,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        clip: float | None,
        batch_size: int,
    ):
        super().__init__(fabric, task, model, optimiser, clip)
        device = fabric.device
        self.index = torch.zeros(batch_size, dtype=torch.int64, device=device)
        for group in optimiser.param_groups:
            group["lr"] = torch.tensor(0.0, device=device)
        weights = [*model.parameters(), *model.buffers()]
        before = [tensor.detach().clone() for tensor in weights]
        moments = {p: clones(state) for p, state in optimiser.state.items()}
        random = torch.cuda.get_rng_state(device)

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries set themselves up; the optimiser makes its state
                optimiser.zero_grad()
                self._gradients(self.index)
                self._update()
        torch.cuda.current_stream(device).wait_stream(side)
        optimiser.zero_grad()
        self.first, self.second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.first):
            self.summary = self._gradients(self.index)
        with torch.cuda.graph(self.second, pool=self.first.pool()):
            self._update()

        # as if nothing had happened
        with torch.no_grad():
            for tensor, value in zip(weights, before, strict=True):
                tensor.copy_(value)
            for parameter, state in optimiser.state.items():
                for name, tensor in state.items():
                    if isinstance(tensor, Tensor):
                        old = moments.get(parameter, {}).get(name)
                        tensor.zero_() if old is None else tensor.copy_(old)
        torch.cuda.set_rng_state(random, device)

    def gradients(self, index: Tensor) -> list[float]:
        self.index.copy_(index)
        self.first.replay()
        return self.summary.tolist()

    def update(self) -> None:
        self.second.replay()

    def set_lr(self, value: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"].fill_(value)


def clones(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def not_finite(batch: tuple[Tensor, ...], model: nn.Module) -> list[str]:
    """What to look at when a loss is not finite, the likeliest cause first."""
    found = [f"batch[{i}]" for i, x in enumerate(batch) if is_broken(x)]
    found += [f"weight {name}" for name, p in model.named_parameters() if is_broken(p)]
    return found + [
        f"gradient of {name}" for name, p in model.named_parameters() if is_broken(p.grad)
    ]


def is_broken(tensor: Tensor | None) -> bool:
    return tensor is not None and not bool(tensor.isfinite().all())
