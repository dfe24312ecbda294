"""Makes the file of real mazes that the package carries.

    python -m tests.worlds.make_maze_levels

The mazes of each size are those that minigrid makes of the seeds from FIRST_SEED on. The same
version of minigrid gives the same bytes.
"""

from importlib.metadata import version

import torch
from safetensors.torch import save_file

from scoff.worlds.maze.levels import Levels
from scoff.worlds.maze.minigrid_levels import COUNT, FILE, ROOM_SIZES
from scoff.worlds.maze.options import MazeOptions

from .minigrid_oracle import level_of, plan_of, real_maze, restart, stack

FIRST_SEED = 1_000_000_000


def real_levels(options: MazeOptions, count: int) -> Levels:
    env = real_maze(options)
    levels = []
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        restart(env, seed)
        levels.append(level_of(env))
    return stack(levels)


def main() -> None:
    tensors = {}
    for room_size in ROOM_SIZES:
        options = MazeOptions(room_size=room_size)
        plan, colour, mission = plan_of(real_levels(options, COUNT), options)
        parts = plan._asdict() | {"colour": colour, "mission": mission}
        for name, part in parts.items():
            dtype = torch.int16 if name in ("position", "target") else torch.uint8
            tensors[f"{room_size}.{name}"] = part.to(dtype).contiguous()
    seeds = f"seeds {FIRST_SEED} to {FIRST_SEED + COUNT - 1}"
    # one entry only: safetensors writes several in any order
    save_file(tensors, FILE, {"source": f"minigrid {version('minigrid')}, {seeds}"})
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
