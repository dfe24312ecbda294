"""What an experiment consists of, and where they are listed."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scoff.training.errors import UsageError
from scoff.training.settings import Settings

if TYPE_CHECKING:
    from scoff.report import Section, Table
    from scoff.training.engine import OwnLoop
    from scoff.training.step import Task
    from scoff.worlds.intphys.cache import Cache

NAMES = ("adding", "dynamics", "switching", "balls", "schemata", "maze", "intphys")
FORMER_OPTIONS = ("settle",)  # of runs from before; they told how to train, not what the model is


@dataclass(frozen=True)
class Finished:
    """A run that was trained and evaluated."""

    name: str
    config: Any
    evaluation: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    path: Path | None = None
    """The folder that it is in."""


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    summary: str
    """In one line."""
    claim: str
    """What the report opens with."""
    config: type[Settings]
    models: Mapping[str, str]
    """Name on the command line -> name for people."""
    presets: Mapping[str, "Preset"]
    make_task: Callable[[Any, torch.device], "Task | OwnLoop"]
    evaluate: Callable[[Any, nn.Module, torch.device], dict[str, Any]]
    """Takes the config, the trained model in evaluation mode and a device; returns JSON."""
    report: Callable[[Sequence[Finished]], "Sequence[Section]"]
    defaults_by: tuple[str, ...] = ()
    """Options that, as the model does, settle what a preset's other values are."""
    judge_data: "Callable[[Any, nn.Module, torch.device, Cache], dict[str, float]] | None" = None
    """Where it can judge movies of a folder: how plausible each is, by its name."""
    measure_file: "Callable[..., tuple[dict[str, Any], Sequence[Table]]] | None" = None
    """Where it can be tested on a file: as `evaluate`, with the file's path after the device; also
    returns tables of it."""

    @property
    def default_preset(self) -> str:
        return next(name for name in ("tuned", "divide", "paper") if name in self.presets)

    def preset(self, name: str, model: str, **chosen: str) -> Settings:
        """`chosen`: of the options in `defaults_by`, those that are given."""
        if name not in self.presets:
            raise UsageError(f"--preset: got {name!r}, wants one of {', '.join(self.presets)}")
        if model not in self.models:
            raise UsageError(f"--model: got {model!r}, wants one of {', '.join(self.models)}")
        return self.presets[name].config(model, **chosen)

    def read_config(self, values: Mapping[str, Any]) -> Settings:
        """From JSON, where tuples are lists."""
        values = {k: v for k, v in values.items() if k not in FORMER_OPTIONS}
        known = {field.name for field in fields(self.config)}
        for name in values.keys() - known:
            raise UsageError(f"config.json: {name} is no option of {self.name}")
        settled: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return self.config(**settled)


@dataclass(frozen=True)
class Preset:
    summary: str
    config: Callable[..., Settings]
    """Of a model, and of options in `Experiment.defaults_by` by their names."""
    models: tuple[str, ...]
    """Those that `reproduce` compares."""
    seeds: int = 3
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of which `reproduce` tries these values, each with each."""


def find_experiment(name: str) -> Experiment:
    if name not in NAMES:
        raise UsageError(f"there is no experiment {name!r}; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"scoff.experiments.{name}").EXPERIMENT
