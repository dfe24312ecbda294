"""From the command line to dataclasses, with errors of one line."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tyro

from scoff.training.errors import UsageError

T = TypeVar("T")


def take_experiment(command: str, args: list[str], also: str = "") -> tuple[str, list[str]]:
    from scoff.experiments import NAMES

    if args and args[0] in ("-h", "--help"):
        print(
            f"usage: scoff {command} EXPERIMENT [options] {also}\n\nexperiments: {', '.join(NAMES)}"
        )
        print(f"scoff {command} EXPERIMENT --help tells the options of one.")
        sys.exit(0)
    if not args or args[0].startswith("-"):
        if name := next((arg for arg in args if arg in NAMES), None):
            raise UsageError(f"{command}: the experiment comes first: scoff {command} {name} ...")
        raise UsageError(
            f"{command}: wants an experiment {also}".rstrip() + f": {', '.join(NAMES)}"
        )
    if args[0] not in NAMES:
        raise UsageError(
            f"there is no experiment {args[0]!r}{meant(args[0], NAMES)}; there are: "
            + ", ".join(NAMES)
        )
    return args[0], args[1:]


def peek(args: Sequence[str], name: str) -> str | None:
    """The value of an option, the last if it is there twice."""
    value = None
    for i, arg in enumerate(args):
        if arg == name and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"{name}="):
            value = arg.split("=", 1)[1]
    return value


def take_values(args: Sequence[str], name: str) -> tuple[tuple[str, ...], list[str]]:
    """All values of an option that may have several, and the other arguments."""
    values: list[str] = []
    rest: list[str] = []
    taking = False
    for arg in args:
        if arg == name or arg.startswith(f"{name}="):
            taking = True
            values += arg.split("=", 1)[1:]
        elif taking and not arg.startswith("-"):
            values.append(arg)
        else:
            taking = False
            rest.append(arg)
    return tuple(dict.fromkeys(values)), rest


def parse(
    kind: type[T],
    args: Sequence[str],
    prog: str,
    description: str | None = None,
    default: T | None = None,
) -> T:
    value, unknown = parse_known(kind, args, prog, description, default)
    if unknown:
        known = re.findall(r"--[a-z][a-z0-9-]*", help_text(kind, prog, default))
        name = unknown[0].split("=")[0]
        raise UsageError(f"there is no option {name}{meant(name, known)}; see {prog} --help")
    return value


def parse_known(
    kind: type[T],
    args: Sequence[str],
    prog: str,
    description: str | None = None,
    default: T | None = None,
) -> tuple[T, list[str]]:
    """The options, and the arguments that are none of them. A wrong value is told in one line."""
    more: dict[str, Any] = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                args=list(args),
                prog=prog,
                description=description,
                return_unknown_args=True,
                **more,
            )
    except SystemExit as end:
        if not end.code:
            raise
        # tyro draws a box: a title, then the message up to a rule
        rows = [line.strip("│╭╮╰╯─ ") for line in said.getvalue().splitlines()[1:]]
        message = " ".join(rows[: rows.index("")] if "" in rows else rows)
        raise UsageError(f"{message.rstrip('.')}; see {prog} --help") from None


def help_text(kind: type[T], prog: str, default: T | None) -> str:
    said = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=prog, **more)
    return said.getvalue()


def meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


def check_device(options: Any) -> None:
    from scoff.training.devices import pick_device

    pick_device(options.device)
