"""What the engine costs over a bare loop: same model, same batches, same optimiser, in turns.

`python benchmarks/engine.py` on the CPU (one thread), `--device cuda` on a GPU, where both run
eagerly. The engine logs, shows progress and guards against what is not finite; the bare loop does
nothing but train. The ratio is the median of the ratios of neighbours.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from scoff.experiments.adding import AddingTask, Config, quick
from scoff.training.data import batch_indices
from scoff.training.engine import Runtime, fit
from scoff.training.run import Run


def with_engine(config: Config, device: str) -> float:
    """Seconds a step"""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", "adding", "quick", config)
        fit(lambda place: AddingTask(config, place), config, run, Runtime(device, progress="lines"))
        return run.seconds() / config.steps


def bare(config: Config, device: str) -> float:
    """Seconds a step"""
    task = AddingTask(config, torch.device(device))
    model = task.model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=0.0)
    start = time.monotonic()
    for step in range(config.steps):
        index = batch_indices(config.seed, step, config.batch_size, task.train_size)
        batch = task.batch(index.to(device))
        loss = nn.functional.mse_loss(model(batch.x)[:, 0], batch.target)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        loss.item()
    return (time.monotonic() - start) / config.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.device}, torch {torch.__version__}, {args.steps} steps, {args.rounds} rounds")
    print(f"{'':14}{'bare ms':>9}{'engine ms':>11}{'ratio':>8}")
    for name in ("gru", "scoff-sparse"):
        config = replace(quick(name), steps=args.steps, valid_sequences=2, acceleration="none")
        pairs = [
            (bare(config, args.device), with_engine(config, args.device))
            for _ in range(args.rounds)
        ]
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        times = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
        print(f"{name:14}{times[0]:>9.2f}{times[1]:>11.2f}{ratio:>8.3f}")


if __name__ == "__main__":
    main()
