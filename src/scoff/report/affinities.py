"""The figure of the paper's appendix: which schema each object file leans to, step by step."""

import math
from collections.abc import Sequence
from html import escape

from scoff.report.figures import COLOURS, WIDTH, Figure

PER_ROW = 4  # steps side by side: as many as a phone can show
LEFT, GAP, ROW, TOP, BOTTOM = 54.0, 16.0, 17.0, 40.0, 34.0  # in points
MUTED, ACCENT = (f"var(--{name}, {COLOURS[name][0]})" for name in ("muted", "accent"))


def affinity(
    probs: Sequence[Sequence[Sequence[float]]],
    *,
    columns: Sequence[str | float],
    marks: Sequence[str],
    active: Sequence[Sequence[bool]] | None = None,
    title: str,
    caption: str,
) -> Figure:
    """A matrix for every step of a short sequence: the stronger the ink, the higher the affinity.

    Args:
        probs: [steps][object files][schemata], from 0 to 1.
        columns: what is read at each step.
        marks: the name of what is special about a step, such as "operand"; "" for nothing.
        active: [steps][object files]; those that are not are grey and hatched. None: all are.
    """
    steps = len(probs)
    files, schemata = (len(probs[0]), len(probs[0][0])) if steps else (0, 0)
    for name, given in (("columns", columns), ("marks", marks), ("active", active)):
        if given is not None and len(given) != steps:
            raise ValueError(f"{name}: got {len(given)}, wants one for each of {steps} steps")

    pitch = (WIDTH - LEFT) / PER_ROW
    cell = (pitch - GAP) / max(1, schemata)
    wide, high = pitch - GAP, files * ROW
    block = TOP + high + BOTTOM
    height = math.ceil(steps / PER_ROW) * block + 26
    svg: list[str] = []
    for step, matrix in enumerate(probs):
        x, y = LEFT + step % PER_ROW * pitch, step // PER_ROW * block + TOP
        mark, read = marks[step], columns[step]
        if mark:
            frame = (x - 5, y - TOP + 2, wide + 10, TOP + high + 20)
            style = f"fill: {ACCENT}; fill-opacity: 0.1; stroke: {ACCENT}; stroke-width: 1.3"
            svg.append(box(*frame, style))
            svg.append(text(x + wide / 2, y - 8, mark, f"fill: {ACCENT}"))
        read = read if isinstance(read, str) else f"{read:.2f}"
        weight = "bold" if mark else "normal"
        svg.append(text(x + wide / 2, y - 23, read, f"font-size: 12.5px; font-weight: {weight}"))
        for file, row in enumerate(matrix):
            is_active = active is None or bool(active[step][file])
            for schema, value in enumerate(row):
                where = (x + schema * cell, y + file * ROW, cell, ROW)
                svg.append(affinity_box(*where, float(value), is_active))
        names = [*(f"file {file + 1}" for file in range(files)), "schema"]
        for row, name in enumerate(names if step % PER_ROW == 0 else ()):
            middle = y + (row + 0.5) * ROW + 4
            svg.append(text(x - 10, middle, name, f"fill: {MUTED}; text-anchor: end"))
        for schema in range(schemata):
            at = (x + (schema + 0.5) * cell, y + high + ROW / 2 + 4)
            svg.append(text(*at, str(schema + 1), f"fill: {MUTED}"))

    y = height - 14
    svg.append(text(LEFT - 10, y + 4, "affinity", f"fill: {MUTED}; text-anchor: end"))
    for fifth in range(6):
        x = LEFT + fifth * 26
        svg.append(affinity_box(x, y - 6, 26, 12, fifth / 5, True))
        svg.append(text(x + 13, y + 18, f"{fifth / 5:.1f}", f"fill: {MUTED}"))
    if active is not None:
        svg.append(affinity_box(LEFT + 200, y - 6, 26, 12, 0, False))
        svg.append(text(LEFT + 232, y + 4, "not active", f"fill: {MUTED}; text-anchor: start"))

    hatch = (
        '<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M 0 0 V 4" '
        f'style="stroke: {MUTED}; stroke-width: 1.4"/></pattern></defs>'
    )
    style = "fill: currentColor; font: 10.5px var(--sans, sans-serif); text-anchor: middle"
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height + 10:g}" '
        f'width="100%" role="img" aria-label="{escape(title)}" style="{style}">'
    )
    return Figure(title, caption, "\n".join([root, hatch, *svg, "</svg>"]))


def affinity_box(
    x: float, y: float, width: float, height: float, value: float, is_active: bool
) -> str:
    edge = f"stroke: {MUTED}; stroke-width: 0.6"
    paper = box(x, y, width, height, "fill: var(--paper, #ffffff)")
    if not math.isfinite(value):
        name = text(x + width / 2, y + height / 2 + 4, str(value), f"fill: {ACCENT}")
        return paper + box(x, y, width, height, f"fill: none; {edge}") + name
    strength = f"fill-opacity: {min(max(value, 0.0), 1.0) * (1 if is_active else 0.3):.2f}"
    filled = paper + box(x, y, width, height, f"fill: currentColor; {strength}; {edge}")
    return filled if is_active else filled + box(x, y, width, height, "fill: url(#hatch)")


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    size = f'width="{width:.2f}" height="{height:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} style="{style}"/>'


def text(x: float, y: float, content: str, style: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" style="{style}">{escape(content)}</text>'
