"""What is told of agents in the maze."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scoff.experiments.base import Finished
from scoff.experiments.comparison import group_runs, spread_line
from scoff.experiments.maze_agents import MODELS
from scoff.experiments.maze_pictures import goal, trajectory, video
from scoff.experiments.maze_walks import CONTENTS
from scoff.report import Estimate, Figure, Line, Section, Table, curves, lines

# Success in rooms larger than those of training, in percent; neither seeds nor spread are told.
PAPER = {"SCOFF": 82.0, "GRU": 56.0, "GRU, as many parameters as SCOFF": 74.0}
PAPER_SIZES = {10, 12}  # walls counted, or not
# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = ["rooms", "doors_open", "test_rooms", "test_mazes"]
WAYS = {"drawn": "actions drawn", "likeliest": "likeliest action"}

Groups = Mapping[str, list[Finished]]


def report(runs: Sequence[Finished]) -> Sequence[Section]:
    groups = group_runs(runs, MODELS, TASK)
    config = runs[0].config
    learned = ", then ".join(map(str, config.rooms))
    return [
        Section(
            "Success by size of the rooms",
            f"In {config.test_mazes:,} mazes of each size, made by minigrid. Sizes count walls: a "
            f"room of 8 has 6 by 6 cells to stand on. Learned in rooms of {learned}. The "
            "paper's larger rooms are 10 by 10; whether that counts walls (10) or not (12) is not "
            "told, nor whether actions were drawn.",
            tables=[success_table(groups), steps_table(groups)],
            figures=[by_size(groups, way) for way in WAYS],
        ),
        *episodes(groups),
        *schemata(groups),
        Section(
            "Training",
            "Frames are steps of all agents together. Seconds include validation.",
            tables=[training_table(groups)],
            figures=[
                learning(groups, "train/success", "Success in training", "share of episodes"),
                learning(groups, "valid/success", "Success in validation", "share of episodes"),
            ],
        ),
    ]


def sizes(groups: Groups) -> list[int]:
    first = next(iter(groups.values()))[0]
    return sorted(map(int, first.evaluation["agent"]["drawn"]))


def results(run: Finished, way: str) -> Mapping[str, Mapping[str, Any]]:
    return run.evaluation["agent"][way]


def success_table(groups: Groups) -> Table:
    columns = sizes(groups)
    rows: list[list[Any]] = []
    for way, told in WAYS.items():
        rows.append([f"here, {told}"])
        for name, group in groups.items():
            rows.append([name, *(percent(group, way, size) for size in columns)])
    rows.append(["without learning"])
    for name, found in references(groups).items():
        rows.append([name, *(100 * found[str(size)]["success"] for size in columns)])
    if PAPER_SIZES.intersection(columns):
        rows.append(["in the paper, 10 by 10"])
    for name, value in PAPER.items() if PAPER_SIZES.intersection(columns) else ():
        rows.append([name, *(value if size in PAPER_SIZES else None for size in columns)])
    header = ["", *(f"rooms of {size}" for size in columns)]
    return Table("Episodes that reached the object, in percent", header, rows)


def percent(group: Sequence[Finished], way: str, size: int) -> Estimate:
    return Estimate.of([100 * results(run, way)[str(size)]["success"] for run in group])


def references(groups: Groups) -> Mapping[str, Mapping[str, Any]]:
    """The same for all runs"""
    return next(iter(groups.values()))[0].evaluation["references"]


def steps_table(groups: Groups) -> Table:
    columns = sizes(groups)
    rows: list[list[Any]] = []
    for way, told in WAYS.items():
        rows.append([f"here, {told}"])
        for name, group in groups.items():
            rows.append([name, *(steps(group, way, size) for size in columns)])
    rows.append(["without learning"])
    for name, found in references(groups).items():
        rows.append([name, *(found[str(size)]["steps"] for size in columns)])
    header = ["", *(f"rooms of {size}" for size in columns)]
    note = "Mean over successful episodes alone, so that a policy that fails at all that is far "
    note += "looks quick."
    return Table("Steps to the object", header, rows, note)


def steps(group: Sequence[Finished], way: str, size: int) -> Estimate | None:
    found = [results(run, way)[str(size)]["steps"] for run in group]
    return None if None in found else Estimate.of(found)


def by_size(groups: Groups, way: str) -> Figure:
    x = sizes(groups)
    series = [
        spread_line(
            name, x, [[100 * results(run, way)[str(s)]["success"] for run in group] for s in x]
        )
        for name, group in groups.items()
    ]
    for name, found in references(groups).items():
        y = [100 * found[str(size)]["success"] for size in x]
        series.append(Line(name, x, y, dashed=True, marker=False))
    learned = ", ".join(map(str, next(iter(groups.values()))[0].config.rooms))
    return lines(
        series,
        title=f"Success against room size, {WAYS[way]}",
        caption=f"Learned in rooms of {learned}.",
        x_label="room size, walls included",
        y_label="percent of episodes",
    )


# --- one episode


def episodes(groups: Groups) -> list[Section]:
    figures = []
    for name, group in groups.items():
        run = group[0]
        seen, size = run.evaluation["example"], run.evaluation["example_size"]
        how = "reached" if seen["success"] else "not reached"
        told = f"{goal(seen).capitalize()}, {how} after {len(seen['actions'])} steps; "
        told += f"rooms of {size}, seed {run.config.seed}."
        use = run.evaluation.get("schemata")
        if use is not None:
            caption = f"{told} At each step: the maze, lighter where the agent sees, what it sees, "
            caption += "and the schema that it chose then."
            count = len(use["counts"][0])
            figures.append(trajectory(seen, size, count, f"{name}: an episode", caption))
        figures.append(video(seen, size, f"{name}: a video of an episode", told))
    text = (
        "Of the first 64 test mazes, the one whose successful episode was of middle length, with "
        "drawn actions."
    )
    return [Section("An episode", text, figures=figures)]


# --- schemata


def schemata(groups: Groups) -> list[Section]:
    rows: list[list[Any]] = []
    tables = []
    for name, group in groups.items():
        known = [run.evaluation["schemata"] for run in group if "schemata" in run.evaluation]
        if not known:
            continue
        share = [use["bits"] / (use["bits_at_most"] or math.nan) for use in known]
        in_use = Estimate.of([use["bits_in_use"] for use in known])
        bits = Estimate.of([use["bits"] for use in known])
        rows.append([name, bits, Estimate.of(share), in_use])
        tables.append(use_table(f"{name}, seed {group[0].config.seed}", known[0]["counts"]))
    if not rows:
        return []
    summary = Table(
        "Information of the chosen schema about what is in view",
        ["", "bits", "share of what there is to know", "bits in use"],
        rows,
        note="Mutual information of the schema of an updated object file and the content of the "
        "view; its share of the entropy of contents; and the entropy of what is chosen.",
    )
    text = (
        "Each moment counts once, as the first of these that is in view: the target, a closed "
        "door, an open door, a wall, nothing. The paper shows by an example that schemata change "
        "with what is seen. A share of 0 would be a choice that has nothing to do with it."
    )
    return [Section("Schemata and what is in view", text, [summary, *tables])]


def use_table(name: str, counts: Sequence[Sequence[float]]) -> Table:
    """How often each schema was chosen, in percent of the moments with a content in view"""
    whole = sum(map(sum, counts)) or math.nan
    rows: list[list[Any]] = []
    for content, row in zip(CONTENTS, counts, strict=True):
        total = sum(row)
        shares = [100 * n / total if total else None for n in row]
        rows.append([content, 100 * total / whole, *shares])
    columns = ["in view", "percent of moments", *(f"schema {n + 1}" for n in range(len(counts[0])))]
    return Table(f"Schemata by what is in view, in percent: {name}", columns, rows)


# --- training


def training_table(groups: Groups) -> Table:
    rows = []
    for name, group in groups.items():
        config = group[0].config
        frames = min(run.evaluation["steps"] for run in group) * frames_of_a_step(config)
        seconds = [run.evaluation["seconds"]["training"] for run in group]
        speed = Estimate.of([frames / s for s in seconds])
        parameters = group[0].evaluation["parameters"]
        rows.append([name, len(group), parameters, frames, Estimate.of(seconds), speed])
    columns = ["", "seeds", "parameters", "frames", "seconds", "frames a second"]
    return Table("Size and time", columns, rows)


def frames_of_a_step(config: Any) -> int:
    return config.batch_size * config.rollout_steps


def learning(groups: Groups, key: str, title: str, y_label: str) -> Figure:
    return curves(
        {
            name: [
                [
                    (r["step"] * frames_of_a_step(run.config) / 1e6, r[key])
                    for r in run.records
                    if key in r and not math.isnan(r[key])
                ]
                for run in group
            ]
            for name, group in groups.items()
        },
        title=title,
        caption=f"Rooms of {stages(groups)}.",
        x_label="million frames",
        y_label=y_label,
        y_log=False,
    )


def stages(groups: Groups) -> str:
    config = next(iter(groups.values()))[0].config
    starts = [start * frames_of_a_step(config) / 1e6 for start in config.starts]
    return ", ".join(
        f"{size} from {start:.3g} million on" if start else str(size)
        for size, start in zip(config.rooms, starts, strict=True)
    )
