"""The ray caster: pictures, who is seen in them, and how far away.

Written once for NumPy, which is the faster on a CPU, and PyTorch, which runs on a GPU; both give
the same bits (see arrays.py). Only pixels where an element or a shadow may be are computed anew,
the others are those of the empty scene; and frames that are like the one before are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scoff.worlds.intphys.arrays import Array, full
from scoff.worlds.intphys.cast import Shot, look_at
from scoff.worlds.intphys.scenes import (
    FIRST_ELEMENT,
    OBJECT,
    OBJECTS,
    OCCLUDER,
    Look,
    Scenes,
)
from scoff.worlds.intphys.screen import Boxes, boxes

Backend = Literal["auto", "numpy", "torch"]

PIXELS = 64
# pixels looked at in one go, some 500 bytes each: what fits into a cache, or fills a GPU and leaves
# room for a dozen processes
_AT_ONCE = {"cpu": 16_000, "cuda": 4_000_000}


class Clips(NamedTuple):
    frames: Tensor  # [N, T, H, W, 3] uint8
    identity: Tensor  # [N, T, H, W] uint8: SKY, FLOOR, or FIRST_ELEMENT + the element's place
    depth: Tensor | None  # [N, T, H, W] int32: millimetres along the line of sight; 0: sky

    @property
    def classes(self) -> Tensor:
        """What a pixel shows: BACKGROUND, OBJECT or OCCLUDER  [N, T, H, W] uint8"""
        is_object = self.identity >= FIRST_ELEMENT
        is_wall = self.identity >= FIRST_ELEMENT + OBJECTS
        return is_object.to(torch.uint8) * OBJECT + is_wall.to(torch.uint8) * (OCCLUDER - OBJECT)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Clips":
        """The same done to all parts"""
        depth = None if self.depth is None else change(self.depth)
        return Clips(change(self.frames), change(self.identity), depth)

    def equal(self, other: "Clips") -> Tensor:
        """Which frames are the same to the last bit  -> [N, T] bool"""
        same = (self.frames == other.frames).flatten(2).all(2)
        same &= (self.identity == other.identity).flatten(2).all(2)
        if self.depth is not None and other.depth is not None:
            same &= (self.depth == other.depth).flatten(2).all(2)
        return same


def render(
    scenes: Scenes,
    pixels: int = PIXELS,
    depth: bool = False,
    backend: Backend = "auto",
    cull: bool = True,
) -> Clips:
    """Pictures of all frames, on the device of the scenes.

    Without `cull` every pixel is looked at for every element: slower, and the same.
    """
    device = scenes.centre.device
    if backend == "auto":
        backend = "numpy" if device.type == "cpu" else "torch"
    if backend not in ("numpy", "torch"):
        raise ValueError(f"backend: got {backend!r}, wants 'auto', 'numpy' or 'torch'")
    if backend == "numpy" and device.type != "cpu":
        raise ValueError(f"backend: got 'numpy' for scenes on {device}, wants 'torch'")
    if pixels < 1:
        raise ValueError(f"pixels: got {pixels}, wants an integer of at least 1")
    size, length = scenes.centre.shape[:2]
    p = pixels * pixels
    empty = _Film.blank(scenes, size, 1, pixels, depth, backend)
    for start in range(0, size, _whole_frames(device, p)):
        part = scenes.select(slice(start, start + _whole_frames(device, p)))
        empty.shoot(_still(part), start, backend)
    film = _Film.blank(scenes, size, length, pixels, depth, backend)
    film.copy_from(empty)
    everywhere = boxes(scenes, pixels)
    if not cull:
        everywhere = _whole_screen(everywhere, pixels)
    frames, source = _changes(scenes)
    for start in range(0, len(frames), _shot_frames(device, p)):
        chosen = frames[start : start + _shot_frames(device, p)]
        film.shoot(_flat(scenes, chosen, everywhere), chosen, backend)
    return film.develop(source)


def _whole_frames(device: torch.device, p: int) -> int:
    return max(1, _AT_ONCE.get(device.type, _AT_ONCE["cuda"]) // p)


def _shot_frames(device: torch.device, p: int) -> int:
    # a quarter of a picture is looked at, more or less
    return max(1, 4 * _AT_ONCE.get(device.type, _AT_ONCE["cuda"]) // p)


def _flat(scenes: Scenes, chosen: Tensor, where: Boxes) -> Shot:
    """The frames number `chosen` [F] of all, scene after scene"""
    scene = torch.div(chosen, scenes.frames, rounding_mode="floor")
    moving = (scenes.centre, scenes.tilt, where.body, where.shade)
    return Shot(
        Look(*(part[scene] for part in scenes.look)),
        scenes.kind[scene],
        scenes.half[scene],
        scenes.yaw[scene],
        *(part.flatten(0, 1)[chosen] for part in moving),
    )


def _still(scenes: Scenes) -> Shot:
    return Shot(
        scenes.look,
        torch.zeros_like(scenes.kind),
        scenes.half,
        scenes.yaw,
        scenes.centre[:, 0],
        scenes.tilt[:, 0],
        None,
        None,
    )


def _whole_screen(where: Boxes, pixels: int) -> Boxes:
    screen = where.body.new_tensor([0, pixels - 1, 0, pixels - 1])
    return Boxes(*(torch.where(part[..., :1] <= part[..., 1:2], screen, part) for part in where))


def _changes(scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Numbers [F] of frames that are not like the one before; for each frame, which it is like"""
    moved = [(part[:, 1:] != part[:, :-1]).flatten(2).any(2) for part in scenes[-2:]]
    is_new = torch.ones(scenes.centre.shape[:2], dtype=torch.bool, device=scenes.kind.device)
    is_new[:, 1:] = moved[0] | moved[1]
    numbers = torch.arange(is_new.numel(), device=is_new.device)
    source = torch.where(is_new.flatten(), numbers, 0).cummax(0).values
    return is_new.flatten().nonzero()[:, 0], source


