"""What PPO acts in: many environments at once, as tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scoff.worlds.maze import Mazes


class Transition(NamedTuple):
    """What comes of one step of all N environments."""

    observation: Tensor  # [N, ...]: where an episode has ended, the first of the next one
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode has ended, there is nothing to come
    truncated: Tensor  # [N] bool: it was cut off, and would have gone on
    # [N, ...]: where an episode has ended, its last observation; elsewhere the same as
    # `observation`
    final_observation: Tensor | None = None


class Environment(Protocol):
    """Episodes that have ended begin anew within the same step.

    For a CUDA graph of a rollout, nothing in `step` and `prepare` may wait for the device, and what
    changes must stay in the same tensors.
    """

    @property
    def num_envs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def reset(self) -> Tensor:
        """Begins new episodes everywhere and gives their first observations  [N, ...]"""
        ...

    def step(self, action: Tensor) -> Transition:
        """[N] int64"""
        ...

    def prepare(self) -> None:
        """Called before each rollout, for what has to be done once in a while."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that changes, random number generators of its own included."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class MazeEnvironment:
    """Mazes, as PPO takes them.

    Args:
        mazes: with autoreset "same-step"; `final_views=True` for values of final observations.
        observe: from views [N, V, V] uint8 to observations. Default: the views themselves, the
            smallest to store; an encoder can embed or paint them.
        refill: mazes drawn before each rollout, to replace those used up. Default: as many as can
            be used up, `mazes.spares`. Where an agent walks through more mazes in a rollout than
            are ready for it, four by default, some come again: give `Mazes` more spares.
    """

    def __init__(
        self,
        mazes: Mazes,
        observe: Callable[[Tensor], Tensor] | None = None,
        refill: int | None = None,
    ):
        if mazes.autoreset != "same-step":
            raise ValueError(f"mazes: got autoreset = {mazes.autoreset!r}, wants 'same-step'")
        self.mazes = mazes
        self.observe = observe or torch.nn.Identity()
        self.refill = mazes.spares if refill is None else refill

    @property
    def num_envs(self) -> int:
        return self.mazes.num_envs

    @property
    def device(self) -> torch.device:
        return self.mazes.device

    def reset(self) -> Tensor:
        return self.observe(self.mazes.reset())

    def step(self, action: Tensor) -> Transition:
        view, reward, terminated, truncated, final_view = self.mazes.step(action)
        final = None if final_view is None else self.observe(final_view)
        return Transition(self.observe(view), reward, terminated, truncated, final)

    def prepare(self) -> None:
        self.mazes.refill(self.refill)

    def state_dict(self) -> dict[str, Any]:
        return self.mazes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mazes.load_state_dict(state)
