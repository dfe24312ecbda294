"""One episode, drawn: what the agent saw, where it was, and which schema was in force."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from scoff.experiments.maze_agents import VIEW_SIZE
from scoff.report.affinities import MUTED, box, text
from scoff.report.figures import SERIES, WIDTH, Figure, label_colour
from scoff.report.pictures import gif, image, png
from scoff.worlds.maze import Levels, MazeOptions, MazePainter, Mazes, ViewPainter
from scoff.worlds.maze.cells import CLOSED_DOOR, MISSIONS, OBJECT

PER_ROW = 5
MOMENTS = 10
SHORT, LONG = 160, 1500  # milliseconds of a picture of the video, and of the last
LARGEST_VIDEO = 400  # steps
BETWEEN = 200  # grey around the view


def retrace(seen: Mapping[str, Any], room_size: int, tile_size: int) -> tuple[Tensor, Tensor]:
    """Pictures of all mazes and views of an episode, the last included  [T + 1, ...] each"""
    options = MazeOptions(room_size=room_size, view_size=VIEW_SIZE)
    rows = [list(bytes.fromhex(row)) for row in seen["grid"]]
    place = (torch.tensor([seen[name]]) for name in ("position", "direction", "target"))
    start = Levels(torch.tensor([rows], dtype=torch.uint8), *place)
    mazes = Mazes(1, options, autoreset="disabled")
    views = [mazes.reset(start=start)]
    states = [copied(mazes.maze)]
    for action in seen["actions"]:
        views.append(mazes.step(torch.tensor([action])).view)
        states.append(copied(mazes.maze))
    paint = MazePainter(mazes.eyes, tile_size)
    both = Levels(*(torch.cat(parts) for parts in zip(*states, strict=True)))
    return paint(both), ViewPainter(tile_size)(torch.cat(views))


def copied(maze: Levels) -> Levels:
    return Levels(*(part.clone() for part in maze))


def moments(count: int) -> list[int]:
    """Steps to show, spread evenly, the first and the last among them"""
    shown = min(count, MOMENTS)
    return sorted({round(i * (count - 1) / max(1, shown - 1)) for i in range(shown)})


def schema_colour(schema: int) -> str:
    name = f"schema {schema + 1}"
    return f"var({label_colour(name)}, {SERIES[schema % len(SERIES)][0]})"


def labels(num_schemata: int) -> tuple[str, ...]:
    return tuple(f"schema {number + 1}" for number in range(num_schemata))


def trajectory(
    seen: Mapping[str, Any], room_size: int, num_schemata: int, title: str, caption: str
) -> Figure:
    """The paper's figure: maze and view at some moments, and below them the schema in force."""
    whole, views = retrace(seen, room_size, 8)
    count = len(seen["actions"])
    schemata: Sequence[Sequence[int]] = seen.get("schemata", [])
    active: Sequence[Sequence[bool]] = seen.get("active", [])
    # a maze of rooms of 8 is 22 cells wide, so that small pictures would show little of it
    width, gap, window = 2 * WIDTH, 8.0, 80.0
    pitch = width / PER_ROW
    side = pitch - gap
    block = 14 + side + 4 + window + (20 if schemata else 0) + 8
    shown = moments(count)
    svg = []
    for index, step in enumerate(shown):
        x, y = index % PER_ROW * pitch, index // PER_ROW * block
        svg.append(text(x + side / 2, y + 10, f"step {step + 1}", f"fill: {MUTED}"))
        svg.append(image(x, y + 14, side, side, png(whole[step])))
        svg.append(image(x + (side - window) / 2, y + 18 + side, window, window, png(views[step])))
        if schemata:
            svg += chosen(x, y + 22 + side + window, side, schemata[step], active[step])
    height = -(-len(shown) // PER_ROW) * block
    if schemata:
        svg.append(
            text(0, height + 10, "schema at every step", f"fill: {MUTED}; text-anchor: start")
        )
        files, pitch = len(schemata[0]), width / count
        for step, choice in enumerate(schemata):
            for file, schema in enumerate(choice):
                where = (step * pitch, height + 16 + file * 9, pitch, 8.0)
                strength = 1 if active[step][file] else 0.2
                style = f"fill: {schema_colour(schema)}; fill-opacity: {strength}"
                svg.append(box(*where, style))
        height += 16 + files * 9 + 6
        for number in range(num_schemata):
            x = number * 76.0
            svg.append(box(x, height, 10, 10, f"fill: {schema_colour(number)}"))
            name = text(x + 14, height + 9, f"schema {number + 1}", "text-anchor: start")
            svg.append(name)
        height += 16
    drawn = framed(svg, height, title, width)
    return Figure(title, caption, drawn, labels(num_schemata), wide=True)


def chosen(
    x: float, y: float, width: float, schemata: Sequence[int], active: Sequence[bool]
) -> list[str]:
    """A box for each object file, with the number of its schema"""
    each = width / len(schemata)
    svg = []
    for file, schema in enumerate(schemata):
        strength = 1 if active[file] else 0.2
        style = f"fill: {schema_colour(schema)}; fill-opacity: {strength}"
        svg.append(box(x + file * each, y, each - 1, 15, style))
        ink = "var(--paper, #ffffff)" if active[file] else MUTED
        number = f"fill: {ink}; font-weight: bold"
        svg.append(text(x + (file + 0.5) * each, y + 11, str(schema + 1), number))
    return svg


def video(seen: Mapping[str, Any], room_size: int, title: str, caption: str) -> Figure:
    """The whole episode, maze and view side by side."""
    tile = 12
    whole, views = (part[: LARGEST_VIDEO + 1] for part in retrace(seen, room_size, tile))
    side = whole.shape[1]
    width = views.shape[2] + 2 * tile
    margin = torch.full((len(whole), side, width, 3), BETWEEN, dtype=torch.uint8)
    top = (side - views.shape[1]) // 2
    margin[:, top : top + views.shape[1], tile:-tile] = views
    pictures = torch.cat([whole, margin], 2)
    times = [SHORT] * (len(pictures) - 1) + [LONG]
    height = WIDTH * pictures.shape[1] / pictures.shape[2]
    svg = [image(0, 0, WIDTH, height, gif(pictures, times))]
    return Figure(title, caption, framed(svg, height, title))


def framed(svg: Sequence[str], height: float, title: str, width: float = WIDTH) -> str:
    style = "fill: currentColor; font: 10.5px var(--sans, sans-serif); text-anchor: middle"
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="100%" role="img" aria-label="{escape(title)}" style="{style}">'
    )
    return "\n".join([root, *svg, "</svg>"])


def goal(seen: Mapping[str, Any]) -> str:
    """In words, what there is to find"""
    codes = [code for row in seen["grid"] for code in bytes.fromhex(row)]
    (mission,) = [code - OBJECT for code in codes if OBJECT <= code < CLOSED_DOOR]
    return MISSIONS[mission].removeprefix("go to ")
