"""How fast the movies of intuitive physics are made, at 64×64 and 100 frames.

`python benchmarks/intphys.py` on one CPU thread, a part of them, and `--device cuda` on a GPU, all:
540 occluded quadruplets of each block (two runs each, cuts found by comparing all their pixels), a
training set of 15,000 movies, which stays in the device's memory, and, on a CPU, quadruplets as
files. `whole` is the time that all of them take, or would take at this rate. On a CPU, seconds
are those that the process had the processor for.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from scoff.worlds.intphys import BLOCKS, quadruplets, training_clips
from scoff.worlds.intphys.stages import Block
from scoff.worlds.intphys.writer import Recipe, write_movies

FRAMES, PIXELS = 100, 64
QUADRUPLETS, CLIPS = 540, 15_000


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def make_quadruplets(block: Block, count: int, batch: int, device: torch.device) -> float:
    start = now(device)
    for first in range(0, count, batch):
        index = torch.arange(first, min(first + batch, count), device=device)
        quadruplets(0, index, block)
    return now(device) - start


def make_training_set(clips: int, batch: int, device: torch.device) -> float:
    start = now(device)
    frames = torch.empty(clips, FRAMES, PIXELS, PIXELS, 3, dtype=torch.uint8, device=device)
    identity = torch.empty(clips, FRAMES, PIXELS, PIXELS, dtype=torch.uint8, device=device)
    for first in range(0, clips, batch):
        last = min(first + batch, clips)
        part = training_clips(0, torch.arange(first, last, device=device))
        frames[first:last], identity[first:last] = part.frames, part.identity
    return now(device) - start


def write_files(count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        recipe = Recipe(train=0, dev=0, test=count, visibilities=("occluded",))
        write_movies(Path(folder) / "data", recipe)
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quadruplets", type=int, help="of each block; default: 9, 540 on CUDA")
    parser.add_argument("--clips", type=int, help="default: 36, 15000 on CUDA")
    parser.add_argument("--batch", type=int, help="default: 9 on a CPU; on CUDA 180 and 1000 clips")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    print(f"{name}, torch {torch.__version__}")
    print(f"{'':10}{'movies':>8}{'seconds':>9}{'frames/s':>11}{'whole':>9}")

    def row(label: str, made: int, of: int, frames: int, seconds: float) -> None:
        whole = seconds * of / made
        rate = frames / seconds
        print(f"{label:10}{made:>8}{seconds:>9.2f}{rate:>11,.0f}{whole:>8.0f}s", flush=True)

    count = args.quadruplets or (QUADRUPLETS if on_gpu else 9)
    batch = args.batch or (180 if on_gpu else 9)
    make_quadruplets("O1", min(batch, 3), batch, device)  # warm-up
    for block in BLOCKS:
        seconds = make_quadruplets(block, count, batch, device)
        row(block, count, QUADRUPLETS, count * 2 * FRAMES, seconds)
    clips = args.clips or (CLIPS if on_gpu else 36)
    batch = args.batch or (1000 if on_gpu else 18)
    seconds = make_training_set(clips, batch, device)
    row("training", clips, CLIPS, clips * FRAMES, seconds)
    if on_gpu:
        print(f"largest memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    else:
        seconds = write_files(count)
        total = len(BLOCKS) * count
        row("files", total, len(BLOCKS) * QUADRUPLETS, total * 4 * FRAMES, seconds)


if __name__ == "__main__":
    main()
