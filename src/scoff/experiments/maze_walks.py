"""Episodes of a policy in given mazes: how many succeed, and what its schemata have to do with it.

Axis letters: N agents, T steps, V cells of a view, F object files, S schemata, C contents of
a view.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from tqdm import tqdm

import scoff
from scoff.experiments.maze_policies import AgentPolicy, Memoryless, Policy, at_random, reactive
from scoff.experiments.measures import entropy, mutual_information
from scoff.models.agent import RecurrentAgent, SCOFFMemory
from scoff.worlds.maze import Levels, MazeOptions, Mazes, levels
from scoff.worlds.maze.cells import CLOSED_DOOR, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.minigrid_levels import minigrid_levels

CONTENTS = ("target", "closed door", "open door", "wall", "nothing")
REFERENCES = {"random": at_random, "reactive, without memory": reactive}
VALID_SEED = 0
ASK_EVERY = 32  # steps between asking whether all have ended, which waits for the device
WARM_UP = 3  # steps before one is captured, in which libraries set themselves up
FOLLOWED = 64  # agents of which every step is kept, for an example to pick


def contents(view: Tensor) -> Tensor:
    """What is in view, the first of CONTENTS that is  [N, V, V] uint8 -> [N] int64"""
    codes = view.flatten(1).int()
    found = torch.stack(
        [
            ((codes >= least) & (codes < end)).any(1)
            for least, end in (
                (OBJECT, CLOSED_DOOR),
                (CLOSED_DOOR, WALL),
                (OPEN_DOOR, OBJECT),
                (WALL, WALL + 1),
            )
        ]
    )
    nothing = torch.ones_like(found[:1])
    return torch.cat([found, nothing]).int().argmax(0)


class Walk(NamedTuple):
    """How episodes ended."""

    success: Tensor  # [N] bool
    steps: Tensor  # [N] int64

    def summary(self) -> dict[str, float | None]:
        """Steps, and their standard deviation, are those of successful episodes."""
        steps = self.steps[self.success].double()
        return {
            "success": len(steps) / len(self.success),
            "steps": steps.mean().item() if len(steps) else None,
            "steps_spread": steps.std().item() if len(steps) > 1 else None,
        }


@dataclass
class Watcher:
    """Looks at an agent's schemata while it walks."""

    agent: RecurrentAgent
    policy: AgentPolicy

    def __post_init__(self) -> None:
        rnn = cast(scoff.SCOFF, self.agent.memory.rnn)
        device = next(self.agent.parameters()).device
        self.counts = torch.zeros(
            len(CONTENTS) * rnn.num_schemata, dtype=torch.float64, device=device
        )
        self.shape = (len(CONTENTS), rnn.num_schemata)
        self.schemata: list[Tensor] = []  # [followed, F] of each step
        self.actives: list[Tensor] = []

    def look(self, view: Tensor, is_walking: Tensor) -> None:
        """Before the policy acts"""
        policy = self.policy
        memory = cast(SCOFFMemory, self.agent.memory)
        features = self.agent.encode(view[None])
        trace = memory.trace(features, policy.state, policy.same_episode, policy.noise)
        schema, active = trace.schema[:, 0], trace.active[:, 0]  # [N, F]
        pair = contents(view)[:, None] * self.shape[1] + schema
        counted = (active & is_walking[:, None]).double()
        self.counts.index_add_(0, pair.flatten(), counted.flatten())
        self.schemata.append(schema[:FOLLOWED])
        self.actives.append(active[:FOLLOWED])

    def table(self) -> Tensor:
        """How often each schema was chosen with each content in view  [C, S]"""
        return self.counts.view(self.shape).cpu()


class Walkers:
    """Agents on their way. What changes stays in the same tensors, for a CUDA graph of a step."""

    def __init__(self, policy: Policy, start: Levels, options: MazeOptions):
        device, count = start.position.device, len(start.position)
        self.policy = policy
        self.mazes = Mazes(count, options, device=device, autoreset="disabled", spares=count)
        self.view = self.mazes.reset(start=start).clone()
        policy.begin(count, device)
        self.is_walking = torch.ones(count, dtype=torch.bool, device=device)
        self.success = torch.zeros_like(self.is_walking)
        self.steps = torch.zeros(count, dtype=torch.int64, device=device)

    def step(self) -> Tensor:
        """The actions taken  [N]"""
        action = self.policy.act(self.view)
        view, _, terminated, truncated, _ = self.mazes.step(action)
        self.view.copy_(view)
        self.steps += self.is_walking
        self.success |= self.is_walking & terminated
        self.is_walking &= ~(terminated | truncated)
        return action


