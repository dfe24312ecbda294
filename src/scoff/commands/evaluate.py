"""`scoff eval`."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from scoff.commands.arguments import check_device, parse
from scoff.training.errors import UsageError


@dataclass(frozen=True)
class Eval:
    """Tests trained models; writes evaluation.json into each run's folder and prints a table."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold such."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""
    threads: int = 1
    """CPU threads."""
    data: Path | None = None
    """Instead of a run's own tests: of intphys a folder of movies in a layout of IntPhys, of balls
    and schemata an HDF5 file with a test set in R-NEM's layout. Writes data.json, of a folder
    answer.txt and data.json where it is known what is possible, into each run's folder."""
    cache: Path | None = None
    """With --data FOLDER: folder of the cache of these movies. Default: intphys-cache in the first
    run's folder."""


def eval_runs(args: list[str]) -> None:
    parsed = parse(Eval, args, "scoff eval")
    check_device(parsed)
    if parsed.threads < 1:
        raise UsageError(f"--threads: got {parsed.threads}, wants at least 1")
    if parsed.cache is not None and parsed.data is None:
        raise UsageError("--cache: wants --data too, the folder of movies that it is of")
    if parsed.data is not None:
        eval_data(parsed, parsed.data)
        return
    from scoff.experiments.evaluate import evaluate_run
    from scoff.experiments.reproduce import expand, finished, print_tables
    from scoff.training.run import Run

    paths = expand(parsed.runs)
    runs = [Run.open(path, to_write=True) for path in paths]
    names = {run.read_config()["experiment"] for run in runs}
    if len(names) > 1:  # no tables hold them all: told before anything is tested and written
        raise UsageError(f"wants runs of one experiment, got {', '.join(sorted(names))}")
    for run in runs:
        evaluate_run(run, parsed.device, parsed.threads)
    print_tables(finished(paths))


def eval_data(parsed: Eval, data: Path) -> None:
    from scoff.experiments import find_experiment
    from scoff.experiments.evaluate import ANSWER, DATA, judge_folder, measure_file
    from scoff.experiments.reproduce import expand
    from scoff.training.run import Run

    runs = expand(parsed.runs)
    cache = parsed.cache or runs[0] / "intphys-cache"
    for path in runs:
        run = Run.open(path, to_write=True)
        if find_experiment(run.read_config()["experiment"]).measure_file is not None:
            written, tables = DATA, measure_file(run, data, parsed.device, parsed.threads)
        else:
            table = judge_folder(run, data, cache, parsed.device, parsed.threads)
            written, tables = ANSWER, [] if table is None else [table]
        for table in tables:
            print(f"\n{table.text()}")
        print(path / written)
