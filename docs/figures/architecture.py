"""Draws architecture.svg: one step of SCOFF.

python docs/figures/architecture.py            # writes architecture.svg beside this file
python docs/figures/architecture.py out.png    # the same picture elsewhere, in any format
"""

import sys
from itertools import product
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Outline

WIDTH, HEIGHT = 1000, 520  # units of the drawing; text sizes are in them too
INK, FAINT, LINE, PANEL, BAND = "#1f2933", "#66727f", "#c3cad2", "#f8f9fb", "#e9edf2"
HUES = ["#2f6fb3", "#d97a2b", "#3a9679", "#9a5fa8"]  # what each object file holds
ROWS = [196, 260, 324, 388]  # y of the object files, from the top
COLUMNS = [494, 550, 606]  # x of the schemata
CHOSEN = [0, 2, 0, 1]  # the first and the third object file choose the same schema
READ = [(0, 1), (1, 3), (3, 2)]  # who is read most, and by whom
SCHEMATA_Y = 136
BEFORE, AFTER, OUT = 364, 866, 666  # x of the object files before and after, and of the updates

# which object file wins each position of the input; -1: none does
MAP = [
    [-1, 0, 0, -1, -1],
    [-1, 0, 0, -1, 1],
    [-1, -1, -1, 1, 1],
    [2, 2, -1, -1, -1],
    [2, -1, -1, 3, 3],
]
SHADES = [  # the numbers that make up each state
    [0.9, 0.3, 0.7, 0.45, 1.0],
    [0.35, 0.8, 0.5, 1.0, 0.65],
    [0.7, 0.45, 1.0, 0.85, 0.3],
    [0.5, 1.0, 0.35, 0.7, 0.9],
]
CELL, LEFT, TOP = 26, 48, 227


def main(target: Path) -> None:
    plt.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "scoff",
        "font.family": ["DejaVu Sans"],
        "text.color": INK,
    }
    figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    figure.patch.set_alpha(0)

    box(axes, WIDTH / 2, HEIGHT / 2, WIDTH - 6, HEIGHT - 6, 22, PANEL, "#d9dee4", 1.2, 0)
    draw_titles(axes)
    draw_input(axes)
    draw_schema_selection(axes)
    draw_communication(axes)
    heard = {reader: k for k, reader in READ}
    for k, y in enumerate(ROWS):
        draw_object_file(axes, BEFORE, y, [HUES[k]] * 5, SHADES[k])
        hues = [HUES[k]] * 4 + [HUES[heard.get(k, k)]]
        draw_object_file(axes, AFTER, y, hues, SHADES[k][::-1])
    draw_loop(axes)

    is_svg = target.suffix == ".svg"
    about = {"Title": "One step of SCOFF", "Creator": None, "Date": None}
    figure.savefig(target, dpi=160, transparent=True, metadata=about if is_svg else None)
    if is_svg:
        # whoever has no DejaVu gets the sans serif of the system
        fonts = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
        target.write_text(target.read_text().replace("'DejaVu Sans'", fonts))


def draw_titles(axes) -> None:
    between = (LEFT + len(MAP) * CELL + BEFORE) / 2 - 18
    for x, title, below in (
        (between, "Input attention", "competition for positions:\nsoftmax over object files"),
        (COLUMNS[1], "Schema selection", "each object file tries all\nschemata and picks one"),
        ((OUT + AFTER) / 2 - 18, "Communication", "each object file\nqueries all"),
    ):
        text(axes, x, 46, title, 18, weight="bold")
        for line, words in enumerate(below.split("\n")):
            text(axes, x, 70 + 20 * line, words, 15, FAINT)
    text(axes, LEFT + len(MAP) * CELL / 2, TOP - 16, "input positions", 15.5)
    text(axes, BEFORE, ROWS[0] - 38, "object files, all alike", 15.5)
    text(axes, AFTER, ROWS[0] - 38, "their new state", 15.5)
    text(axes, COLUMNS[1], ROWS[-1] + 54, "schemata, shared by all", 15.5)


def draw_input(axes) -> None:
    size = len(MAP)
    for row, column in product(range(size), range(size)):
        k = MAP[row][column]
        x, y = LEFT + column * CELL, TOP + row * CELL
        color = "#e3e7ec" if k < 0 else HUES[k]
        axes.add_patch(
            Rectangle((x, y), CELL, CELL, facecolor=color, edgecolor=PANEL, lw=1.6, zorder=3)
        )
    edge = LEFT + size * CELL
    for k, to in enumerate(ROWS):
        for row in range(size):
            here = [c for c in range(size) if MAP[row][c] == k]
            y = TOP + (row + 0.5) * CELL
            start, stop = (edge + 5, y), (BEFORE - 45, to)
            if here:
                stream(axes, start, stop, HUES[k], 0.9 + 0.9 * len(here), 0.75, 2.5)
            else:
                stream(axes, start, stop, LINE, 0.7, 0.55, 1)


def draw_object_file(axes, x: float, y: float, hues: list[str], shades: list[float]) -> None:
    box(axes, x, y, 88, 38, 10, "white", INK, 1.4, 6)
    for i, (hue, shade) in enumerate(zip(hues, shades, strict=True)):
        left = x - 34 + 14 * i
        axes.add_patch(Rectangle((left, y - 9), 12, 18, facecolor=hue, alpha=shade, lw=0, zorder=7))


