"""Testing a trained run."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scoff.experiments.base import Experiment, find_experiment
from scoff.training.checkpoint import write_atomic
from scoff.training.devices import pick_device
from scoff.training.engine import ON_GPU
from scoff.training.errors import ScoffError, StorageError, UsageError
from scoff.training.logs import Progress
from scoff.training.run import Run, as_json, environment
from scoff.training.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from scoff.report import Table
    from scoff.worlds.intphys.cache import Cache

ANSWER, DATA = "answer.txt", "data.json"


def evaluate_run(run: Run, device_name: str, threads: int) -> None:
    """Writes the run's evaluation.json."""
    torch.set_num_threads(threads)
    device = pick_device(device_name)
    experiment, config, model = load(run, device)
    step, trained = run.progress()
    started = time.monotonic()
    with precision(config, device):
        result = experiment.evaluate(config, model, device)
    result |= {
        "steps": step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": {"training": trained, "evaluation": time.monotonic() - started},
        "environment": environment(),
    }
    run.write_evaluation(result)


def measure_file(run: Run, path: Path, device_name: str, threads: int) -> "Sequence[Table]":
    """Writes the run's data.json about the test set of a file, and gives tables of it."""
    torch.set_num_threads(threads)
    device = pick_device(device_name)
    # what it was trained on may be gone
    experiment, config, model = load(run, device, without=("data",))
    assert experiment.measure_file is not None
    with precision(config, device):
        measures, tables = experiment.measure_file(config, model, device, path)
    content = {"file": str(path), "measures": measures, "environment": environment()}
    write_atomic(run.path / DATA, as_json(content))
    return tables


def precision(config: Settings, device: torch.device) -> torch.autocast:
    """As in the validation during training."""
    mixed = config.precision == "bf16-mixed"
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed)


def load(
    run: Run, device: torch.device, without: Sequence[str] = ()
) -> "tuple[Experiment, Settings, nn.Module]":
    """What a run was, but for these options, and the model that came of it, in evaluation mode."""
    held = run.read_config()
    experiment = find_experiment(held["experiment"])
    values = {k: v for k, v in held["config"].items() if k not in without}
    if device.type == "cpu" and values.get("backend") in ON_GPU:  # it was trained elsewhere
        values["backend"] = "auto"
    config = experiment.read_config(values)
    model = experiment.make_task(config, device).model
    try:
        model.load_state_dict(run.read_weights())
    except RuntimeError as error:
        raise StorageError(f"{run.path}: the weights are not those of config.json") from error
    return experiment, config, model.to(device).eval()


def judge_folder(
    run: Run, folder: Path, cache_path: Path, device_name: str, threads: int
) -> "Table | None":
    """Writes the run's answer.txt about movies of a folder, and where it is known which of them are
    possible data.json too, of which it gives a table."""
    from scoff.experiments.intphys_data import answer, data_table
    from scoff.worlds.intphys.png import DataError

    torch.set_num_threads(threads)
    device = pick_device(device_name)
    experiment, config, model = load(run, device)
    if experiment.judge_data is None:
        raise UsageError(f"--data: {run.path} is of {experiment.name}, which has no use for it")
    try:
        cache = open_cache(folder, cache_path, getattr(config, "frame_size"), threads)  # noqa: B009
        scores = experiment.judge_data(config, model, device, cache)
        told: dict[str, Any] | None = answer(run.path / ANSWER, cache, scores)
    except DataError as error:
        raise ScoffError(str(error)) from error
    except OSError as error:
        raise StorageError(f"{cache_path}, {run.path}: {error.strerror or error}") from error
    if told is None:
        return None
    content = {"folder": str(folder), "measures": told, "environment": environment()}
    write_atomic(run.path / DATA, as_json(content))
    return data_table(folder.name, told)


def open_cache(folder: Path, path: Path, size: int, workers: int) -> "Cache":
    """Reads all movies, but for those that were read before."""
    from scoff.worlds.intphys.cache import build_cache

    with ExitStack() as stack:
        progress: Progress | None = None

        def show(done: int, total: int) -> None:
            nonlocal progress
            if progress is None:  # some may be there already
                progress = Progress(total, done, "cache", "auto", "movie")
                stack.callback(progress.close)
            else:
                progress.update(done, {})

        return build_cache(folder, path, size, workers, show)
