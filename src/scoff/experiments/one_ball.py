"""What experiments with one ball share: whether schemata stand for its ways to move."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import scoff
from scoff.experiments.blobs import Matches, find_blobs, match_blobs, true_centres
from scoff.experiments.measures import entropy, joint_counts, or_none
from scoff.experiments.rollouts import (
    error_curve,
    estimate_known,
    f1_curve,
    relative_curve,
    rollout_table,
    why_not_relative,
)
from scoff.experiments.video import VideoConfig, training_table
from scoff.experiments.video_measures import agreement, owners, schema_use, to_pixels
from scoff.models.video import VideoModel, VideoTrace
from scoff.worlds.dynamics import RADIUS, Clips

if TYPE_CHECKING:
    from scoff.experiments.base import Finished
    from scoff.experiments.films import Pictures
    from scoff.report import Section, Table
    from scoff.report.films import Lane

MOST_BLOBS = 4  # that are looked for in a frame, which has one


def find_ball(frames: Tensor, identity: Tensor) -> Matches:
    """[N, T, 1, H, W], [N, T, H, W]"""
    found = find_blobs(frames[:, :, 0], RADIUS, MOST_BLOBS)
    return match_blobs(found, true_centres(identity, 1), reach=RADIUS)


def least_errors(frames: Tensor, doubt: float) -> Tensor:
    """What it costs to predict frames that are known, as well as doubt allows: grey pixels are
    uncertain by themselves  [N, T, 1, H, W] -> [N, T]"""
    told = frames.clamp(doubt, 1 - doubt)
    return F.binary_cross_entropy(told, frames, reduction="none").mean((2, 3, 4))


class Use(NamedTuple):
    """How often schemata are chosen."""

    by_holder: Tensor  # [S, D] with each dynamics, by the object file that has the ball
    by_all: Tensor  # [S, D] by any that is updated
    overall: Tensor  # [S]


def count_use(model: VideoModel, clips: Clips, dynamics: int, burn_in: int) -> Use:
    """The first `burn_in` predictions do not count, for there is nothing yet to choose by."""
    trace = model.trace(clips.frames[:, :-1])
    layer = cast(scoff.Trace, trace.layer)
    schemata = cast(scoff.SCOFF, model.rnn).num_schemata
    first = model.options.stack - 1
    in_force = clips.dynamics[:, first:-1]
    holder = cast(Tensor, holders(model, trace, clips.identity))
    whose = holder.clamp(min=0)
    chosen = layer.schema.gather(-1, whose)

    def pairs(schema: Tensor, where: Tensor) -> Tensor:
        where = where.clone()
        where[:, :burn_in] = False
        true = in_force[..., None].expand_as(schema)
        return joint_counts(schema[where], true[where], schemata, dynamics).cpu()

    return Use(
        pairs(chosen, (holder >= 0) & layer.active.gather(-1, whose)),
        pairs(layer.schema, layer.active),
        schema_use(layer.schema, layer.active, schemata).cpu(),
    )


def holders(model: VideoModel, trace: VideoTrace, shown: Tensor) -> Tensor | None:
    """Which object file has what is 1; -1: it is not seen  [N, T, H, W] -> [N, T - stack, 1]"""
    masks, attention = trace.decoded.masks, trace.attention
    if masks is None and attention is None:
        return None
    at = held_from(model, trace)
    seen = shown[:, at : at + shown.shape[1] - model.options.stack].long()
    weights = (
        to_pixels(cast(Tensor, attention), model.options.frame_size) if masks is None else masks
    )
    return owners(weights, seen, 1)


def held_from(model: VideoModel, trace: VideoTrace) -> int:
    """First frame of `holders`: a mask is painted for the next, attention is paid to this one."""
    return model.options.stack - (trace.decoded.masks is None)


def describe_use(parts: Sequence[Use]) -> dict[str, Any]:
    use = Use(*(torch.stack(counts).sum(0) for counts in zip(*parts, strict=True)))
    holder, everyone = agreement(use.by_holder), agreement(use.by_all)
    return {
        "information": or_none(holder.information),
        "accuracy": or_none(holder.accuracy),
        "match": holder.match,
        "information_all": or_none(everyone.information),
        "accuracy_all": or_none(everyone.accuracy),
        "counts": use.by_holder.tolist(),
        "bits": entropy(use.overall),
    }


def with_schemata(groups: "Mapping[str, list[Finished]]") -> "dict[str, list[Finished]]":
    """Those runs whose model has any."""
    known = {
        name: [run for run in group if "schemata" in run.evaluation]
        for name, group in groups.items()
    }
    return {name: group for name, group in known.items() if group}


def agreement_table(groups: "Mapping[str, list[Finished]]") -> "Table":
    from scoff.report import Table

    keys = ("information", "accuracy", "information_all", "accuracy_all", "bits")
    rows = [
        [
            name,
            *(estimate_known([run.evaluation["schemata"][key] for run in group]) for key in keys),
        ]
        for name, group in groups.items()
    ]
    return Table(
        "Agreement of the chosen schema and the true dynamics",
        ["", "information", "accuracy", "information, all", "accuracy, all", "bits in use"],
        rows,
        note="On the test set: normalised mutual information, and the share of steps that the best "
        "one-to-one match gets right, of the object file that has the ball, where it is updated, "
        "and of all that are. Bits: entropy of what is chosen.",
    )


def seeds_table(groups: "Mapping[str, list[Finished]]") -> "Table":
    """A correspondence counts only if every seed finds it."""
    from scoff.report import Table

    rows: list[list[Any]] = []
    for name, group in groups.items():
        for run in sorted(group, key=lambda run: run.config.seed):
            use = run.evaluation["schemata"]
            pairs = zip(use["match"], use["counts"], strict=True)
            match = ", ".join(str(d + 1) if d >= 0 and n[d] else "none" for d, n in pairs)
            rows.append(
                [f"{name}, seed {run.config.seed}", use["accuracy"], use["information"], match]
            )
    columns = ["", "accuracy", "information", "dynamics of schema 1, 2, ..."]
    return Table("Agreement in each seed", columns, rows)


def dynamics_lane(run: "Finished", dynamics: Tensor, names: Sequence[str]) -> "Lane":
    """Which of the named dynamics brings about the frame after each  [T]

    In the colour of the schema that stands for it, so that a choice that agrees looks the same.
    """
    from scoff.experiments.films import colour_name
    from scoff.report.films import Lane

    use = run.evaluation["schemata"]
    numbers = dynamics_colours(use["match"], use["counts"])
    told = []
    for name, number in zip(names, numbers, strict=True):
        has_schema = number < len(use["match"])
        told.append(f"{name} {colour_name(number)}{'' if has_schema else ' (no schema)'}")
    return Lane(
        "dynamics",
        [numbers[d] for d in dynamics.tolist()],
        words=dict(zip(numbers, names, strict=True)),
        legend=f"Dynamics are in the colour of the schema that matches best: {', '.join(told)}.",
    )


def dynamics_colours(match: Sequence[int], counts: Sequence[Sequence[int]]) -> list[int]:
    """For each dynamics the schema that stands for it, or else another of other colour.

    Args:
        match: as in Agreement.
        counts: [S][D], of which it was made. A match that never occurs is none.
    """
    from scoff.report.films import PALETTE

    schema = {d: s for s, d in enumerate(match) if d >= 0 and counts[s][d]}
    taken = {s % len(PALETTE) for s in schema.values()}
    spare = (n for n in itertools.count(len(match)) if n % len(PALETTE) not in taken)
    return [schema[d] if d in schema else next(spare) for d in range(len(counts[0]))]


def closing_sections(
    groups: "Mapping[str, list[Finished]]",
    config: VideoConfig,
    horizons: Sequence[int],
    drawn: "Pictures",
) -> "list[Section]":
    """Object files, rollouts and training, of either experiment"""
    from scoff.experiments.comparison import learning_curves
    from scoff.experiments.films import left_out
    from scoff.report import Section

    shares = [*itertools.chain(*drawn.shares)]
    inside = Section(
        "Object files",
        "What each of them, or each module of RIMs, reads of a true frame, and what it paints of "
        "the next.",
        figures=shares,
    )
    return [
        *([inside] if shares else []),
        Section(
            "Rollouts",
            f"From {config.context} frames on, each frame is predicted from the one before. The "
            "cross-entropy of a blurred picture is low: read the share of balls found (F1) and how "
            f"far off they are beside it.{why_not_relative(groups)}{left_out(groups)}",
            tables=[rollout_table(groups, horizons)],
            figures=[
                error_curve(groups, config.context),
                *relative_curve(groups, config.context),
                f1_curve(groups, config.context, RADIUS),
                *drawn.rollouts,
            ],
        ),
        Section(
            "Training",
            f"Validated on {config.valid_clips:,} clips. Seconds include validation.",
            tables=[training_table(groups)],
            figures=[learning_curves(groups, "valid/nll", "nats a pixel")],
        ),
    ]
