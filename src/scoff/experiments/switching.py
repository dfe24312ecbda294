"""One ball that moves in one of two ways and changes from one to the other on the way.

It goes to and fro, horizontally or vertically; two bulbs in a corner show which. The paper (section
"Single object with switching dynamics", appendix "Switching Dynamics"): schemata and ways to move
correspond one to one, with one object file and with six, and the next frame is predicted precisely
even just after a change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

import scoff
from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.blobs import (
    Matches,
    f1,
    find_blobs,
    match_blobs,
    position_error,
    true_centres,
)
from scoff.experiments.measures import entropy, joint_counts
from scoff.experiments.video import (
    MODELS,
    VideoConfig,
    VideoTask,
    chunks,
    next_frame_errors,
    training_table,
)
from scoff.experiments.video_measures import (
    agreement,
    horizon_errors,
    owners,
    schema_use,
    switch_errors,
    to_pixels,
)
from scoff.models.video import VideoModel, VideoTrace
from scoff.worlds.dynamics import FLOOR, RADIUS, Clips, switching_dynamics
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Figure, Section, Table

# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = ["frames", "stack", "train_clips", "valid_clips", "test_clips", "data_seed", "context"]

DYNAMICS = ("horizontal", "vertical")
BURN_IN = 2  # predictions that do not count, for there is nothing yet to choose by
SETTLE = 5  # frames after a change that are not steady
MOST_BLOBS = 4  # that are looked for in a frame, which has one
SHOWN = 8  # steps of the example


@dataclass(frozen=True)
class Config(VideoConfig):
    stack: int = 5
    """How many of the last frames are read at each step."""
    context: int = 35
    """Frames that are given before a rollout. When the change comes cannot be told, so they should
    reach beyond it."""
    object_files: int = 1
    """Object files of SCOFF, modules of RIMs, memory slots of RMC."""
    active: int = 1
    """How many object files or modules are updated at each step (scoff-sparse, rims)."""
    schemata: int = 2
    """Schemata of SCOFF."""
    hidden_size: int = 100
    """Size of the whole state."""


class SwitchingTask(VideoTask):
    def clips(self, index: Tensor, split: Split) -> Clips:
        return switching_dynamics(self.config.data_seed, index, self.config.frames, split)


# --- evaluation


class Tested(NamedTuple):
    """What a model predicts on some clips; each tensor has these first."""

    errors: Tensor  # [N, T - stack] of next frames
    dynamics: Tensor  # [N, T - stack] that bring them about
    rollout: Tensor  # [N, T - context] errors
    distance: Tensor  # [N, T - context, 1] of the ball in rollouts, and so are those below
    hits: Tensor
    missed: Tensor
    extra: Tensor


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Errors after a change and elsewhere, rollouts, and what schemata have to do with dynamics."""
    assert isinstance(model, VideoModel)
    task = SwitchingTask(config, device)
    tested, used = [], []
    for index in tqdm(chunks(config.test_clips, device), "testing", disable=None):
        clips = task.clips(index, "test")
        tested.append(predict(config, model, clips))
        if isinstance(model.rnn, scoff.SCOFF):
            used.append(count_use(model, clips))
    all_clips = Tested(*(torch.cat(parts) for parts in zip(*tested, strict=True)))
    switch = switch_errors(all_clips.errors, all_clips.dynamics, BURN_IN, SETTLE)
    ahead = horizon_errors(all_clips.rollout)
    matches = Matches(*all_clips[3:])
    result: dict[str, Any] = {
        "valid": task.validate(model),
        "after_change": switch.after.tolist(),
        "steady": switch.steady,
        "rollout": {
            "nll": ahead.each.tolist(),
            "cumulative": ahead.cumulative.tolist(),
            "f1": f1(matches).tolist(),
            # None where no ball was found in any clip
            "position": [x if x == x else None for x in position_error(matches).tolist()],
        },
    }
    if used:
        result["schemata"] = describe_use(used)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        result["example"] = example(model, task.clips(first, "test"))
    return result