@dataclass
class _Film:
    """Pictures in the making: NumPy's or PyTorch's, one row for each pixel of each frame."""

    shape: tuple[int, int, int, int]
    frames: Array  # [N · T · P, 3] uint8
    identity: Array  # [N · T · P] uint8
    depth: Array | None  # [N · T · P] int32

    @classmethod
    def blank(
        cls, scenes: Scenes, size: int, length: int, pixels: int, depth: bool, backend: Backend
    ) -> "_Film":
        like = np.empty(0) if backend == "numpy" else scenes.half
        rows = size * length * pixels * pixels
        return cls(
            (size, length, pixels, pixels),
            full(like, (rows, 3), 0, "uint8"),
            full(like, (rows,), 0, "uint8"),
            full(like, (rows,), 0, "int32") if depth else None,
        )

    def copy_from(self, empty: "_Film") -> None:
        size, length, pixels, _ = self.shape
        p = pixels * pixels
        for mine, other in zip(self._layers(), empty._layers(), strict=True):
            trailing = mine.shape[1:]
            mine.reshape(size, length, p, *trailing)[:] = other.reshape(size, 1, p, *trailing)

    def shoot(self, shot: Shot, first: Array, backend: Backend) -> None:
        """Fills in frames: those from number `first` on, or those with these numbers"""
        pixels = self.shape[-1]
        if backend == "numpy":
            shot = shot.numpy()
            first = first if isinstance(first, int) else first.numpy()
        seen = look_at(shot, pixels, self.depth is not None)
        frame = seen.frame + first if isinstance(first, int) else first[seen.frame]
        rows = frame * (pixels * pixels) + seen.pixel
        self.frames[rows] = seen.colour
        self.identity[rows] = seen.identity
        if self.depth is not None:
            self.depth[rows] = seen.depth

    def develop(self, source: Tensor) -> Clips:
        """Clips, in which frame i is the picture number source[i]"""
        size, length, pixels, _ = self.shape
        layers = []
        for layer in self._layers():
            rows = torch.as_tensor(layer).unflatten(0, (size * length, pixels, pixels))
            layers.append(rows[source].unflatten(0, (size, length)))
        return Clips(layers[0], layers[1], layers[2] if self.depth is not None else None)

    def _layers(self) -> list[Array]:
        return [x for x in (self.frames, self.identity, self.depth) if x is not None]
