"""One HTML page that holds all it shows: no scripts, no network."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoff.report.figures import COLOURS, SERIES, Figure, label_colour, needs, with_prefix
from scoff.report.tables import Cell, Estimate, Table, format_cell
from scoff.training.checkpoint import write_atomic

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """A blank line in `text` starts a new paragraph, and backquotes enclose code."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class RunInfo:
    """What it takes to believe, and to repeat, one run."""

    name: str
    command: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    seconds: float
    parameters: int


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    runs: Sequence[RunInfo],
    rerun: Sequence[str],
) -> None:
    """Writes the page at once: a reader finds the old one or the new one, never a part.

    Args:
        lead: what was found, as `Section.text`.
        rerun: commands, one a line, that make all this again.
    """
    with needs("jinja2"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("scoff.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "paragraphs": paragraphs,
        "parts": parts,
        "flat": flat,
        "duration": duration,
        "inline": inline,
    }
    environment.tests |= {"estimate": lambda cell: isinstance(cell, Estimate)}
    page = environment.get_template("template.html.j2").render(
        title=title,
        lead=lead,
        sections=sections,
        runs=runs,
        rerun=rerun,
        colours=palette(sections),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode())


def palette(sections: Sequence[Section]) -> list[tuple[str, str, str]]:
    """CSS variables with their values in light and dark mode.

    The labels of the most figures have the first, which are told apart best. Where there are more
    labels than colours, those of one figure still differ if they can.
    """
    figures = [figure for section in sections for figure in section.figures]
    labels = Counter(label for figure in figures for label in figure.labels)
    given: dict[str, int] = {}
    for label, _ in labels.most_common():
        beside = {other for figure in figures if label in figure.labels for other in figure.labels}
        near = {given[other] for other in beside if other in given}
        times = Counter(given.values())
        given[label] = min(range(len(SERIES)), key=lambda n: (n in near, times[n], n))
    named = [(f"--{name}", *pair) for name, pair in COLOURS.items()]
    return named + [(label_colour(label), *SERIES[number]) for label, number in given.items()]


def inline(figure: Figure, number: int) -> "Markup":
    from markupsafe import Markup

    return Markup(with_prefix(figure.svg, f"figure-{number}-"))


def paragraphs(text: str) -> "Markup":
    from markupsafe import Markup, escape

    blocks = [str(escape(block.strip())) for block in re.split(r"\n\s*\n", text) if block.strip()]
    blocks = [re.sub(r"`([^`]+)`", r"<code>\1</code>", block) for block in blocks]
    return Markup("\n".join(f"<p>{block}</p>" for block in blocks))


def parts(cell: Cell) -> tuple[str, str]:
    """A cell and its spread, with the minus sign of print."""
    if isinstance(cell, str):
        return cell, ""
    head, tail = format_cell(cell)
    return head.replace("-", "−"), tail.replace("-", "−")  # noqa: RUF001


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, those of nested mappings with dots in their names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", str(value)


def duration(seconds: float) -> str:
    if not 0 <= seconds < float("inf"):
        return f"{seconds} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
