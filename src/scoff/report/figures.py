"""Figures as inline SVG that follows the light or dark mode of the page around it."""

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

WIDTH = 400.0
"""Of every figure, in points: near a phone's, so that text shrinks little there."""

# Each in light and in dark mode. All have a contrast of at least 4.5 except the grid's.
COLOURS = {
    "muted": ("#5f6670", "#a3abb5"),
    "grid": ("#d9dde2", "#343a41"),
    "accent": ("#a8480a", "#f2a46b"),
}
# Searched for the largest distance, the first six above all, also as the colour-blind see them.
SERIES = [
    ("#1767e6", "#6c8aef"),
    ("#e0200f", "#e6b051"),
    ("#088473", "#a3f5d7"),
    ("#8a0b96", "#c36094"),
    ("#512505", "#d06d17"),
    ("#052f51", "#87c6f2"),
    ("#595656", "#bcbcad"),
    ("#ae1320", "#ce877e"),
]
MUTED, GRID, ACCENT = (light for light, _ in COLOURS.values())

# Black is the text colour of the page. Text is laid out in one font, whatever the reader's.
STYLE: Any = {
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


@dataclass(frozen=True)
class Figure:
    """`svg` goes into the page as it is. `labels` are those whose colours the page settles. What is
    `wide` has a row of the page to itself."""

    title: str
    caption: str
    svg: str
    labels: tuple[str, ...] = ()
    wide: bool = False


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Around the import of a package that only the experiments need."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"scoff.report needs {package}: pip install 'scoff[experiments]'", name=package
        ) from None


@contextmanager
def drawing(height: float) -> Iterator["Drawing"]:
    """An empty matplotlib figure in the style of the page, `height` points high."""
    with needs("matplotlib"):
        import matplotlib
        from matplotlib.figure import Figure as Drawing
    with matplotlib.rc_context(STYLE):
        yield Drawing(figsize=(WIDTH / 72, height / 72))


def to_svg(figure: "Drawing", title: str, colours: Mapping[str, str] | None = None) -> str:
    """Inline SVG, the same for the same figure. Black becomes the page's text colour.

    `colours` says what, in CSS, becomes of others, such as {"#fe0000": "var(--mine)"}.
    """
    with needs("matplotlib"):
        import matplotlib
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scoff"}):
        nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    _, _, svg = buffer.getvalue().partition("<svg ")
    root, _, body = svg.partition(">")
    # matplotlib's style sheet would apply to the page as a whole
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    css = {light: f"var(--{name}, {light})" for name, (light, _) in COLOURS.items()}
    css |= {"#000000": "currentColor"} | dict(colours or {})
    body = edit_tags(body, lambda tag: clean(tag, used, css))
    box = re.findall(r'viewBox="[^"]*"', root)[0]
    style = "fill: currentColor; stroke-linejoin: round; stroke-linecap: butt"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} width="100%" role="img" '
        f'aria-label="{escape(title)}" style="{style}">{body.strip()}'
    )


def clean(tag: str, used_ids: set[str], css: Mapping[str, str]) -> str:
    if not used_ids.intersection(re.findall(r' id="([^"]*)"', tag)):
        tag = re.sub(r' id="[^"]*"', "", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--sans, sans-serif)", tag)
    # a hundredth of a point cannot be seen
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", " ".join(tag.split()))
    return re.sub(r"(?<=: )#[0-9a-f]{6}", lambda hex: css.get(hex.group(), hex.group()), tag)


def edit_tags(svg: str, edit: Callable[[str], str]) -> str:
    """Leaves text as it is, which may look like anything."""
    return re.sub(r"<[^>]+>", lambda tag: edit(tag.group()), svg)


def with_prefix(svg: str, prefix: str) -> str:
    """Its ids, and what refers to them, renamed, so that they differ from those of others."""
    return edit_tags(svg, lambda tag: re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", tag))


def label_colour(label: str) -> str:
    """The CSS variable that holds the colour of a label."""
    return "--label-" + hashlib.sha256(label.encode()).hexdigest()[:10]
