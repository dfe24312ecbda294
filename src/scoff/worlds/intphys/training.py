"""Scenes to learn from: all possible.

Even numbers are runs like those of the tests, of each block, visibility and movement in turn, with
the camera moved a little. Odd ones are free play: objects that rest, roll, are thrown, drop or
collide, and walls that rise and fall as they like. Some of either kind are empty.
"""

import torch
from torch import Tensor

from scoff.worlds.intphys.motion import roll, swing
from scoff.worlds.intphys.quadruplets import MIN_HIDDEN
from scoff.worlds.intphys.render import PIXELS, Backend, Clips, render
from scoff.worlds.intphys.scenes import (
    FRAMES,
    HALF_VIEW,
    LOOK_DRAWS,
    OBJECTS,
    WALL_DEPTH,
    WALLS,
    Look,
    Scenes,
    assemble,
    between,
    draw_kinds,
    draw_look,
)
from scoff.worlds.intphys.shapes import NONE
from scoff.worlds.intphys.stages import (
    BLOCKS,
    LANES,
    MEDIUM_RADIUS,
    MOVEMENTS,
    STAGE_DRAWS,
    VISIBILITIES,
    YAW,
    Block,
    Movement,
    Visibility,
    stage,
)
from scoff.worlds.random import STREAMS, Split, uniform

TURNS = 3  # that a wall makes at most
EMPTY = 0.12  # of free play
_PER_OBJECT = 9
_FREE_DRAWS = LOOK_DRAWS + _PER_OBJECT * OBJECTS + 4 + WALLS * (4 + TURNS)
_CELLS: list[tuple[Block, Visibility, Movement]] = [
    (b, v, m) for b in BLOCKS for v in VISIBILITIES for m in MOVEMENTS
]


def training_clips(
    seed: int,
    index: Tensor,
    split: Split = "train",
    pixels: int = PIXELS,
    frames: int = FRAMES,
    depth: bool = False,
    backend: Backend = "auto",
    min_hidden: int = MIN_HIDDEN,
) -> Clips:
    """The training videos number `index` [N] int64, on the device of `index`."""
    scenes = training_scenes(seed, index, split, frames, min_hidden)
    return render(scenes, pixels, depth, backend)


def training_scenes(
    seed: int,
    index: Tensor,
    split: Split = "train",
    frames: int = FRAMES,
    min_hidden: int = MIN_HIDDEN,
) -> Scenes:
    if split not in STREAMS:
        raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, STREAMS))}")
    if frames < 2:
        raise ValueError(f"frames: got {frames}, wants an integer of at least 2")
    draws = uniform(seed, STREAMS[split], index, max(_FREE_DRAWS, STAGE_DRAWS + 1))
    half = torch.div(index, 2, rounding_mode="floor")
    cell = torch.where(index % 2 == 0, half % len(_CELLS), -1)
    places, parts = [], []
    for number in range(-1, len(_CELLS)):
        here = (cell == number).nonzero()[:, 0]
        if len(here) == 0:
            continue
        mine = draws[here]
        if number < 0:
            parts.append(free_play(mine[:, :_FREE_DRAWS], frames))
        else:
            block, visibility, movement = _CELLS[number]
            turn = torch.div(half[here], len(_CELLS), rounding_mode="floor")
            pair = stage(
                mine[:, :STAGE_DRAWS],
                turn,
                block,
                visibility,
                movement,
                min_hidden,
                fixed_camera=False,
                frames=frames,
            )
            parts.append(_either(pair.first, pair.second, mine[:, STAGE_DRAWS] < 0.5))
        places.append(here)
    order = torch.cat(places).argsort()
    look = Look(*(torch.cat(list(p))[order] for p in zip(*(s.look for s in parts), strict=True)))
    rest = (torch.cat(list(p))[order] for p in zip(*(s[1:] for s in parts), strict=True))
    return Scenes(look, *rest)


