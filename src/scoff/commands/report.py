"""`scoff report` and `scoff export`."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from scoff.commands.arguments import parse
from scoff.training.errors import UsageError

GENERATOR = b'name="generator" content="scoff"'  # in pages


@dataclass(frozen=True)
class Report:
    """Writes one self-contained HTML page about runs that were trained and tested."""

    runs: Positional[tuple[Path, ...]] = ()
    """Folders of runs, or folders that hold such."""
    pretrained: str | None = None
    """Instead of runs: a trained model that comes with the package; scoff list names them."""
    out: Path | None = None
    """The page. Default: report.html, or NAME.html of a trained model in the package."""


def report(args: list[str]) -> None:
    parsed = parse(Report, args, "scoff report")
    out = parsed.out or Path(f"{parsed.pretrained or 'report'}.html")
    if out.suffix != ".html":
        raise UsageError(f"--out: got {out}, wants a name that ends in .html")
    if out.is_file() and GENERATOR not in out.read_bytes()[:1000]:
        raise UsageError(f"--out: {out} is there and is no page of scoff's: not overwritten")
    if (parsed.pretrained is None) == (not parsed.runs):
        raise UsageError("report: wants either folders of runs or --pretrained NAME")
    from scoff.experiments.reproduce import expand, finished, untested, write_report
    from scoff.pretrained import find

    paths = expand(parsed.runs if parsed.pretrained is None else [find(parsed.pretrained)])
    command = "scoff report " + shlex.join(args)
    write_report(finished(paths), out, [command], untested(paths))
    print(out)


@dataclass(frozen=True)
class Export:
    """Puts trained and tested models into the package, for scoff report --pretrained NAME."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold such."""
    name: str
    """What they are called there."""
    replace: bool = False
    """Replace what has this name already."""


def export(args: list[str]) -> None:
    parsed = parse(Export, args, "scoff export")
    from scoff.experiments.reproduce import expand
    from scoff.pretrained import export as copy

    print(copy(expand(parsed.runs), parsed.name, parsed.replace))