def draw_schema_selection(axes) -> None:
    top, bottom = SCHEMATA_Y - 24, ROWS[-1] + 28
    for j, x in enumerate(COLUMNS):
        box(axes, x, (top + bottom) / 2, 48, bottom - top, 12, BAND, "none", 0, 1)
        box(axes, x, SCHEMATA_Y, 40, 36, 8, INK, "none", 0, 6)
        draw_dynamics(axes, x, SCHEMATA_Y, j)
    for k, y in enumerate(ROWS):
        axes.plot([BEFORE + 44, COLUMNS[-1]], [y, y], color=LINE, lw=1.4, zorder=2)
        chosen = COLUMNS[CHOSEN[k]]
        axes.plot([chosen, OUT], [y, y], color=HUES[k], lw=2.6, zorder=3, solid_capstyle="round")
        for j, x in enumerate(COLUMNS):
            mine = j == CHOSEN[k]
            face, edge = (HUES[k], HUES[k]) if mine else ("white", "#9aa5b1")
            size = 11 if mine else 8
            axes.add_patch(Circle((x, y), size, facecolor=face, edgecolor=edge, lw=1.3, zorder=4))
        axes.add_patch(Circle((OUT, y), 5, facecolor=HUES[k], lw=0, zorder=5))


def draw_dynamics(axes, x: float, y: float, j: int) -> None:
    """A small picture of what schema j does to a state."""
    shapes = [
        [(-13, 8), (13, -8)],  # goes on
        [(-13, -9), (-1, 8), (13, -9)],  # bounces
        [(-13, 6), (-5, 6), (-5, -6), (5, -6), (5, 6), (13, 6)],  # switches
    ]
    xs, ys = zip(*shapes[j], strict=True)
    axes.plot(
        [x + a for a in xs],
        [y + b for b in ys],
        color="white",
        lw=2,
        zorder=7,
        solid_capstyle="round",
        solid_joinstyle="round",
    )


def draw_communication(axes) -> None:
    for k, y in enumerate(ROWS):
        for reader, to in enumerate(ROWS):
            start, stop = (OUT + 5, y), (AFTER - 46, to)
            if k == reader:
                stream(axes, start, stop, HUES[k], 2.6, 1, 4)
            elif (k, reader) in READ:
                stream(axes, start, stop, HUES[k], 1.9, 0.75, 3)
            else:
                stream(axes, start, stop, LINE, 0.7, 0.55, 1)


def draw_loop(axes) -> None:
    bottom, side, r = 484, 952, 22
    last, first = AFTER + 46, BEFORE
    middle = (ROWS[0] + ROWS[-1]) / 2
    # a bracket takes all object files together
    bracket(axes, last + 6, ROWS[0] - 18, ROWS[-1] + 18)
    points = [(last + 14, middle), (side, middle), (side, bottom), (first, bottom)]
    points.append((first, ROWS[-1] + 36))
    axes.add_patch(
        FancyArrowPatch(
            path=rounded(points, r),
            arrowstyle="-|>,head_length=7,head_width=4",
            color=INK,
            lw=1.8,
            zorder=2,
        )
    )
    label = "next step"
    box(axes, COLUMNS[1], bottom, 116, 30, 8, PANEL, "none", 0, 3)
    text(axes, COLUMNS[1], bottom + 5, label, 15.5)


def bracket(axes, x: float, top: float, bottom: float) -> None:
    path = rounded([(x, top), (x + 8, top), (x + 8, bottom), (x, bottom)], 5)
    axes.add_patch(PathPatch(path, facecolor="none", edgecolor=INK, lw=1.8, zorder=2))


def rounded(points: list[tuple[float, float]], radius: float) -> Outline:
    """A line through the points, its corners rounded."""
    vertices, codes = [points[0]], [Outline.MOVETO]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [towards(corner, before, radius), corner, towards(corner, after, radius)]
        codes += [Outline.LINETO, Outline.CURVE3, Outline.CURVE3]
    return Outline([*vertices, points[-1]], [*codes, Outline.LINETO])


def towards(start, stop, distance: float) -> tuple[float, float]:
    dx, dy = stop[0] - start[0], stop[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    return start[0] + dx * distance / length, start[1] + dy * distance / length


def stream(axes, start, stop, color: str, width: float, alpha: float, zorder: float) -> None:
    """A line that leaves and arrives level."""
    middle = (start[0] + stop[0]) / 2
    path = Outline(
        [start, (middle, start[1]), (middle, stop[1]), stop],
        [Outline.MOVETO, Outline.CURVE4, Outline.CURVE4, Outline.CURVE4],
    )
    axes.add_patch(
        PathPatch(
            path,
            facecolor="none",
            edgecolor=color,
            lw=width,
            alpha=alpha,
            zorder=zorder,
            capstyle="round",
        )
    )


def box(axes, x, y, width, height, radius, face, edge, line, zorder) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2 + radius, y - height / 2 + radius),
            width - 2 * radius,
            height - 2 * radius,
            boxstyle=f"round,pad={radius},rounding_size={radius}",
            facecolor=face,
            edgecolor=edge,
            lw=line,
            zorder=zorder,
        )
    )


def text(axes, x: float, y: float, words: str, size: float, color: str = INK, **style) -> None:
    axes.text(
        x,
        y,
        words,
        fontsize=size * 0.72,
        color=color,
        ha="center",
        va="baseline",
        zorder=9,
        **style,
    )


if __name__ == "__main__":
    beside = Path(__file__).with_suffix(".svg")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else beside)
