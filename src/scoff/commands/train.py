"""`scoff train`, and the training of what other commands compare."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import OmitArgPrefixes

from scoff.commands.arguments import parse, peek, take_experiment
from scoff.training.errors import UsageError

if TYPE_CHECKING:
    from scoff.experiments import Experiment
    from scoff.training.run import Run

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
