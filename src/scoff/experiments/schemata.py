"""More schemata than there is use for, on bouncing balls.

The paper (section "Increasing the number of schemata"): of ten, only three are used on the curtain
and four on six to eight balls, and the error is about that of a SCOFF that has no more than these.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scoff.experiments import balls
from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.video import MODELS

if TYPE_CHECKING:
    from scoff.report import Figure, Section, Table

Groups = Mapping[str, list[Finished]]

COUNTS = ("2", "3", "4", "6", "10")
VARIANTS = ("curtain", "678balls")
# of ten schemata, those that were used
PAPER = {"curtain": 3, "678balls": 4}
OWN_MODELS = {name: MODELS[name] for name in ("scoff", "scoff-sparse")}


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.balls_report import (
        TITLES,
        film_step,
        group_variants,
        pictures,
        rollout_section,
    )
    from scoff.experiments.binding import choice_table, event_table
    from scoff.experiments.comparison import learning_curves
    from scoff.experiments.video import training_table
    from scoff.report import Section

    sections = []
    by_variant = group_variants(runs)
    every = film_step(by_variant)
    for variant, groups in by_variant.items():
        by_count = dict(sorted(groups.items(), key=lambda item: item[1][0].config.schemata))
        text = (
            "How many of its schemata SCOFF uses, and what that does to rollouts. Errors are in "
            "nats a pixel, cumulative; read the share of balls found (F1) beside them."
        )
        if variant in PAPER:
            text += f" The paper: of ten, {PAPER[variant]} were used, at about the same error."
        drawn, missing = pictures(by_count, every)
        # what would be too much of all, of the run that has the most to choose from
        most = dict(list(by_count.items())[-1:])
        inside = itertools.chain(*drawn.shares[-1:])
        tables = [number_table(by_count), choice_table(by_count), event_table(most)]
        sections += [
            Section(
                TITLES[variant],
                text,
                [table for table in tables if table is not None],
                [in_use_curve(by_count), count_curve(by_count), *inside, *drawn.lanes],
            ),
            rollout_section(
                by_count,
                f"{TITLES[variant]}: rollouts",
                [*fewest_curve(by_count), *drawn.rollouts],
                missing,
            ),
            Section(
                f"{TITLES[variant]}: training",
                "Seconds include validation.",
                [training_table(by_count)],
                [learning_curves(by_count, "valid/nll", "nats a pixel")],
            ),
        ]
    return sections


def number_table(groups: Groups) -> "Table":
    from scoff.experiments.balls_report import HORIZONS
    from scoff.experiments.rollouts import estimate_known, within
    from scoff.report import Estimate, Table

    shown = within(groups, HORIZONS)
    rows: list[list[Any]] = []
    for name, group in groups.items():
        row: list[Any] = [name, Estimate.of([2 ** bits(run) for run in group])]
        for key in ("cumulative", "f1"):
            ahead = [run.evaluation["rollout"][key] for run in group]
            row += [estimate_known([values[n - 1] for values in ahead]) for n in shown]
        rows.append(row)
    ahead = [f"{what} {n}" for what in ("error up to", "F1 at") for n in shown]
    columns = ["", "effective number", *ahead]
    return Table(
        "Schemata in use, and rollouts",
        columns,
        rows,
        note="As many as: schemata that, all chosen equally often, would have the same entropy.",
    )


def bits(run: Finished) -> float:
    return run.evaluation["schemata"]["bits"]


def in_use_curve(groups: Groups) -> "Figure":
    from scoff.experiments.comparison import spread_line
    from scoff.report import Line, lines

    by_model = values_by_count(groups, lambda run: 2 ** bits(run))
    series = [spread_line(name, list(own), list(own.values())) for name, own in by_model.items()]
    counts = sorted({count for own in by_model.values() for count in own})
    series.append(Line("all of them", counts, counts, dashed=True, marker=False))
    return lines(
        series,
        title="Schemata in use",
        caption="By the entropy of what is chosen: as many as would have it if all were chosen "
        "equally often.",
        x_label="schemata there are",
        y_label="effective number of schemata",
    )


def count_curve(groups: Groups) -> "Figure":
    from scoff.experiments.balls_report import HORIZONS
    from scoff.experiments.comparison import spread_line
    from scoff.experiments.rollouts import within
    from scoff.report import lines

    series = []
    for n in within(groups, HORIZONS):
        by_model = values_by_count(
            groups, lambda run, n=n: run.evaluation["rollout"]["cumulative"][n - 1]
        )
        series += [
            spread_line(f"{name}, up to {n}", list(own), list(own.values()))
            for name, own in by_model.items()
        ]
    return lines(
        series,
        title="Error by number of schemata",
        caption="Cumulative, of rollouts of so many frames.",
        x_label="schemata there are",
        y_label="nats a pixel",
    )


def values_by_count(
    groups: Groups, value: Callable[[Finished], float]
) -> dict[str, dict[int, list[float]]]:
    """Of each model, at each number of schemata, of all seeds."""
    by_model: dict[str, dict[int, list[float]]] = {}
    for group in groups.values():
        config = group[0].config
        own = by_model.setdefault(OWN_MODELS[config.model], {})
        own.setdefault(config.schemata, []).extend(map(value, group))
    return by_model


def fewest_curve(groups: Groups) -> "list[Figure]":
    """Errors of rollouts divided by those with the fewest schemata; of one number, none."""
    from scoff.experiments.comparison import spread_line
    from scoff.experiments.rollouts import relative_errors
    from scoff.report import lines

    fewest = next(iter(groups))
    if len(groups) < 2:
        return []
    relative = relative_errors(groups, "nll", fewest)
    figure = lines(
        [spread_line(name, range(1, len(values) + 1), values) for name, values in relative.items()],
        title="Error relative to the fewest schemata",
        caption=f"Of each frame of rollouts: the error divided by that of {fewest}, seed by seed. "
        "Below 1 is better.",
        x_label="predicted frame",
        y_label="times the error with the fewest",
    )
    return [figure]


# --- presets


def on_curtain_or(make: Any) -> Any:
    """A preset of bouncing balls, on the curtain if nothing else is asked for."""

    def config(model: str, variant: str = VARIANTS[0]) -> balls.Config:
        return make(model, variant)

    return config


def quick(model: str, variant: str = VARIANTS[0]) -> balls.Config:
    return replace(balls.quick(model, variant), steps=300)


GRID = {"variant": VARIANTS, "schemata": COUNTS}

EXPERIMENT = Experiment(
    name="schemata",
    title="More schemata than needed",
    summary="SCOFF on bouncing balls with 2 to 10 schemata: how many of them are used.",
    claim="SCOFF predicts bouncing balls with two to ten schemata to choose from. The question is "
    "how many it uses, and whether those that it does not need do any harm.",
    config=balls.Config,
    models=OWN_MODELS,
    presets={
        "quick": Preset(
            "short clips, few steps: a minute each on a CPU core",
            quick,
            ("scoff",),
            seeds=1,
            grid={"variant": VARIANTS[:1], "schemata": ("2", "10")},
        ),
        "tuned": Preset(
            "as tuned of balls: minutes on a GPU", on_curtain_or(balls.tuned), ("scoff",), grid=GRID
        ),
        "paper": Preset(
            "as paper of balls: hours", on_curtain_or(balls.paper), ("scoff",), grid=GRID
        ),
    },
    make_task=balls.BallsTask,
    evaluate=balls.evaluate,
    report=report,
    defaults_by=("variant",),
    measure_file=balls.measure_file,
)
