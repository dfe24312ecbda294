"""What rays see: the nearest element, floor or sky, its colour, and whether the sun shines on it.

One implementation for NumPy and PyTorch; see arrays.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from scoff.worlds.intphys import surfaces
from scoff.worlds.intphys.arrays import Array, byte, count, full, namespace, nonzero
from scoff.worlds.intphys.scenes import FIRST_ELEMENT, FLOOR, HALF_VIEW, OBJECTS, SKY, Look
from scoff.worlds.intphys.shapes import FAR, HIT, NAMES, Vector, dot, normal

SAMPLES = 2  # along each side of a pixel
MILLIMETRES = 1000.0
_LIFT = 2.0e-3  # above the surface: where a ray to the sun starts


class Shot(NamedTuple):
    """Single frames: all that is needed of F of them, the look repeated."""

    look: Look
    kind: Array
    half: Array
    yaw: Array
    centre: Array
    tilt: Array
    body: Array  # boxes, see screen.py; None: every pixel is looked at, and there are no elements
    shade: Array

    def numpy(self) -> "Shot":
        def turn(part: Array) -> Array:
            return None if part is None else part.numpy()

        look = Look(*map(turn, self.look))
        return Shot(look, *map(turn, self[1:]))


class Seen(NamedTuple):
    """M pixels, of which each is that number of a frame of a shot."""

    frame: Array
    pixel: Array
    colour: Array  # [M, 3] uint8
    identity: Array  # [M] uint8
    depth: Array | None  # [M] int32


def look_at(shot: Shot, pixels: int, depth: bool) -> Seen:
    xp = namespace(shot.half)
    p = pixels * pixels
    size = len(shot.kind)
    if shot.body is None:
        where = count(shot.half, size * p)
        in_body = in_shade = None
    else:
        in_body, in_shade = _inside(shot.body, pixels), _inside(shot.shade, pixels)  # [K, F, H, W]
        wanted: Array = in_shade[0]
        for one in in_shade[1:]:
            wanted = wanted | one
        where = nonzero(wanted.reshape(-1))
    frame, pixel = where // p, where % p
    look = Look(*(part[frame] for part in shot.look))
    eye = _split(look.eye)
    ray = _rays(look.view, pixel, pixels)
    best, identity = _ground(eye, ray)
    shape = tuple(best.shape)
    facing = [full(best, shape, up) for up in (0.0, 1.0, 0.0)]  # the floor's
    albedo = list(
        surfaces.tiles(
            eye[0] + best * ray[0],
            eye[2] + best * ray[2],
            (_split(look.floor[:, 0]), _split(look.floor[:, 1])),
            look.grain[:, -1:],
            best,
        )
    )
    for element, kind, rows in _each(shot.kind, frame, where, in_body):
        part = _Part.of(shot, element, frame[rows])
        origin, direction = part.inward(eye, ray, rows)
        t = HIT[kind](origin, direction, part.half)
        is_nearer = t < best[rows]
        point = tuple(o + t * d for o, d in zip(origin, direction, strict=True))
        outward = part.turn_back(normal(kind, point, part.half))
        grain = look.grain[rows, element][:, None]
        shade = surfaces.brightness(kind, element >= OBJECTS, point, part.half, grain)
        colour = look.colour[rows, element]
        best[rows] = xp.where(is_nearer, t, best[rows])
        identity[rows] = xp.where(
            is_nearer, full(t, tuple(t.shape), FIRST_ELEMENT + element, "uint8"), identity[rows]
        )
        for axis in range(3):
            facing[axis][rows] = xp.where(is_nearer, outward[axis], facing[axis][rows])
            albedo[axis][rows] = xp.where(
                is_nearer, colour[:, axis : axis + 1] * shade, albedo[axis][rows]
            )

    sun = _split(look.sun)
    place = tuple(e + best * r + _LIFT * f for e, r, f in zip(eye, ray, facing, strict=True))
    in_shadow = full(best, shape, 0, "bool")
    for element, kind, rows in _each(shot.kind, frame, where, in_shade):
        part = _Part.of(shot, element, frame[rows])
        origin, direction = part.inward(place, sun, rows)
        in_shadow[rows] = in_shadow[rows] | (HIT[kind](origin, direction, part.half) < FAR)

    low, top = _split(look.sky[:, 0]), _split(look.sky[:, 1])
    colour = surfaces.lit(
        (albedo[0], albedo[1], albedo[2]), facing[1], dot(tuple(facing), sun), in_shadow
    )
    colour = surfaces.hazy(colour, best, low)
    sky = surfaces.heaven(ray[1], (low, top))
    is_sky = identity == SKY
    mixed = [_mean(xp.where(is_sky, s, c)) for s, c in zip(sky, colour, strict=True)]
    centre = identity[:, 0]
    far = best[:, 0] * MILLIMETRES
    far = xp.where(centre == SKY, 0 * far, far)
    return Seen(
        frame,
        pixel,
        xp.stack([byte(c) for c in mixed], 1),
        centre,
        (far.int() if xp is torch else far.astype(np.int32)) if depth else None,
    )


def _inside(box: Array, pixels: int) -> list[Array]:
    """Which pixels are in each element's box  [F, K, 4] -> K times [F, H, W]"""
    line = count(box, pixels)
    across = (line >= box[..., 0:1]) & (line <= box[..., 1:2])  # [F, K, W]
    down = (line >= box[..., 2:3]) & (line <= box[..., 3:4])
    return [down[:, k, :, None] & across[:, k, None, :] for k in range(box.shape[1])]


