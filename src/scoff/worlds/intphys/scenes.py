"""What a video shows, before there are pictures: a camera, a sun, objects and walls over time.

Lengths are in metres: x to the right, y up, z away from the camera; the floor is y = 0. There are
places for three objects and three walls; a place that is not used has kind NONE.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from scoff.worlds.intphys.shapes import BOX, CONE, NONE, SPHERE

FRAMES = 100
OBJECTS = 3
WALLS = 3
ELEMENTS = OBJECTS + WALLS
WALL_DEPTH = 5.5  # where walls stand
WALL_HEIGHT = 2.4
WALL_THICKNESS = 0.16
HALF_VIEW = 0.55  # tangent of half the angle of view
EYE_HEIGHT = 2.0
PITCH = 0.055  # tangent of half the angle that the camera looks down

# what a pixel of `identity` shows: from FIRST_ELEMENT on, the elements in their places
SKY, FLOOR, FIRST_ELEMENT = 0, 1, 2
# and of which class that is, as the benchmark's baseline tells it
BACKGROUND, OBJECT, OCCLUDER = 0, 1, 2

PAINTS = (
    (0.86, 0.22, 0.20),
    (0.20, 0.44, 0.82),
    (0.95, 0.74, 0.18),
    (0.30, 0.66, 0.34),
    (0.62, 0.34, 0.72),
    (0.92, 0.50, 0.16),
    (0.16, 0.64, 0.66),
    (0.90, 0.52, 0.66),
)
WALL_PAINTS = ((0.62, 0.33, 0.26), (0.55, 0.52, 0.48), (0.50, 0.40, 0.28), (0.42, 0.46, 0.54))
FLOORS = (
    ((0.60, 0.56, 0.48), (0.52, 0.47, 0.40)),
    ((0.46, 0.52, 0.42), (0.39, 0.45, 0.35)),
    ((0.58, 0.58, 0.60), (0.48, 0.48, 0.51)),
    ((0.66, 0.54, 0.42), (0.56, 0.45, 0.34)),
)
SKIES = (  # at the horizon, and above
    ((0.80, 0.87, 0.94), (0.36, 0.58, 0.86)),
    ((0.90, 0.88, 0.84), (0.52, 0.64, 0.80)),
    ((0.84, 0.90, 0.92), (0.44, 0.66, 0.78)),
)


class Look(NamedTuple):
    """Camera, light and colours: what does not change in a video."""

    eye: Tensor  # [N, 3]
    view: Tensor  # [N, 3, 3]: to the right, up and forward
    sun: Tensor  # [N, 3]: where the light comes from, of length 1
    colour: Tensor  # [N, K, 3] from 0 to 1
    floor: Tensor  # [N, 2, 3]: of the two kinds of tile
    sky: Tensor  # [N, 2, 3]: at the horizon, and above
    grain: Tensor  # [N, K + 1] int32: which texture the elements and the floor have


class Scenes(NamedTuple):
    look: Look
    kind: Tensor  # [N, K] int64
    half: Tensor  # [N, K, 3]: half the size
    yaw: Tensor  # [N, K, 2]: cosine and sine of the angle about the vertical
    centre: Tensor  # [N, T, K, 3]
    tilt: Tensor  # [N, T, K, 2]: of the angle by which an element leans back

    @property
    def frames(self) -> int:
        return self.centre.shape[1]

    def select(self, scenes: Tensor | slice) -> Self:
        look = Look(*(part[scenes] for part in self.look))
        return self._replace(look=look, **{k: v[scenes] for k, v in self._parts().items()})

    def to(self, device: torch.device | str) -> Self:
        look = Look(*(part.to(device) for part in self.look))
        return self._replace(look=look, **{k: v.to(device) for k, v in self._parts().items()})

    def _parts(self) -> dict[str, Tensor]:
        return {name: part for name, part in self._asdict().items() if name != "look"}


def between(low: float, high: float, chance: Tensor) -> Tensor:
    return low + (high - low) * chance


def pick(table: tuple, chance: Tensor) -> Tensor:
    """One row of a table for each number on [0, 1)  [...] -> [..., row]"""
    rows = torch.tensor(table, dtype=torch.float64, device=chance.device)
    return rows[(chance * len(table)).long()]


def rotation(half_tangent: Tensor) -> Tensor:
    """Cosine and sine of an angle, from the tangent of its half: exact everywhere  -> [..., 2]"""
    square = half_tangent * half_tangent
    return torch.stack(
        [(1 - square) / (1 + square), (half_tangent + half_tangent) / (1 + square)], -1
    )


LOOK_DRAWS = 16


def draw_look(draws: Tensor, fixed_camera: bool) -> Look:
    """[N, LOOK_DRAWS] -> a look for each"""
    height, turn, lean, light, floor, sky = draws[:, :6].unbind(1)
    # three objects of colours that differ
    order = draws[:, 6 : 6 + len(PAINTS)].argsort(dim=1, stable=True)[:, :OBJECTS]
    paints = pick(PAINTS, (order + 0.5) * (1 / len(PAINTS)))
    walls = pick(WALL_PAINTS, draws[:, 14:15]).expand(-1, WALLS, -1)
    bits = (draws[:, 15:16] * 2.0**20).long() + torch.arange(ELEMENTS + 1, device=draws.device)
    still = torch.zeros_like(turn)
    if fixed_camera:
        height, turn, lean = still + EYE_HEIGHT, still, still + PITCH
    else:
        height = between(EYE_HEIGHT - 0.15, EYE_HEIGHT + 0.15, height)
        turn = between(-0.05, 0.05, turn)
        lean = between(PITCH - 0.02, PITCH + 0.02, lean)
    (cos_y, sin_y), (cos_p, sin_p) = (rotation(x).unbind(-1) for x in (turn, lean))
    right = torch.stack([cos_y, still, -sin_y], -1)
    up = torch.stack([sin_y * sin_p, cos_p, cos_y * sin_p], -1)
    forward = torch.stack([sin_y * cos_p, -sin_p, cos_y * cos_p], -1)
    # from behind the camera, so that walls hide the shadows of what they hide
    aside = torch.where(light < 0.5, 1.0, -1.0) * between(0.08, 0.16, (2 * light) % 1)
    sun = torch.stack([aside, still + 1, still - 0.4], -1)
    x, y, z = sun.unbind(-1)
    sun = sun / (x * x + y * y + z * z).sqrt()[:, None]
    return Look(
        torch.stack([still, height, still], -1).float(),
        torch.stack([right, up, forward], 1).float(),
        sun.float(),
        torch.cat([paints, walls], 1).float(),
        pick(FLOORS, floor).float(),
        pick(SKIES, sky).float(),
        bits.to(torch.int32),
    )


def half_sizes(kind: Tensor, radius: Tensor) -> Tensor:
    """Of objects; cubes and cones look about as large as spheres  [...] -> [..., 3]"""
    side = torch.where(kind == BOX, 0.86 * radius, radius)
    tall = torch.where(kind == CONE, 1.05 * radius, side)
    return torch.stack([side, tall, side], -1)


def assemble(
    look: Look,
    kind: Tensor,
    radius: Tensor,
    yaw: Tensor,
    foot: Tensor,
    wall_width: Tensor,
    wall_x: Tensor,
    wall_lean: Tensor,
) -> Scenes:
    """Scenes of objects [N, 3] whose lowest point is at `foot` [N, T, 3, 3] and of walls.

    `yaw` [N, 3] and `wall_lean` [N, T, W] are tangents of half the angles; a wall at 0 stands, at 1
    lies. A wall of width 0 [N, W] is not there.
    """
    half = half_sizes(kind, radius)
    up = torch.zeros_like(half) + half.new_tensor([0.0, 1.0, 0.0])
    centre = foot + (half * up)[:, None]
    upright = torch.zeros_like(foot[..., :2]) + half.new_tensor([1.0, 0.0])

    lean = rotation(wall_lean)  # [N, T, W, 2]
    hinge = torch.stack([wall_x, torch.zeros_like(wall_x), torch.full_like(wall_x, WALL_DEPTH)], -1)
    cos, sin = lean.unbind(-1)
    middle = torch.stack([torch.zeros_like(cos), cos, sin], -1) * (WALL_HEIGHT / 2)
    # lifted a little when it lies, so that it is on the floor and not in it
    middle = middle + torch.stack([torch.zeros_like(cos), sin, torch.zeros_like(cos)], -1) * (
        WALL_THICKNESS / 2
    )
    wall_half = torch.stack(
        [
            wall_width / 2,
            torch.full_like(wall_width, WALL_HEIGHT / 2),
            torch.full_like(wall_width, WALL_THICKNESS / 2),
        ],
        -1,
    )
    wall_kind = torch.where(wall_width > 0, BOX, NONE)
    straight = torch.zeros_like(wall_half[..., :2]) + wall_half.new_tensor([1.0, 0.0])
    return Scenes(
        look,
        torch.cat([kind, wall_kind], 1),
        torch.cat([half, wall_half], 1).float(),
        torch.cat([rotation(yaw), straight], 1).float(),
        torch.cat([centre, hinge[:, None] + middle], 2).float(),
        torch.cat([upright, lean], 2).float(),
    )


def draw_kinds(chance: Tensor) -> Tensor:
    shapes = torch.tensor([SPHERE, BOX, CONE], device=chance.device)
    return shapes[(chance * 3).long()]
