"""The settings of PPO."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Truncation = Literal["final-value", "last-value", "terminal"]


@dataclass(frozen=True)
class PPOConfig:
    """The defaults suit hundreds of environments; `paper()` is BabyAI's setting."""

    rollout_steps: int = 64
    """Steps of each environment between updates."""
    sequence_steps: int | None = 32
    """Steps that gradients go back through; divides rollout_steps. None: all of a rollout."""
    epochs: int = 2
    """Times that an update goes through a rollout."""
    minibatches: int = 4
    """Parts of an epoch; each has the same number of whole sequences."""
    repeat_choices: bool = False
    """An update takes the schemata that the rollout took. False: it chooses anew, with the noise of
    the rollout, so that close choices turn out another way when weights have changed a little."""
    lr: float = 7e-4
    """Learning rate of Adam."""
    adam_eps: float = 1e-5
    """Added to Adam's denominator. torch's own default is 1e-8."""
    discount: float = 0.99
    """Of the reward, by each step that it is later."""
    gae_lambda: float = 0.95
    """Of generalised advantages: 0 trusts the value after one step, 1 the rewards alone."""
    reward_scale: float = 1.0
    """Rewards are multiplied by it before anything is learned from them."""
    truncation: Truncation = "final-value"
    """What an episode that was cut off would still have brought: the value of its final
    observation, for which the agent decides a second time in each step; that of the one before it
    (last-value), which costs nothing; or nothing, as if it had ended (terminal)."""
    clip: float = 0.2
    """How far the probability of an action may move from that of the rollout, as a share of it."""
    value_clip: float | None = None
    """How far values may move from those of the rollout. None: as far as they will."""
    value_weight: float = 0.5
    """Of the squared error of values, in the loss."""
    entropy_weight: float = 0.01
    """Of the policy's entropy, in the loss."""
    normalise_advantages: bool = True
    """Advantages of a minibatch get mean 0 and deviation 1."""
    max_grad_norm: float | None = 0.5
    """Largest norm of the gradient; larger ones are scaled down. None: no limit."""

    @classmethod
    def paper(cls) -> "PPOConfig":
        """BabyAI's, for 64 environments, with the learning rate of SCOFF's paper (BabyAI: 1e-4)."""
        return cls(
            rollout_steps=40,
            sequence_steps=20,
            epochs=4,
            minibatches=2,
            lr=3e-4,
            gae_lambda=0.99,
            reward_scale=20.0,
            truncation="terminal",
            value_clip=0.2,
            normalise_advantages=False,
        )

    def __post_init__(self) -> None:
        for name in ("rollout_steps", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants at least 1")
        if self.length < 1 or self.rollout_steps % self.length:
            raise ValueError(
                f"sequence_steps: got {self.sequence_steps}, wants a divisor of rollout_steps = "
                f"{self.rollout_steps}"
            )
        if self.truncation not in get_args(Truncation):
            wants = ", ".join(map(repr, get_args(Truncation)))
            raise ValueError(f"truncation: got {self.truncation!r}, wants one of {wants}")
        for name in ("lr", "adam_eps", "clip", "value_clip", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, wants a number above 0")
        if not 0 < self.reward_scale < math.inf:
            raise ValueError(f"reward_scale: got {self.reward_scale}, wants a number above 0")
        for name in ("value_weight", "entropy_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants 0 or more")
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants a number from 0 to 1")

    @property
    def length(self) -> int:
        """Steps of a sequence"""
        return self.rollout_steps if self.sequence_steps is None else self.sequence_steps
