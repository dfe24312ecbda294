"""Scenes of the tests, in pairs: two possible runs that differ in one object, the magic one.

    O1  it is there, or not
    O2  it has one shape, or another
    O3  it is in one place, or another

What is occluded disappears behind walls: once, or twice in dynamic 2. Sizes and speeds are chosen
so that both runs look the same meanwhile; whether they do is for the pictures to tell. Motion is in
closed form, so that whatever is not magic is the same to the last bit.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from scoff.worlds.intphys.scenes import (
    FRAMES,
    LOOK_DRAWS,
    OBJECTS,
    WALL_DEPTH,
    WALLS,
    Scenes,
    assemble,
    between,
    draw_look,
)
from scoff.worlds.intphys.shapes import BOX, CONE, NONE, SPHERE

Block = Literal["O1", "O2", "O3"]
Visibility = Literal["visible", "occluded"]
Movement = Literal["static", "dynamic_1", "dynamic_2"]
BLOCKS: tuple[Block, ...] = ("O1", "O2", "O3")
VISIBILITIES: tuple[Visibility, ...] = ("visible", "occluded")
MOVEMENTS: tuple[Movement, ...] = ("static", "dynamic_1", "dynamic_2")

STAGE_DRAWS = LOOK_DRAWS + 13 * OBJECTS + 9
GRAVITY = 9.8 / 15**2  # metres and frames, at 15 frames a second
LANES = (9.2, 10.7, 12.2)  # depths at which objects move
COLUMNS = (-0.34, 0.0, 0.34)  # where they rest, x / z
MEDIUM_RADIUS = 0.74
YAW = 0.2  # tangent of half the angle by which objects are turned at most
SPARE = 0.004  # by how much walls are wider than they need to be, on either side, as x / z
WIDE = 1.13  # half the width of the widest object, a cube that is turned so, in radii
_SHAPES = (SPHERE, BOX, CONE)
_SHAPE_PAIRS = ((0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2))


class Pair(NamedTuple):
    first: Scenes
    second: Scenes
    magic: Tensor  # [N] int64: the place of the object that differs
    objects: Tensor  # [N] int64: how many there are, with the magic one


class _Motion(NamedTuple):
    """Of objects [N, 3]: x = start + speed · frame, and hops"""

    start: Tensor
    speed: Tensor
    hop: Tensor  # frames from one to the next; 0: none
    phase: Tensor

    def foot(self, depth: Tensor, frames: int) -> Tensor:
        """[N, T, 3, 3]"""
        time = torch.arange(frames, device=depth.device).double()[None, :, None]
        x = self.start[:, None] + self.speed[:, None] * time
        since = time + self.phase[:, None] * self.hop[:, None]
        period = self.hop[:, None].clamp(min=1.0)
        since = since - period * (since / period).floor()
        y = torch.where(
            self.hop[:, None] > 0, 0.5 * GRAVITY * since * (period - since), torch.zeros_like(x)
        )
        return torch.stack([x, y, depth[:, None].expand_as(x)], -1)

    @property
    def height(self) -> Tensor:
        return self.hop * self.hop * (GRAVITY / 8)


def stage(
    draws: Tensor,
    number: Tensor,
    block: Block,
    visibility: Visibility,
    movement: Movement,
    min_hidden: int,
    fixed_camera: bool = True,
    frames: int = FRAMES,
) -> Pair:
    """Runs from draws [N, STAGE_DRAWS]; `number` [N] says which directions and shapes, in turn."""
    n, device = len(draws), draws.device
    sizes = [LOOK_DRAWS, *[OBJECTS] * 13, 9]
    (
        look,
        depths,
        radii,
        kinds,
        yaws,
        places,
        speeds,
        times,
        sides,
        hops,
        phases,
        lanes,
        cols,
        _,
        m,
    ) = draws.double().split(sizes, 1)
    look = draw_look(look, fixed_camera)
    slot = torch.arange(OBJECTS, device=device)
    objects = 1 + (m[:, 0] * OBJECTS).long()
    magic = (m[:, 1] * objects).long()
    is_magic = slot == magic[:, None]  # [N, 3]
    is_there = slot < objects[:, None]
    moves = movement != "static"
    twice = movement == "dynamic_2"

    doubled = twice or (block == "O3" and moves)  # two walls
    lane = lanes.argsort(dim=1, stable=True)
    radius = MEDIUM_RADIUS + between(-0.06, 0.06, radii)
    if doubled:  # the magic object not in front and not large: it has to fit between the walls
        lane = (lane + (lane.gather(1, magic[:, None]) == 0)) % len(LANES)
        radius = torch.where(is_magic, radius - 0.06, radius)
    depth = _rows(LANES, lane) + between(-0.15, 0.15, depths)
    shape, other_shape = _shapes(kinds, number, is_magic)
    yaw = between(-YAW, YAW, yaws)

    still = torch.zeros_like(depth)
    hop = torch.where(hops < 0.5, between(9.0, 12.5, hops * 2), still) if moves else still
    motion = _Motion(still, still, hop, phases)
    # How far from their middle an object and its shadow are seen, as x / z. The shadow is on one
    # side, so this middle is a little aside of the object's.
    slant = (-look.sun[:, 0] / look.sun[:, 1]).double()[:, None]
    shade = slant * (2 * radius + motion.height)
    wide = torch.where((shape == BOX) | (other_shape == BOX), WIDE, 1.0) * radius
    reach, aside = _extent(wide, shade, depth)
    side = torch.where(sides < 0.5, 1.0, -1.0).double()
    side = torch.where(is_magic, torch.where(number % 2 == 0, 1.0, -1.0)[:, None].double(), side)
    column = _rows(COLUMNS, cols.argsort(dim=1, stable=True)) + between(-0.04, 0.04, places)

    least, most = (0, 4) if doubled else (2, 12)
    hidden = between(min_hidden + least, min_hidden + most, m[:, 2:3])  # frames
    offset = (0.25 if visibility == "occluded" else 0.19) if doubled else 0.0
    widest = min(0.235, 0.175 + 0.005 * max(0, min_hidden - 8)) if doubled else 0.40
    middle = (
        between(-0.1, 0.1, m[:, 3:4])
        if moves and not doubled
        else between(-0.015, 0.015, m[:, 3:4])
    )
    if moves:
        speed = between(0.14, 0.17, speeds) if doubled else between(0.15, 0.21, speeds)
        slow = (2 * depth * (widest - reach) / hidden).clamp(min=0.02)
        speed = torch.where(is_magic, speed.minimum(slow), speed)
        cover = reach + hidden * speed / (2 * depth)  # half a wall's width, as x / z
        when = 0.5 * frames + between(-8.0, 8.0, times) * (0.4 if doubled else 1.0)
        way = torch.where(is_magic, middle, column * 0.5)
        if block == "O3" and not twice:
            way = torch.where(is_magic, middle - side * offset, way)
        motion = motion._replace(
            speed=side * speed, start=way * depth - side * speed * when, phase=phases
        )
    else:
        cover = reach + between(0.015, 0.05, m[:, 4:5])
        motion = motion._replace(start=column * depth)

    first, second = motion, motion
    depth_second = depth
    if block == "O3":
        if not moves:
            depth = torch.where(is_magic, LANES[0] + between(-0.15, 0.15, depths), depth)
            depth_second = torch.where(is_magic, LANES[2] + between(-0.15, 0.15, depths), depth)
            first = motion._replace(start=column * depth)
            second = motion._replace(start=column * depth_second)
            reach, aside = _extent(wide, shade, depth)
            cover = reach + between(0.015, 0.05, m[:, 4:5])
        elif twice:  # from the other side: behind the other wall at the same times
            mirrored = 2 * (middle * depth) - motion.start
            second = motion._replace(
                start=torch.where(is_magic, mirrored, motion.start),
                speed=torch.where(is_magic, -motion.speed, motion.speed),
            )
        else:
            ahead = motion.start + 2 * side * offset * depth
            second = motion._replace(start=torch.where(is_magic, ahead, motion.start))

    own = cover.gather(1, magic[:, None])  # [N, 1]
    target = column.gather(1, magic[:, None]) if not moves else middle
    target = target + aside.gather(1, magic[:, None])
    centres = torch.cat([target - offset, target + offset, torch.zeros_like(target)], 1)
    width = own.expand(-1, WALLS) * (2 * WALL_DEPTH)
    used = 0 if visibility == "visible" else 2 if doubled else 1
    width = width * (torch.arange(WALLS, device=device) < used)
    lean = _rise_and_fall(m, hidden, frames) if not moves else _fall(m, frames)
    lean = lean[..., None].expand(-1, -1, WALLS)

    def run(kind: Tensor, way: _Motion, far: Tensor) -> Scenes:
        kind = torch.where(is_there, kind, NONE)
        foot = way.foot(far, frames)
        return assemble(look, kind, radius, yaw, foot, width, centres * WALL_DEPTH, lean)

    absent = torch.where(is_magic, NONE, shape)
    others = {"O1": absent, "O2": other_shape, "O3": shape}
    one, two = run(shape, first, depth), run(others[block], second, depth_second)
    swap = (number // 2 % 2 == 1) if block == "O3" else torch.zeros(n, dtype=torch.bool)
    return _swapped(one, two, swap.to(device), magic, objects)


def _rows(table: tuple[float, ...], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float64, device=index.device)[index]


def _extent(wide: Tensor, shade: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Half the width of an object with its shadow, and how far aside their middle is, as x / z"""
    return (wide + 0.5 * shade.abs()) / depth + SPARE, 0.5 * shade / depth


