"""How fast clips are made: frames a second of each world, pictures and all that is behind them.

`python benchmarks/worlds.py` on one CPU thread, `--device cuda` on a GPU, where each world's whole
training set is made. Random starts, motion, identity per pixel and the frames that a model gets are
counted; nothing leaves the device. `simulated` is the share of the time that goes into motion.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scoff.worlds import balls, dynamics

World = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], int, int]


def worlds() -> dict[str, World]:
    """What happens, pictures of it, frames a clip, clips of the training set"""

    def bouncing(variant: balls.VariantName) -> World:
        def simulate(index: Tensor) -> balls.Trajectories:
            return balls.trajectories(0, index, variant)

        return simulate, lambda truth: balls.render(truth).frames, balls.FRAMES, 50_000

    def draw(truth: dynamics.Trajectories) -> Tensor:
        return dynamics.render(truth).frames

    return {
        "three": (lambda index: dynamics.three_trajectories(0, index), draw, 20, 10_000),
        "switching": (lambda index: dynamics.switching_trajectories(0, index), draw, 51, 10_000),
        **{variant: bouncing(variant) for variant in balls.VARIANTS},
    }


def measure(world: World, clips: int, batch: int, device: torch.device) -> tuple[float, float]:
    """Seconds in all, and of those in simulation"""
    simulate, draw, _, _ = world

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    draw(simulate(torch.arange(min(batch, clips), device=device)))  # warm-up
    simulated, start = 0.0, now()
    for first in range(0, clips, batch):
        index = torch.arange(first, min(first + batch, clips), device=device)
        begun = now()
        truth = simulate(index)
        simulated += now() - begun
        draw(truth)
    return now() - start, simulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clips", type=int, help="default: 512 on a CPU, the training set on CUDA")
    parser.add_argument("--batch", type=int, help="clips at once; default: 64, or 2500 on CUDA")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    batch = args.batch or (2500 if on_gpu else 64)
    print(f"{name}, torch {torch.__version__}, {batch} clips at once")
    print(f"{'':18}{'clips':>8}{'frames':>8}{'seconds':>9}{'frames/s':>12}{'simulated':>11}")
    for label, world in worlds().items():
        _, _, frames, size = world
        clips = args.clips or (size if on_gpu else 512)
        seconds, simulated = measure(world, clips, batch, device)
        rate, share = clips * frames / seconds, simulated / seconds
        print(f"{label:18}{clips:>8}{frames:>8}{seconds:>9.2f}{rate:>12,.0f}{share:>11.0%}")


if __name__ == "__main__":
    main()
