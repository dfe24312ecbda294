"""The `scoff` command. Heavy modules are imported by the commands that need them."""

import io
import itertools
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tyro.conf import OmitArgPrefixes, Positional

from scoff.arguments import meant, parse, parse_known, peek, take_experiment, take_values
from scoff.bench_command import bench
from scoff.data_commands import data
from scoff.training.errors import ScoffError, UsageError

if TYPE_CHECKING:
    from scoff.experiments import Experiment
    from scoff.training.run import Run

USAGE = """\
usage: scoff COMMAND ...

  scoff list                          experiments, their models and presets
  scoff train EXPERIMENT [options]    train a model; scoff train EXPERIMENT --help for the options
  scoff train --resume RUN            go on with a run that was stopped
  scoff eval RUN...                   test trained models
  scoff eval RUN... --data FOLDER     judge movies of IntPhys, write answer.txt
  scoff eval RUN... --data FILE.h5    test on a file of bouncing balls
  scoff reproduce EXPERIMENT          train and test all models, compare with the paper
  scoff report RUN...                 one HTML page about trained and tested models
  scoff report --pretrained NAME      the same about models that come with the package
  scoff export RUN... --name NAME     put trained and tested models into the package
  scoff bench                         speed of the layers against torch's own
  scoff data balls --out FILE.h5      write clips of bouncing balls
  scoff data intphys --out FOLDER     write movies of possible and impossible physics
  scoff data intphys-cache FOLDER     make such, or the real ones, ready for training

Each command explains itself with --help."""

