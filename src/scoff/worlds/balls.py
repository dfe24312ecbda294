"""Bouncing balls: discs of two masses, or three behind a curtain, in a box of 10 units, 64 pixels.

Radii, masses and speeds are those of the videos of R-NEM (van Steenkiste et al., 2018). A clip is a
function of (seed, split, index); balls() gives pictures with all that is behind them. To draw from
one set many times, keep trajectories() and render() those of each batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from scoff.worlds.billiards import roll
from scoff.worlds.random import STREAMS, Split, directions, uniform

VariantName = Literal["4balls", "678balls", "curtain", "coloured4balls", "coloured678balls"]

BOX = 10.0
PIXELS = 64
FRAMES = 51
CURTAIN = 28  # pixels
# Set1 of ColorBrewer
COLOURS = ((228, 26, 28), (55, 126, 184), (77, 175, 74), (152, 78, 163))
# how often each ball is moved to another place before it starts
SWEEPS = 32
# On a CPU so few are drawn at a time that what is made in between is small and its memory is used
# again: to get new memory takes longer than to draw into it.
PICTURES_AT_ONCE = 128


@dataclass(frozen=True)
class Variant:
    counts: tuple[int, ...]  # clip i has counts[i % len(counts)] balls
    radii: tuple[float, float]  # of light and heavy balls: a coin is tossed for each
    masses: tuple[float, float]
    speed: float  # root of the sum of all balls' squared speeds, in units a frame
    has_curtain: bool = False
    has_colours: bool = False


FOUR = Variant((4,), (0.8, 1.0), (1.0, 6.0), 1 / 3)
MANY = replace(FOUR, counts=(6, 7, 8))
VARIANTS: dict[VariantName, Variant] = {
    "4balls": FOUR,
    "678balls": MANY,
    "curtain": Variant((3,), (1.2, 1.2), (1.0, 1.0), 1 / 2, has_curtain=True),
    "coloured4balls": replace(FOUR, has_colours=True),
    "coloured678balls": replace(MANY, has_colours=True),
}


class Trajectories(NamedTuple):
    """What happens, without pictures."""

    position: Tensor  # [N, T, K, 2] float64, in units of the box: x to the right, y down
    velocity: Tensor  # [N, T, K, 2] float64, in units a frame
    hits: Tensor  # [N, T, K] int64: collisions with other balls since the frame before
    bounces: Tensor  # [N, T, K] int64: collisions with walls since the frame before
    finished: Tensor  # [N] bool; false: stands still after too many collisions
    radius: Tensor  # [N, K] float64; 0: there is no such ball
    mass: Tensor  # [N, K] float64
    curtain: Tensor | None  # [N, 2] int64: column and row of its upper left pixel
    colour: Tensor | None  # [N, K] int64: which of COLOURS

    def select(self, clips: Tensor) -> Self:
        """Some of them, by their places [M] int64"""
        return self._replace(
            **{name: part[clips] for name, part in self._asdict().items() if part is not None}
        )


class Pictures(NamedTuple):
    """What is seen and nothing else, a byte a pixel."""

    pixels: Tensor  # [N, T, H, W] bool: what is lit; or uint8, as it is to be of coloured balls:
    # identity, as in Clips
    colour: Tensor | None = None  # [N, K] int64: which of COLOURS

    def select(self, clips: Tensor) -> "Pictures":
        """Some of them, by their places [M] int64"""
        return Pictures(self.pixels[clips], None if self.colour is None else self.colour[clips])

    @property
    def frames(self) -> Tensor:
        """[N, T, C, H, W] float32 from 0 to 1: one channel, or red, green and blue"""
        n, frames, *size = self.pixels.shape
        device, seen = self.pixels.device, self.pixels.view(torch.uint8)
        paint = None if self.colour is None else _paint(self.colour)
        channels = 1 if paint is None else 3
        picture = torch.empty(n, frames, channels, *size, dtype=torch.float32, device=device)
        for part in _parts(n, frames, device):
            if paint is None:
                picture[part].copy_(seen[part].clamp(max=1)[:, :, None])
            else:
                picture[part].copy_(_colour_in(seen[part], paint[part])).mul_(1 / 255)
        return picture


class Clips(NamedTuple):
    """Pictures and what is behind them. What has a default, files of others do not tell."""

    identity: Tensor  # [N, T, H, W] uint8: whose pixel it is, from 1; 0 where no ball is seen
    collisions: Tensor  # [N, T, H, W] bool: seen of balls that hit another since the frame before
    events: Tensor  # [N, T] int64: how often balls hit each other since the frame before
    position: Tensor  # [N, T, K, 2] float32: as in Trajectories, and so are those below
    velocity: Tensor  # [N, T, K, 2] float32
    hits: Tensor | None = None
    bounces: Tensor | None = None
    radius: Tensor | None = None
    mass: Tensor | None = None
    curtain: Tensor | None = None
    colour: Tensor | None = None
    features: Tensor | None = None  # [N, T, H, W] bool: the picture, if it is not identity > 0

    @property
    def frames(self) -> Tensor:
        """[N, T, C, H, W] float32 from 0 to 1: one channel, or red, green and blue"""
        own = self.identity if self.features is None or self.colour is not None else self.features
        return Pictures(own, self.colour).frames


def balls(
    seed: int,
    index: Tensor,
    variant: VariantName = "4balls",
    frames: int = FRAMES,
    split: Split = "train",
) -> Clips:
    """The clips number `index` [N] int64 of the split, on the device of `index`."""
    return render(trajectories(seed, index, variant, frames, split))


def trajectories(
    seed: int,
    index: Tensor,
    variant: VariantName = "4balls",
    frames: int = FRAMES,
    split: Split = "train",
) -> Trajectories:
    """What happens in the clips number `index` [N] int64 of the split."""
    if variant not in VARIANTS:
        wants = ", ".join(map(repr, VARIANTS))
        raise ValueError(f"variant: got {variant!r}, wants one of {wants}")
    if frames < 1:
        raise ValueError(f"frames: got {frames}, wants an integer of at least 1")
    if split not in STREAMS:
        raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, STREAMS))}")
    kind = VARIANTS[variant]
    most = max(kind.counts)
    sizes = [most, most, most, most, 2, 2 * most * SWEEPS]
    draws = uniform(seed, STREAMS[split], index, sum(sizes)).double()
    coin, share, angle, _, corner, places = draws.split(sizes, 1)  # the fourth are for colours

    is_present = torch.arange(most, device=index.device) < _counts(index, kind.counts)[:, None]
    radius, mass = (
        torch.full_like(coin, heavy).masked_fill_(coin < 0.5, light) * is_present
        for light, heavy in (kind.radii, kind.masses)
    )
    position = arrange(radius, places.unflatten(1, (SWEEPS, most, 2)))
    velocity = set_off(is_present, share, angle) * kind.speed
    motion = roll(position, velocity, radius, mass, frames, BOX)
    curtain = (corner * (PIXELS - CURTAIN + 1)).long() if kind.has_curtain else None
    colour = colours(seed, index, variant, split) if kind.has_colours else None
    return Trajectories(*motion, radius, mass, curtain, colour)


def colours(seed: int, index: Tensor, variant: VariantName, split: Split = "train") -> Tensor:
    """Which of COLOURS the balls of each clip have, or would have  [N] -> [N, K] int64"""
    most = max(VARIANTS[variant].counts)
    draws = uniform(seed, STREAMS[split], index, 4 * most)
    return (draws[:, 3 * most :] * len(COLOURS)).long()


def _counts(index: Tensor, counts: tuple[int, ...]) -> Tensor:
    """How many balls each clip has  [N] -> [N]"""
    number = torch.full_like(index, counts[0])
    for place, count in enumerate(counts[1:], start=1):
        number.masked_fill_(index % len(counts) == place, count)
    return number


def arrange(radius: Tensor, places: Tensor) -> Tensor:
    """Where balls start: anywhere in the box, but not on each other  [N, K] -> [N, K, 2]

    The usual way is to draw all places anew until no two balls overlap, which has no bound. Here
    they start from a lattice, and in turn each moves to a random place [N, sweeps, K, 2] if nobody
    is there. That tends to the same distribution (it is Metropolis's algorithm) and always ends.
    """
    discs = radius.shape[1]
    side = next(n for n in range(2, discs + 2) if n * n >= discs)
    disc = torch.arange(discs, device=radius.device)
    lattice = torch.stack([disc % side, disc // side], -1).double() / (side - 1)
    low, room = radius[..., None], (BOX - 2 * radius)[..., None]
    position = low + room * lattice  # [N, K, 2]
    reach = radius[:, :, None] + radius[:, None]  # [N, K, K]
    # a ball that is not there is in nobody's way
    reach = torch.where((radius > 0)[:, :, None], reach * reach, -1.0)
    for sweep in (low[:, None] + room[:, None] * places).unbind(1):
        for mover, place in enumerate(sweep.unbind(1)):
            away = position - place[:, None]
            away = away * away
            free = away[..., 0] + away[..., 1] > reach[:, :, mover]
            free = (free | (disc == mover)).all(1)
            position[:, mover] = torch.where(free[:, None], place, position[:, mover])
    return position * (radius > 0)[..., None]


def set_off(is_present: Tensor, share: Tensor, angle: Tensor) -> Tensor:
    """Velocities whose squares sum to 1, uniform on that sphere  [N, K] -> [N, K, 2]

    As of normal numbers divided by their norm: the squared speeds of n balls are then distributed
    as the gaps that n - 1 uniform numbers leave between 0 and 1, and directions are uniform.
    """
    # one number less than there are balls; the others are 1 and leave no gap
    is_cut = is_present[:, 1:]
    cuts = torch.where(is_cut, share[:, 1:], 1.0).sort(1).values
    zero, one = torch.zeros_like(cuts[:, :1]), torch.ones_like(cuts[:, :1])
    speed = torch.cat([zero, cuts, one], 1).diff().sqrt()
    return speed[..., None] * directions(angle)


def render(truth: Trajectories) -> Clips:
    """A pixel is a ball's if its centre is in it."""
    n, frames, _ = truth.hits.shape
    device = truth.position.device
    position = truth.position.float()
    radius = truth.radius.float()  # in single precision like the positions
    identity = torch.zeros(n, frames, PIXELS, PIXELS, dtype=torch.uint8, device=device)
    collisions = torch.zeros_like(identity)
    has_hit = (truth.hits > 0).view(torch.uint8)
    for part in _parts(n, frames, device):
        _draw(position[part], radius[part], has_hit[part], identity[part], collisions[part])
    if truth.curtain is not None:
        seen = (~behind(truth.curtain)).view(torch.uint8)[:, None]
        identity *= seen
        collisions *= seen
    return Clips(
        identity,
        collisions.view(torch.bool),
        truth.hits.sum(-1) // 2,
        position,
        truth.velocity.float(),
        truth.hits,
        truth.bounces,
        radius,
        truth.mass.float(),
        truth.curtain,
        truth.colour,
    )


def _parts(clips: int, frames: int, device: torch.device) -> list[slice]:
    """Those to be drawn at once"""
    if device.type != "cpu":  # fewer operations are faster there
        return [slice(None)]
    at_once = max(1, PICTURES_AT_ONCE // max(1, frames))
    return [slice(first, first + at_once) for first in range(0, clips, at_once)]


def _draw(
    position: Tensor, radius: Tensor, has_hit: Tensor, identity: Tensor, collisions: Tensor
) -> None:
    """Into the last two, [N, T, H, W] uint8, from [N, T, K, 2], [N, K] and [N, T, K] uint8"""
    pixel = torch.arange(PIXELS, dtype=torch.float32, device=position.device)
    centre = (pixel + 0.5) * (BOX / PIXELS)
    across, down = ((centre - axis[..., None]) ** 2 for axis in position.unbind(-1))
    radius = radius[:, None, :, None]
    reach = radius * radius - down  # [N, T, K, H]: how far across a row is in the ball, squared
    # arithmetic of bytes, which is several times faster than masks
    mark = torch.empty_like(identity)
    signed = torch.empty_like(identity, dtype=torch.int8) if identity.device.type == "cpu" else None
    for disc in range(position.shape[2]):
        own_across, own_reach = across[:, :, disc, None, :], reach[:, :, disc, :, None]
        inside = _compare(torch.lt, own_across, own_reach, signed)
        torch.maximum(identity, torch.mul(inside, disc + 1, out=mark), out=identity)
        hit = has_hit[:, :, disc, None, None]
        torch.maximum(collisions, torch.mul(inside, hit, out=mark), out=collisions)


def _compare(
    how: Callable[..., Tensor], x: Tensor, y: Tensor | int, space: Tensor | None
) -> Tensor:
    """Zeros and ones, uint8. On a CPU torch compares several times faster into bytes, for which
    there is space then, than into bool, for which its loop has no vector instructions."""
    return (how(x, y) if space is None else how(x, y, out=space)).view(torch.uint8)


def _colour_in(identity: Tensor, paint: Tensor) -> Tensor:
    """[N, T, H, W] uint8, [N, K, 3] uint8 -> [N, T, 3, H, W] uint8"""
    n, frames, *size = identity.shape
    picture = identity.new_zeros(n, frames, 3, *size)
    space = torch.empty_like(identity)[:, :, None] if identity.device.type == "cpu" else None
    for disc, rgb in enumerate(paint.unbind(1)):  # [N, 3]
        is_here = _compare(torch.eq, identity[:, :, None], disc + 1, space)
        picture.addcmul_(is_here, rgb[:, None, :, None, None])  # a pixel is of one ball
    return picture


def behind(curtain: Tensor) -> Tensor:
    """[N, 2] -> [N, H, W] bool"""
    pixel = torch.arange(PIXELS, device=curtain.device)
    column, row = ((pixel >= at[:, None]) & (pixel < at[:, None] + CURTAIN) for at in curtain.T)
    return row[:, :, None] & column[:, None, :]


def _paint(colour: Tensor) -> Tensor:
    """COLOURS[colour]  [N, K] -> [N, K, 3] uint8"""
    # not by a table: it would be copied to the GPU, which CUDA graphs forbid
    rgb = torch.zeros(*colour.shape, 3, dtype=torch.uint8, device=colour.device)
    for number, shades in enumerate(COLOURS):
        for channel, shade in enumerate(shades):
            rgb[..., channel].masked_fill_(colour == number, shade)
    return rgb
