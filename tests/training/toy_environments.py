"""Small environments whose best policies are known."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scoff.training.environments import Transition


class Toy:
    """What they share: a generator, and counted steps of each episode."""

    def __init__(self, num_envs: int, seed: int = 0):
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.generator = torch.Generator().manual_seed(seed)
        self.age = torch.zeros(num_envs, dtype=torch.int64)
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "age": self.age}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.age.copy_(state["age"])


class Bandit(Toy):
    """One step an episode; arm k pays 1 with probability k / (arms - 1) * 0.9."""

    def __init__(self, num_envs: int, arms: int = 4, seed: int = 0):
        super().__init__(num_envs, seed)
        self.chance = torch.linspace(0, 0.9, arms)

    def reset(self) -> Tensor:
        return torch.ones(self.num_envs, 1)

    def step(self, action: Tensor) -> Transition:
        luck = torch.rand(self.num_envs, generator=self.generator)
        reward = (luck < self.chance[action]).float()
        ended = torch.ones(self.num_envs, dtype=torch.bool)
        return Transition(self.reset(), reward, ended, ~ended, self.reset())


class Recall(Toy):
    """A cue at the first step; `delay` steps later the action has to be the cue.

    Observations: the cue, one of two, at the first step alone; whether the answer is wanted now.
    """

    def __init__(self, num_envs: int, delay: int, seed: int = 0):
        super().__init__(num_envs, seed)
        self.delay = delay
        self.cue = torch.zeros(num_envs, dtype=torch.int64)

    def reset(self) -> Tensor:
        self.cue.random_(0, 2, generator=self.generator)
        # at different ages, so that episodes start anywhere within a sequence
        self.age.random_(0, self.delay + 1, generator=self.generator)
        return self._observe()

    def step(self, action: Tensor) -> Transition:
        ended = self.age == self.delay
        reward = (ended & (action == self.cue)).float()
        self.age.add_(1).masked_fill_(ended, 0)
        fresh = torch.empty_like(self.cue).random_(0, 2, generator=self.generator)
        torch.where(ended, fresh, self.cue, out=self.cue)
        return Transition(self._observe(), reward, ended, torch.zeros_like(ended))

    def _observe(self) -> Tensor:
        shown = torch.nn.functional.one_hot(self.cue, 2) * (self.age == 0)[:, None]
        return torch.cat([shown, (self.age == self.delay)[:, None]], 1).float()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cue": self.cue}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.cue.copy_(state["cue"])


class Chance(Toy):
    """Everything is random, ends of both kinds included; remembers what it gave."""

    def __init__(self, num_envs: int, size: int = 3, seed: int = 0):
        super().__init__(num_envs, seed)
        self.size = size
        self.given: list[Transition] = []

    def reset(self) -> Tensor:
        return self._numbers(self.size)

    def step(self, action: Tensor) -> Transition:
        terminated, truncated = torch.rand(2, self.num_envs, generator=self.generator) < 0.15
        ended = (terminated | truncated)[:, None]
        final = self._numbers(self.size) + action[:, None]
        observation = torch.where(ended, self._numbers(self.size), final)
        reward = self._numbers(1)[:, 0]
        self.given.append(Transition(observation, reward, terminated, truncated, final))
        return self.given[-1]

    def _numbers(self, size: int) -> Tensor:
        return torch.randn(self.num_envs, size, generator=self.generator)
