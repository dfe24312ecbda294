"""Plots that experiments share. Every one reads on a phone and in light and dark mode."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from scoff.report.figures import MUTED, SERIES, WIDTH, Figure, drawing, label_colour, to_svg
from scoff.report.tables import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTER = 6.4  # width in points of a letter of 11 points, on average and rather too much
LINE = 13.0  # height of a line of labels
THIN = {"ls": "-", "lw": 0.7, "alpha": 0.45}
BOLD = {"ls": "-", "lw": 2.0}


@dataclass(frozen=True)
class Line:
    """Points joined by a line, with a band from `low` to `high` where these are given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    marker: bool = True


def lines(
    series: Sequence[Line],
    *,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
) -> Figure:
    """Lines that carry their labels at their ends. Those of one label have one colour, and the
    first of them carries it.

    A point that has no place, because it is not finite or not positive on a log axis, is a cross at
    the edge of the plot.
    """
    if any(line.low is not None for line in series):
        caption = f"{caption} Bands: lowest to highest seed.".strip()
    first = {line.label: line for line in reversed(series)}
    strokes = [
        Stroke(
            line,
            {"ls": "--" if line.dashed else "-", "marker": "o" if line.marker else ""},
            is_named=line is first[line.label],
        )
        for line in series
    ]
    scales = ("log" if x_log else "linear", "log" if y_log else "linear")
    return plot(strokes, scales, title, caption, x_label, y_label)


def curves(
    runs: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    *,
    title: str,
    caption: str,
    x_label: str = "step",
    y_label: str,
    y_log: bool = True,
) -> Figure:
    """Learning curves as (step, value) of each seed of each model, thin, and their mean, bold.

    The mean is over the steps that all seeds of a model have reached.
    """
    if any(len(seeds) > 1 for seeds in runs.values()):
        caption = f"{caption} Thin: seeds; bold: their mean.".strip()
    strokes = []
    for label, seeds in runs.items():
        for seed in seeds if len(seeds) > 1 else ():
            strokes.append(Stroke(Line(label, *unzip(seed)), THIN, is_named=False))
        strokes.append(Stroke(Line(label, *unzip(mean_curve(seeds))), BOLD))
    scales = ("linear", "log" if y_log else "linear")
    return plot(strokes, scales, title, caption, x_label, y_label)


class Stroke(NamedTuple):
    line: Line
    look: Mapping[str, Any]
    is_named: bool = True


def plot(
    strokes: Sequence[Stroke],
    scales: tuple[str, str],
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
) -> Figure:
    """Strokes in a plot of their scales, and beside it the names of those that have one."""
    labels = tuple(dict.fromkeys(stroke.line.label for stroke in strokes))
    colours = {label: f"#fe{index:04x}" for index, label in enumerate(labels)}
    names = [textwrap.wrap(stroke.line.label, 18) for stroke in strokes if stroke.is_named]
    right = LETTER * max((len(row) for rows in names for row in rows), default=0) + 38
    bottom, top = 40.0, 28.0
    height = max(250.0, sum(map(len, names)) * LINE + bottom + top)
    with drawing(height) as figure:
        axes = figure.add_subplot(xscale=scales[0], yscale=scales[1], xlabel=x_label)
        for stroke in strokes:
            draw_stroke(axes, stroke, colours[stroke.line.label])
        set_ticks(axes, scales, {float(x) for stroke in strokes for x in stroke.line.x})
        left = (
            LETTER * max((len(tick.get_text()) for tick in axes.get_yticklabels()), default=0) + 8
        )
        size = (WIDTH - left - right, height - bottom - top)
        axes.set_position((left / WIDTH, bottom / height, size[0] / WIDTH, size[1] / height))
        axes.set_title(y_label, pad=10, x=-left / size[0])
        place_names(axes, size, [stroke for stroke in strokes if stroke.is_named], names, colours)
        # the page settles the colours of labels; without one they are those of the palette in turn
        css = {
            colours[label]: f"var({label_colour(label)}, {SERIES[index % len(SERIES)][0]})"
            for index, label in enumerate(labels)
        }
        return Figure(title, caption, to_svg(figure, title, css), labels)


def draw_stroke(axes: "Axes", stroke: Stroke, colour: str) -> None:
    line = stroke.line
    least = 0.0 if axes.get_yscale() == "log" else -math.inf
    shown = [y if least < y < math.inf else math.nan for y in line.y]
    alone = {"marker": "o"} if len(shown) == 1 else {}  # a line of one point is not seen
    axes.plot(line.x, shown, color=colour, **{**stroke.look, **alone})
    lost = [(x, y) for x, y, s in zip(line.x, line.y, shown, strict=True) if math.isnan(s)]
    if lost and stroke.is_named:
        edges = [0 if y <= 0 else 1 for _, y in lost]
        at_edge = axes.get_xaxis_transform()
        axes.plot([x for x, _ in lost], edges, "x", color=colour, clip_on=False, transform=at_edge)
    if line.low is not None and line.high is not None:
        # below zero a log axis cuts the band off; one that is there altogether has no place
        high = [y if least < y < math.inf else math.nan for y in line.high]
        axes.fill_between(line.x, line.low, high, color=colour, alpha=0.14, lw=0)


