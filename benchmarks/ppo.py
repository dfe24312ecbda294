"""How fast agents learn in the maze: frames a second of PPO, and where the time goes.

`python benchmarks/ppo.py --device cuda` at the settings of --preset, eagerly and from CUDA graphs;
without --device on one CPU thread, eagerly. A frame is one step of one agent. Each agent is timed
in turn, after a warm-up, with the agents of --batch-size in rooms of --room-size; the median of
--rounds iterations counts. "20M" is how long 20 million frames take at that rate, in minutes.
--profile tells what the fastest of these spends its time on (see ppo_parts.py).
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ppo_parts import print_parts, rollout_parts, update_parts
from scoff.bench.timing import milliseconds
from scoff.experiments import find_experiment
from scoff.experiments.maze import MazeTask, ppo_config
from scoff.experiments.maze_agents import MODELS
from scoff.training.ppo import PPO
from scoff.training.ppo_graph import Replay


def make(model: str, args: argparse.Namespace) -> PPO:
    device = torch.device(args.device)
    changes: dict[str, Any] = {"rooms": (args.room_size,), "shares": (1.0,)}
    for name in ("batch_size", "hidden_size", "rollout_steps", "sequence_steps"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    config: Any = replace(find_experiment("maze").preset(args.preset, model), **changes)
    torch.manual_seed(0)
    task = MazeTask(config, device)
    return PPO(task.model.to(device), task.environment(0), ppo_config(config))


def works(ppo: PPO, graph: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """A rollout and an update"""
    if not graph:
        return ppo.collect, ppo.update
    replay = Replay(ppo)
    return replay.rollout.replay, replay.learning.replay


def measure(model: str, graph: bool, args: argparse.Namespace) -> tuple[float, float, int]:
    """Milliseconds of a rollout and of an update, and the frames of both together"""
    ppo = make(model, args)
    rollout, update = works(ppo, graph)
    pairs = []
    for _ in range(args.rounds + 1):
        pairs.append((milliseconds(rollout, ppo.device), milliseconds(update, ppo.device)))
    times = [statistics.median(column) for column in zip(*pairs[1:], strict=True)]
    return times[0], times[1], ppo.num_envs * ppo.config.rollout_steps


def profile(model: str, args: argparse.Namespace) -> None:
    ppo = make(model, args)
    rollout, update = works(ppo, graph=ppo.on_gpu)
    rollout()
    update()
    with torch.no_grad():
        parts = rollout_parts(ppo, ppo.agent)
        print_parts(f"{model}, rollout", rollout, parts, ppo, args.rounds)
    rollout()
    parts = update_parts(ppo, ppo.agent)
    print_parts(f"{model}, update", update, parts, ppo, args.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tuned")
    parser.add_argument("--models", nargs="+", default=["scoff", "gru"], choices=MODELS)
    parser.add_argument("--room-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    for name in ("--batch-size", "--hidden-size", "--rollout-steps", "--sequence-steps"):
        parser.add_argument(name, type=int, help="default: the preset's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = args.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    print(f"{name}, torch {torch.__version__}, preset {args.preset}, rooms of {args.room_size}")
    print(f"{'':22}{'rollout ms':>12}{'update ms':>12}{'frames/s':>12}{'20M, min':>12}")
    for model in args.models:
        for graph in (False, True) if on_gpu else (False,):
            rollout, update, frames = measure(model, graph, args)
            rate = 1e3 * frames / (rollout + update)
            row = f"{model}{', graph' if graph else ''}"
            print(f"{row:22}{rollout:>12.1f}{update:>12.1f}{rate:>12,.0f}{20e6 / rate / 60:>12.1f}")
    if args.profile:
        for model in args.models:
            profile(model, args)


if __name__ == "__main__":
    main()
