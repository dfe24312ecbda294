"""Many mazes at once, one agent in each, and new mazes for those that end.

All state is in tensors that keep their place, nothing waits for the device and no shape depends on
the data: a CUDA graph of `step`, with the policy in it, can be replayed.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from scoff.worlds.maze.cells import CLOSED_DOOR, COLOURS, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.levels import Levels, levels
from scoff.worlds.maze.options import MazeOptions
from scoff.worlds.maze.view import Eyes
from scoff.worlds.random import Split

TURN_LEFT, TURN_RIGHT, FORWARD, PICK_UP, DROP, TOGGLE, DONE = range(7)
NUM_ACTIONS = 7

Autoreset = Literal["same-step", "next-step", "disabled"]


class Step(NamedTuple):
    view: Tensor  # [N, V, V] uint8: see cells.py
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the object is right before the agent
    truncated: Tensor  # [N] bool: it was the last step
    # [N, V, V] uint8: if a new maze has begun, how the one before ended; only if it was asked for
    final_view: Tensor | None = None


class Supply:
    """Mazes drawn ahead, handed out in the order of their numbers.

    To draw a maze takes as long as some steps, and only few agents need one after a step, but which
    is known on the device alone. So `size` mazes lie ready in a ring, `take` copies some of them,
    and `refill`, called once in a while, replaces those that are gone.
    """

    def __init__(
        self, seed: int, options: MazeOptions, split: Split, size: int, device: torch.device
    ):
        self.seed, self.options = seed, options
        self.split: Split = split
        self.size = size
        self.ring = levels(seed, torch.arange(size, device=device), options, split)
        self.drawn = torch.full((), size, dtype=torch.int64, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)

    def restart(self, seed: int) -> None:
        """Begins anew, from the first maze of a seed."""
        self.seed = seed
        first = torch.arange(self.size, device=self.drawn.device)
        fresh = levels(seed, first, self.options, self.split)
        for part, new in zip(self.ring, fresh, strict=True):
            part.copy_(new)
        self.drawn.fill_(self.size)
        self.taken.zero_()

    def take(self, is_needed: Tensor) -> Levels:
        """A maze for each agent, the next one where it is needed  [N] bool -> [N]

        Beyond those drawn, mazes come again that were handed out `size` mazes ago.
        """
        count = is_needed.cumsum(0)
        slot = (self.taken + count - 1).remainder_(self.size)
        self.taken += count[-1]
        return Levels(*(part.index_select(0, slot) for part in self.ring))

    def refill(self, count: int) -> None:
        """Draws the next `count` mazes and keeps those for which there is room."""
        number = self.drawn + torch.arange(count, device=self.drawn.device)
        has_room = number < self.taken + self.size
        slot = number % self.size
        fresh = levels(self.seed, number, self.options, self.split)
        for part, new in zip(self.ring, fresh, strict=True):
            keep = part.index_select(0, slot)
            part.index_copy_(0, slot, torch.where(_like(has_room, new), new, keep))
        self.drawn += has_room.sum()


class Mazes:
    """`num_envs` agents, each in a maze of its own.

    autoreset    what happens when an episode ends. "same-step": a new one begins at once, and the
                 view is the first of it. "next-step": it begins at the next step, whose action does
                 nothing and whose reward is 0. "disabled": nothing.
    spares       mazes that lie ready. They are used up as episodes end: call refill() once in a
                 while, or mazes come again.
    final_views  whether a step tells the last view of episodes that it ended ("same-step" only)
    """

    def __init__(
        self,
        num_envs: int,
        options: MazeOptions | None = None,
        seed: int = 0,
        split: Split = "train",
        device: torch.device | str = "cpu",
        autoreset: Autoreset = "same-step",
        spares: int | None = None,
        final_views: bool = False,
    ):
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, wants an integer of at least 1")
        if autoreset not in get_args(Autoreset):
            wants = ", ".join(map(repr, get_args(Autoreset)))
            raise ValueError(f"autoreset: got {autoreset!r}, wants one of {wants}")
        spares = max(4 * num_envs, 64) if spares is None else spares
        if spares < num_envs:
            raise ValueError(f"spares: got {spares}, wants at least num_envs = {num_envs}")
        self.num_envs = num_envs
        self.options = options = options or MazeOptions()
        self.device = torch.device(device)
        self.autoreset: Autoreset = autoreset
        self.spares = spares
        self.final_views = final_views
        self.eyes = Eyes(options, self.device)

        def table(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        self._ahead = table([1, options.width, -1, -options.width])
        self._turn = table([-1, 1, 0, 0, 0, 0, 0])
        self._toggled = table(_toggled(), torch.uint8)
        self.supply = Supply(seed, options, split, spares, self.device)
        # the place of the mazes; which ones, reset() says
        self.maze = Levels(*(part[:num_envs].clone() for part in self.supply.ring))
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.has_ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def seed(self, seed: int) -> None:
        """From the next reset on, mazes are those of this seed, from number 0 on."""
        self.supply.restart(seed)

    def reset(self, where: Tensor | None = None, start: Levels | None = None) -> Tensor:
        """Begins new episodes, everywhere or `where` [N] bool, and gives the views.

        In the next mazes of the supply, or in those of `start`, one for each agent.
        """
        if where is None:
            where = torch.ones_like(self.has_ended)
        if start is not None and start.grid.shape != self.maze.grid.shape:
            raise ValueError(
                f"start: got grids of shape {tuple(start.grid.shape)}, wants "
                f"{tuple(self.maze.grid.shape)}, as num_envs and options say"
            )
        self._begin(where, self.supply.take(where) if start is None else start)
        self.has_ended.logical_and_(~where)
        return self.eyes(self.maze)

    def step(self, action: Tensor) -> Step:
        """What comes of the agents' actions [N] int64, from 0 to 6"""
        terminated = self._act(action)
        self.steps += 1
        truncated = self.steps >= self.options.max_steps
        # in double precision and then rounded, so that it is the same everywhere
        reward = 1 - 0.9 * (self.steps.double() / self.options.max_steps)
        reward = torch.where(terminated, reward, 0.0).float()
        final_view = None
        if self.autoreset == "next-step":
            terminated, truncated = terminated & ~self.has_ended, truncated & ~self.has_ended
            reward = reward.masked_fill_(self.has_ended, 0)
            self._begin(self.has_ended, self.supply.take(self.has_ended))
            torch.logical_or(terminated, truncated, out=self.has_ended)
        elif self.autoreset == "same-step":
            if self.final_views:
                final_view = self.eyes(self.maze)
            has_ended = terminated | truncated
            self._begin(has_ended, self.supply.take(has_ended))
        return Step(self.eyes(self.maze), reward, terminated, truncated, final_view)

    def refill(self, count: int | None = None) -> None:
        """Draws the next `count` mazes, num_envs by default, to replace those that were used up."""
        count = self.num_envs if count is None else count
        if not 1 <= count <= self.spares:
            raise ValueError(f"count: got {count}, wants from 1 to {self.spares}, that of spares")
        self.supply.refill(count)

    def state_dict(self) -> dict[str, Tensor]:
        """All that changes, to go on from later; the tensors themselves, as modules do."""
        return {
            **{f"maze.{name}": part for name, part in self.maze._asdict().items()},
            **{f"supply.{name}": part for name, part in self.supply.ring._asdict().items()},
            "steps": self.steps,
            "has_ended": self.has_ended,
            "drawn": self.supply.drawn,
            "taken": self.supply.taken,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Options, num_envs, spares and the seed have to be those of the mazes that were saved."""
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"state: got {sorted(state)}, wants {sorted(own)}")
        for name, part in own.items():
            if state[name].shape != part.shape:
                got, wants = tuple(state[name].shape), tuple(part.shape)
                raise ValueError(f"state[{name!r}]: got shape {got}, wants {wants}")
        for name, part in own.items():
            part.copy_(state[name])

    def _begin(self, where: Tensor, start: Levels) -> None:
        for part, new in zip(self.maze, start, strict=True):
            torch.where(_like(where, part), new, part, out=part)
        self.steps.masked_fill_(where, 0)

    def _act(self, action: Tensor) -> Tensor:
        """Carries out the actions; whether the object is before the agent then  [N] -> [N] bool

        The object ends the episode before anything could be done with it, and nothing else can be
        picked up: these actions do nothing.
        """
        grid, position, direction, target = self.maze
        step = self._ahead.index_select(0, direction)
        front = (position + step)[:, None]
        cells = grid.flatten(1)
        cell = cells.gather(1, front)
        toggled = self._toggled.index_select(0, cell[:, 0].int())[:, None]
        cells.scatter_(1, front, torch.where((action == TOGGLE)[:, None], toggled, cell))
        position += step * ((action == FORWARD) & (cell[:, 0] < OBJECT))
        direction.add_(self._turn.index_select(0, action)).bitwise_and_(3)
        return position + self._ahead.index_select(0, direction) == target


def _like(mask: Tensor, part: Tensor) -> Tensor:
    """[N] -> [N, 1, ...], as many axes as `part` has"""
    return mask.view(-1, *[1] * (part.dim() - 1))


def _toggled() -> list[int]:
    """What becomes of a cell: doors open and close."""
    after = list(range(WALL + 1))
    for colour in range(len(COLOURS)):
        after[OPEN_DOOR + colour] = CLOSED_DOOR + colour
        after[CLOSED_DOOR + colour] = OPEN_DOOR + colour
    return after