def set_ticks(axes: "Axes", scales: tuple[str, str], points: set[float]) -> None:
    """On x at the points themselves when they are few; on y at 1, 2 and 5 on a short log axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for axis, scale in ((axes.xaxis, scales[0]), (axes.yaxis, scales[1])):
        low, high = axis.get_view_interval()
        if scale == "log":
            is_short = high < 50 * low
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,), numticks=6))
        else:
            whole = axis is axes.xaxis and all(float(x).is_integer() for x in points)
            axis.set_major_locator(MaxNLocator(5, integer=whole))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(
            FuncFormatter(
                lambda value, _, axis=axis: tick_label(value, axis.get_majorticklocs().tolist())
            )
        )
    if 0 < len(points) <= 8 and all(map(math.isfinite, points)):
        along = axes.transAxes.inverted()
        places = {x: along.transform(axes.transData.transform((x, 1)))[0] for x in sorted(points)}
        ticks: list[float] = []
        for x, place in places.items():
            if not ticks or place - places[ticks[-1]] > 0.08:  # else the labels would touch
                ticks.append(x)
        axes.xaxis.set_major_locator(FixedLocator(ticks))


def tick_label(value: float, ticks: Sequence[float]) -> str:
    """As in tables, or with more digits where so few would put ticks elsewhere."""
    gap = min((high - low for low, high in pairwise(sorted(ticks))), default=math.inf)
    short = {tick: format_number(float(f"{tick:.6g}")) for tick in (value, *ticks)}
    if all(abs(float(told.replace(",", "")) - tick) < gap / 10 for tick, told in short.items()):
        return short[value]
    return f"{Decimal(f'{value:.6g}').normalize():,f}"


def place_names(
    axes: "Axes",
    size: tuple[float, float],
    strokes: Sequence[Stroke],
    names: Sequence[Sequence[str]],
    colours: Mapping[str, str],
) -> None:
    """Beside the last point of each stroke, moved apart where they would overlap."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # what follows must not widen the plot
    lowest, highest = axes.get_ylim()
    to_axes = axes.transData - axes.transAxes
    ends = []
    for line, *_ in strokes:
        shown = [(x, y) for x, y in zip(line.x, line.y, strict=True) if lowest <= y <= highest]
        ends.append(to_axes.transform(shown[-1]) if shown else (1.0, 1.0))
    order = sorted(range(len(ends)), key=lambda index: ends[index][1])
    heights = [len(names[index]) * LINE / size[1] for index in order]
    centres = spread_out([ends[index][1] for index in order], heights)
    for index, centre in zip(order, centres, strict=True):
        line, look, _ = strokes[index]
        colour = colours[line.label]
        (x, y), key = ends[index], [1 + 12 / size[0], 1 + 26 / size[0]]
        style: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([x, key[0]], [y, centre], color=MUTED, lw=0.5, ls=":", zorder=1, **style)
        axes.plot(key, [centre] * 2, color=colour, lw=1.4, ls=look["ls"], **style)
        name = "\n".join(names[index])
        axes.text(1 + 31 / size[0], centre, name, color=colour, va="center_baseline", **style)


def spread_out(centres: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Sorted centres moved apart so that none overlap and, if there is room, all lie in [0, 1]."""

    def push_up(centres: Sequence[float], sizes: Sequence[float], floor: float) -> list[float]:
        pushed = []
        for centre, size in zip(centres, sizes, strict=True):
            pushed.append(max(centre, floor + size / 2))
            floor = pushed[-1] + size / 2
        return pushed

    def push_down(centres: Sequence[float], sizes: Sequence[float], ceiling: float) -> list[float]:
        mirrored = push_up([-centre for centre in centres[::-1]], sizes[::-1], -ceiling)
        return [-centre for centre in mirrored[::-1]]

    # half way between moving all up and all down, a group stays around its middle
    up, down = push_up(centres, sizes, -math.inf), push_down(centres, sizes, math.inf)
    middle = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    return push_down(push_up(middle, sizes, 0), sizes, 1.04)


def mean_curve(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    values = [dict(seed) for seed in seeds]
    steps = sorted(set.intersection(*map(set, values))) if values else []
    return [(step, sum(seed[step] for seed in values) / len(values)) for step in steps]


def unzip(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
