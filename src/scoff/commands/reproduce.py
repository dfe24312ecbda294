"""`scoff reproduce`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scoff.commands.arguments import check_device, parse_known, peek, take_experiment, take_values
from scoff.commands.train import advise, check_model, check_weights, parse_training
from scoff.training.errors import UsageError

if TYPE_CHECKING:
    from scoff.experiments import Experiment
    from scoff.experiments.reproduce import Plan


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
    from scoff.experiments import reproduce as work
    from scoff.training.settings import flag

    name, rest = take_experiment("reproduce", args)
    experiment = find_experiment(name)
    options, more = parse_known(
        ReproduceOptions, rest, f"scoff reproduce {name}", description(experiment)
    )
    check_device(options)
    preset_name = options.preset or experiment.default_preset
    check_options(experiment, options, preset_name, more)
    preset = experiment.presets[preset_name]
    models = tuple(dict.fromkeys(options.models or preset.models))
    seeds = preset.seeds if options.seeds is None else options.seeds
    grid = {}
    for key, values in preset.grid.items():
        given, more = take_values(more, "--" + flag(key))
        grid[key] = given or values
    out = options.out or Path("runs") / f"{name}-{preset_name}"
    common = ["--preset", preset_name, *more]
    plans = plan_runs(experiment, models, seeds, grid, common, out, options.device)

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


def description(experiment: "Experiment") -> str:
    from scoff.training.settings import flag

    text = (
        f"{experiment.summary}\n\nTrains and tests every model and seed, then compares them with "
        "the paper. What is there already is not done again. All options of "
        f"scoff train {experiment.name} can be given too, and hold for every run."
    )
    varied = {key for preset in experiment.presets.values() for key in preset.grid}
    if varied:
        names = ", ".join(f"--{flag(key)}" for key in sorted(varied))
        text += f" Several values can be given of {names}: each is tried."
    return text


def check_options(
    experiment: "Experiment", options: ReproduceOptions, preset: str, more: Sequence[str]
) -> None:
    if preset not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise UsageError(f"--preset: got {preset!r}, wants one of {known}")
    if options.seeds is not None and options.seeds < 1:
        raise UsageError(f"--seeds: got {options.seeds}, wants at least 1")
    for taken in ("--model", "--seed", "--resume", "--evaluate"):
        if peek(more, taken) is not None or taken in more:
            several = f" (did you mean {taken}s?)" if taken in ("--model", "--seed") else ""
            told = f"see scoff reproduce {experiment.name} --help"
            raise UsageError(f"{taken} is no option of reproduce{several}; {told}")
    for model in options.models:
        if model not in experiment.models:
            known = ", ".join(experiment.models)
            raise UsageError(f"--models: got {model!r}, wants some of {known}")


def plan_runs(
    experiment: "Experiment",
    models: Sequence[str],
    seeds: int,
    grid: Mapping[str, Sequence[str]],
    common: Sequence[str],
    out: Path,
    device: str,
) -> "list[Plan]":
    """One for each model, seed and combination of the grid's values, all checked: what cannot run
    is told before the first one begins."""
    from scoff.experiments.reproduce import Plan
    from scoff.training.engine import check
    from scoff.training.run import Run
    from scoff.training.settings import flag

    weights, shared = take_values(common, "--weights-from")
    if len(weights) > 1:
        raise UsageError(f"--weights-from: got {len(weights)} folders, wants one")
    plans = []
    asked = itertools.product(itertools.product(*grid.values()), models, range(seeds))
    for cell, model, seed in asked:
        label = "-".join([*cell, model, str(seed)])
        own = ["--model", model, "--seed", str(seed), *shared]
        for key, value in zip(grid, cell, strict=True):
            own += ["--" + flag(key), value]
        for folder in weights:
            own += ["--weights-from", str(Path(folder) / label)]
        _, _, runtime, config = parse_training(experiment.name, own, "reproduce")
        if not Run(out / label).finished:
            check(config, replace(runtime, device=device))
        if not (out / label).exists():
            if seed == 0:
                check_model(experiment, config)
            check_weights(experiment, config)
        machine = ["--threads", str(runtime.threads), "--tracker", runtime.tracker]
        machine.append("--tensorboard" if runtime.tensorboard else "--no-tensorboard")
        plans.append(Plan(out / label, config, own, machine))
    return plans