def graph_of(walkers: Walkers) -> torch.cuda.CUDAGraph:
    """One step, to be replayed: launched one by one, kernels would wait for the CPU."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(walkers.policy.generator)
    with torch.cuda.graph(graph):
        walkers.step()
    return graph


@torch.no_grad()
def walk(
    policy: Policy,
    start: Levels,
    options: MazeOptions,
    watcher: Watcher | None = None,
    actions: list[Tensor] | None = None,
    replay: bool = True,
) -> Walk:
    """One episode in each maze; appends the actions of the first agents to `actions`.

    `replay`: from a CUDA graph, on a GPU, if nobody watches.
    """
    walkers = Walkers(policy, start, options)
    replay = replay and start.position.is_cuda and watcher is None and actions is None
    graph = None
    with torch.cuda.device_of(start.position):  # graphs are captured and replayed there
        for number in range(options.max_steps):
            if replay and number == WARM_UP:
                graph = graph_of(walkers)
            if graph is not None:
                graph.replay()
            else:
                if watcher is not None:
                    watcher.look(walkers.view, walkers.is_walking)
                action = walkers.step()
                if actions is not None:
                    actions.append(action[:FOLLOWED])
            if number % ASK_EVERY == ASK_EVERY - 1 and not walkers.is_walking.any():
                break
    return Walk(walkers.success, walkers.steps)


def validate_agent(
    policy: Policy, options: MazeOptions, count: int, device: torch.device
) -> dict[str, float]:
    start = levels(VALID_SEED, torch.arange(count, device=device), options, "valid")
    found = walk(policy, start, options)
    return {
        "success": found.success.double().mean().item(),
        # one that fails takes all the time there is
        "steps": found.steps.double().mean().item(),
    }


def first_levels(options: MazeOptions, count: int, device: torch.device) -> Levels:
    whole = minigrid_levels(options, device)
    return whole.select(torch.arange(count, device=device))


def evaluate_agent(
    agent: RecurrentAgent,
    sizes: Mapping[int, MazeOptions],
    example_size: int,
    count: int,
    device: torch.device,
) -> dict[str, Any]:
    """In `count` of minigrid's mazes of each size; what schemata do, in those of one size."""
    result: dict[str, Any] = {"example_size": example_size, "agent": {}, "references": {}}
    policies: dict[str, Policy] = {
        "drawn": AgentPolicy(agent, greedy=False),
        "likeliest": AgentPolicy(agent, greedy=True),
        **{name: Memoryless(choose) for name, choose in REFERENCES.items()},
    }
    todo = [(size, name) for size in sizes for name in policies]
    for size, name in tqdm(todo, "testing", unit="walk", disable=None):
        options, policy = sizes[size], policies[name]
        start = first_levels(options, count, device)
        whose = "references" if name in REFERENCES else "agent"
        watcher, actions = None, None
        if size == example_size and name == "drawn":
            actions = []
            if isinstance(agent.memory, SCOFFMemory):
                watcher = Watcher(agent, cast(AgentPolicy, policy))
        found = walk(policy, start, options, watcher, actions)
        result[whose].setdefault(name, {})[size] = found.summary()
        if actions is not None:
            result["example"] = example(start, found, actions, watcher)
        if watcher is not None:
            result["schemata"] = describe_use(watcher.table())
    return result


def describe_use(counts: Tensor) -> dict[str, Any]:
    """Of a table of contents and schemata  [C, S]"""
    return {
        "counts": counts.tolist(),
        "bits": mutual_information(counts),
        "bits_at_most": entropy(counts.sum(1)),
        "bits_in_use": entropy(counts.sum(0)),
    }


def example(
    start: Levels, found: Walk, actions: list[Tensor], watcher: Watcher | None
) -> dict[str, Any]:
    """The episode of middle length among the first agents' that succeeded; else the first."""
    followed = min(FOLLOWED, len(found.steps))
    steps, success = found.steps[:followed].tolist(), found.success[:followed].tolist()
    good = sorted((n, agent) for agent, n in enumerate(steps) if success[agent])
    length, agent = good[len(good) // 2] if good else (steps[0], 0)
    chosen = torch.tensor([agent], device=found.steps.device)
    maze = start.select(chosen)
    seen: dict[str, Any] = {
        "success": success[agent],
        "grid": [bytes(row).hex() for row in maze.grid[0].tolist()],
        "position": maze.position.item(),
        "direction": maze.direction.item(),
        "target": maze.target.item(),
        "actions": torch.stack(actions)[:length, agent].tolist(),
    }
    if watcher is not None:
        seen["schemata"] = torch.stack(watcher.schemata)[:length, agent].tolist()
        seen["active"] = torch.stack(watcher.actives)[:length, agent].tolist()
    return seen
