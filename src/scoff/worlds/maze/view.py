"""What the agent sees: a square of cells ahead of it, without those behind walls and closed doors.

Sight spreads from the agent's row to the far end. Within a row it spreads sideways from cell to
cell, first to the right, then to the left, and from every transparent cell it passes to the three
cells above; walls and closed doors are seen but not seen through. With a row's cells as bits, all
of that is one lookup a row, in a table.
"""

import torch
from torch import Tensor

from scoff.worlds.maze.cells import AGENT, CLOSED_DOOR, UNSEEN
from scoff.worlds.maze.levels import Levels
from scoff.worlds.maze.options import MazeOptions


class Eyes:
    """Gives views [N, V, V] uint8. The agent is at [V - 1, V // 2] and looks to row 0."""

    def __init__(self, options: MazeOptions, device: torch.device | str = "cpu"):
        self.size = options.view_size
        # Tables, made once: CUDA graphs forbid to copy them to the GPU when they are needed
        self.cells = visible_square(options).to(device)  # [4 * H * W, V * V]
        self.sight = sight_table(self.size).to(device)
        self.bit = (1 << torch.arange(self.size)).to(device=device, dtype=torch.int32)

    def __call__(self, maze: Levels) -> Tensor:
        cells = self.look(maze)
        view = torch.where(self.visible(cells), cells, UNSEEN)
        view[:, -1, self.size // 2].fill_(AGENT)
        return view

    def look(self, maze: Levels) -> Tensor:
        """The square ahead, seen or not  -> [N, V, V] uint8"""
        n, cells = len(maze.grid), maze.grid[0].numel()
        square = self.cells.index_select(0, maze.direction * cells + maze.position)
        first = torch.arange(0, n * cells, cells, device=square.device)[:, None]
        return maze.grid.take(square.add_(first)).view(n, self.size, self.size)

    def visible(self, square: Tensor) -> Tensor:
        """[N, V, V] uint8 -> [N, V, V] bool"""
        opaque = ((square >= CLOSED_DOOR) * self.bit).sum(-1, dtype=torch.int32)  # [N, V]
        lit = torch.full_like(opaque[:, 0], 1 << self.size // 2)
        seen = [lit] * self.size
        for row in range(self.size - 1, -1, -1):
            both = self.sight.index_select(0, lit << self.size | opaque[:, row])
            seen[row], lit = both & (1 << self.size) - 1, both >> self.size
        return (torch.stack(seen, 1)[..., None] & self.bit) != 0


def visible_square(options: MazeOptions) -> Tensor:
    """The cells in view for each direction and position  -> [4 * H * W, V * V] int64

    Cells outside are replaced by the nearest one of the maze, which is a wall as they are.
    """
    height, width, size = options.height, options.width, options.view_size
    ahead = torch.arange(size - 1, -1, -1)[:, None].expand(size, size)
    aside = (torch.arange(size) - size // 2).expand(size, size)
    row = torch.arange(height)[:, None, None, None]
    column = torch.arange(width)[:, None, None]
    squares = []
    # right, down, left, up: what is ahead and to the right of the agent, in rows and columns
    for step_down, step_right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        rows = (row + ahead * step_down + aside * step_right).clamp(0, height - 1)
        columns = (column + ahead * step_right - aside * step_down).clamp(0, width - 1)
        squares.append((rows * width + columns).flatten(2).flatten(0, 1))
    return torch.cat(squares)


def sight_table(size: int) -> Tensor:
    """What is seen of a row, and what is lit of the next  -> [4**V] int32

    The entry of `lit << V | opaque` is `lit of the next row << V | seen of this one`.
    """
    entry = torch.arange(1 << 2 * size, dtype=torch.int32)
    seen, clear = entry >> size, ~entry
    above = torch.zeros_like(entry)
    for columns, step in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
        for column in columns:
            shines = (seen & clear) >> column & 1
            seen = seen | shines << column + step
            above = above | shines << column | shines << column + step
    return above << size | seen
