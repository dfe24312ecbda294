"""Test movies in fours: two possible ones, and two that change from one to the other and cannot be.

Occluded ones are cut only between frames that are the same, to the last bit, in both runs: picture,
identity and depth. So all four consist of the same frames, and so many steps as the hidden part is
long look the same in the impossible ones as in the possible: only a memory can tell them apart.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from scoff.worlds.intphys.render import PIXELS, Backend, Clips, render
from scoff.worlds.intphys.scenes import FIRST_ELEMENT, FRAMES, Scenes
from scoff.worlds.intphys.stages import (
    BLOCKS,
    MOVEMENTS,
    STAGE_DRAWS,
    VISIBILITIES,
    Block,
    Pair,
    Visibility,
    stage,
)
from scoff.worlds.random import STREAMS, Split, uniform

ATTEMPTS = 32
MIN_HIDDEN = 5
MARGIN = 2  # hidden frames on either side of a cut
SEEN = 3  # frames in which the magic object must be seen before, between and after
FROM_ENDS = (8, 5)  # frames from a visible cut to where the object comes and goes; if cut twice
APART = 1.0  # metres, from one place of an object to the other, at a visible cut
_CUT_DRAWS = 6


class QuadrupletError(ValueError):
    """No scene was found in which the object is hidden for as long as was asked for."""


class Quadruplets(NamedTuple):
    """N of them. Movies are in random order; `possible` tells which are which."""

    number: Tensor  # [N] int64
    runs: Clips  # [2, N, T, ...]: the two possible runs
    scenes: tuple[Scenes, Scenes]
    source: Tensor  # [N, 4, T] int64: from which run the frames of a movie are
    possible: Tensor  # [N, 4] bool
    cuts: Tensor  # [N, 2] int64: first frame from the other run; 0: none
    hidden: Tensor  # [N, 2] int64: how many frames look alike in both runs there
    movement: Tensor  # [N] int64: place in MOVEMENTS
    magic: Tensor  # [N] int64: place of the object that differs
    objects: Tensor  # [N] int64

    @property
    def start(self) -> Tensor:
        """From which run a movie starts; in O1 run 0 has the object  [N, 4] int64"""
        return self.source[:, :, 0]

    def movies(self) -> Clips:
        """[N, 4, T, ...]"""
        return self.runs.map(self.splice)

    def splice(self, runs: Tensor) -> Tensor:
        """[2, N, T, ...] -> [N, 4, T, ...]"""
        size, _, length = self.source.shape
        place = torch.arange(size, device=runs.device)[:, None, None]
        return runs[self.source, place, torch.arange(length, device=runs.device)]

    def select(self, chosen: Tensor | slice) -> Self:
        first, second = (run.select(chosen) for run in self.scenes)
        runs = self.runs.map(lambda part: part[:, chosen])
        rest = {
            name: part[chosen]
            for name, part in self._asdict().items()
            if name not in ("runs", "scenes")
        }
        return self._replace(runs=runs, scenes=(first, second), **rest)


def quadruplets(
    seed: int,
    index: Tensor,
    block: Block,
    visibility: Visibility = "occluded",
    split: Split = "test",
    min_hidden: int = MIN_HIDDEN,
    pixels: int = PIXELS,
    frames: int = FRAMES,
    depth: bool = False,
    backend: Backend = "auto",
) -> Quadruplets:
    """Those number `index` [N] int64 of a block, on the device of `index`.

    Number i is static, dynamic 1 or dynamic 2 as i % 3 is 0, 1 or 2.
    """
    for name, got, wants in (
        ("block", block, BLOCKS),
        ("visibility", visibility, VISIBILITIES),
        ("split", split, tuple(STREAMS)),
    ):
        if got not in wants:
            raise ValueError(f"{name}: got {got!r}, wants one of {', '.join(map(repr, wants))}")
    if min_hidden < 2 * MARGIN:
        raise ValueError(f"min_hidden: got {min_hidden}, wants an integer of at least {2 * MARGIN}")
    if frames < 40:
        raise ValueError(f"frames: got {frames}, wants an integer of at least 40")
    cell = BLOCKS.index(block) * len(VISIBILITIES) + VISIBILITIES.index(visibility)
    parts: list[Quadruplets] = []
    for movement, name in enumerate(MOVEMENTS):
        left = index[index % len(MOVEMENTS) == movement]
        for attempt in range(ATTEMPTS):
            if len(left) == 0:
                break
            # apart from the streams of training scenes
            stream = STREAMS[split] + len(STREAMS) * (1 + cell + attempt * 64)
            draws = uniform(seed, stream, left, STAGE_DRAWS + _CUT_DRAWS)
            pair = stage(
                draws[:, :STAGE_DRAWS],
                torch.div(left, len(MOVEMENTS), rounding_mode="floor"),
                block,
                visibility,
                name,
                min_hidden,
                frames=frames,
            )
            # depth is always compared, so that cuts do not depend on whether it is asked for
            runs = [render(run, pixels, True, backend) for run in pair[:2]]
            found = _cut(runs, pair, block, visibility, movement == 2, min_hidden, draws[:, -6:])
            good = found.good.nonzero()[:, 0]
            parts.append(_four(left, runs, pair, found, movement, draws[:, -4:], depth, good))
            left = left[~found.good]
        if len(left):
            raise QuadrupletError(
                f"no {visibility} {name} scene of {block} hides its object for {min_hidden} "
                f"frames in {ATTEMPTS} attempts (number {int(left[0])}): min_hidden is too large"
            )
    return _in_order(parts, index)


class _Cuts(NamedTuple):
    good: Tensor  # [N] bool
    cuts: Tensor  # [N, 2]
    hidden: Tensor  # [N, 2]


def _cut(
    runs: list[Clips],
    pair: Pair,
    block: Block,
    visibility: Visibility,
    twice: bool,
    min_hidden: int,
    draws: Tensor,
) -> _Cuts:
    shown = FIRST_ELEMENT + pair.magic[:, None, None, None]
    seen = [(run.identity == shown).flatten(2).any(2) for run in runs]  # [N, T]
    if block == "O1":
        seen = seen[:1]
    if visibility == "visible":
        return _visible_cuts(pair, seen, block == "O3", twice, draws)
    alike = runs[0].equal(runs[1])
    first, last = _stretch(alike)
    length = last - first + 1
    time = torch.arange(alike.shape[1], device=alike.device)
    fits = alike & (time - first >= MARGIN) & (last - time + 1 >= MARGIN)
    fits &= length >= min_hidden
    for one in seen:
        total = one.cumsum(1)
        fits &= total.gather(1, first) >= SEEN
        fits &= total[:, -1:] - total.gather(1, last) >= SEEN
    # the first stretch that fits, and the next
    start = torch.where(fits, first, alike.shape[1])
    opening = start.amin(1, keepdim=True)
    in_first = fits & (first == opening)
    later = torch.where(fits & (first > opening), first, alike.shape[1])
    in_second = fits & (first == later.amin(1, keepdim=True))
    chosen = [_draw(in_first, draws[:, 0])]
    good = in_first.any(1)
    if twice:
        chosen.append(_draw(in_second, draws[:, 1]))
        good &= in_second.any(1)
        for one in seen:
            total = one.cumsum(1)
            between = total.gather(1, chosen[1][:, None]) - total.gather(1, chosen[0][:, None])
            good &= (between >= SEEN)[:, 0]
    hidden = [length.gather(1, cut[:, None])[:, 0] for cut in chosen]
    return _Cuts(good, _two(chosen), _two(hidden))


def _visible_cuts(pair: Pair, seen: list[Tensor], moved: bool, twice: bool, draws: Tensor) -> _Cuts:
    both = seen[0]
    for one in seen[1:]:
        both = both & one
    first, last = _stretch(both)
    time = torch.arange(both.shape[1], device=both.device)
    ends = FROM_ENDS[twice]
    fits = both & (time - first >= ends) & (last - time >= ends)
    if moved:
        place = pair.magic.view(-1, 1, 1, 1).expand(-1, both.shape[1], 1, 3)
        one, other = (run.centre.gather(2, place)[:, :, 0] for run in pair[:2])
        fits &= (one - other).abs().amax(-1) >= APART
    if not twice:
        cut = _draw(fits, draws[:, 0])
        return _Cuts(fits.any(1), _two([cut]), torch.zeros_like(_two([cut])))
    middle = (torch.where(both, first, 0).amax(1) + torch.where(both, last, 0).amax(1)) // 2
    early = fits & (time < middle[:, None] - 2)
    late = fits & (time > middle[:, None] + 2)
    cuts = _two([_draw(early, draws[:, 0]), _draw(late, draws[:, 1])])
    return _Cuts(early.any(1) & late.any(1), cuts, torch.zeros_like(cuts))


def _stretch(flags: Tensor) -> tuple[Tensor, Tensor]:
    """First and last frame of the stretch of true ones around each  [N, T] -> [N, T] both"""
    length = flags.shape[1]
    time = torch.arange(length, device=flags.device).expand_as(flags)
    before = torch.where(flags, -1, time).cummax(1).values
    after = torch.where(flags, length, time).flip(1).cummin(1).values.flip(1)
    return (before + 1).clamp(max=length - 1), (after - 1).clamp(min=0)


def _draw(flags: Tensor, chance: Tensor) -> Tensor:
    """One of the true ones; 0 where there is none  [N, T], [N] -> [N]"""
    rank = (chance * flags.sum(1)).long()
    is_it = flags & (flags.cumsum(1) == rank[:, None] + 1)
    return is_it.long().argmax(1)


def _two(columns: list[Tensor]) -> Tensor:
    return torch.stack([*columns, torch.zeros_like(columns[0])][:2], 1)


def _four(
    number: Tensor,
    runs: list[Clips],
    pair: Pair,
    found: _Cuts,
    movement: int,
    order: Tensor,
    depth: bool,
    good: Tensor,
) -> Quadruplets:
    time = torch.arange(pair.first.frames, device=number.device)
    first, second = found.cuts[:, 0, None], found.cuts[:, 1, None]
    changed = (time >= first) & ((time < second) | (second == 0))
    changed = changed.long()  # [N, T]
    never = torch.zeros_like(changed)
    source = torch.stack([never, never + 1, changed, 1 - changed], 1)
    shuffle = order.argsort(dim=1, stable=True)  # [N, 4]
    source = source.gather(1, shuffle[..., None].expand_as(source))
    clips = Clips(
        torch.stack([run.frames for run in runs])[:, good],
        torch.stack([run.identity for run in runs])[:, good],
        torch.stack([_depth(run) for run in runs])[:, good] if depth else None,
    )
    return Quadruplets(
        number[good],
        clips,
        (pair.first.select(good), pair.second.select(good)),
        source[good],
        (shuffle < 2)[good],
        found.cuts[good],
        found.hidden[good],
        torch.full_like(number, movement)[good],
        pair.magic[good],
        pair.objects[good],
    )


def _depth(clips: Clips) -> Tensor:
    assert clips.depth is not None
    return clips.depth


def _in_order(parts: list[Quadruplets], index: Tensor) -> Quadruplets:
    if not parts:
        raise ValueError("index: got no number, wants at least one")

    def join(pieces: list, axis: int = 0) -> Tensor:
        return torch.cat(pieces, axis)

    def together(which: Callable[[Quadruplets], Scenes]) -> Scenes:
        scenes = [which(part) for part in parts]
        look = type(scenes[0].look)(
            *(join(list(p)) for p in zip(*(s.look for s in scenes), strict=True))
        )
        return Scenes(look, *(join(list(p)) for p in zip(*(s[1:] for s in scenes), strict=True)))

    runs = [part.runs for part in parts]
    has_depth = runs[0].depth is not None
    clips = Clips(
        join([run.frames for run in runs], 1),
        join([run.identity for run in runs], 1),
        join([_depth(run) for run in runs], 1) if has_depth else None,
    )
    whole = Quadruplets(
        join([part.number for part in parts]),
        clips,
        (together(lambda part: part.scenes[0]), together(lambda part: part.scenes[1])),
        *(join([part[i] for part in parts]) for i in range(3, len(Quadruplets._fields))),
    )
    # back to the order that was asked for, in which a number may come twice
    place = torch.searchsorted(whole.number.sort().values, index)
    return whole.select(whole.number.argsort()[place])