def predict(config: Config, model: VideoModel, clips: Clips) -> Tested:
    future = model(
        clips.frames[:, : config.context],
        targets=clips.frames[:, config.stack :],
        free=config.frames - config.context - 1,
    )
    first = config.context - config.stack  # of the predictions, the first whose frame is not given
    return Tested(
        next_frame_errors(model, clips.frames),
        clips.dynamics[:, config.stack - 1 : -1],
        cast(Tensor, future.errors)[:, first:],
        *find_ball(future.frames[:, first:], clips.identity[:, config.context :]),
    )


def find_ball(frames: Tensor, identity: Tensor) -> Matches:
    """Above the floor, where there are no bulbs  [N, T, 1, H, W], [N, T, H, W]"""
    floor = int(FLOOR)
    found = find_blobs(frames[:, :, 0, :floor], RADIUS, MOST_BLOBS)
    return match_blobs(found, true_centres(identity[:, :, :floor], 1), reach=RADIUS)


class Use(NamedTuple):
    """How often schemata are chosen."""

    by_holder: Tensor  # [S, D] with each dynamics, by the object file that has the ball
    by_all: Tensor  # [S, D] by any that is updated
    overall: Tensor  # [S]


def count_use(model: VideoModel, clips: Clips) -> Use:
    trace = model.trace(clips.frames[:, :-1])
    layer = cast(scoff.Trace, trace.layer)
    schemata = cast(scoff.SCOFF, model.rnn).num_schemata
    first = model.options.stack - 1
    in_force, seen = clips.dynamics[:, first:-1], clips.identity[:, first:-1]
    holder = owners(weights(trace, model), seen, 1)  # [N, T', 1]
    chosen = layer.schema.gather(-1, holder.clamp(min=0))

    def pairs(schema: Tensor, where: Tensor) -> Tensor:
        where = where.clone()
        where[:, :BURN_IN] = False
        true = in_force[..., None].expand_as(schema)
        return joint_counts(schema[where], true[where], schemata, len(DYNAMICS)).cpu()

    return Use(
        pairs(chosen, holder >= 0),
        pairs(layer.schema, layer.active),
        schema_use(layer.schema, layer.active, schemata).cpu(),
    )


def weights(trace: VideoTrace, model: VideoModel) -> Tensor:
    """Who has which pixel: by masks, or without them by attention  [N, T, F, H, W]"""
    if trace.decoded.masks is not None:
        return trace.decoded.masks
    return to_pixels(cast(Tensor, trace.attention), model.options.frame_size)


def describe_use(parts: Sequence[Use]) -> dict[str, Any]:
    use = Use(*(torch.stack(counts).sum(0) for counts in zip(*parts, strict=True)))
    holder, everyone = agreement(use.by_holder), agreement(use.by_all)
    return {
        "information": holder.information,
        "accuracy": holder.accuracy,
        "match": holder.match,
        "information_all": everyone.information,
        "accuracy_all": everyone.accuracy,
        "counts": use.by_holder.tolist(),
        "bits": entropy(use.overall),
    }


