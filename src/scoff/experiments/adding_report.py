"""What is told of models that add."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scoff.experiments.adding import MODELS, TASK, Config
from scoff.experiments.base import Finished
from scoff.experiments.comparison import group_runs, learning_curves, spread_line
from scoff.report import Estimate, Figure, Line, Lowest, Section, Table, affinity, lines

# Mean test set error at length 200, by number of operands. The paper does not say which error; the
# training script of RIMs, by the same authors, prints the mean squared error times 3.125.
PAPER: dict[str, dict[int, float]] = {
    "LSTM": {2: 0.8731, 3: 1.3017, 4: 1.6789, 5: 2.0334, 8: 4.8872, 9: 7.3730, 10: 11.3595},
    "RIMs": {2: 0.0007, 3: 0.0009, 4: 0.0014, 5: 0.0045, 8: 0.0555, 9: 0.1958, 10: 0.8904},
    "SCOFF": {2: 0.0005, 3: 0.0007, 4: 0.0013, 5: 0.0030, 8: 0.0191, 9: 0.0379, 10: 0.0539},
}


def report(runs: Sequence[Finished]) -> Sequence[Section]:
    groups = group_runs(runs, MODELS, TASK)
    config: Config = runs[0].config
    return [
        Section(
            "Error by number of operands",
            "Mean squared error on the test sequences. The trivial predictors say the same "
            "whatever they read: the mean of the training targets, or, told how many operands "
            "there are, half of that. Errors near theirs mean that nothing was learned which holds "
            "at that length.",
            tables=[error_table(groups, length, config) for length in config.test_lengths],
            figures=[by_operands(groups, config), by_length(groups, config)],
        ),
        Section(
            "Training",
            f"Validated on {config.valid_length or config.length} numbers with "
            f"{' or '.join(map(str, config.valid_operands or config.operands))} operands. Seconds "
            "include validation.",
            tables=[training_table(groups)],
            figures=[learning_curves(groups, "valid/mse", "mean squared error")],
        ),
        *schema_sections(groups),
    ]


def error(run: Finished, length: int, operands: int) -> float:
    return run.evaluation["errors"][str(length)][str(operands)]


def trivial(config: Config) -> dict[str, dict[int, float]]:
    """Expected squared errors of answers that do not depend on what is read."""
    mean = sum(config.operands) / len(config.operands) / 2
    # a sum of n uniform numbers has the mean n / 2 and the variance n / 12
    return {
        "mean of training targets": {n: n / 12 + (n / 2 - mean) ** 2 for n in config.test_operands},
        "half the number of operands": {n: n / 12 for n in config.test_operands},
    }


def error_table(groups: Mapping[str, list[Finished]], length: int, config: Config) -> Table:
    counts = config.test_operands
    rows: list[list[Any]] = [["ours"]]
    for name, group in groups.items():
        errors = [Estimate.of([error(run, length, n) for run in group]) for n in counts]
        rows.append([name, *errors])
    ours = range(1, len(rows))
    if length == 200:
        rows.append(["in the paper"])
        rows += [[name, *(line.get(n) for n in counts)] for name, line in PAPER.items()]
    rows.append(["trivial predictors"])
    rows += [[name, *line.values()] for name, line in trivial(config).items()]
    return Table(
        f"Mean squared error on {length} numbers, by how many of them are to be added (training: "
        f"{config.length} numbers, {' or '.join(map(str, config.operands))} to be added)",
        ["", *map(str, counts)],
        rows,
        highlight=Lowest(range(1, len(counts) + 1), ours),
    )


def training_table(groups: Mapping[str, list[Finished]]) -> Table:
    rows = []
    for name, group in groups.items():
        first = group[0]
        seconds = Estimate.of([run.evaluation["seconds"]["training"] for run in group])
        valid = Estimate.of([run.evaluation["valid"]["mse"] for run in group])
        steps = min(run.evaluation["steps"] for run in group)
        if steps < first.config.steps:
            steps = f"{steps:,} of {first.config.steps:,}"
        sizes = [first.evaluation["parameters"], steps, first.config.batch_size]
        rows.append([name, len(group), *sizes, seconds, valid])
    columns = ["", "seeds", "parameters", "steps", "batch", "seconds", "validation error"]
    return Table("Size, time and validation error", columns, rows)


def by_operands(groups: Mapping[str, list[Finished]], config: Config) -> Figure:
    length, counts = config.test_lengths[0], config.test_operands
    series = [
        spread_line(name, counts, [[error(run, length, n) for run in group] for n in counts])
        for name, group in groups.items()
    ]
    if length == 200:
        paper = PAPER["SCOFF"]
        known = [n for n in counts if n in paper]
        series.append(Line("SCOFF, paper", known, [paper[n] for n in known], dashed=True))
    floor = trivial(config)["half the number of operands"]
    series.append(Line("trivial", counts, [floor[n] for n in counts], dashed=True, marker=False))
    trained = " or ".join(map(str, config.operands))
    return lines(
        series,
        title=f"Error against number of operands, {length} numbers",
        caption=f"Trained with {trained} operands among {config.length} numbers. Trivial: half "
        "the number of operands.",
        x_label="operands",
        y_label="mean squared error",
        y_log=True,
    )


def by_length(groups: Mapping[str, list[Finished]], config: Config) -> Figure:
    n = config.test_operands[0]
    series = []
    for name, group in groups.items():
        start = [run.evaluation["valid"].get(f"mse_{n}") for run in group]
        known = all(value is not None for value in start) and not config.valid_length
        x = [*([config.length] if known else []), *config.test_lengths]
        y = [*([start] if known else [])]
        y += [[error(run, length, n) for run in group] for length in config.test_lengths]
        series.append(spread_line(name, x, y))
    return lines(
        series,
        title=f"Error against length, {n} operands",
        caption=f"Trained at length {config.length}.",
        x_label="numbers in the sequence",
        y_label="mean squared error",
        x_log=True,
        y_log=True,
    )


def schema_sections(groups: Mapping[str, list[Finished]]) -> list[Section]:
    rows, figures = [], []
    for name, group in groups.items():
        known = [run for run in group if "schemata" in run.evaluation]
        if not known:
            continue
        use = [run.evaluation["schemata"] for run in known]

        def share(key: str, use: list[dict[str, Any]] = use) -> Estimate:
            return Estimate.of([u[key] / (u[f"{key}_at_most"] or math.nan) for u in use])

        bits = Estimate.of([u["bits"] for u in use])
        rows.append([name, bits, share("bits"), share("pattern_bits")])
        seen = known[0].evaluation["example"]
        marks = ["operand" if operand else "" for operand in seen["is_operand"]]
        figures.append(
            affinity(
                seen["probs"],
                columns=seen["values"],
                marks=marks,
                active=seen["active"],
                title=f"{name}: affinity of object files to schemata",
                caption=f"Eight numbers, two of them to be added; seed {known[0].config.seed}. "
                f"Answer {seen['answer']:.3f}, sum {seen['target']:.3f}. Over the test set the "
                f"schemata were chosen at operands in {percent(use[0]['use_at_operands'])}, "
                f"elsewhere in {percent(use[0]['use_elsewhere'])} of the cases.",
            )
        )
    if not rows:
        return []
    columns = ["", "bits", "share of what there is to know", "share, all choices of a step"]
    table = Table(
        "Mutual information between 'is an operand' and the chosen schema",
        columns,
        rows,
        note="Over the test set at the first test length, of object files that are updated. All "
        "choices of a step: who was updated and which schema each took, together. Share: of the "
        "entropy of 'is an operand'.",
    )
    text = (
        "The paper reports that one schema is chosen at operands and another elsewhere. A share of "
        "1 would be just that, 0 that the choice has nothing to do with operands."
    )
    return [Section("Schemata at operands and elsewhere", text, [table], figures)]


def percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.0%}" for share in shares)
