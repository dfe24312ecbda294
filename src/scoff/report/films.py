"""Figures made of pictures: strips of frames, films that move, lanes of time under frames.

Pictures are uint8 tensors [..., height, width, 3]. They go into the page as PNG or GIF, within SVG,
so that the page stays one file.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scoff.report.figures import COLOURS, WIDTH, Figure, needs

if TYPE_CHECKING:
    from PIL.Image import Image

# of object files and of schemata; tell each other apart on black, and on light and dark pages
NAMED = {
    "blue": (78, 141, 240),
    "orange": (240, 128, 40),
    "green": (58, 175, 96),
    "red": (214, 72, 92),
    "violet": (150, 112, 214),
    "brown": (160, 110, 80),
    "pink": (226, 120, 196),
    "grey": (128, 134, 142),
    "yellow": (188, 180, 44),
    "turquoise": (44, 182, 200),
}
PALETTE = tuple(NAMED.values())
GAP, LABEL, SMALL = 3.0, 15.0, 10.0  # in points: between pictures, a line of text, its letters
LEFT, LANE = 62.0, 11.0  # width of the names of lanes, height of a lane
TINY, NARROW = 8.0, 4.6  # in points: letters within a lane, and how wide one is, rather too much
MUTED, ACCENT = (f"var(--{name}, {COLOURS[name][0]})" for name in ("muted", "accent"))
SECONDS_A_FRAME = 0.1
SEAM = 2  # pixels between films
FEW = 32  # colours of a picture: more than the eye tells apart in so small a one


@dataclass(frozen=True)
class Lane:
    """What was the case at each frame: a number, which has a colour, or None."""

    name: str
    values: Sequence[int | None]
    faint: Sequence[bool] | None = None
    """Where it is drawn pale."""
    is_mark: bool = False
    """In the colour of text."""
    words: Mapping[int, str] = field(default_factory=dict)
    """Names of numbers, written on them where there is room."""
    legend: str = ""
    """What its colours are, for the caption."""


def strip(
    rows: Sequence[tuple[str, Tensor]], heads: Sequence[str], *, title: str, caption: str
) -> Figure:
    """Rows of pictures with a name above each, and what each column is above all.

    Args:
        rows: names, and pictures [columns, h, w, 3].
    """
    for name, pictures in rows:
        if len(pictures) != len(heads):
            raise ValueError(f"{name}: got {len(pictures)} pictures, wants {len(heads)} as heads")
    pitch = (WIDTH + GAP) / len(heads)
    side = pitch - GAP
    parts = [text((n + 0.5) * pitch - GAP / 2, 10, head, "middle") for n, head in enumerate(heads)]
    y = LABEL
    for name, pictures in rows:
        parts.append(text(0, y + 10, name))
        y += LABEL
        for n, picture in enumerate(pictures):
            parts.append(image(png(picture), n * pitch, y, side, side))
        y += side + GAP
    return Figure(title, caption, svg(parts, y, title))


def animation(panels: Sequence[tuple[str, Tensor]], *, title: str, caption: str) -> Figure:
    """Films side by side with a name above each  [frames, h, w, 3]"""
    gap = panels[0][1].new_full((*panels[0][1].shape[:2], SEAM, 3), 128)
    joined = torch.cat([part for _, film in panels for part in (gap, film)][1:], 2)
    height, width = joined.shape[1:3]
    # two are as large as three, so that films of different models can be compared
    scale = WIDTH / max(width, 3 * panels[0][1].shape[2] + 2 * SEAM)
    parts, x = [], 0.0
    for name, film in panels:
        parts.append(text(x, 10, name))
        x += (film.shape[2] + SEAM) * scale
    parts.append(image(gif(joined), 0, LABEL, width * scale, height * scale, is_sharp=True))
    return Figure(title, caption, svg(parts, LABEL + height * scale, title))


def timeline(
    pictures: Tensor,
    at: Sequence[int],
    frames: int,
    lanes: Sequence[Lane],
    *,
    title: str,
    caption: str,
) -> Figure:
    """Pictures at their place in time, and lanes of colour under them.

    Args:
        pictures: [n, h, w, 3]
        at: the frame of each.
        frames: how many there are, in each lane too.
        caption: legends of lanes come after it.
    """
    for lane in lanes:
        if len(lane.values) != frames:
            raise ValueError(f"{lane.name}: got {len(lane.values)} values, wants {frames} frames")
    pitch = (WIDTH - LEFT) / frames
    room = (WIDTH - LEFT + GAP) / len(at)
    side = room - GAP
    parts = []
    for number, (picture, frame) in enumerate(zip(pictures, at, strict=True)):
        x = LEFT + number * room
        parts.append(image(png(picture), x, 0, side, side))
        parts.append(line(x + side / 2, side, LEFT + (frame + 0.5) * pitch, side + 8))
    y = side + 9
    for lane in lanes:
        parts.append(text(0, y + LANE - 2, lane.name))
        parts.append(line(LEFT, y + LANE, WIDTH, y + LANE, 0.3))
        for start, stop, value, pale in runs(lane):
            colour = "currentColor" if lane.is_mark else rgb(PALETTE[value % len(PALETTE)])
            opacity = ' fill-opacity="0.25"' if pale else ""
            parts.append(
                f'<rect x="{LEFT + start * pitch:.2f}" y="{y:.2f}" '
                f'width="{(stop - start) * pitch:.2f}" height="{LANE - 1:g}" '
                f'fill="{colour}"{opacity}/>'
            )
            word, width = lane.words.get(value, ""), (stop - start) * pitch
            if word and len(word) * NARROW < width:
                place = f'x="{LEFT + start * pitch + width / 2:.2f}" y="{y + LANE - 3:.2f}"'
                look = f'text-anchor="middle" font-size="{TINY:g}" fill="#000"'
                parts.append(f"<text {place} {look}>{escape(word)}</text>")
        y += LANE + 1
    for frame in range(0, frames, 10 if frames > 24 else 5):
        parts.append(text(LEFT + (frame + 0.5) * pitch, y + 10, str(frame), "middle"))
    parts.append(text(0, y + 10, "frame"))
    caption = " ".join([caption, *(lane.legend for lane in lanes if lane.legend)])
    return Figure(title, caption, svg(parts, y + LABEL, title))


def runs(lane: Lane) -> list[tuple[int, int, int, bool]]:
    """Stretches of the same value: first frame, the one after the last, value, whether pale"""
    found: list[tuple[int, int, int, bool]] = []
    for number, value in enumerate(lane.values):
        pale = bool(lane.faint[number]) if lane.faint is not None else False
        if value is None:
            continue
        if found and found[-1][1:] == (number, value, pale):
            found[-1] = (found[-1][0], number + 1, value, pale)
        else:
            found.append((number, number + 1, value, pale))
    return found


# --- parts of SVG


def svg(parts: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:.2f}" '
        f'width="100%" role="img" aria-label="{escape(title)}" '
        f'style="fill: currentColor; font: {SMALL:g}px var(--sans, sans-serif)">'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, content: str, anchor: str = "start") -> str:
    look = f'text-anchor="{anchor}" fill="{MUTED}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {look}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, width: float = 0.7) -> str:
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {ends} stroke="{MUTED}" stroke-width="{width:g}"/>'


def image(uri: str, x: float, y: float, width: float, height: float, is_sharp: bool = False) -> str:
    """`is_sharp`: enlarged without blurring; lines one pixel wide must not be made smaller so."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    # a rim, so that black pictures can be told from a dark page
    rim = f'<rect {place} fill="none" stroke="{MUTED}" stroke-width="0.5"/>'
    look = ' style="image-rendering: pixelated"' if is_sharp else ""
    return f'<image {place} href="{uri}"{look}/>{rim}'


def rgb(colour: tuple[int, int, int]) -> str:
    return f"#{bytes(colour).hex()}"


# --- pictures as data


def png(picture: Tensor) -> str:
    """[h, w, 3] as a data URI"""
    buffer = io.BytesIO()
    as_image(picture).quantize(FEW).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def gif(film: Tensor, seconds: float = SECONDS_A_FRAME) -> str:
    """[frames, h, w, 3] as a data URI of a film that goes on for ever"""
    pictures = [as_image(frame).quantize(FEW) for frame in film]
    times = [round(1000 * seconds)] * (len(pictures) - 1) + [round(5000 * seconds)]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0
    )
    return f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def as_image(picture: Tensor) -> "Image":
    with needs("PIL"):
        from PIL import Image
    height, width, _ = picture.shape
    return Image.frombytes("RGB", (width, height), picture.contiguous().cpu().numpy().tobytes())
