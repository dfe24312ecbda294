"""How plausible movies are to judges that learn nothing: what scores mean, and whether tests leak.

All give one number for each movie, [N, 4] float64, the higher the more plausible.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from scoff.worlds.intphys.quadruplets import Quadruplets
from scoff.worlds.intphys.scenes import FIRST_ELEMENT, OBJECTS

STEADY = 4  # frames: from when on the judge that follows objects is sure of a speed
JUMP = 0.05  # metres: by how much a step may differ from the one before


def copy_scores(frames: Tensor, lag: int = 1, reduce: Literal["mean", "max"] = "mean") -> Tensor:
    """How well a frame is predicted by one `lag` steps before  [N, 4, T, ...] uint8 -> [N, 4]

    A judge that sees no more than two frames at a time. Sums are of integers, and exact.
    """
    if not 1 <= lag < frames.shape[2]:
        raise ValueError(f"lag: got {lag}, wants from 1 to {frames.shape[2] - 1}")
    pictures = frames.flatten(3)
    steps = [
        (pictures[:, :, t].int() - pictures[:, :, t - lag].int()).square_().sum(-1)
        for t in range(lag, frames.shape[2])
    ]
    errors = torch.stack(steps, -1)  # [N, 4, T - lag] int64
    worst = errors.amax(-1) if reduce == "max" else errors.sum(-1)
    return -worst.double()


def frame_scores(frames: Tensor, seed: int = 0) -> Tensor:
    """A judge of single frames: a random function of each, summed  [N, 4, T, ...] -> [N, 4]"""
    pictures = frames.flatten(3).long()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-99, 100, pictures.shape[-1:], generator=generator)
    weight = weight.to(frames.device)
    totals = [
        ((pictures[:, :, t] * weight).sum(-1) % 65537).square_() for t in range(frames.shape[2])
    ]
    return torch.stack(totals, -1).sum(-1).double()


def state_scores(quadruplets: Quadruplets) -> Tensor:
    """A judge that knows the truth: counts what changes shape, comes from nowhere or jumps."""
    first, second = quadruplets.scenes
    frames = first.frames
    kind = torch.stack([run.kind[:, None].expand(-1, frames, -1) for run in (first, second)])
    kind = quadruplets.splice(kind)[..., :OBJECTS]  # [N, 4, T, 3]
    place = quadruplets.splice(torch.stack([first.centre, second.centre]))[..., :OBJECTS, :]
    # what has hops has no constant speed upwards
    steps = place[:, :, 1:, :, ::2] - place[:, :, :-1, :, ::2]
    jumps = ((steps[:, :, 1:] - steps[:, :, :-1]).abs() > JUMP).any(-1) & (kind[:, :, 2:] > 0)
    changes = kind[:, :, 1:] != kind[:, :, :-1]
    return -(jumps.flatten(2).sum(2) + changes.flatten(2).sum(2)).double()


class _Views(NamedTuple):
    """Of one object in M movies, [M, T] each"""

    area: Tensor
    fill: Tensor  # how much of the box around it it covers
    top: Tensor
    bottom: Tensor
    edges: tuple[Tensor, Tensor]  # its first and its last column
    are_free: tuple[Tensor, Tensor]  # whether the edges are its own: nothing is next to them


def track_scores(identity: Tensor, memory: int) -> Tensor:
    """A judge that follows what it sees: at constant speed, over `memory` frames at most.

    [N, 4, T, H, W] -> [N, 4]. It knows objects by their looks (their number in `identity`), expects
    them to come out from behind a wall as they went in, and counts those that do not, that have
    changed shape or size, and that are not where nothing hides them.
    """
    size, four = identity.shape[:2]
    movies = identity.flatten(0, 1)
    surprise = torch.zeros(len(movies), dtype=torch.float64, device=identity.device)
    for place in range(OBJECTS):
        views = _views(movies, FIRST_ELEMENT + place)
        surprise += _reshaped(views, memory)
        for side in range(2):
            surprise += _lost(movies, views, side, memory)
    return -surprise.view(size, four)


def _views(movies: Tensor, shown: int) -> _Views:
    is_it = movies == shown
    pixels = movies.shape[-1]
    area = is_it.flatten(2).sum(2)
    line = torch.arange(pixels, device=movies.device)

    def ends(flags: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(flags, line, pixels).amin(-1)
        return first, torch.where(flags, line, -1).amax(-1)

    (left, right), (top, bottom) = ends(is_it.any(2)), ends(is_it.any(3))
    # what is under it, such as a wall that lies before it, hides no edge
    level = (line >= top[..., None] - 1) & (line < bottom[..., None])

    def is_free(column: Tensor) -> Tensor:
        inside = (column >= 0) & (column < pixels)
        place = column.clamp(0, pixels - 1)[..., None, None].expand(-1, -1, pixels, 1)
        beside = movies.gather(3, place)[..., 0]  # [M, T, H]
        return (area > 0) & inside & ~((beside >= FIRST_ELEMENT) & level).any(-1)

    box = ((right - left + 1) * (bottom - top + 1)).clamp(min=1)
    free = is_free(left - 1), is_free(right + 1)
    return _Views(area, area / box, top, bottom, (left, right), free)


def _reshaped(views: _Views, memory: int) -> Tensor:
    """By how much an object that is seen whole has changed shape or size since it last was"""
    whole = views.are_free[0] & views.are_free[1]
    size, shape = views.area.double().sqrt(), views.fill.double()
    usual_size, usual_shape = size[:, 0].clone(), shape[:, 0].clone()
    when = torch.full_like(views.area[:, 0], -memory - 1)
    change = torch.zeros_like(usual_size)
    for t, is_whole in enumerate(whole.unbind(1)):
        is_known = t - when <= memory
        bent = ((shape[:, t] - usual_shape).abs() - 0.08).clamp(min=0)
        grown = ((size[:, t] / usual_size.clamp(min=1) - 1).abs() - 0.12).clamp(min=0)
        change += torch.where(is_whole & is_known, 20 * (bent + grown), 0.0)
        # a mean of the last few: pictures of the same thing differ by some pixels
        keep = torch.where(is_known, 0.75, 0.0)
        usual_size = torch.where(is_whole, keep * usual_size + (1 - keep) * size[:, t], usual_size)
        usual_shape = torch.where(
            is_whole, keep * usual_shape + (1 - keep) * shape[:, t], usual_shape
        )
        when = torch.where(is_whole, t, when)
    return change


def _lost(movies: Tensor, views: _Views, side: int, memory: int) -> Tensor:
    """How often an edge is not where its speed has brought it, though nothing hides it"""
    edge, is_free = views.edges[side].float(), views.are_free[side]
    pixels, device = movies.shape[-1], movies.device
    every = torch.arange(len(movies), device=device)
    inward = torch.arange(4, device=device) * (1 - 2 * side)
    line = torch.arange(pixels, device=device)
    known = torch.zeros(len(movies), dtype=torch.bool, device=device)
    last = torch.zeros(len(movies), dtype=torch.long, device=device)
    start, sighted = last.clone(), last.clone()
    speed = torch.zeros(len(movies), device=device)
    count = torch.zeros(len(movies), dtype=torch.float64, device=device)
    for t in range(movies.shape[1]):
        known &= t - sighted <= memory
        settled = known & (last - start >= STEADY)  # long enough to tell its speed
        expected = edge[every, last] + speed * (t - last)
        away = (edge[:, t] - expected).abs() > 4
        count += (settled & is_free[:, t] & away).double()

        column = expected.round().long()[:, None] + inward  # [M, 4]
        in_view = ((column > 1) & (column < pixels - 2)).all(1)
        strip = movies[every[:, None], t, :, column.clamp(0, pixels - 1)]  # [M, 4, H]
        level = (line >= views.top[every, last][:, None] - 2) & (
            line < views.bottom[every, last][:, None] + 2
        )
        is_hidden = ((strip >= FIRST_ELEMENT) & level[:, None]).flatten(1).any(1)
        count += (settled & (views.area[:, t] == 0) & in_view & ~is_hidden).double()

        seen = is_free[:, t]
        goes_on = known & seen & (last == t - 1) & ~(settled & away)
        start = torch.where(seen, torch.where(goes_on, start.clamp(min=t - 16), t), start)
        pace = (edge[:, t] - edge[every, start]) / (t - start).clamp(min=1)
        speed = torch.where(goes_on, pace, torch.where(known, speed, 0.0))
        last = torch.where(seen, t, last)
        sighted = torch.where(views.area[:, t] > 0, t, sighted)
        known |= seen
    return count
