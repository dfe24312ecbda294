"""A quadruplet as models see it: when and where they are surprised, and who follows the hidden."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

import scoff
from scoff.experiments.base import Finished
from scoff.experiments.films import (
    COLUMNS,
    DIM,
    OUTLINE,
    Chosen,
    as_bytes,
    choose,
    named,
    schema_rows,
    spread,
    trained,
)
from scoff.experiments.intphys import Config, as_frames, frame_errors, make_tests, observe
from scoff.experiments.one_ball import held_from, holders
from scoff.models.video import VideoModel
from scoff.report import Figure
from scoff.report.figures import WIDTH, label_colour
from scoff.report.films import GAP, LABEL, Lane, image, line, png, strip, svg, text, timeline
from scoff.worlds.intphys.scenes import FIRST_ELEMENT

EXAMPLE = 1  # number of the quadruplet of O1 that is shown: an object that passes a wall
CURVE = 34.0  # height of a curve, in points


class Shown(NamedTuple):
    """One quadruplet, the possible movies first. T frames that are watched."""

    pictures: Tensor  # [4, T, H, W, 3] uint8
    frames: Tensor  # [4, T, 3, H, W], as a model takes it
    magic: Tensor  # [4, T, H, W] bool: where the object that differs is
    possible: list[bool]
    pairs: list[int]  # of each movie the possible one that starts alike
    cuts: list[int]


class Seen(NamedTuple):
    """What a model makes of it."""

    group: str
    name: str
    model: VideoModel
    where: Tensor  # [4, T, H, W] errors; 0 where there are none


def film_figures(groups: Mapping[str, list[Finished]]) -> tuple[list[Figure], list[Figure]]:
    """Of surprise, and of what goes on inside. One seed of each model."""
    first = next(iter(groups.values()))[0]
    chosen = choose(groups)
    if not chosen:
        return [], []
    shown = example(first.config)
    seen = [watch(one, shown, first.config.draws) for one in chosen]
    inside = [follow_figure(one, shown) for one in seen]
    return [
        quadruplet_figure(seen, shown, first.config),
        *(where_figure(one, shown) for one in seen),
    ], [figure for figure in inside if figure is not None]


def example(config: Config) -> Shown:
    tests = make_tests(config, torch.tensor([EXAMPLE]), "O1", "occluded")
    order = (~tests.possible[0]).long().argsort(stable=True)
    every = slice(None, None, config.skip)
    movies = tests.movies().map(lambda part: part[0, order][:, every])
    start, possible = tests.start[0, order].tolist(), tests.possible[0, order].tolist()
    return Shown(
        movies.frames,
        as_frames(config, observe(config, movies)),
        movies.identity == FIRST_ELEMENT + int(tests.magic[0]),
        possible,
        [start.index(mine) for mine in start],
        [cut // config.skip for cut in tests.cuts[0].tolist() if cut > 0],
    )


@torch.no_grad()
def watch(chosen: Chosen, shown: Shown, draws: int) -> Seen:
    model = trained(chosen.run)
    stack = model.options.stack
    where = torch.zeros_like(shown.frames[:, :, 0])
    where[:, stack:] = frame_errors(model, shown.frames, draws)
    return Seen(chosen.group, chosen.name, model, where)


def quadruplet_figure(seen: Sequence[Seen], shown: Shown, config: Config) -> Figure:
    """Four film strips, each with the surprise of all models under it"""
    length = shown.pictures.shape[1]
    at = spread(length, COLUMNS)
    pitch = (WIDTH + GAP) / len(at)
    side = pitch - GAP
    curves = torch.stack([one.where.mean((-2, -1)) for one in seen])  # [models, 4, T]
    counted = curves[:, :, config.context :]
    most = float(counted.max())
    parts, y = [], 0.0
    for n, one in enumerate(seen):
        colour = f"var({label_colour(one.group)}, currentColor)"
        parts.append(f'<rect x="{n * 96:.2f}" y="3" width="12" height="3" fill="{colour}"/>')
        parts.append(text(n * 96 + 16, 9, one.group))
    y += LABEL
    for movie, is_possible in enumerate(shown.possible):
        parts.append(text(0, y + 10, "possible" if is_possible else "impossible"))
        y += LABEL
        for n, frame in enumerate(at):
            x = n * pitch
            parts.append(image(png(shown.pictures[movie, frame]), x, y, side, side))
        y += side + 2
        # frame t is under its picture: pictures are spread evenly from the first to the last
        across = (WIDTH - side) / (length - 1)
        for cut in () if is_possible else shown.cuts:
            x = side / 2 + (cut - 0.5) * across
            parts.append(line(x, y, x, y + CURVE, 1.0))
        for one, values in zip(seen, counted[:, movie], strict=True):
            points = " ".join(
                f"{side / 2 + (config.context + t) * across:.2f},"
                f"{y + CURVE * (1 - value / most):.2f}"
                for t, value in enumerate(values.tolist())
            )
            colour = f"var({label_colour(one.group)}, currentColor)"
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
            )
        parts.append(line(0, y + CURVE, WIDTH, y + CURVE, 0.3))
        y += CURVE + 4
    title = "Surprise at a quadruplet of O1"
    caption = (
        f"Curves: error of each frame ({'; '.join(one.name for one in seen)}), in nats a pixel, "
        f"all on one scale up to {most:.2g}. Vertical lines: where impossible movies change from "
        "one run to the other, while both look the same."
    )
    return Figure(title, caption, svg(parts, y, title), tuple(one.group for one in seen))


def where_figure(one: Seen, shown: Shown) -> Figure:
    """Around the frame at which an impossible movie surprises more than its possible twin"""
    curve = one.where.mean((-2, -1))
    excess = curve - curve[torch.tensor(shown.pairs)]
    movie = int(excess.amax(1).argmax())
    length = curve.shape[1]
    start = min(max(int(excess[movie].argmax()) - 3, 0), length - COLUMNS)
    frames = range(start, start + COLUMNS)
    pair = shown.pairs[movie]
    most = float(one.where[[movie, pair], start : start + COLUMNS].max()) or 1.0
    rows = []
    for label, number in (("impossible", movie), ("possible, started alike", pair)):
        pictures = shown.pictures[number, start : start + COLUMNS]
        heat = (one.where[number, start : start + COLUMNS, :, :, None] / most).sqrt()
        glow = torch.tensor(OUTLINE) / 255
        under = DIM * pictures / 255
        rows += [(label, pictures), ("surprise", as_bytes(under * (1 - heat) + glow * heat))]
    return strip(
        rows,
        [str(frame) for frame in frames],
        title=f"{one.name}: where the surprise is",
        caption="Orange: error of a pixel, brightest where it is largest (the root of it is "
        "shown). Numbers: watched frames.",
    )


@torch.no_grad()
def follow_figure(one: Seen, shown: Shown) -> Figure | None:
    """Who has the object that is hidden, and which schemata are chosen meanwhile"""
    if one.model.options.slots == 1:
        return None
    # a possible movie in which the object is there
    movie = int(shown.magic[:2].flatten(1).sum(1).argmax())
    frames, magic = shown.frames[movie, None], shown.magic[movie, None]
    trace = one.model.trace(frames[:, :-1])
    owner = holders(one.model, trace, magic)
    if owner is None:
        return None
    length, at_first = frames.shape[1], held_from(one.model, trace)
    is_seen = magic[0].flatten(1).any(1)
    when = is_seen.nonzero()[:, 0]
    first, last = int(when[0]), int(when[-1])
    hidden = [0 if first < t < last and not is_seen[t] else None for t in range(length)]
    held: list[int | None] = [None] * length
    for t, number in enumerate(owner[0, :, 0].tolist()):
        held[at_first + t] = None if number < 0 else number
    lanes = [Lane("hidden", hidden, is_mark=True), Lane("who has it", held)]
    told = f"Who has it: the object file ({named(one.model.options.object_files)})."
    if isinstance(one.model.rnn, scoff.SCOFF):
        layer = cast(scoff.Trace, trace.layer)
        lanes += schema_rows(layer, one.model.options.stack)
        told += " Below: the schema that each object file chose, in the same colours."
    at = spread(length, COLUMNS)
    return timeline(
        shown.pictures[movie, torch.tensor(at)],
        at,
        length,
        lanes,
        title=f"{one.name}: who follows the hidden object",
        caption=f"A possible movie. Black: the object is behind the wall. {told}",
    )