def example(model: VideoModel, clips: Clips) -> dict[str, Any]:
    """What each object file chose in the steps around the change of a clip."""
    layer = cast(scoff.Trace, model.trace(clips.frames[:, :-1]).layer)
    first = model.options.stack - 1
    in_force = clips.dynamics[0, first:-1]
    change = int((in_force[1:] != in_force[:-1]).nonzero()[0]) + 1
    start = max(0, min(change - SHOWN // 2, len(in_force) - SHOWN))
    shown = slice(start, start + SHOWN)
    return {
        "frames": list(range(start + first, start + first + len(in_force[shown]))),
        "dynamics": in_force[shown].tolist(),
        "probs": layer.schema_probs[0, shown].tolist(),
        "active": layer.active[0, shown].tolist(),
    }


# --- report


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.comparison import group_runs, learning_curves
    from scoff.report import Section

    groups = group_runs(runs, MODELS, TASK)
    config: Config = runs[0].config
    return [
        Section(
            "Just after a change",
            "Mean error of the predicted next frame, in nats a pixel: of the first frame that "
            f"follows from the new dynamics, and of frames at least {SETTLE} later or before any "
            "change. The bulbs tell of the change in time, so a ratio of 1 can be had.",
            tables=[switch_table(groups)],
            figures=[after_change(groups)],
        ),
        *schema_sections(groups),
        Section(
            "Rollouts",
            f"From {config.context} frames on, each frame is predicted from the one before. "
            "The cross-entropy of a blurred picture is low: read the share of balls found (F1) and "
            "how far off they are beside it.",
            tables=[rollout_table(groups)],
            figures=[rollout_curve(groups, config)],
        ),
        Section(
            "Training",
            f"Validated on {config.valid_clips:,} clips. Seconds include validation.",
            tables=[training_table(groups)],
            figures=[learning_curves(groups, "valid/nll", "nats a pixel")],
        ),
    ]


def switch_table(groups: Mapping[str, list[Finished]]) -> "Table":
    from scoff.report import Estimate, Lowest, Table

    rows: list[list[Any]] = []
    for name, group in groups.items():
        first = [run.evaluation["after_change"][0] for run in group]
        steady = [run.evaluation["steady"] for run in group]
        ratio = [a / b for a, b in zip(first, steady, strict=True)]
        rows.append([name, *map(Estimate.of, (first, steady, ratio))])
    columns = ["", "first frame", "steady", "ratio"]
    lowest = Lowest((1, 2, 3), range(len(rows)))
    return Table("Error of the first frame after a change", columns, rows, highlight=lowest)


def after_change(groups: Mapping[str, list[Finished]]) -> "Figure":
    from scoff.experiments.comparison import spread_line
    from scoff.report import lines

    series = []
    for name, group in groups.items():
        by_delay = zip(*(run.evaluation["after_change"] for run in group), strict=True)
        steady = [run.evaluation["steady"] for run in group]
        values = [steady, *map(list, by_delay)]
        series.append(spread_line(name, range(len(values)), values))
    return lines(
        series,
        title="Error after a change",
        caption="At 0: steady; from 1 on: the first frame that follows from the new dynamics, the "
        "second, and so on. Bands: lowest to highest seed.",
        x_label="frames after the change",
        y_label="nats a pixel",
        y_log=True,
    )


def rollout_table(groups: Mapping[str, list[Finished]]) -> "Table":
    from scoff.report import Estimate, Table

    steps = len(next(iter(groups.values()))[0].evaluation["rollout"]["nll"])
    shown = sorted({min(n, steps) for n in (1, 5, 10, steps)})
    rows: list[list[Any]] = []
    for name, group in groups.items():
        row: list[Any] = [name]
        for n in shown:
            ahead = [run.evaluation["rollout"] for run in group]
            row.append(Estimate.of([a["cumulative"][n - 1] for a in ahead]))
            row.append(Estimate.of([a["f1"][n - 1] for a in ahead]))
            off = [a["position"][n - 1] for a in ahead]
            row.append(None if None in off else Estimate.of(off))
        rows.append(row)
    parts = ("error up to", "F1 at", "pixels off at")
    columns = ["", *(f"{part} {n}" for n in shown for part in parts)]
    return Table("Rollouts, by number of frames", columns, rows)


def rollout_curve(groups: Mapping[str, list[Finished]], config: Config) -> "Figure":
    from scoff.experiments.comparison import spread_line
    from scoff.report import lines

    series = []
    for name, group in groups.items():
        values = list(zip(*(run.evaluation["rollout"]["f1"] for run in group), strict=True))
        series.append(spread_line(name, range(1, len(values) + 1), values))
    return lines(
        series,
        title="Balls found in rollouts",
        caption=f"After {config.context} given frames. Found: a spot within {RADIUS:g} pixels of "
        "the ball. Bands: lowest to highest seed.",
        x_label="predicted frame",
        y_label="F1",
    )


def schema_sections(groups: Mapping[str, list[Finished]]) -> "list[Section]":
    from scoff.report import Estimate, Section, Table, affinity

    rows, figures = [], []
    for name, group in groups.items():
        known = [run for run in group if "schemata" in run.evaluation]
        if not known:
            continue
        use = [run.evaluation["schemata"] for run in known]
        keys = ("information", "accuracy", "information_all", "accuracy_all", "bits")
        rows.append([name, *(Estimate.of([u[key] for u in use]) for key in keys)])
        seen = known[0].evaluation["example"]
        before = [seen["dynamics"][0], *seen["dynamics"][:-1]]
        now = seen["dynamics"]
        figures.append(
            affinity(
                seen["probs"],
                columns=[f"frame {n}" for n in seen["frames"]],
                marks=["change" if a != b else "" for a, b in zip(before, now, strict=True)],
                active=seen["active"],
                title=f"{name}: affinity of object files to schemata",
                caption=f"Around a change from {DYNAMICS[now[0]]} to {DYNAMICS[now[-1]]}; seed "
                f"{known[0].config.seed}.",
            )
        )
    if not rows:
        return []
    columns = ["", "information", "accuracy", "information, all", "accuracy, all", "bits in use"]
    table = Table(
        "Agreement of the chosen schema and the true dynamics",
        columns,
        rows,
        note="On the test set: normalised mutual information, and the share of steps that the best "
        "one-to-one match gets right, of the object file that has the ball and of all that are "
        "updated. Bits: entropy of what is chosen.",
    )
    text = (
        "The paper reports that schemata and dynamics correspond one to one: that would be 1 in "
        "both. A schema that is always chosen has an information of 0 and an accuracy near a half."
    )
    return [Section("Schemata and dynamics", text, [table], figures)]


# --- presets


def paper(model: str, object_files: int = 1) -> Config:
    """The table of the paper's appendix. It tells neither the size of the state nor for how long
    it was trained: 100 for each object file and 100 epochs, as for the paper's bouncing balls."""
    return Config(
        model=cast(Any, model),
        object_files=object_files,
        active=max(1, 2 * object_files // 3),
        hidden_size=100 * object_files,
        steps=100 * 10_000 // 50,
        batch_size=50,
        lr=1e-4,
        input_heads=4,
        input_value_size=64,
        input_dropout=0.1,
        comm_dropout=0.1,
        decoder="attention",
        painter="deconvolution",
        validate_every=1000,
        checkpoint_every=1000,
    )


def six(model: str) -> Config:
    return paper(model, object_files=6)


def divide(model: str, object_files: int = 1) -> Config:
    """Trained faster, each object file painted by itself, and schemata asked to divide the work."""
    return Config(
        model=cast(Any, model),
        object_files=object_files,
        active=max(1, 2 * object_files // 3),
        hidden_size=100 * object_files,
        steps=3000,
        batch_size=50,
        lr=1e-3,
        warmup=0.05,
        decay="cosine",
        features=64,
        persistence=0.03,
        information=0.003,
    )


def divide_six(model: str) -> Config:
    return divide(model, object_files=6)


def quick(model: str) -> Config:
    return replace(
        Config(model=cast(Any, model)),
        steps=600,
        batch_size=8,
        lr=3e-3,
        warmup=0.05,
        decay="cosine",
        frames=21,
        context=16,
        stack=3,
        features=64,
        valid_clips=32,
        test_clips=64,
        validate_every=100,
        checkpoint_every=200,
    )


EXPERIMENT = Experiment(
    name="switching",
    title="A ball that changes its way to move",
    summary="Predict the next frame of a ball with two dynamics; schemata should be these.",
    claim="A ball oscillates horizontally or vertically and changes once from one to the other, "
    "which two bulbs show. Models predict the next frame. The question is whether schemata "
    "correspond to the two dynamics, one to one, and whether the frame after the change is "
    "predicted as well as others.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "short clips: minutes on two CPU cores", quick, ("scoff", "gru", "gru-matched"), seeds=1
        ),
        "divide": Preset(
            "schemata are asked to divide the work; one object file",
            divide,
            ("scoff", "gru", "gru-matched"),
        ),
        "divide-six": Preset(
            "the same with six object files", divide_six, ("scoff", "gru", "gru-matched")
        ),
        "paper": Preset("one object file, as in the paper's text: hours", paper, tuple(MODELS)),
        "paper-six": Preset("six object files, as in its appendix: hours", six, tuple(MODELS)),
    },
    make_task=SwitchingTask,
    evaluate=evaluate,
    report=report,
)