def _each(
    kinds: Array, frame: Array, where: Array, inside: list[Array] | None
) -> Iterator[tuple[int, int, Array]]:
    """Elements, by shape, and which of the M pixels may show them"""
    if inside is None:
        return
    for element, mask in enumerate(inside):
        rows = nonzero(mask.reshape(-1)[where])
        of_kind = kinds[:, element][frame[rows]]
        for kind in NAMES:
            chosen = rows[of_kind == kind]
            if len(chosen):
                yield element, kind, chosen


class _Part(NamedTuple):
    """One element as seen from M pixels: numbers [M, 1]"""

    half: Vector
    centre: Vector
    yaw: tuple[Array, Array]
    tilt: tuple[Array, Array] | None  # None: does not lean

    @classmethod
    def of(cls, shot: Shot, element: int, frame: Array) -> "_Part":
        cos, sin = (shot.yaw[:, element, i][frame][:, None] for i in range(2))
        lean = None
        if element >= OBJECTS:
            lean = (
                shot.tilt[:, element, 0][frame][:, None],
                shot.tilt[:, element, 1][frame][:, None],
            )
        return cls(
            _split(shot.half[:, element][frame]),
            _split(shot.centre[:, element][frame]),
            (cos, sin),
            lean,
        )

    def inward(self, origin: Vector, direction: Vector, rows: Array) -> tuple[Vector, Vector]:
        """A ray in the element's own axes"""
        moved = tuple(o[rows] - c for o, c in zip(origin, self.centre, strict=True))
        return self._turn(moved), self._turn(tuple(d[rows] for d in direction))

    def _turn(self, vector: Vector) -> Vector:
        x, y, z = vector
        if self.tilt is not None:  # walls do not turn
            cos, sin = self.tilt
            return x, cos * y + sin * z, cos * z - sin * y
        cos, sin = self.yaw
        return cos * x - sin * z, y, sin * x + cos * z

    def turn_back(self, vector: Vector) -> Vector:
        x, y, z = vector
        if self.tilt is not None:
            cos, sin = self.tilt
            return x, cos * y - sin * z, sin * y + cos * z
        cos, sin = self.yaw
        return cos * x + sin * z, y, cos * z - sin * x


def _split(vectors: Array) -> Vector:
    """[M, 3] -> three times [M, 1]"""
    return vectors[:, 0:1], vectors[:, 1:2], vectors[:, 2:3]


def _rays(view: Array, pixel: Array, pixels: int) -> Vector:
    """Directions of the samples of each pixel, one long along the line of sight  -> [M, S] each"""
    xp = namespace(view)
    steps = [(i + 0.5) / SAMPLES for i in range(SAMPLES)]
    across = [(x, y) for y in steps for x in steps]
    scale = 2 * HALF_VIEW / pixels
    column, row = pixel % pixels, pixel // pixels
    column, row = (x.float() if xp is torch else x.astype(np.float32) for x in (column, row))
    right = xp.stack([(column + x - pixels / 2) * scale for x, _ in across], 1)
    up = xp.stack([(pixels / 2 - row - y) * scale for _, y in across], 1)
    x, y, z = (
        view[:, 0, i : i + 1] * right + view[:, 1, i : i + 1] * up + view[:, 2, i : i + 1]
        for i in range(3)
    )
    return x, y, z


def _ground(eye: Vector, ray: Vector) -> tuple[Array, Array]:
    """Floor or sky, and how far"""
    xp = namespace(ray[1])
    is_floor = ray[1] < -1.0e-3
    down = xp.where(is_floor, ray[1], -1 + 0 * ray[1])
    t = xp.where(is_floor, -eye[1] / down, 1.0e4 + 0 * down)
    floor = full(t, tuple(t.shape), FLOOR, "uint8")
    return t, xp.where(is_floor, floor, 0 * floor)


def _mean(samples: Array) -> Array:
    """Of a pixel's samples, from 0 to 255"""
    xp = namespace(samples)
    total = samples[:, 0]
    for i in range(1, samples.shape[1]):
        total = total + samples[:, i]
    scaled = total * (255.0 / samples.shape[1]) + 0.5
    scaled = xp.where(scaled > 255.0, 255.0 + 0 * scaled, scaled)
    return xp.where(scaled < 0, 0 * scaled, scaled)
