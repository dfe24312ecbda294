"""Tables of numbers, and the one way in which numbers are written."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

MISSING = "–"  # noqa: RUF001
PLUS_MINUS = " ± "


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the sample standard deviation, and how many seeds there were."""

    mean: float
    spread: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Estimate":
        """One seed has no spread. One that is not finite makes the mean nan or infinite."""
        values = [float(value) for value in values]
        if not values:
            raise ValueError("values: got none, wants at least one")
        if not all(map(math.isfinite, values)):
            return cls(sum(values) / len(values), None, len(values))
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), spread, len(values))

    def __str__(self) -> str:
        if self.spread is None:
            return format_number(self.mean)
        if not math.isfinite(self.mean) or not math.isfinite(self.spread):
            return format_number(self.mean) + PLUS_MINUS + format_number(self.spread)
        # both to the same digit, the last that counts in the larger: a spread below it is 0.00
        power, decimals = significant(max(abs(self.mean), self.spread))
        return PLUS_MINUS.join(fixed(value, power, decimals) for value in (self.mean, self.spread))


Cell = str | int | float | Estimate | None


class Lowest(NamedTuple):
    """Marks the lowest number of each of these columns among these rows, all by index."""

    columns: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True)
class Table:
    """Cells in rows, the first of which names the row. None is a number that there is not.

    A row of a single cell is a heading for the rows that follow.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    highlight: Lowest | None = None

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) not in (1, len(self.columns)):
                raise ValueError(
                    f"rows: got one of {len(row)} cells, wants {len(self.columns)} as there are "
                    "columns, or 1 for a heading"
                )

    def is_heading(self, row: int) -> bool:
        return len(self.rows[row]) == 1 < len(self.columns)

    def is_numeric(self, column: int) -> bool:
        cells = self.cells(column)
        return any(cell is not None for cell in cells) and not any(
            isinstance(cell, str) for cell in cells
        )

    def cells(self, column: int) -> list[Cell]:
        return [row[column] for r, row in enumerate(self.rows) if not self.is_heading(r)]

    def tail_width(self, column: int) -> int:
        """Characters that the spreads of a column take, so that the means can be aligned."""
        if not self.is_numeric(column):
            return 0
        return max((len(format_cell(cell)[1]) for cell in self.cells(column)), default=0)

    def highlighted(self) -> set[tuple[int, int]]:
        """The (row, column) of the marked cells: several of a column when they are equal."""
        marked = set()
        columns, rows = self.highlight or ((), ())
        if len(rows) < 2:  # there is nothing to compare
            return marked
        for column in columns:
            values = {row: magnitude(self.rows[row][column]) for row in rows}
            lowest = min(filter(math.isfinite, values.values()), default=None)
            marked |= {(row, column) for row, value in values.items() if value == lowest}
        return marked

    def text(self) -> str:
        """For a terminal."""
        columns = range(len(self.columns))
        tails = [self.tail_width(c) for c in columns]
        header = [one_line(name) for name in self.columns]
        body = [
            [head + tail.ljust(tails[c]) for c, (head, tail) in enumerate(map(format_cell, row))]
            for row in self.rows
        ]
        full = [header, *(cells for r, cells in enumerate(body) if not self.is_heading(r))]
        widths = [max(len(cells[c]) for cells in full) for c in columns]

        def join(cells: Sequence[str]) -> str:
            if len(cells) < len(columns):
                return cells[0]
            pads = [str.rjust if self.is_numeric(c) else str.ljust for c in columns]
            return "  ".join(map(lambda pad, *cell: pad(*cell), pads, cells, widths)).rstrip()

        lines = [join(cells) for cells in [header, *body]]
        rule = "─" * max(map(len, lines))
        note = [one_line(self.note)] if self.note else []
        return "\n".join([one_line(self.title), lines[0], rule, *lines[1:], *note]) + "\n"

    def markdown(self) -> str:
        count = len(self.columns)
        marked = self.highlighted()
        rule = ["---:" if self.is_numeric(c) else ":---" for c in range(count)]
        grid = [[escape_markdown(name) for name in self.columns], rule]
        for r, row in enumerate(self.rows):
            cells = [escape_markdown("".join(format_cell(cell))) for cell in row]
            cells = [f"**{cell}**" if (r, c) in marked else cell for c, cell in enumerate(cells)]
            if self.is_heading(r):
                cells = [f"*{cells[0]}*", *[""] * (count - 1)]
            grid.append(cells)
        body = "\n".join("| " + " | ".join(line) + " |" for line in grid)
        note = f"\n{escape_markdown(self.note)}\n" if self.note else ""
        return f"**{escape_markdown(self.title)}**\n\n{body}\n{note}"


def format_number(value: float) -> str:
    """Three significant digits, two below 0.1, and none that were not given: 0.0005, 0.054, 11.4.

    Integers are exact.
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(float(value))
    power, decimals = significant(abs(value))
    given = Decimal(repr(float(value))).normalize().scaleb(-power).as_tuple().exponent
    return fixed(value, power, min(decimals, max(0, -int(given))))


def format_cell(cell: Cell) -> tuple[str, str]:
    """A value, and apart from it its spread."""
    if cell is None:
        return MISSING, ""
    if isinstance(cell, str):
        return one_line(cell), ""
    if isinstance(cell, Estimate):
        mean, sign, spread = str(cell).partition(PLUS_MINUS)
        return mean, sign + spread
    return format_number(cell), ""


def significant(size: float) -> tuple[int, int]:
    """The power of ten to write apart, 0 for none, and the decimals to write."""
    if size == 0:
        return 0, 0
    power = int(f"{size:.2e}".split("e")[1])
    if not -4 <= power < 9:
        return power, 1 if power < 0 else 2
    return 0, max(0, 2 - power) if power >= -1 else 1 - power


def fixed(value: float, power: int, decimals: int) -> str:
    scaled = Decimal(repr(float(value))).scaleb(-power)
    return f"{scaled:z,.{decimals}f}" + (f"e{power}" if power else "")


def magnitude(cell: Cell) -> float:
    """What a cell is compared by; nan if by nothing."""
    value = cell.mean if isinstance(cell, Estimate) else cell
    return math.nan if value is None or isinstance(value, str) else float(value)


def one_line(text: str) -> str:
    """Without line breaks, nor characters that a terminal would obey."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\|<*`\[])", r"\\\1", one_line(text))
