"""`scoff data`."""

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scoff.commands.arguments import parse
from scoff.commands.intphys import cache_intphys, write_intphys
from scoff.training.errors import StoppedError, StorageError, UsageError


def data(args: list[str]) -> None:
    worlds: dict[str, Callable[[list[str]], None]] = {
        "balls": write_balls_file,
        "intphys": write_intphys,
        "intphys-cache": cache_intphys,
    }
    if args and args[0] in ("-h", "--help"):
        print(f"usage: scoff data {{{','.join(worlds)}}} [options]\n")
        print("scoff data balls --help tells the options of one.")
    elif not args or args[0] not in worlds:
        got = f"got {args[0]!r}, " if args else ""
        raise UsageError(f"data: {got}wants the world to take clips of: {', '.join(worlds)}")
    else:
        worlds[args[0]](args[1:])


def write_balls_file(args: list[str]) -> None:
    from scoff.worlds.balls import VariantName

    @dataclass(frozen=True)
    class DataBalls:
        out: Path
        """The file, whose name ends in .h5; one that is there is not overwritten."""
        variant: VariantName = "4balls"
        """How many balls, and of what kind."""
        clips: int = 50_000
        """Training clips."""
        valid_clips: int | None = None
        """Validation clips. Default: a fifth of --clips, at least one."""
        test_clips: int | None = None
        """Test clips. Default: a fifth of --clips, at least one."""
        seed: int = 0
        """Of all clips: the same, the same file."""
        device: str = "auto"
        """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    about = "Writes clips of bouncing balls into an HDF5 file, in the layout of R-NEM's."
    parsed = parse(DataBalls, args, "scoff data balls", about)
    fifth = max(1, parsed.clips // 5)
    sizes: dict[Any, int] = {
        "train": parsed.clips,
        "valid": fifth if parsed.valid_clips is None else parsed.valid_clips,
        "test": fifth if parsed.test_clips is None else parsed.test_clips,
    }
    for option, size, least in (
        ("clips", sizes["train"], 1),
        ("valid-clips", sizes["valid"], 0),
        ("test-clips", sizes["test"], 0),
    ):
        if size < least:
            raise UsageError(f"--{option}: got {size}, wants at least {least}")
    if not 0 <= parsed.seed < 1 << 64:
        raise UsageError(f"--seed: got {parsed.seed}, wants from 0 to 2**64 - 1")
    if parsed.out.suffix != ".h5" or not parsed.out.parent.is_dir():
        raise UsageError(
            f"--out: got {parsed.out}, wants a name that ends in .h5 in a folder that there is"
        )
    if parsed.out.exists():
        raise UsageError(f"--out: {parsed.out} is there already, and is not overwritten")
    from scoff.training.devices import pick_device
    from scoff.training.logs import Progress
    from scoff.training.signals import catch_signals
    from scoff.worlds.balls_file import write_balls

    device = pick_device(parsed.device)
    progress = Progress(sum(sizes.values()), 0, parsed.variant, "auto", "clip")
    done = 0
    with closing(progress), catch_signals() as stop:

        def show(more: int) -> None:
            nonlocal done
            if stop.signal is not None:  # what was begun is removed on the way out
                raise StoppedError(
                    "stopped; nothing was written", by_keyboard=stop.signal == signal.SIGINT
                )
            done += more
            progress.update(done, {})

        try:
            write_balls(
                parsed.out, sizes, parsed.variant, parsed.seed, device=device, progress=show
            )
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"cannot write {parsed.out}: {reason}") from error
    print(parsed.out)
