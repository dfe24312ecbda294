"""What was measured, for people and as JSON."""

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import scoff
from scoff.bench.floor import Floor, Machine, WeightReading, Work
from scoff.bench.settings import Setting
from scoff.bench.stages import Stages
from scoff.bench.timing import Timing

WIDTH = 120
NAME = 18  # width of the first column
MISSING = "-"

NOTES = """\
both: forward and backward. peak MiB: during both. ratio: to nn.GRU of the same width, which takes
turns with the layer; the row of nn.GRU, against another like it, shows how far to trust it. GRU ms:
what nn.GRU takes for both in these turns. Where that is more than in its own row, another layer
beside it holds it up.
floor: of SCOFF's both, the largest of the bytes over the bandwidth, the operations of Algorithm 1
over the rate, and the steps there and back x the latency. x floor: both, from the CUDA graph where
there is one, over it. of one program to a sequence: what `fused` takes to read, at each step, the
weights that do not stay in shared memory, and nothing else; no part of the floor.
nn.GRU, nn.LSTM and flashrnn read one vector of the input's width at each step; positions, where
there are any, are SCOFF's and RIMs' to read, and reducing them to a vector is not in the others'
times. One of these whose output and gradients are not those of the reference gets no times."""


@dataclass(frozen=True)
class Row:
    """A layer at a setting: its measures, or why there are none."""

    setting: str
    layer: str
    parameters: int | None = None
    check_error: float | None = None  # the largest relative one
    forward: Timing | None = None
    both: Timing | None = None
    graph: Timing | None = None
    peak_mib: float | None = None
    floor_ratio: float | None = None
    problem: str | None = None  # why there are no measures
    failed: bool = False  # it is not fit for use, rather than not made for this device or size
    note: str | None = None
    stages: Stages | None = None


@dataclass(frozen=True)
class Section:
    setting: Setting
    work: Work
    floor: Floor
    rows: list[Row]
    reading: WeightReading | None = None  # None: not of `fused`, or not measured


@dataclass(frozen=True)
class Report:
    machine: Machine
    device_type: str
    dtype: torch.dtype
    sections: list[Section]

    @property
    def failures(self) -> list[Row]:
        return [row for section in self.sections for row in section.rows if row.failed]

    def as_json(self) -> dict[str, Any]:
        return {
            "scoff": scoff.__version__,
            "torch": torch.__version__,
            "machine": asdict(self.machine),
            "dtype": name_of(self.dtype),
            "allow_tf32": allow_tf32(),
            "settings": [
                {
                    **asdict(s.setting),
                    "work": asdict(s.work),
                    "floor_ms": asdict(s.floor),
                    "weight_reading": None if s.reading is None else asdict(s.reading),
                }
                for s in self.sections
            ],
            "rows": [asdict(row) for section in self.sections for row in section.rows],
        }


def allow_tf32() -> dict[str, bool]:
    return {
        "matmul": bool(torch.backends.cuda.matmul.allow_tf32),
        "cudnn": bool(torch.backends.cudnn.allow_tf32),
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def header(machine: Machine, device_type: str, dtype: torch.dtype) -> str:
    threads = "" if device_type == "cuda" else f", {torch.get_num_threads()} thread"
    flags = ", ".join(f"{name} {allowed}" for name, allowed in allow_tf32().items())
    return (
        f"{machine.device}{threads}, torch {torch.__version__}, {name_of(dtype)}, "
        f"allow_tf32: {flags}\n{machine}"
    )


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    cell: Callable[[Row], str]


def timing_columns(title: str, get: Callable[[Row], Timing | None]) -> list[Column]:
    return [
        Column(f"{title} ms", 12, lambda row: number(t.ms if (t := get(row)) else None)),
        Column("ratio", 7, lambda row: number(t.ratio if (t := get(row)) else None)),
    ]


def columns(with_graph: bool) -> list[Column]:
    return [
        Column("parameters", 11, lambda row: f"{row.parameters:,}"),
        *timing_columns("forward", lambda row: row.forward),
        *timing_columns("both", lambda row: row.both),
        Column("GRU ms", 10, lambda row: number(t.gru_ms if (t := row.both) else None)),
        *(timing_columns("graph", lambda row: row.graph) if with_graph else ()),
        Column("peak MiB", 11, lambda row: number(row.peak_mib, 1)),
        Column("x floor", 9, lambda row: number(row.floor_ratio, 1)),
    ]


def number(value: float | None, decimals: int = 2) -> str:
    return MISSING if value is None else f"{value:,.{decimals}f}"


def section_text(section: Section, device_type: str) -> str:
    shown = columns(with_graph=device_type == "cuda")
    lines = [str(section.setting), ""]
    lines.append(" " * NAME + "".join(f"{column.title:>{column.width}}" for column in shown))
    for row in section.rows:
        if row.problem is None:
            cells = "".join(f"{column.cell(row):>{column.width}}" for column in shown)
            lines.append(f"{row.layer:{NAME}}{cells}")
        else:
            lines += wrapped(f"{row.layer:{NAME}}{row.problem}")
    for row in section.rows:
        if row.note is not None:
            lines += wrapped(f"{row.layer:{NAME}}{row.note}")
    lines.append(floor_line(section.work, section.floor))
    if section.reading is not None:
        lines.append(reading_line(section.reading))
    for row in section.rows:
        if row.stages is not None:
            lines += ["", *stage_lines(row.layer, row.stages)]
    return "\n".join(lines)


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * NAME)


def floor_line(work: Work, floor: Floor) -> str:
    return (
        f"floor: {floor.ms:.4g} ms; bytes {floor.bytes:.4g} "
        f"({work.bytes / 1e6:.4g} MB), operations {floor.operations:.4g} "
        f"({work.operations / 1e9:.4g} GFLOP), latency {floor.latency:.4g} ({work.steps} steps)"
    )


def reading_line(reading: WeightReading) -> str:
    return (
        f"of one program to a sequence: weights {reading.ms:.4g} ms "
        f"({reading.bytes / 1e3:.4g} KB a step, {reading.rate / 1e9:.4g} GB/s a processor, "
        f"{1e6 * reading.seconds:.4g} us a step)"
    )


def stage_lines(layer: str, found: Stages) -> list[str]:
    host = f"host: {found.host_ms:.2f} ms until the calls of both return"
    if found.launches == 0:  # it may not be allowed to look
        return [f"{layer:{NAME}}the profiler saw nothing of the GPU", host]
    rows = [(x.name, x.ms, x.launches, x.us_a_step) for x in found.stages]
    rows.append(("all", found.gpu_ms, found.launches, None))
    cells = [
        f"{name:{NAME}}{number(ms, 3):>10}{launches:>10,}"
        + ("" if us is None else f"{number(us, 1):>11}")
        for name, ms, launches, us in rows
    ]
    titles = f"{layer:{NAME}}{'GPU ms':>10}{'launches':>10}{'us a step':>11}"
    return [titles, *cells, host]
