"""Rollouts: how they are tested, and how runs are compared by them.

Horizons are counted from 1: the first predicted frame. H horizons, K balls.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from scoff.experiments.blobs import Matches, f1, position_error
from scoff.experiments.measures import or_none
from scoff.experiments.video import MODELS
from scoff.experiments.video_measures import horizon_errors
from scoff.models.video import VideoModel

if TYPE_CHECKING:
    from scoff.experiments.base import Finished
    from scoff.report import Figure, Line, Table

    Groups = Mapping[str, list[Finished]]

# whose errors others are divided by: the first of these that there is
BASELINES = {
    MODELS["gru"]: "the GRU of the same width",
    MODELS["gru-matched"]: "the GRU with as many parameters as SCOFF",
}


class Rollout(NamedTuple):
    errors: Tensor  # [N, H]
    squared: Tensor  # [N, H] mean squared differences of pixels
    frames: Tensor  # [N, H, C, height, width]


def roll_out(model: VideoModel, frames: Tensor, context: int) -> Rollout:
    """From the first `context` frames on to the last  [N, T, C, height, width]"""
    stack = model.options.stack
    future = model(
        frames[:, :context], targets=frames[:, stack:], free=frames.shape[1] - context - 1
    )
    first = context - stack  # of the predictions, the first whose frame is not given
    told = future.frames[:, first:]
    squared = (told - frames[:, context:]).square().mean((2, 3, 4))
    return Rollout(cast(Tensor, future.errors)[:, first:], squared, told)


def describe_rollouts(errors: Tensor, matches: Matches) -> dict[str, list[float | None]]:
    """At each horizon"""
    ahead = horizon_errors(errors)
    return {
        "nll": ahead.each.tolist(),
        "cumulative": ahead.cumulative.tolist(),
        "f1": f1(matches).tolist(),
        "position": [*map(or_none, position_error(matches).tolist())],
    }


# --- report


def rollout_table(groups: "Groups", horizons: Sequence[int]) -> "Table":
    """Cumulative errors, balls found and how far off they are, where the clips go so far."""
    parts = {"cumulative": "error up to", "f1": "F1 at", "position": "pixels off at"}
    return horizon_table("Rollouts, by number of frames", groups, horizons, parts)


def squared_table(groups: "Groups", horizons: Sequence[int]) -> "Table":
    parts = {"squared_cumulative": "up to"}
    return horizon_table("Squared errors, by number of frames", groups, horizons, parts)


def horizon_table(
    title: str, groups: "Groups", horizons: Sequence[int], parts: Mapping[str, str]
) -> "Table":
    """At each horizon all parts, by their keys in the evaluation"""
    from scoff.report import Table

    shown = within(groups, horizons)
    rows: list[list[Any]] = []
    for name, group in groups.items():
        ahead = [run.evaluation["rollout"] for run in group]
        cells = [estimate_known([a[key][n - 1] for a in ahead]) for n in shown for key in parts]
        rows.append([name, *cells])
    return Table(title, ["", *(f"{part} {n}" for n in shown for part in parts.values())], rows)


def has_squared(groups: "Groups") -> bool:
    """Not if some were tested before they were told."""
    return all("squared" in run.evaluation["rollout"] for group in groups.values() for run in group)


def within(groups: "Groups", horizons: Sequence[int]) -> list[int]:
    """Those horizons that there are, and the last instead of those beyond it."""
    last = len(next(iter(groups.values()))[0].evaluation["rollout"]["nll"])
    return sorted({min(n, last) for n in horizons})


def estimate_known(values: Sequence[float | None]) -> Any:
    from scoff.report import Estimate

    known = [value for value in values if value is not None]
    return Estimate.of(known) if len(known) == len(values) else None


def pick_baseline(*worlds: "Groups") -> str:
    """One for all of them, so that their errors are divided by the same model's."""
    shared = (name for name in BASELINES if all(name in groups for groups in worlds))
    return next(shared, MODELS["gru"])


def why_not_relative(groups: "Groups") -> str:
    """A paragraph that says why errors are not divided by those of a GRU, if they are not."""
    if pick_baseline(groups) in groups:
        return ""
    several = any(MODELS[group[0].config.model] in BASELINES for group in groups.values())
    reason = "there are several kinds of it" if several else "there is none among these runs"
    return f"\n\nErrors are not divided by those of a GRU, for {reason}."


def relative_errors(groups: "Groups", key: str, baseline: str) -> dict[str, list[list[float]]]:
    """Each group's errors at each horizon, a list over seeds, divided by the baseline's.

    By those of the same seed, or by their mean where the seeds are not the same. Without a baseline
    there is nothing to divide by, and the result is empty.
    """
    if baseline not in groups:
        return {}
    base = {run.config.seed: run.evaluation["rollout"][key] for run in groups[baseline]}
    mean = [sum(values) / len(base) for values in zip(*base.values(), strict=True)]
    found: dict[str, list[list[float]]] = {}
    for name, group in groups.items():
        by_seed = [
            [a / b for a, b in zip(run.evaluation["rollout"][key], own, strict=True)]
            for run in group
            for own in [base.get(run.config.seed, mean)]
        ]
        found[name] = [list(values) for values in zip(*by_seed, strict=True)]
    return found


def relative_curve(groups: "Groups", context: int, squared: bool = False) -> "list[Figure]":
    """Empty if there is no baseline, or nothing but it."""
    from scoff.experiments.comparison import spread_line
    from scoff.report import lines

    baseline = pick_baseline(groups)
    relative = relative_errors(groups, "squared" if squared else "nll", baseline)
    if len(relative) < 2:
        return []
    what = "Squared error" if squared else "Error"
    figure = lines(
        [spread_line(name, range(1, len(values) + 1), values) for name, values in relative.items()],
        title=f"{what} relative to {baseline}",
        caption=f"Of each frame of rollouts after {context} given frames: the {what.lower()} "
        f"divided by that of {BASELINES[baseline]}, seed by seed. Below 1 is better.",
        x_label="predicted frame",
        y_label="times this GRU's error",
    )
    return [figure]


def error_curve(
    groups: "Groups", context: int, squared: bool = False, mean_picture: float | None = None
) -> "Figure":
    """`mean_picture`: the error of one who knows no more than how often each pixel is lit."""
    from scoff.report import Line, lines

    series = by_horizon(groups, "squared" if squared else "nll")
    if mean_picture is not None:
        x = series[0].x
        series.append(Line("mean picture", x, [mean_picture] * len(x), dashed=True, marker=False))
    return lines(
        series,
        title="Squared error of rollouts" if squared else "Error of rollouts",
        caption=f"Of each frame, by itself, after {context} given frames.",
        x_label="predicted frame",
        y_label="mean square of a pixel's error" if squared else "nats a pixel",
        y_log=True,
    )


def by_horizon(groups: "Groups", key: str) -> "list[Line]":
    from scoff.experiments.comparison import spread_line

    series = []
    for name, group in groups.items():
        values = list(zip(*(run.evaluation["rollout"][key] for run in group), strict=True))
        series.append(spread_line(name, range(1, len(values) + 1), values))
    return series


def f1_curve(
    groups: "Groups", context: int, reach: float, still: Sequence[float] | None = None
) -> "Figure":
    """`still`: what is found if the last given frame stays as it is."""
    from scoff.report import Line, lines

    # of files without radii, balls behind a curtain were once not looked for
    known = {
        name: [run for run in group if None not in run.evaluation["rollout"]["f1"]]
        for name, group in groups.items()
    }
    series = by_horizon({name: group for name, group in known.items() if group}, "f1")
    if still is not None:
        stays = Line("last given frame", range(1, len(still) + 1), still, dashed=True, marker=False)
        series.append(stays)
    return lines(
        series,
        title="Balls found in rollouts",
        caption=f"After {context} given frames. Found: a spot within {reach:.2g} pixels of the "
        "ball.",
        x_label="predicted frame",
        y_label="F1",
    )
