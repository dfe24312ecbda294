"""How fast agents learn in the maze: frames a second of PPO, and where the time goes.

`python benchmarks/ppo.py --device cuda` at the settings of --preset, eagerly and from CUDA graphs;
without --device on one CPU thread, eagerly. A frame is one step of one agent. Each agent is timed
in turn, after a warm-up, with the agents of --batch-size in rooms of --room-size; the median of
--rounds iterations counts. "20M" is how long 20 million frames take at that rate, in minutes.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from scoff.bench.timing import milliseconds
from scoff.experiments import find_experiment
from scoff.experiments.maze import MazeTask, ppo_config
from scoff.experiments.maze_agents import MODELS
from scoff.training.ppo import PPO
from scoff.training.ppo_graph import Replay


def measure(model: str, graph: bool, args: argparse.Namespace) -> tuple[float, float, int]:
    """Milliseconds of a rollout and of an update, and the frames of both together"""
    device = torch.device(args.device)
    changes: dict[str, Any] = {"rooms": (args.room_size,), "shares": (1.0,)}
    for name in ("batch_size", "hidden_size", "rollout_steps", "sequence_steps"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    config: Any = replace(find_experiment("maze").preset(args.preset, model), **changes)
    torch.manual_seed(0)
    task = MazeTask(config, device)
    ppo = PPO(task.model.to(device), task.environment(0), ppo_config(config))
    rollout: Callable[[], object] = ppo.collect
    update: Callable[[], object] = ppo.update
    if graph:
        replay = Replay(ppo)
        rollout, update = replay.rollout.replay, replay.learning.replay
    pairs = []
    for _ in range(args.rounds + 1):
        pairs.append((milliseconds(rollout, device), milliseconds(update, device)))
    times = [statistics.median(column) for column in zip(*pairs[1:], strict=True)]
    return times[0], times[1], config.batch_size * config.rollout_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tuned")
    parser.add_argument("--models", nargs="+", default=["scoff", "gru"], choices=MODELS)
    parser.add_argument("--room-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
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


if __name__ == "__main__":
    main()