def _either(one: Scenes, other: Scenes, is_one: Tensor) -> Scenes:
    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(is_one.view(-1, *[1] * (a.dim() - 1)), a, b)

    return Scenes(one.look, *map(choose, one[1:], other[1:]))


def free_play(draws: Tensor, frames: int) -> Scenes:
    """[N, _FREE_DRAWS] -> N scenes"""
    device = draws.device
    sizes = [LOOK_DRAWS, *[OBJECTS] * _PER_OBJECT, 4, *[WALLS] * 4, WALLS * TURNS]
    look, lanes, depths, radii, kinds, yaws, modes, places, speeds, sides, few, *walls = (
        draws.double().split(sizes, 1)
    )
    look = draw_look(look, fixed_camera=False)
    is_there = torch.arange(OBJECTS, device=device) < _how_many(few[:, 0])[:, None]
    kind = torch.where(is_there, draw_kinds(kinds), NONE)
    radius = MEDIUM_RADIUS + between(-0.06, 0.06, radii)
    table = torch.tensor(LANES, dtype=torch.float64, device=device)
    depth = table[lanes.argsort(dim=1, stable=True)] + between(-0.15, 0.15, depths)
    # the first two in one plane, so that they can meet
    meets = (few[:, 1] < 0.4) & is_there[:, 1]
    depth = torch.where(meets[:, None] & _slot(1, device), depth[:, :1], depth)

    side = torch.where(sides < 0.5, 1.0, -1.0).double()
    # two that meet come from different sides
    side = torch.where(meets[:, None] & _slot(1, device), -side[:, :1], side)
    edge = HALF_VIEW * depth + 1.2
    speed = between(0.1, 0.24, speeds)
    rests, drops, flies = modes < 0.2, (modes >= 0.2) & (modes < 0.4), modes >= 0.75
    inside = between(-0.42, 0.42, places) * depth
    # what rests or drops keeps to its own part of the picture if it may meet another
    inside = torch.where(meets[:, None], -side * (0.12 * depth + inside.abs() * 0.5), inside)
    late = speed * between(0.0, 0.3 * frames, places)
    stays = rests | drops
    x = torch.where(stays, inside, -side * (edge + late))
    y = torch.where(drops, between(1.5, 5.0, speeds), torch.where(flies, 0.4, 0.0))
    rise = torch.where(flies, between(0.1, 0.3, places), 0.0)
    tracks = roll(x, y, torch.where(stays, 0.0, side * speed), rise, radius * 1.08, meets, frames)
    foot = torch.stack([tracks.x, tracks.y, depth[:, None].expand_as(tracks.x)], -1)

    where, width, stands, pace, turns = walls
    used = torch.arange(WALLS, device=device) < (few[:, 2:3] * (WALLS + 0.5)).floor()
    column = torch.tensor([-0.36, 0.0, 0.36], dtype=torch.float64, device=device)
    order = where.argsort(dim=1, stable=True)
    centre = (column[order] + between(-0.03, 0.03, where)) * WALL_DEPTH
    width = torch.where(used, between(1.1, 1.75, width), 0.0)
    # a turn after the last frame never comes
    lean = swing(
        stands < 0.5,
        between(0.05, 1.4, turns.unflatten(1, (WALLS, TURNS))) * frames,
        between(0.05, 0.14, pace),
        frames,
    )
    yaw = between(-YAW, YAW, yaws)
    return assemble(look, kind, radius, yaw, foot, width, centre, lean)


def _how_many(chance: Tensor) -> Tensor:
    """None, one, two or three objects: as in the benchmark, but that some scenes are empty"""
    left = (chance - EMPTY) * (1 / (1 - EMPTY))
    return (left >= 0).long() + (left >= 0.15).long() + (left >= 0.35).long()


def _slot(number: int, device: torch.device) -> Tensor:
    return torch.arange(OBJECTS, device=device) == number