# of layers, where they are called otherwise than the options
ARGUMENTS = {
    "hidden_size": "--hidden-size",
    "num_object_files": "--object-files",
    "active_object_files": "--active",
    "num_schemata": "--schemata",
    "num_modules": "--object-files",
    "active_modules": "--active",
    "num_slots": "--object-files",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not know all characters
            stream.reconfigure(errors="replace")
    logging.basicConfig(format="scoff: %(message)s", level=logging.INFO)
    for noisy in ("lightning_fabric", "lightning.fabric", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        run_command(args)
    except ScoffError as error:
        print(f"scoff: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(0)


def run_command(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return
    if args[0] == "--version":
        import scoff

        print(scoff.__version__)
        return
    command = COMMANDS.get(args[0])
    if command is None:
        raise UsageError(
            f"there is no command {args[0]!r}{meant(args[0], COMMANDS)}; there are: "
            + ", ".join(COMMANDS)
        )
    command(args[1:])


# --- list


@dataclass(frozen=True)
class List:
    """Lists the experiments, their models and presets."""


def list_experiments(args: list[str]) -> None:
    parse(List, args, "scoff list")
    from scoff.experiments import NAMES, find_experiment

    for name in NAMES:
        experiment = find_experiment(name)
        print(f"{name}\n  {experiment.summary}\n  models:  {', '.join(experiment.models)}")
        width = max(map(len, experiment.presets))
        for key, preset in experiment.presets.items():
            print(f"  preset:  {key:<{width}}  {preset.summary}")
            compared = f"{', '.join(preset.models)}; seeds: {preset.seeds}"
            print(f"           {'':{width}}  reproduce compares {compared}")
            for option, values in preset.grid.items():
                print(f"           {'':{width}}  with {option}: {', '.join(values)}")
    from scoff.pretrained import names

    print(f"trained models in the package, for scoff report --pretrained: {', '.join(names())}")


# --- train


@dataclass(frozen=True)
class TrainOptions:
    preset: str = "tuned"
    """Where the options' defaults come from; see scoff list."""
    out: Path | None = None
    """Folder of the run. Default: runs/EXPERIMENT/MODEL-SEED."""
    evaluate: bool = False
    """Also test the model when it is trained, and print what scoff eval prints."""


def train(args: list[str]) -> None:
    if any(arg == "--resume" or arg.startswith("--resume=") for arg in args):
        resume(args)
        return
    name, rest = take_experiment("train", args, also="or --resume RUN")
    experiment, options, runtime, config = parse_training(name, rest)
    from scoff.training.devices import rank
    from scoff.training.engine import check
    from scoff.training.run import Run

    out = options.out or Path("runs") / name / f"{config.model}-{config.seed}"
    check(config, runtime)
    check_model(experiment, config)
    check_weights(experiment, config)
    advice = advise(experiment, peek(rest, "--preset"), runtime.device)
    run = Run.create(out, name, options.preset, config) if rank() == 0 else Run(out)
    if advice and rank() == 0 and runtime.progress != "off":
        print(advice, file=sys.stderr, flush=True)
    carry_out(experiment, config, run, runtime, options.evaluate)


@dataclass(frozen=True)
class ResumeOptions:
    resume: Path
    """Folder of the run to go on with."""
    evaluate: bool = False
    """Also test the model when it is trained, and print what scoff eval prints."""


def resume(args: list[str]) -> None:
    from scoff.experiments import find_experiment
    from scoff.training.engine import Runtime
    from scoff.training.run import Run

    @dataclass(frozen=True)
    class Resume:
        run: OmitArgPrefixes[ResumeOptions]
        machine: OmitArgPrefixes[Runtime]

    if not args[0].startswith("-"):
        raise UsageError(f"train --resume RUN takes no experiment, got {args[0]}")
    parsed = parse(Resume, args, "scoff train", "Goes on with a run that was stopped.")
    run = Run.open(parsed.run.resume, to_write=True)
    held = run.read_config()
    experiment = find_experiment(held["experiment"])
    config = experiment.read_config(held["config"])
    carry_out(experiment, config, run, parsed.machine, parsed.run.evaluate)


def parse_training(
    name: str, args: list[str], prog: str = "train"
) -> "tuple[Experiment, TrainOptions, Any, Any]":
    from scoff.experiments import find_experiment
    from scoff.training.engine import Runtime
    from scoff.training.settings import flag

    experiment = find_experiment(name)
    # the defaults of all other options hang on these
    preset = peek(args, "--preset") or experiment.default_preset
    model = peek(args, "--model") or next(iter(experiment.models))
    chosen = {key: peek(args, "--" + flag(key)) for key in experiment.defaults_by}
    default = experiment.preset(preset, model, **{k: v for k, v in chosen.items() if v is not None})

    @dataclass(frozen=True)
    class Train:
        run: OmitArgPrefixes[TrainOptions]
        machine: OmitArgPrefixes[Runtime]
        config: OmitArgPrefixes[experiment.config]  # pyright: ignore[reportInvalidTypeForm]
        """What is learned, from what and how: a run's identity, kept in its config.json."""

    lines = [experiment.summary, "", f"Defaults are those of --preset {preset} --model {model}."]
    lines += [f"  {key}: {value.summary}" for key, value in experiment.presets.items()]
    parsed = parse(
        Train,
        args,
        f"scoff {prog} {name}",
        "\n".join(lines),
        Train(TrainOptions(preset=preset), Runtime(), default),
    )
    return experiment, parsed.run, parsed.machine, parsed.config


def check_weights(experiment: "Experiment", config: Any) -> None:
    """Only of a run that is yet to begin: one that goes on has its own."""
    if config.weights_from is not None:
        import torch

        from scoff.training.engine import load_weights
        from scoff.training.run import Run

        run = Run.open(Path(config.weights_from))
        load_weights(experiment.make_task(config, torch.device("cpu")).model, run)


def check_model(experiment: "Experiment", config: Any) -> None:
    """Refuses sizes that do not fit together, as the layers do, before anything is written."""
    import torch

    from scoff.training.step import ChecksNew

    try:
        task = experiment.make_task(config, torch.device("cpu"))
        if isinstance(task, ChecksNew):
            task.check_new()
    except (TypeError, ValueError) as error:
        raise UsageError(by_options(str(error))) from error


def by_options(message: str) -> str:
    """What a layer says of its arguments, as said of the options that they come from"""
    for argument, option in ARGUMENTS.items():
        message = re.sub(rf"\b{argument}\b", option, message)
    return message


def carry_out(
    experiment: "Experiment", config: Any, run: "Run", runtime: Any, evaluate: bool
) -> None:
    from scoff.experiments.evaluate import evaluate_run
    from scoff.experiments.reproduce import finished, print_tables
    from scoff.training.devices import rank
    from scoff.training.engine import fit

    already = " already" if run.finished else ""
    if not already:
        label = f"{experiment.name} {config.model} {config.seed}"
        fit(lambda device: experiment.make_task(config, device), config, run, runtime, label)
    if rank() == 0:
        if evaluate:
            evaluate_run(run, runtime.device, runtime.threads)
            if runtime.progress != "off":
                print_tables(finished([run.path]))
        elif runtime.progress != "off":
            message = f"{run.path} is trained{already}; test it with: scoff eval {run.path}"
            print(message, file=sys.stderr)


# --- eval


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


def advise(experiment: "Experiment", preset: str | None, device: str) -> str | None:
    """Where no preset was asked for: the default is for a GPU."""
    from scoff.training.devices import pick_device

    if preset is not None or pick_device(device).type != "cpu":
        return None
    name, quick = experiment.default_preset, experiment.presets["quick"]
    return (
        f"this is --preset {name}: {experiment.presets[name].summary}; on a CPU you may want "
        f"--preset quick: {quick.summary}"
    )


# --- reproduce


@dataclass(frozen=True)
class ReproduceOptions:
    models: tuple[str, ...] = ()
    """Which to compare. Default: those of the preset; see scoff list."""
    seeds: int | None = None
    """How many runs of each. Default: the preset's."""
    preset: str | None = None
    """Where the options' defaults come from; see scoff list. Default: the first there is of tuned,
    divide, paper."""
    out: Path | None = None
    """Folder of all runs and of the report. Default: runs/EXPERIMENT-PRESET."""
    jobs: int | None = None
    """Runs at a time. Default: as many as there are CPU cores, one on a GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """auto: a bar on a terminal, else lines."""


def reproduce(args: list[str]) -> None:
    from scoff.experiments import find_experiment
    from scoff.experiments.reproduce import Plan
    from scoff.training.engine import check
    from scoff.training.run import Run
    from scoff.training.settings import flag

    name, rest = take_experiment("reproduce", args)
    experiment = find_experiment(name)
    text = (
        f"{experiment.summary}\n\nTrains and tests every model and seed, then compares them with "
        "the paper. What is there already is not done again. All options of "
        f"scoff train {name} can be given too, and hold for every run."
    )
    varied = {key for preset in experiment.presets.values() for key in preset.grid}
    if varied:
        names = ", ".join(f"--{flag(key)}" for key in sorted(varied))
        text += f" Several values can be given of {names}: each is tried."
    options, more = parse_known(ReproduceOptions, rest, f"scoff reproduce {name}", text)
    check_device(options)
    preset_name = options.preset or experiment.default_preset
    if preset_name not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise UsageError(f"--preset: got {preset_name!r}, wants one of {known}")
    preset = experiment.presets[preset_name]
    models = dict.fromkeys(options.models or preset.models)
    seeds = preset.seeds if options.seeds is None else options.seeds
    if seeds < 1:
        raise UsageError(f"--seeds: got {seeds}, wants at least 1")
    for taken in ("--model", "--seed", "--resume", "--evaluate"):
        if peek(more, taken) is not None or taken in more:
            several = f" (did you mean {taken}s?)" if taken in ("--model", "--seed") else ""
            raise UsageError(
                f"{taken} is no option of reproduce{several}; see scoff reproduce {name} --help"
            )
    for model in models:
        if model not in experiment.models:
            known = ", ".join(experiment.models)
            raise UsageError(f"--models: got {model!r}, wants some of {known}")
    out = options.out or Path("runs") / f"{name}-{preset_name}"
    grid = {}
    for key, values in preset.grid.items():
        given, more = take_values(more, "--" + flag(key))
        grid[key] = given or values
    weights, more = take_values(more, "--weights-from")
    if len(weights) > 1:
        raise UsageError(f"--weights-from: got {len(weights)} folders, wants one")
    common = ["--preset", preset_name, *more]
    plans = []
    for cell in itertools.product(*grid.values()):
        for model, seed in itertools.product(models, range(seeds)):
            label = "-".join([*cell, model, str(seed)])
            own = ["--model", model, "--seed", str(seed), *common]
            for key, value in zip(grid, cell, strict=True):
                own += ["--" + flag(key), value]
            for folder in weights:
                own += ["--weights-from", str(Path(folder) / label)]
            _, _, runtime, config = parse_training(name, own, "reproduce")
            if not Run(out / label).finished:
                check(config, replace(runtime, device=options.device))
            if not (out / label).exists():
                if seed == 0:
                    check_model(experiment, config)
                check_weights(experiment, config)
            machine = ["--threads", str(runtime.threads), "--tracker", runtime.tracker]
            machine.append("--tensorboard" if runtime.tensorboard else "--no-tensorboard")
            plans.append(Plan(out / label, config, own, machine))
    from scoff.experiments import reproduce as work

    each = ", ".join([*models, *itertools.chain(*grid.values())])
    about = [
        experiment.summary,
        f"preset {preset_name}: {preset.summary}",
        f"{len(plans)} run{'s' if len(plans) > 1 else ''}: {each}; seeds: {seeds}",
        advise(experiment, options.preset, options.device),
    ]
    work.reproduce(
        experiment,
        plans,
        out,
        options.device,
        options.jobs,
        options.progress,
        args,
        "\n".join(filter(None, about)),
    )


# --- report


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


def check_device(options: Any) -> None:
    from scoff.training.devices import pick_device

    pick_device(options.device)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": list_experiments,
    "train": train,
    "eval": eval_runs,
    "reproduce": reproduce,
    "report": report,
    "export": export,
    "bench": bench,
    "data": data,
}
