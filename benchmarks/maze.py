"""How fast agents walk in the maze: steps a second of a random policy, with views.

`python benchmarks/maze.py` on one CPU thread, `--device cuda` on a GPU, where steps are replayed as
a CUDA graph, too. Random actions, steps, new mazes for episodes that end and the views are counted,
as codes and as pictures of 40×40 pixels; nothing leaves the device. `levels` is how many mazes a
second are drawn; with every --refill-th step, as many are drawn as there are agents.
"""

import argparse

import torch

from scoff.bench.timing import captured, milliseconds
from scoff.worlds.maze import NUM_ACTIONS, MazeOptions, Mazes, ViewPainter, levels

ROWS = ("levels", "codes", "pictures", "codes, graph", "pictures, graph")


def measure(row: str, options: MazeOptions, args: argparse.Namespace) -> float:
    """Steps, or mazes, a second"""
    device = torch.device(args.device)
    num_envs = args.num_envs
    if row == "levels":
        index = torch.arange(num_envs, device=device)

        def draw() -> None:
            levels(0, index, options)
            index.add_(num_envs)

        draw()  # warm-up
        rounds = max(1, args.steps // 20)
        took = milliseconds(lambda: [draw() for _ in range(rounds)], device)
        return 1e3 * rounds * num_envs / took

    mazes = Mazes(num_envs, options, device=device)
    paint = ViewPainter(device=device)
    mazes.reset()

    def step() -> None:
        action = torch.randint(0, NUM_ACTIONS, (num_envs,), device=device)
        view = mazes.step(action).view
        if row.startswith("pictures"):
            paint(view)

    one_step, refill = step, mazes.refill
    if row.endswith("graph"):
        one_step, refill = captured(step).replay, captured(mazes.refill).replay

    def walk(count: int) -> None:
        for number in range(count):
            one_step()
            if number % args.refill == 0:
                refill()

    walk(args.refill)  # warm-up
    return 1e3 * args.steps * num_envs / milliseconds(lambda: walk(args.steps), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--num-envs", type=int, help="default: 1024, or 16384 on CUDA")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--refill", type=int, default=40, help="steps between refills")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    parser.add_argument("--room-sizes", type=int, nargs="+", default=[4, 6, 8, 10, 12])
    args = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = args.device == "cuda"
    args.num_envs = args.num_envs or (16384 if on_gpu else 1024)
    name = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    print(f"{name}, torch {torch.__version__}, {args.num_envs} agents; per second:")
    print(f"{'room size':18}" + "".join(f"{size:>13}" for size in args.room_sizes))
    for row in ROWS:
        if row.endswith("graph") and not on_gpu:
            continue
        rates = [
            max(measure(row, MazeOptions(room_size=size), args) for _ in range(args.rounds))
            for size in args.room_sizes
        ]
        print(f"{row:18}" + "".join(f"{rate:>13,.0f}" for rate in rates))


if __name__ == "__main__":
    main()
