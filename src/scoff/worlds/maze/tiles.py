"""Pictures of cells: coloured shapes, computed at three times the size and averaged.

They are those of MiniGrid to the last bit, which is why sums are divided and cut to bytes in just
this order.
"""

import torch
from torch import Tensor

from scoff.worlds.maze.cells import (
    CLOSED_DOOR,
    COLOURS,
    EMPTY,
    KINDS,
    NUM_CODES,
    OBJECT,
    OPEN_DOOR,
    UNSEEN,
    WALL,
)

FINER = 3
BLACK, GREY, RED = (0, 0, 0), (100, 100, 100), (255, 0, 0)
RGB = {
    "red": RED,
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "purple": (112, 39, 195),
    "yellow": (255, 255, 0),
    "grey": GREY,
}
LINE = 0.031

Colour = tuple[int, int, int]


class Canvas:
    """A square picture from (0, 0), upper left, to (1, 1). A pixel is painted if its centre is."""

    def __init__(self, tile_size: int):
        pixels = tile_size * FINER
        self.picture = torch.zeros(pixels, pixels, 3, dtype=torch.float64)
        centre = (torch.arange(pixels, dtype=torch.float64) + 0.5) / pixels
        self.x, self.y = centre, centre[:, None]
        self.rectangle(0, LINE, 0, 1, GREY)
        self.rectangle(0, 1, 0, LINE, GREY)

    def rectangle(self, left: float, right: float, top: float, bottom: float, rgb: Colour) -> None:
        across = (self.x >= left) & (self.x <= right)
        self._paint(across & (self.y >= top) & (self.y <= bottom), rgb)

    def disc(self, x: float, y: float, radius: float, rgb: Colour) -> None:
        away = (self.x - x) * (self.x - x) + (self.y - y) * (self.y - y)
        self._paint(away <= radius * radius, rgb)

    def arrow(self, direction: int, rgb: Colour) -> None:
        """The agent, a triangle that points to the right if `direction` is 0, else clockwise"""
        # as the triangle turns, a point of the picture turns the other way
        x, y = self.x.expand_as(self.picture[..., 0]), self.y.expand_as(self.picture[..., 0])
        for _ in range(direction):
            x, y = y, 1 - x
        # between the left side and the two that meet at the tip
        slope = 0.31 / 0.75
        below_upper = y - 0.5 >= -slope * (0.87 - x)
        above_lower = y - 0.5 <= slope * (0.87 - x)
        self._paint((x >= 0.12) & below_upper & above_lower, rgb)

    def lighten(self) -> None:
        """Blends with 30 % white, cut to whole numbers"""
        self.picture = (self.picture + 0.30 * (255 - self.picture)).floor()

    def tile(self) -> Tensor:
        """-> [tile_size, tile_size, 3] uint8"""
        across = _mean_of_three(self.picture.unflatten(1, (-1, FINER)), 2)
        return _mean_of_three(across.unflatten(0, (-1, FINER)), 1).to(torch.uint8)

    def _paint(self, where: Tensor, rgb: Colour) -> None:
        self.picture[where] = torch.tensor(rgb, dtype=torch.float64)


def _mean_of_three(picture: Tensor, dim: int) -> Tensor:
    first, second, third = picture.unbind(dim)
    return (first + second + third) / FINER


def draw(canvas: Canvas, code: int) -> None:
    if code == WALL:
        canvas.rectangle(0, 1, 0, 1, GREY)
    elif code >= CLOSED_DOOR:
        _closed_door(canvas, RGB[COLOURS[code - CLOSED_DOOR]])
    elif code >= OBJECT:
        kind, colour = divmod(code - OBJECT, len(COLOURS))
        {"key": _key, "ball": _ball, "box": _box}[KINDS[kind]](canvas, RGB[COLOURS[colour]])
    elif code >= OPEN_DOOR:
        canvas.rectangle(0.88, 1, 0, 1, RGB[COLOURS[code - OPEN_DOOR]])
        canvas.rectangle(0.92, 0.96, 0.04, 0.96, BLACK)


def _closed_door(canvas: Canvas, rgb: Colour) -> None:
    for edge, shade in ((0, rgb), (0.04, BLACK), (0.08, rgb), (0.12, BLACK)):
        far = 1 - edge
        canvas.rectangle(edge, far, edge, far, shade)
    canvas.disc(0.75, 0.5, 0.08, rgb)  # the handle


def _key(canvas: Canvas, rgb: Colour) -> None:
    canvas.rectangle(0.50, 0.63, 0.31, 0.88, rgb)
    canvas.rectangle(0.38, 0.50, 0.59, 0.66, rgb)
    canvas.rectangle(0.38, 0.50, 0.81, 0.88, rgb)
    canvas.disc(0.56, 0.28, 0.190, rgb)
    canvas.disc(0.56, 0.28, 0.064, BLACK)


def _ball(canvas: Canvas, rgb: Colour) -> None:
    canvas.disc(0.5, 0.5, 0.31, rgb)


def _box(canvas: Canvas, rgb: Colour) -> None:
    canvas.rectangle(0.12, 0.88, 0.12, 0.88, rgb)
    canvas.rectangle(0.18, 0.82, 0.18, 0.82, BLACK)
    canvas.rectangle(0.16, 0.84, 0.47, 0.53, rgb)  # the slit


def tile(code: int, tile_size: int, is_seen: bool = True, agent: int | None = None) -> Tensor:
    """A cell, and the agent in it if its direction is told  -> [tile_size, tile_size, 3] uint8"""
    canvas = Canvas(tile_size)
    draw(canvas, code)
    if agent is not None:
        canvas.arrow(agent, RED)
    if is_seen:
        canvas.lighten()
    return canvas.tile()


def view_tiles(tile_size: int) -> Tensor:
    """Of all that is in a view  -> [NUM_CODES, tile_size, tile_size, 3] uint8"""
    tiles = [tile(code, tile_size) for code in range(UNSEEN)]
    tiles.append(tile(EMPTY, tile_size, is_seen=False))
    tiles.append(tile(EMPTY, tile_size, agent=3))
    assert len(tiles) == NUM_CODES
    return torch.stack(tiles)