def _shapes(chance: Tensor, number: Tensor, is_magic: Tensor) -> tuple[Tensor, Tensor]:
    """Of all objects, and with the magic one's other shape  [N, 3] both"""
    shapes = torch.tensor(_SHAPES, device=chance.device)
    pair = torch.tensor(_SHAPE_PAIRS, device=chance.device)[number // 2 % len(_SHAPE_PAIRS)]
    drawn = shapes[(chance * len(_SHAPES)).long()]
    one, other = (torch.where(is_magic, shapes[pair[:, i : i + 1]], drawn) for i in range(2))
    return one, other


def _rise_and_fall(m: Tensor, hidden: Tensor, frames: int) -> Tensor:
    """A wall lies, rises, stands and lies down again: how it leans [N, T]"""
    time = torch.arange(frames, device=m.device).double()
    pace = between(0.07, 0.11, m[:, 5:6])
    stands = hidden + between(2.0, 0.36 * frames, m[:, 6:7])
    whole = stands + 2 / pace
    start = between(0.0, 1.0, m[:, 7:8]) * (frames - 18 - whole).clamp(min=0) + 9
    up = 1 - pace * (time - start)
    down = pace * (time - (start + 1 / pace + stands))
    return up.maximum(down).clamp(0, 1)


def _fall(m: Tensor, frames: int) -> Tensor:
    """A wall stands, and falls near the end: how it leans [N, T]"""
    time = torch.arange(frames, device=m.device).double()
    start = frames - 15 + between(-2.0, 2.0, m[:, 5:6])
    return (between(0.08, 0.12, m[:, 6:7]) * (time - start)).clamp(0, 1)


def _swapped(one: Scenes, two: Scenes, swap: Tensor, magic: Tensor, objects: Tensor) -> Pair:
    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(swap.view(-1, *[1] * (a.dim() - 1)), b, a)

    first = Scenes(one.look, *map(choose, one[1:], two[1:]))
    second = Scenes(one.look, *map(choose, two[1:], one[1:]))
    return Pair(first, second, magic, objects)
