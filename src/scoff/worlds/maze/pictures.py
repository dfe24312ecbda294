"""From codes of cells to pictures, by looking up tiles."""

import torch
from torch import Tensor

from scoff.worlds.maze.cells import OBJECT, UNSEEN
from scoff.worlds.maze.levels import Levels
from scoff.worlds.maze.tiles import tile, view_tiles
from scoff.worlds.maze.view import Eyes


class Mosaic:
    """Puts tiles [K, T, T, 3] together: [N, R, C] -> [N, R * T, C * T, 3] uint8"""

    def __init__(self, tiles: Tensor, device: torch.device | str = "cpu"):
        self.tile_size = tiles.shape[1]
        lines = tiles.flatten(0, 1).flatten(1)  # [K * T, 3 * T]
        # fewer and wider elements are copied faster
        wide = next(t for t in (torch.int64, torch.int32, torch.uint8) if _fits(lines, t))
        self.lines = lines.view(wide).to(device)
        self.line = torch.arange(self.tile_size, dtype=torch.int32, device=device)[:, None]

    def __call__(self, codes: Tensor) -> Tensor:
        n, rows, columns = codes.shape
        size = self.tile_size
        line = codes.int()[:, :, None] * size + self.line  # [N, rows, T, columns]
        pixels = self.lines.index_select(0, line.flatten()).view(torch.uint8)
        return pixels.view(n, rows * size, columns * size, 3)


def _fits(lines: Tensor, dtype: torch.dtype) -> bool:
    return lines.shape[1] % dtype.itemsize == 0


class ViewPainter(Mosaic):
    """Pictures of views: [N, V, V] uint8 -> [N, V * T, V * T, 3] uint8, red, green and blue"""

    def __init__(self, tile_size: int = 8, device: torch.device | str = "cpu"):
        super().__init__(view_tiles(tile_size), device)


class MazePainter:
    """Pictures of whole mazes with the agent, lighter where it can see"""

    def __init__(self, eyes: Eyes, tile_size: int = 8, device: torch.device | str = "cpu"):
        self.eyes = eyes
        cells = range(UNSEEN)
        unseen, seen = ([tile(c, tile_size, is_seen) for c in cells] for is_seen in (False, True))
        # the agent stands on nothing or in an open door
        agent = [tile(c, tile_size, agent=way) for way in range(4) for c in range(OBJECT)]
        self.mosaic = Mosaic(torch.stack(unseen + seen + agent), device)

    def __call__(self, maze: Levels) -> Tensor:
        """-> [N, H * T, W * T, 3] uint8"""
        shape = maze.grid.shape
        codes = maze.grid.flatten(1).int()
        square = self.eyes.cells.index_select(0, maze.direction * codes.shape[1] + maze.position)
        is_visible = self.eyes.visible(self.eyes.look(maze)).flatten(1)
        # Whatever is outside shares the number of a wall, but is never seen: it adds nothing.
        seen = torch.zeros_like(codes).scatter_add_(1, square, is_visible.int()).clamp_(max=1)
        here = codes.gather(1, maze.position[:, None])
        agent = 2 * UNSEEN + maze.direction[:, None].int() * OBJECT + here
        codes = (codes + UNSEEN * seen).scatter_(1, maze.position[:, None], agent)
        return self.mosaic(codes.view(shape))
