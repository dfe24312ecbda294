"""Trained models that come with the package: folders of runs, less what only training needs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from scoff.training.checkpoint import write_atomic
from scoff.training.errors import UsageError
from scoff.training.run import Run

HERE = Path(__file__).parent
LARGEST = 8_000_000  # bytes of weights that are not too many to ship


def names() -> list[str]:
    found = {path.parent.parent.name for path in HERE.glob("*/*/config.json")}
    return sorted(name for name in found if not name.startswith("."))  # left by a crash


def find(name: str) -> Path:
    """The folder that holds the runs of this name."""
    known = names()
    if name not in known:
        there = f"there are: {', '.join(known)}" if known else "there are none"
        raise UsageError(f"--pretrained: there is no trained model {name!r}; {there}")
    return HERE / name


def export(paths: Sequence[Path], name: str, replace: bool = False) -> Path:
    """Copies runs that were trained and tested, under this name.

    Of the records only those of validation are kept.

    Args:
        replace: take the place of what has this name already.
    """
    if not name or Path(name).name != name or name.startswith((".", "_")):
        raise UsageError(f"--name: got {name!r}, wants a name without slashes")
    runs = [Run.open(path) for path in paths]
    for run in runs:
        if not run.finished or run.read_evaluation() is None:
            raise UsageError(f"{run.path} is not trained and tested: scoff eval {run.path}")
        if run.weights_path.stat().st_size > LARGEST:
            size = run.weights_path.stat().st_size
            raise UsageError(
                f"{run.weights_path}: has {size:,} bytes, wants at most {LARGEST:,} to be shipped"
            )
    if len({run.read_config()["experiment"] for run in runs}) > 1:
        raise UsageError("wants runs of one experiment")
    folder, aside = HERE / name, HERE / f".{name}.tmp"
    if folder.exists() and not replace:
        raise UsageError(
            f"--name: there is a trained model {name!r} already; --replace replaces it"
        )
    try:
        shutil.rmtree(aside, ignore_errors=True)
        for run in runs:
            own = aside / run.path.resolve().name
            own.mkdir(parents=True)
            for path in (
                run.config_path,
                run.weights_path,
                run.training_path,
                run.evaluation_path,
            ):
                shutil.copyfile(path, own / path.name)
            kept = [r for r in run.read_metrics() if any(key.startswith("valid/") for key in r)]
            lines = "".join(json.dumps(record) + "\n" for record in kept)
            write_atomic(own / run.metrics_path.name, lines.encode())
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder
