"""Runs on intuitive physics side by side, and beside judges that learn nothing and people."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from scoff.experiments.base import Finished
from scoff.experiments.comparison import group_runs, learning_curves
from scoff.experiments.films import left_out
from scoff.experiments.intphys import Config
from scoff.experiments.intphys_films import film_figures
from scoff.experiments.intphys_scores import HIDING, WAYS
from scoff.experiments.video import MODELS, training_table
from scoff.report import Estimate, Lowest, Section, Table
from scoff.worlds.intphys import BLOCKS, MOVEMENTS
from scoff.worlds.intphys.metrics import bootstrap

Groups = Mapping[str, list[Finished]]

# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = (
    "observe",
    "frames",
    "skip",
    "context",
    "window",
    "draws",
    "frame_size",
    "min_hidden",
    "train_clips",
    "valid_clips",
    "test_clips",
    "visible_clips",
    "data_seed",
)
# Relative errors on O1, O2 and O3 of the original benchmark, which is another set of movies.
OCCLUDED: dict[str, tuple[float | Estimate, ...]] = {
    "SCOFF, paper": (Estimate(0.34, 0.05, 3), Estimate(0.35, 0.05, 3), Estimate(0.42, 0.02, 3)),
    "RMC, paper": (Estimate(0.43, 0.05, 3), Estimate(0.39, 0.03, 3), Estimate(0.46, 0.02, 3)),
    "benchmark's baseline, paper": (0.52, 0.52, 0.51),
    "people": (0.15, 0.16, 0.40),
    "V-JEPA-H, mean surprise": (0.0056, 0.0, 0.0019),
    "V-JEPA-H, maximum": (0.082, 0.081, 0.256),
}
VISIBLE: dict[str, tuple[float | Estimate, ...]] = {
    "people": (0.10, 0.13, 0.20),
    "V-JEPA-H, mean surprise": (0.0, 0.0, 0.0),
    "V-JEPA-H, maximum": (0.006, 0.008, 0.002),
}
PUBLISHED = {"occluded": OCCLUDED, "visible": VISIBLE}
ABSOLUTE = {  # 1 - AUC
    "occluded": {"people": (0.30, 0.30, 0.45), "V-JEPA-H, maximum": (0.28, 0.30, 0.44)},
    "visible": {"people": (0.18, 0.21, 0.27), "V-JEPA-H, maximum": (0.08, 0.12, 0.08)},
}
TOLD_WAYS = {
    "mean": "mean over time",
    "max": "worst frame",
    "window": "worst window",
    "objects": "mean over time, of pixels that show an object",
}


def report_runs(runs: Sequence[Finished]) -> list[Section]:
    groups = group_runs(runs, MODELS, TASK)
    config: Config = runs[0].config
    quadruplet, inside = film_figures(groups)
    drawn = (
        f" SCOFF's schemata are drawn {config.draws} times, as in training, and a pixel is as "
        "likely as it is on average; this was not fixed in advance."
        if config.draws
        else ""
    )
    tables = [error_table(groups, "occluded", "relative"), interval_table(groups)]
    if config.visible_clips:
        tables.append(error_table(groups, "visible", "relative"))
    more = [
        other_scores(groups),
        *(error_table(groups, v, "absolute") for v in visibilities(groups)),
        *(pairwise_table(groups, v) for v in visibilities(groups)),
    ]
    return [
        Section(
            "Possible or not",
            "A movie is as plausible as the mean over time of its log-likelihood, which was fixed "
            f"in advance; the first {config.context} frames do not count.{drawn} Relative error: "
            "how often the two impossible movies of four are together the more plausible. 0.5 is "
            f"chance. {config.test_clips:,} occluded quadruplets of each block, generated. They "
            "consist of the same frames whether possible or not, so that only memory tells them "
            f"apart. Mean and standard deviation over seeds.{left_out(groups)}",
            tables,
            quadruplet,
        ),
        Section(
            "Where it fails",
            "Relative error by movement and by how long the object is hidden, in frames of the "
            "whole movie, and the share of pairs told apart where the object of O1 vanishes and "
            "where it appears (1 is perfect).",
            [movement_table(groups), hiding_table(groups), direction_table(groups)],
        ),
        Section(
            "Other scores and measures",
            "Absolute error: 1 - AUC over all movies of a block, each judged by itself. Pairwise: "
            "the share of impossible movies that are less plausible than the possible one that "
            "starts alike.",
            more,
        ),
        *following(groups, inside),
        Section(
            "Training",
            f"Validated on {config.valid_clips:,} possible movies, in nats a pixel. Seconds "
            "include validation.",
            [training_table(groups)],
            [learning_curves(groups, "valid/nll", "nats a pixel")],
        ),
    ]


def visibilities(groups: Groups) -> list[str]:
    first = next(iter(groups.values()))[0]
    return list(dict.fromkeys(name.split("/")[0] for name in first.evaluation["tests"]))


def estimate(group: Sequence[Finished], test: str, way: str, measure: str) -> Estimate:
    return Estimate.of([run.evaluation["tests"][test][way][measure][0] for run in group])


def error_table(groups: Groups, visibility: str, measure: str) -> Table:
    """Models, judges that learn nothing, and what was published, by block"""
    tests = [f"{visibility}/{block}" for block in BLOCKS]
    rows: list[list[Any]] = [
        [name, *(estimate(group, test, "mean", measure) for test in tests)]
        for name, group in groups.items()
    ]
    models = range(len(rows))
    rows += [["without learning"], ["chance", *(0.5 for _ in BLOCKS)]]
    first = next(iter(groups.values()))[0]
    for name, found in first.evaluation["references"].items():
        rows.append([name, *(found[test][measure][0] for test in tests)])
    published: Mapping[str, Sequence[float | Estimate]] = (
        PUBLISHED if measure == "relative" else ABSOLUTE
    )[visibility]
    rows.append(["on the original benchmark"])
    rows += [[name, *values] for name, values in published.items()]
    what = "Relative error" if measure == "relative" else "Absolute error (1 - AUC)"
    return Table(
        f"{what}, {visibility}",
        ["", *BLOCKS],
        rows,
        note="Copies predict a frame by one so many frames before it. The tracker follows masks "
        "at constant speed; the oracle knows the state.",
        highlight=Lowest(range(1, 1 + len(BLOCKS)), models),
    )


def interval_table(groups: Groups) -> Table:
    """How sure these are, and whether the first model is ahead on the same quadruplets"""
    name, *others = groups
    rows = [[model, *intervals(groups[model])] for model in groups]
    if others:
        rows += [[f"{name}, less others"]]
        rows += [[model, *intervals(groups[name], groups[model])] for model in others]
    return Table(
        "Relative error, occluded, with 95 % intervals over quadruplets",
        ["", *BLOCKS],
        rows,
        note="Of each quadruplet the mean over seeds. Differences are between the same "
        f"quadruplets; below zero: {name} is better.",
    )


def intervals(group: Sequence[Finished], other: Sequence[Finished] = ()) -> list[str]:
    """By block, of a model's errors, or of how much larger they are than another's"""
    cells = []
    for block in BLOCKS:
        errors = mean_errors(group, block)
        if other:
            errors = errors - mean_errors(other, block)
        found = bootstrap(lambda drawn, e=errors: e[drawn].mean(1), len(errors))
        cells.append(f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    return cells


def mean_errors(group: Sequence[Finished], block: str) -> torch.Tensor:
    """Of each quadruplet, over seeds  [N]"""
    errors = [run.evaluation["errors"][f"occluded/{block}"] for run in group]
    return torch.tensor(errors, dtype=torch.float64).mean(0)


def split_table(
    groups: Groups, title: str, part: str, kinds: Sequence[str], note: str = ""
) -> Table:
    """Occluded relative errors of each block, apart by something"""
    first = next(iter(groups.values()))[0].evaluation[part]
    columns = [
        (block, kind) for block in BLOCKS for kind in kinds if kind in first[f"occluded/{block}"]
    ]
    rows: list[list[Any]] = []
    for name, group in groups.items():
        row: list[Any] = [name]
        for block, kind in columns:
            found = [run.evaluation[part][f"occluded/{block}"][kind] for run in group]
            row.append(Estimate.of([one["relative"][0] for one in found]))
        rows.append(row)
    counts: list[Any] = ["quadruplets"]
    counts += [first[f"occluded/{block}"][kind]["relative"][3] for block, kind in columns]
    return Table(title, ["", *(f"{b}, {k}" for b, k in columns)], [*rows, counts], note)


def movement_table(groups: Groups) -> Table:
    return split_table(groups, "Occluded, by movement", "movements", MOVEMENTS)


def hiding_table(groups: Groups) -> Table:
    note = "The shorter of two occlusions counts."
    return split_table(groups, "Occluded, by frames hidden", "hiding", HIDING, note)


def direction_table(groups: Groups) -> Table:
    tests = [f"{visibility}/O1" for visibility in visibilities(groups)]
    kinds = [(test, kind) for test in tests for kind in ("vanishes", "appears")]
    rows: list[list[Any]] = []
    for name, group in groups.items():
        found = [
            Estimate.of([run.evaluation["directions"][test][kind][0] for run in group])
            for test, kind in kinds
        ]
        rows.append([name, *found])
    columns = ["", *(f"{test.split('/')[0]}, {kind}" for test, kind in kinds)]
    return Table("Pairs told apart in O1, by what the object does first", columns, rows)


def other_scores(groups: Groups) -> Table:
    tests = [f"occluded/{block}" for block in BLOCKS]
    rows: list[list[Any]] = []
    for way in WAYS:
        rows.append([TOLD_WAYS[way]])
        for name, group in groups.items():
            rows.append([name, *(estimate(group, test, way, "relative") for test in tests)])
    return Table("Relative error by other scores, occluded", ["", *BLOCKS], rows)


def pairwise_table(groups: Groups, visibility: str) -> Table:
    tests = [f"{visibility}/{block}" for block in BLOCKS]
    rows = [
        [name, *(estimate(group, test, "mean", "pairwise") for test in tests)]
        for name, group in groups.items()
    ]
    return Table(f"Pairwise accuracy, {visibility}", ["", *BLOCKS], rows)


def following(groups: Groups, figures: Sequence[Any]) -> list[Section]:
    known = {
        name: [run.evaluation["following"] for run in group]
        for name, group in groups.items()
        if all(run.evaluation.get("following", {}).get("same") is not None for run in group)
    }
    if not known:
        return []
    rows = [
        [name, Estimate.of([one["same"] for one in group]), group[0]["times"]]
        for name, group in known.items()
    ]
    tables = [
        Table(
            "How often the object comes back to the object file that had it",
            ["", "same object file", "times"],
            rows,
            note="Possible occluded movies. Who has the object is told by masks, or attention.",
        ),
        *schema_tables(known),
    ]
    about = "Which object file has the object before and after it was hidden, and which schema "
    about += "that object file chooses meanwhile."
    return [Section("Who follows what is hidden", about, tables, figures)]


def schema_tables(known: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Schemata have no names, so each run has rows of its own"""
    rows: list[list[Any]] = []
    for name, group in known.items():
        for number, one in enumerate(group):
            for state, shares in one.get("schemata", {}).items():
                rows.append([f"{name}, run {number + 1}, object {state}", *shares])
    if not rows:
        return []
    most = max(map(len, rows))
    rows = [[*row, *[None] * (most - len(row))] for row in rows]
    columns = ["", *(str(n) for n in range(1, most))]
    return [Table("Share of schemata that the object's file chooses", columns, rows)]
