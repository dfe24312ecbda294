"""`scoff data intphys` and `scoff data intphys-cache`."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from scoff.commands.arguments import parse
from scoff.training.errors import ScoffError, StorageError, UsageError


def write_intphys(args: list[str]) -> None:
    from scoff.worlds.intphys.writer import Recipe, write_movies

    @dataclass(frozen=True)
    class DataIntphys:
        out: Path
        """The folder; one that is there is not overwritten."""
        recipe: OmitArgPrefixes[Recipe]
        """What it is made from: the same, the same files."""
        device: str = "auto"
        """cpu, cuda, cuda:1, or auto: a GPU where there is one."""
        workers: int = 1
        """Processes on a CPU; threads that pack files on a GPU."""

    about = "Writes movies of possible and impossible physics, in the layout of IntPhys."
    parsed = parse(DataIntphys, args, "scoff data intphys", about)
    recipe = parsed.recipe
    for option, got, least in (
        ("train", recipe.train, 0),
        ("dev", recipe.dev, 0),
        ("test", recipe.test, 0),
        ("pixels", recipe.pixels, 1),
        ("frames", recipe.frames, 40),
        ("min-hidden", recipe.min_hidden, 4),
        ("visibilities", len(recipe.visibilities), 1),
        ("workers", parsed.workers, 1),
    ):
        if got < least:
            raise UsageError(f"--{option}: got {got}, wants at least {least}")
    if recipe.train + recipe.dev + recipe.test == 0:
        raise UsageError("--train, --dev, --test: got 0, wants at least one of them above")
    if not 0 <= recipe.seed < 1 << 64:
        raise UsageError(f"--seed: got {recipe.seed}, wants from 0 to 2**64 - 1")
    if not parsed.out.parent.is_dir():
        raise UsageError(f"--out: got {parsed.out}, wants a name in a folder that there is")
    if parsed.out.exists():
        raise UsageError(f"--out: {parsed.out} is there already, and is not overwritten")
    from scoff.training.devices import pick_device
    from scoff.training.logs import Progress
    from scoff.worlds.intphys import QuadrupletError

    device = pick_device(parsed.device)
    total = recipe.train + 12 * (recipe.dev + recipe.test)
    done = 0

    def show(more: int) -> None:
        nonlocal done
        done += more
        progress.update(done, {})

    with closing(Progress(total, 0, "intphys", "auto", "movie")) as progress:
        try:
            write_movies(parsed.out, recipe, device, parsed.workers, show)
        except QuadrupletError as error:
            raise UsageError(f"--min-hidden: {error}") from error
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"cannot write {parsed.out}: {reason}") from error
    print(parsed.out)


def cache_intphys(args: list[str]) -> None:
    @dataclass(frozen=True)
    class CacheIntphys:
        folder: Positional[Path]
        """Movies in a layout of IntPhys: real ones, or those of scoff data intphys."""
        out: Path
        """Folder of the cache. If it was begun, it goes on where it stopped."""
        size: int = 64
        """Pixels a side."""
        workers: int = 1
        """Processes that read."""

    about = "Reads all movies of a folder once and keeps them at the size for training."
    parsed = parse(CacheIntphys, args, "scoff data intphys-cache", about)
    for option, got in (("size", parsed.size), ("workers", parsed.workers)):
        if got < 1:
            raise UsageError(f"--{option}: got {got}, wants at least 1")
    from scoff.experiments.evaluate import open_cache
    from scoff.worlds.intphys.png import DataError

    try:
        open_cache(parsed.folder, parsed.out, parsed.size, parsed.workers)
    except DataError as error:
        raise ScoffError(str(error)) from error
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write {parsed.out}: {reason}") from error
    print(parsed.out)
