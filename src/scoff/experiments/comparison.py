"""Runs side by side, in whatever experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from scoff.experiments.base import Finished
from scoff.report import Figure, Line, curves
from scoff.training.errors import UsageError
from scoff.training.settings import flag


def group_runs(
    runs: Sequence[Finished], names: Mapping[str, str], task: Sequence[str]
) -> dict[str, list[Finished]]:
    """Runs that differ in nothing but their seed, under the name of their model.

    Where a model was run with several configs, its name is followed by what differs. The fields in
    `task` say what is learned and tested: runs that differ in these cannot be compared.
    """
    first = runs[0]
    for run in runs:
        for field in task:
            if getattr(run.config, field) != getattr(first.config, field):
                raise UsageError(
                    f"{first.name} and {run.name} cannot be compared: --{flag(field)} differs"
                )
    groups: dict[str, list[Finished]] = {}
    for model, name in names.items():
        own: dict[Any, list[Finished]] = {}
        for run in runs:
            if run.config.model == model:
                own.setdefault(replace(run.config, seed=0), []).append(run)
        for config, group in own.items():
            if len({run.config.seed for run in group}) < len(group):
                raise UsageError(f"{', '.join(run.name for run in group)}: two are the same run")
            varied = [
                f"{flag(field.name)} {getattr(config, field.name)}"
                for field in fields(config)
                if len({getattr(other, field.name) for other in own}) > 1
            ]
            groups[f"{name} ({', '.join(varied)})" if varied else name] = group
    return groups


def spread_line(label: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Line:
    """A line through the means over seeds, with a band from the lowest to the highest."""
    means = [sum(v) / len(v) for v in values]
    several = len(values[0]) > 1
    low, high = ([min(v) for v in values], [max(v) for v in values]) if several else (None, None)
    return Line(label, x, means, low, high)


def learning_curves(groups: Mapping[str, list[Finished]], key: str, y_label: str) -> Figure:
    return curves(
        {
            name: [[(r["step"], r[key]) for r in run.records if key in r] for run in group]
            for name, group in groups.items()
        },
        title="Validation error during training",
        caption="",
        y_label=y_label,
    )
