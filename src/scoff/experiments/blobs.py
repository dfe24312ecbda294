"""Balls in a picture, found without being told where they are, and matched to where they are.

Places are in pixels: x to the right, y down, the centre of the first pixel at (0.5, 0.5). Leading
axes are free. Nothing waits for the device and no shape depends on the data.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scoff.experiments.matching import assign
from scoff.experiments.measures import exactly

APART = 1.5  # radii between the centres of two blobs, at least; of touching balls it is 2
CLEAR = 0.45  # of what a whole ball answers to the filter


class Blobs(NamedTuple):
    centre: Tensor  # [..., K, 2]
    is_there: Tensor  # [..., K] bool


class Matches(NamedTuple):
    distance: Tensor  # [..., K] of each true ball from its blob, in pixels; inf: it has none
    hits: Tensor  # [...] balls that have a blob
    missed: Tensor  # [...] balls that have none
    extra: Tensor  # [...] blobs that have no ball


@exactly
def find_blobs(picture: Tensor, radius: float, most: int) -> Blobs:
    """The `most` clearest round spots of about this radius  [..., H, W] from 0 to 1

    A filter answers most where a spot's centre is, also of spots that touch. Around each spot, from
    the clearest on, others are passed over. A spot's centre is then that of the light that is
    nearer to it than to any other.

    Args:
        radius: of the smallest balls, in pixels.
    """
    lead, (height, width) = picture.shape[:-2], picture.shape[-2:]
    light = picture.reshape(-1, height, width).float()
    kernel = _spot_filter(radius, light)
    reach = kernel.shape[-1] // 2
    answer = F.conv2d(light[:, None], kernel[None, None], padding=reach).flatten(1)  # [M, H * W]
    threshold = CLEAR * kernel.clamp(min=0).sum()
    place = _places(height, width, light)  # [H * W, 2]
    seeds, is_there = [], []
    for _ in range(most):
        top, at = answer.max(-1)
        seed = place[at]  # [M, 2]
        away = (place - seed[:, None]).square().sum(-1)
        answer = torch.where(away < (APART * radius) ** 2, -torch.inf, answer)
        seeds.append(seed)
        is_there.append(top > threshold)
    seed, there = torch.stack(seeds, 1), torch.stack(is_there, 1)
    centre = _centroids(light.flatten(1), place, seed, there, 2 * radius)
    return Blobs(centre.view(*lead, most, 2), there.view(*lead, most))


@exactly
def true_centres(identity: Tensor, balls: int, least: int = 1) -> Blobs:
    """Where what is seen of each ball is  [..., H, W] -> [..., balls]

    Args:
        identity: whose pixel it is, from 1; 0 where no ball is seen.
        least: pixels that must be seen.
    """
    place = _places(identity.shape[-2], identity.shape[-1], identity.float())
    ball = torch.arange(1, balls + 1, device=identity.device)
    own = (identity.flatten(-2)[..., None, :] == ball[:, None]).float()  # [..., K, H * W]
    area = own.sum(-1)
    return Blobs(own @ place / area.clamp(min=1)[..., None], area >= least)


def match_blobs(found: Blobs, true: Blobs, reach: float, optional: Tensor | None = None) -> Matches:
    """As many pairs as can be within `reach` pixels, and of those matches the nearest.

    Args:
        optional: [..., K] bool, balls of which too little is seen: to find them is no hit, not to
            find them no miss.
    """
    distance = torch.cdist(true.centre.double(), found.centre.double())  # [..., K, blobs]
    counts = true.is_there if optional is None else true.is_there & ~optional
    fits = (distance <= reach) & true.is_there[..., None] & found.is_there[..., None, :]
    # one more pair outweighs all that distances can differ, and a ball that counts all that do not
    size = 1 + min(distance.shape[-2:])
    prize = torch.where(counts, reach * size * size, reach * size)[..., None]
    pair = assign(torch.where(fits, prize - distance, 0.0))
    picked = pair.clamp(min=0)[..., None]
    is_paired = (pair >= 0) & fits.gather(-1, picked)[..., 0]
    is_hit = is_paired & counts
    own = torch.where(is_hit, distance.gather(-1, picked)[..., 0], torch.inf)
    hits = is_hit.sum(-1)
    extra = found.is_there.sum(-1) - is_paired.sum(-1)
    return Matches(own, hits, counts.sum(-1) - hits, extra)


def f1(matches: Matches) -> Tensor:
    """The harmonic mean of precision and recall, over the first axis  [N, ...] -> [...]"""
    hits = matches.hits.sum(0).double()
    wrong = (matches.missed + matches.extra).sum(0)
    return 2 * hits / (2 * hits + wrong)


def position_error(matches: Matches) -> Tensor:
    """Mean distance of balls that have a blob, over the first axis and balls  [N, ..., K] -> [...]

    A model that shows one ball well has a small error: read it beside f1.
    """
    is_hit = matches.distance.isfinite()
    total = torch.where(is_hit, matches.distance, 0.0).sum((0, -1))
    return total / is_hit.sum((0, -1))


def _spot_filter(radius: float, like: Tensor) -> Tensor:
    """A bright spot with a dark ring (negative Laplacian of a Gaussian) that answers most to a disc
    of this radius, and to even light nothing"""
    half = math.ceil(2.5 * radius)
    at = torch.arange(-half, half + 1, device=like.device, dtype=like.dtype)
    # its zero is at the disc's rim
    distance = (at[:, None].square() + at.square()) / radius**2
    kernel = (1 - distance) * (-distance).exp()
    return kernel - kernel.mean()


def _places(height: int, width: int, like: Tensor) -> Tensor:
    """[height * width, 2]"""
    x = torch.arange(width, device=like.device, dtype=like.dtype) + 0.5
    y = torch.arange(height, device=like.device, dtype=like.dtype) + 0.5
    return torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)], -1).flatten(0, 1)


def _centroids(light: Tensor, place: Tensor, seed: Tensor, there: Tensor, reach: float) -> Tensor:
    """Of the light that is nearer to each seed than to others  [M, P], [M, K, 2] -> [M, K, 2]"""
    away = torch.cdist(seed, place)  # [M, K, P]
    away = torch.where(there[..., None], away, torch.inf)
    nearest = away.argmin(1, keepdim=True)
    index = torch.arange(seed.shape[1], device=seed.device)[:, None]
    # a faint glow all over the picture does not pull
    bright = torch.where(light > 0.5, light, 0.0)[:, None]
    share = torch.where((nearest == index) & (away < reach), bright, 0.0)
    total = share.sum(-1, keepdim=True)
    return torch.where(total > 0, share @ place / total.clamp(min=1e-6), seed)
