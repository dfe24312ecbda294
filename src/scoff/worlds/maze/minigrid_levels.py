"""Mazes for tests that were not made here: 1,024 of each size, from minigrid's own GoToObjMaze.

tests/worlds/make_maze_levels.py made the file. safetensors is needed, and imported only here.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from scoff.worlds.maze.levels import Levels, Plan, build
from scoff.worlds.maze.options import MazeOptions

FILE = Path(__file__).with_name("minigrid_levels.safetensors")
# Trained on: 4, 6 and 8. "10×10" of the paper's tests is 10 with walls counted, 12 without.
ROOM_SIZES = (4, 6, 8, 10, 12)
COUNT = 1024


def minigrid_levels(
    options: MazeOptions | None = None, device: torch.device | str = "cpu"
) -> Levels:
    """All mazes of the size that the options tell; there are 3 rows of 3 rooms."""
    options = options or MazeOptions()
    if (options.num_rows, options.num_cols) != (3, 3):
        got = f"{options.num_rows} and {options.num_cols}"
        raise ValueError(f"num_rows, num_cols: got {got}, wants 3 and 3, as in the file")
    if options.room_size not in ROOM_SIZES:
        wants = ", ".join(map(str, ROOM_SIZES))
        raise ValueError(f"room_size: got {options.room_size}, wants one in the file: {wants}")
    with safe_open(FILE, "pt", device=str(device)) as file:

        def part(name: str) -> torch.Tensor:
            return file.get_tensor(f"{options.room_size}.{name}").long()

        plan = Plan(*(part(name) for name in Plan._fields))
        plan = plan._replace(has_door=plan.has_door.bool())
        return build(plan, part("colour"), part("mission"), options)
