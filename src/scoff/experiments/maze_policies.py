"""Ways to walk through mazes: a trained agent, and two that have learned nothing."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from scoff.models.agent import RecurrentAgent
from scoff.worlds.maze import NUM_ACTIONS
from scoff.worlds.maze.cells import CLOSED_DOOR, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.mazes import FORWARD, TOGGLE, TURN_LEFT, TURN_RIGHT

SEED = 0  # of drawn actions in tests


class Policy(Protocol):
    generator: torch.Generator

    def begin(self, num_agents: int, device: torch.device) -> None:
        """New episodes begin."""
        ...

    def act(self, view: Tensor) -> Tensor:
        """The next action of every agent  [N, V, V] uint8 -> [N] int64"""
        ...


class Memoryless:
    """`choose` gets views and two random numbers on [0, 1) for each  [N, V, V], [2, N] -> [N]"""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]):
        self.choose = choose

    def begin(self, num_agents: int, device: torch.device) -> None:
        self.num_agents = num_agents
        self.generator = torch.Generator(device).manual_seed(SEED)

    def act(self, view: Tensor) -> Tensor:
        device = self.generator.device
        luck = torch.rand(2, self.num_agents, generator=self.generator, device=device)
        return self.choose(view, luck)


def at_random(view: Tensor, luck: Tensor) -> Tensor:  # noqa: ARG001
    return (luck[0] * NUM_ACTIONS).long()


def reactive(view: Tensor, luck: Tensor) -> Tensor:
    """Goes to the object or to a door that is in view, opens doors, turns at walls, else strolls.

    All by what it sees at the moment, so that it walks to and fro through doors it has been at.
    """
    codes = view.int()
    size = codes.shape[-1]
    front = codes[:, -2, size // 2]
    is_free = front < OBJECT
    turn = torch.where(luck[1] < 0.5, TURN_LEFT, TURN_RIGHT)
    stroll = torch.where(is_free & (luck[0] < 0.85), FORWARD, turn)
    is_closed = (codes >= CLOSED_DOOR) & (codes < WALL)
    is_open = (codes >= OPEN_DOOR) & (codes < OBJECT)
    is_object = (codes >= OBJECT) & (codes < CLOSED_DOOR)
    # half of the times, or it would never leave a room with a door that it just came through
    to_door = torch.where(luck[1] < 0.5, towards(is_closed | is_open, is_free), stroll)
    action = torch.where((is_closed | is_open).flatten(1).any(1), to_door, stroll)
    action = torch.where((front >= CLOSED_DOOR) & (front < WALL), TOGGLE, action)
    return torch.where(is_object.flatten(1).any(1), towards(is_object, is_free), action)


def towards(is_goal: Tensor, is_free: Tensor) -> Tensor:
    """A step to the nearest goal in view, straight ahead first  [N, V, V] bool, [N] -> [N]"""
    size = is_goal.shape[-1]
    place = torch.arange(size, device=is_goal.device)
    ahead, aside = (size - 1 - place)[:, None], place - size // 2
    distance = (ahead + aside.abs()).masked_fill(~is_goal, 2 * size)  # [N, V, V]
    nearest = distance.flatten(1).argmin(1)
    ahead, aside = size - 1 - nearest // size, nearest % size - size // 2
    turn = torch.where(aside < 0, TURN_LEFT, TURN_RIGHT)
    return torch.where((ahead > 0) & is_free, FORWARD, turn)


class AgentPolicy:
    """A trained agent, which draws its actions or takes the likeliest.

    Its memory is as in evaluation: nothing in it is random.
    """

    def __init__(self, agent: RecurrentAgent, greedy: bool):
        self.agent, self.greedy = agent.eval(), greedy

    def begin(self, num_agents: int, device: torch.device) -> None:
        self.noise = self.agent.draw_noise(1, num_agents)
        self.state = self.agent.initial_state(self.noise).clone()
        self.same_episode = torch.zeros(1, num_agents, dtype=torch.bool, device=device)
        self.generator = torch.Generator(device).manual_seed(SEED)

    def act(self, view: Tensor) -> Tensor:
        decision = self.agent(view[None], self.state, self.same_episode, self.noise)
        self.state.copy_(decision.state)
        logits = decision.logits[0].float()
        if self.greedy:
            return logits.argmax(-1)
        chances = logits.softmax(-1)
        waits = torch.empty_like(chances).exponential_(generator=self.generator)
        return (chances / waits.clamp(min=torch.finfo(waits.dtype).tiny)).argmax(-1)
