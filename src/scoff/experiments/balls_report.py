"""Runs on bouncing balls side by side: tables and figures of each variant, and of all together."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scoff.experiments.balls import Config, smallest_radius
from scoff.experiments.balls_data import check_data, read_clips
from scoff.experiments.base import Finished
from scoff.experiments.binding import binding_table, choice_table, event_table, events
from scoff.experiments.comparison import group_runs, learning_curves
from scoff.experiments.films import Pictures, film_figures, left_out
from scoff.experiments.rollouts import (
    BASELINES,
    error_curve,
    estimate_known,
    f1_curve,
    has_squared,
    pick_baseline,
    relative_curve,
    relative_errors,
    rollout_table,
    squared_table,
    why_not_relative,
    within,
)
from scoff.experiments.video import MODELS, training_table
from scoff.experiments.video_measures import COLLISION, WALL
from scoff.report import Estimate, Figure, Lowest, Section, Table
from scoff.report.films import Lane
from scoff.training.errors import UsageError
from scoff.training.settings import flag
from scoff.worlds.balls import VARIANTS, Clips, render, trajectories

Groups = Mapping[str, list[Finished]]

TITLES: dict[str, str] = {
    "4balls": "Four balls",
    "678balls": "Six to eight balls",
    "curtain": "Three balls and a curtain",
    "coloured4balls": "Four balls in colours",
    "coloured678balls": "Six to eight balls in colours",
}
# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = (
    "data",
    "frames",
    "stack",
    "train_clips",
    "valid_clips",
    "test_clips",
    "data_seed",
    "context",
    "doubt",
)
HORIZONS = (10, 30)  # of the paper's figures
MOST_WHOLE_FILMS = 16


def report_variants(runs: Sequence[Finished]) -> list[Section]:
    by_variant = group_variants(runs)
    sections = [overview(by_variant)] if len(by_variant) > 1 else []
    every = film_step(by_variant)
    for variant, groups in by_variant.items():
        heading = TITLES[variant] if len(by_variant) > 1 else ""
        sections += variant_sections(groups, heading, every)
    return sections


def film_step(by_variant: Mapping[str, Groups]) -> int:
    """Films have every so many-th frame, for a page should stay below a few megabytes."""
    return 1 if sum(map(len, by_variant.values())) <= MOST_WHOLE_FILMS else 2


def group_variants(runs: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
    by_variant: dict[str, dict[str, list[Finished]]] = {}
    for variant in VARIANTS:
        own = [run for run in runs if run.config.variant == variant]
        if own:
            by_variant[variant] = group_runs(own, MODELS, TASK)
    return by_variant


def overview(by_variant: Mapping[str, Groups]) -> Section:
    """All variants side by side: where the advantage grows, if it does"""
    baseline = pick_baseline(*by_variant.values())
    titles = {"cumulative": f"Cumulative error relative to {baseline}"}
    if any(map(has_squared, by_variant.values())):
        titles["squared_cumulative"] = f"Cumulative squared error relative to {baseline}"
    titles["f1"] = "F1"
    return Section(
        "All variants",
        f"Cumulative error of rollouts divided by that of {BASELINES[baseline]}, seed by seed, at "
        "10 and 30 frames, and the share of balls found (F1) there. Below 1 is better than that "
        "GRU. The paper shows SCOFF below GRU and RIMs everywhere, the more so with more balls.",
        tables=[overview_table(by_variant, key, title, baseline) for key, title in titles.items()],
    )


def overview_table(by_variant: Mapping[str, Groups], key: str, title: str, baseline: str) -> Table:
    names = dict.fromkeys(name for groups in by_variant.values() for name in groups)
    rows: list[list[Any]] = [[name] for name in names]
    columns = [""]
    for variant, groups in by_variant.items():
        found: Mapping[str, Sequence[Sequence[float | None]]] = {}
        if key == "f1":
            found = {
                name: list(zip(*(run.evaluation["rollout"]["f1"] for run in group), strict=True))
                for name, group in groups.items()
            }
        elif key == "cumulative" or has_squared(groups):
            found = relative_errors(groups, key, baseline)
        for n in within(groups, HORIZONS):
            columns.append(f"{variant}, {n}")
            for row, name in zip(rows, names, strict=True):
                row.append(estimate_known(found[name][n - 1]) if name in found else None)
    heading = f"{title}, by variant and number of frames"
    return Table(heading, columns, rows, note=unlike(by_variant))


def unlike(by_variant: Mapping[str, Groups]) -> str:
    """Names what variants differ in besides what makes them what they are."""

    def value(config: Config, field: str) -> float | str:
        if field == "data":  # files are of one variant each
            return "generated" if config.data is None else "of a file"
        return getattr(config, field)

    told = []
    for field in (*TASK, "steps"):
        values = {
            variant: sorted({value(group[0].config, field) for group in groups.values()})
            for variant, groups in by_variant.items()
        }
        if len({tuple(own) for own in values.values()}) > 1:
            each = [
                f"{' and '.join(x if isinstance(x, str) else f'{x:,}' for x in own)} ({variant})"
                for variant, own in values.items()
            ]
            told.append(f"{flag(field)} {', '.join(each)}")
    if not told:
        return ""
    return f"Compare within a variant only, for not all were run alike: {'; '.join(told)}."


def variant_sections(groups: Groups, heading: str, every: int) -> list[Section]:
    config: Config = next(iter(groups.values()))[0].config
    prefix = f"{heading}: " if heading else ""

    def titled(title: str) -> str:
        return prefix + title.lower() if prefix else title

    drawn, missing = pictures(groups, every)
    return [
        rollout_section(
            groups, titled("Rollouts"), drawn.rollouts, why_not_relative(groups) + missing
        ),
        Section(
            titled("Object files and schemata"),
            "Whether object files share out the balls and stay with them, how many schemata are "
            "chosen and when. The paper expects such schemata as collisions, free flight, walls "
            "and the passage behind the curtain.",
            inside_tables(groups),
            [*drawn.lanes, *itertools.chain(*drawn.shares)],
        ),
        Section(
            titled("Training"),
            f"Validated on {config.valid_clips:,} clips. Seconds include validation.",
            [training_table(groups)],
            [learning_curves(groups, "valid/nll", "nats a pixel")],
        ),
    ]


def rollout_section(
    groups: Groups, title: str, figures: Sequence[Figure], missing: str = ""
) -> Section:
    """Errors and balls found, by horizon, and then the figures.

    Args:
        missing: a paragraph about what is left out.
    """
    first = next(iter(groups.values()))[0]
    config: Config = first.config
    still = first.evaluation.get("still", {}).get("f1")
    text = (
        f"After {config.context} given frames each frame is predicted from the one before. Errors "
        "are in nats a pixel, cumulative: the mean over all frames up to there. They saturate "
        "after some ten frames, and a blurred picture has a low one: read the share of balls "
        "found (F1) and how far off they are beside them."
    )
    if "mean_picture" in first.evaluation:
        text += f" The mean picture has an error of {first.evaluation['mean_picture']:.3g}."
    squared, mean_squared = has_squared(groups), first.evaluation.get("mean_picture_squared")
    if squared:
        text += (
            " Squared errors, of predicted and true pixels, have a bound: who is sure of what is "
            "wrong pays some two times what the mean picture pays, not many times that."
        )
    return Section(
        title,
        text + missing,
        rollout_tables(groups),
        [
            error_curve(groups, config.context, mean_picture=first.evaluation.get("mean_picture")),
            *relative_curve(groups, config.context),
            *([error_curve(groups, config.context, True, mean_squared)] if squared else []),
            *(relative_curve(groups, config.context, squared=True) if squared else []),
            f1_curve(groups, config.context, smallest_radius(config.variant), still),
            *figures,
        ],
    )


def tables_of(groups: Groups) -> list[Table]:
    """All that tell of tests."""
    return [*rollout_tables(groups), *inside_tables(groups)]


def rollout_tables(groups: Groups) -> list[Table]:
    squared = has_squared(groups)
    tables = [
        rollout_table(groups, (1, *HORIZONS)),
        relative_table(groups),
        squared_table(groups, HORIZONS) if squared else None,
        relative_table(groups, squared=True) if squared else None,
        emerged_table(groups),
    ]
    return [table for table in tables if table is not None]


def inside_tables(groups: Groups) -> list[Table]:
    tables = [binding_table(groups), choice_table(groups), event_table(groups)]
    return [table for table in tables if table is not None]


def pictures(groups: Groups, every: int = 1) -> tuple[Pictures, str]:
    """With a paragraph about what is left out."""
    config: Config = next(iter(groups.values()))[0].config
    if config.data is not None:
        try:
            check_data(config, ["test"])
        except UsageError as error:  # all numbers are known; the file may be elsewhere by now
            return Pictures(), f"\n\nThere are no pictures, for they need test clips: {error}."
    return film_figures(groups, example, story, every), left_out(groups)


def example(config: Config) -> Clips:
    """The first test clip."""
    first = torch.zeros(1, dtype=torch.int64)
    if config.data is not None:
        return read_clips(config, first)
    return render(trajectories(config.data_seed, first, config.variant, config.frames, "test"))


def story(run: Finished) -> list[Lane]:
    """After which frames something happens to any ball, if that is told."""
    event = events(example(run.config))  # [1, T, K]
    if event is None:
        return []
    lanes = []
    for name, kind in (("collisions", COLLISION), ("walls", WALL)):
        # on the way from each frame to the next, which the choice at that frame brings about
        happened = (event[0, 1:] == kind).any(1).tolist()
        at = [*(0 if yes else None for yes in happened), None]
        lanes.append(Lane(name, at, is_mark=True, legend=f"{name.capitalize()} are any ball's."))
    return lanes


def relative_table(groups: Groups, squared: bool = False) -> Table | None:
    baseline = pick_baseline(groups)
    key = "squared_cumulative" if squared else "cumulative"
    relative = relative_errors(groups, key, baseline)
    if len(relative) < 2:
        return None
    shown = within(groups, HORIZONS)
    rows = [
        [name, *(Estimate.of(values[n - 1]) for n in shown)] for name, values in relative.items()
    ]
    return Table(
        f"Cumulative {'squared ' if squared else ''}error relative to {baseline}",
        ["", *(f"up to {n} frames" for n in shown)],
        rows,
        highlight=Lowest(range(1, 1 + len(shown)), range(len(rows))),
    )


def emerged_table(groups: Groups) -> Table | None:
    known = {
        name: [run.evaluation["emerged"] for run in group]
        for name, group in groups.items()
        if "emerged" in group[0].evaluation
    }
    if not known:
        return None
    shown = within(groups, (5, *HORIZONS))
    balls = next(iter(known.values()))[0]["balls"]
    there = [f"{balls[n - 1]:,} at {n}" for n in shown]
    still = next(iter(groups.values()))[0].evaluation["still"]
    if "emerged" in still:  # it was not told of all that were tested
        known["the last given frame stays"] = [still["emerged"]]
    rows: list[list[Any]] = []
    for name, group in known.items():
        row: list[Any] = [name]
        for n in shown:
            row.append(estimate_known([own["found"][n - 1] for own in group]))
            row.append(estimate_known([own["position"][n - 1] for own in group]))
        rows.append(row)
    columns = ["", *(f"{part} at {n}" for n in shown for part in ("found", "pixels off"))]
    return Table(
        "Balls that come out from behind the curtain",
        columns,
        rows,
        note="Balls of which half is seen at this frame, and less than half was at some frame "
        "since the last given one. Found: the share of them that has a spot in the prediction. "
        f"There are {', '.join(there)}.",
    )
