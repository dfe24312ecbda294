"""What every run can be told, whatever the experiment."""

import math
from dataclasses import dataclass
from typing import Literal

from scoff.training.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Part of a run's identity: the same settings give the same numbers."""

    seed: int = 0
    """Seed of weights, data order and noise."""
    steps: int = 10_000
    """Training steps."""
    batch_size: int = 64
    """Sequences in each step, over all processes together."""
    lr: float = 1e-3
    """Learning rate of Adam, after the warm-up."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls to 0 over the steps after the warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as in AdamW."""
    clip: float | None = 1.0
    """Largest norm of the gradient; larger ones are scaled down. None: no limit."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Numbers that the model computes with; weights are float32 in either case."""
    acceleration: Literal["auto", "none", "graph", "compile"] = "auto"
    """Run each step eagerly (none), from a CUDA graph (graph) or through torch.compile (compile).
    auto: a graph on a single GPU, else none."""
    weights_from: str | None = None
    """Folder of a trained run to start from: its weights, nothing else. With reproduce, the folder
    that holds the runs, of which each starts from the one with its name."""
    log_every: int = 50
    """Steps over which the logged loss is averaged."""
    validate_every: int = 500
    """Steps between validations; there is one at the end in any case."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; there is one at the end in any case."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{flag(name)}: got {getattr(self, name)}, wants at least 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed: got {self.seed}, wants a number from 0 to 2^63 - 1")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"--lr: got {self.lr}, wants a number above 0")
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"--warmup: got {self.warmup}, wants a share from 0 to 1")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"--weight-decay: got {self.weight_decay}, wants at least 0")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"--clip: got {self.clip}, wants a number above 0, or None")

    def lr_at(self, step: int) -> float:
        """Of the step with this number, counted from 0."""
        warm = round(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(self.steps - warm, 1)
        if self.decay == "linear":
            return self.lr * (1 - done)
        if self.decay == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        return self.lr


def flag(field: str) -> str:
    """The command line's name of a field."""
    return field.replace("_", "-")
