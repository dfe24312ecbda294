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
from scoff.experiments.blobs import Matches
from scoff.experiments.one_ball import (
    agreement_table,
    closing_sections,
    count_use,
    describe_use,
    dynamics_lane,
    find_ball,
    least_errors,
    seeds_table,
    with_schemata,
)
from scoff.experiments.rollouts import (
    describe_rollouts,
    roll_out,
)
from scoff.experiments.video import (
    MODELS,
    VideoConfig,
    VideoTask,
    chunks,
    next_frame_errors,
)
from scoff.experiments.video_measures import switch_errors
from scoff.models.video import VideoModel
from scoff.training.errors import UsageError
from scoff.worlds.dynamics import FLOOR, Clips, switching_dynamics, when_it_changes
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Figure, Section, Table
    from scoff.report.films import Lane

# what is learned and how it is tested; runs that differ in these cannot be compared
TASK = (
    "frames",
    "stack",
    "train_clips",
    "valid_clips",
    "test_clips",
    "data_seed",
    "context",
    "doubt",
)

DYNAMICS = ("horizontal", "vertical")
BURN_IN = 2  # predictions that do not count, for there is nothing yet to choose by
SETTLE = 5  # frames after a change that are not steady
FEWEST_FRAMES = 14  # fewer, and the latest change is not settled before the clip ends
HORIZONS = (1, 5, 10, 20)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_world("one ball", self.stack + BURN_IN + 1)
        if self.frames < FEWEST_FRAMES:
            raise UsageError(
                f"--frames: got {self.frames}, wants at least {FEWEST_FRAMES}, so that there are "
                "steady ones after a change"
            )
        first_change = when_it_changes(self.frames)[0]
        if self.stack > first_change:
            raise UsageError(
                f"--stack: got {self.stack}, wants at most {first_change} with --frames "
                f"{self.frames}, so that no clip changes before the first prediction"
            )


class SwitchingTask(VideoTask):
    def clips(self, index: Tensor, split: Split) -> Clips:
        return switching_dynamics(self.config.data_seed, index, self.config.frames, split)


# --- evaluation


class Tested(NamedTuple):
    """What a model predicts on some clips; each tensor has these first."""

    errors: Tensor  # [N, T - stack] of next frames
    least: Tensor  # [N, T - stack] that they have to be
    dynamics: Tensor  # [N, T - stack] that bring them about
    rollout: Tensor  # [N, T - context] errors
    distance: Tensor  # [N, T - context, 1] of the ball in rollouts, and so are those below
    hits: Tensor
    missed: Tensor
    extra: Tensor


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Errors after a change and later, rollouts, and what schemata have to do with dynamics."""
    assert isinstance(model, VideoModel)
    task = SwitchingTask(config, device)
    tested, used = [], []
    for index in tqdm(chunks(config.test_clips, device), "testing", disable=None):
        clips = task.clips(index, "test")
        tested.append(predict(config, model, clips))
        if isinstance(model.rnn, scoff.SCOFF):
            used.append(count_use(model, clips, len(DYNAMICS), BURN_IN))
    all_clips = Tested(*(torch.cat(parts) for parts in zip(*tested, strict=True)))
    switch, least = (
        switch_errors(errors, all_clips.dynamics, BURN_IN, SETTLE)
        for errors in (all_clips.errors, all_clips.least)
    )
    result: dict[str, Any] = {
        "valid": task.validate(model),
        "after_change": switch.after.tolist(),
        "settled": switch.steady,
        "least": {"after_change": least.after.tolist(), "settled": least.steady},
        "rollout": describe_rollouts(all_clips.rollout, Matches(*all_clips[4:])),
    }
    if used:
        result["schemata"] = describe_use(used)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        result["example"] = example(model, task.clips(first, "test"))
    return result


def predict(config: Config, model: VideoModel, clips: Clips) -> Tested:
    errors, _, frames = roll_out(model, clips.frames, config.context)
    floor = int(FLOOR)  # below it are the bulbs
    return Tested(
        next_frame_errors(model, clips.frames),
        least_errors(clips.frames[:, config.stack :], config.doubt),
        clips.dynamics[:, config.stack - 1 : -1],
        errors,
        *find_ball(frames[..., :floor, :], clips.identity[:, config.context :, :floor]),
    )


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
    from scoff.experiments.comparison import group_runs
    from scoff.experiments.films import film_figures
    from scoff.report import Section

    groups = group_runs(runs, MODELS, TASK)
    config: Config = runs[0].config
    drawn = film_figures(groups, example_clip, story)
    return [
        Section(
            "Just after a change",
            "Mean error of the predicted next frame, in nats a pixel: of the first frame that "
            f"follows from the new dynamics, and of steady ones, at least {SETTLE} later. The "
            "bulbs tell of the change in time, so a ratio of 1 can be had. Frames before it do not "
            "count: when the bulbs will change cannot be foreseen. Most of either error cannot be "
            "avoided, for grey pixels, as at the rim of the ball, cost something even if they are "
            'predicted exactly; the columns "added" leave that out.',
            tables=[switch_table(groups)],
            figures=[after_change(groups)],
        ),
        *schema_sections(groups, drawn.lanes),
        *closing_sections(groups, config, HORIZONS, drawn),
    ]


def switch_table(groups: Mapping[str, list[Finished]]) -> "Table":
    from scoff.report import Estimate, Lowest, Table

    def cells_of(pairs: list[tuple[float, float]]) -> list[Any]:
        ratios = [first / steady for first, steady in pairs]
        return [*map(Estimate.of, zip(*pairs, strict=True)), Estimate.of(ratios)]

    rows: list[list[Any]] = []
    for name, group in groups.items():
        errors = [switch_error(run) for run in group]
        rows.append([name, *cells_of(errors)])
        if all("least" in run.evaluation for run in group):
            rows[-1] += cells_of([added_error(run) for run in group])
        else:  # some were tested before it was measured
            rows[-1] += [None] * 3
    columns = ["", "first frame", "steady", "ratio", "added: first", "steady", "ratio"]
    lowest = Lowest(range(1, len(columns)), range(len(rows)))
    return Table("Error of the first frame after a change", columns, rows, highlight=lowest)


def switch_error(run: Finished) -> tuple[float, float]:
    """Of the first frame and of steady ones"""
    found = run.evaluation
    if "settled" not in found:
        raise UsageError(
            f"{run.path}: was tested when steady frames were others; again: scoff eval {run.path}"
        )
    return found["after_change"][0], found["settled"]


def added_error(run: Finished) -> tuple[float, float]:
    """Of both, what goes beyond the least there can be"""
    (first, steady), least = switch_error(run), run.evaluation["least"]
    return first - least["after_change"][0], steady - least["settled"]


def after_change(groups: Mapping[str, list[Finished]]) -> "Figure":
    from scoff.experiments.comparison import spread_line
    from scoff.report import Line, lines

    series = []
    for name, group in groups.items():
        values = list(zip(*(run.evaluation["after_change"] for run in group), strict=True))
        delays = range(1, len(values) + 1)
        series.append(spread_line(name, delays, values))
        steady = sum(switch_error(run)[1] for run in group) / len(group)
        series.append(Line(name, delays, [steady] * len(values), dashed=True, marker=False))
    return lines(
        series,
        title="Error after a change",
        caption="Of the first frame that follows from the new dynamics, the second, and so on. "
        "Dashed: steady frames.",
        x_label="frames after the change",
        y_label="nats a pixel",
        y_log=True,
    )


def example_clip(config: Config) -> Clips:
    """The first test clip."""
    first = torch.zeros(1, dtype=torch.int64)
    return switching_dynamics(config.data_seed, first, config.frames, "test")


def story(run: Finished) -> "list[Lane]":
    """Which dynamics are in force."""
    return [dynamics_lane(run, example_clip(run.config).dynamics[0], DYNAMICS)]


def schema_sections(
    groups: Mapping[str, list[Finished]], looks: "Sequence[Figure]"
) -> "list[Section]":
    from scoff.report import Section, affinity

    known, figures = with_schemata(groups), []
    for name, group in known.items():
        seen = group[0].evaluation["example"]
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
                f"{group[0].config.seed}.",
            )
        )
    if not known:
        return []
    text = (
        "The paper reports that schemata and dynamics correspond one to one: that would be 1 in "
        "both. A schema that is always chosen has an information of 0 and an accuracy near a half. "
        f"Dynamics 1 is {DYNAMICS[0]}, 2 {DYNAMICS[1]}."
    )
    tables = [agreement_table(known), seeds_table(known)]
    return [Section("Schemata and dynamics", text, tables, [*figures, *looks])]


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
    """Trained faster, each object file painted by itself, and schemata asked to divide the work.

    What surprises counts, for the first frame after a change is one in fifty."""
    return Config(
        model=cast(Any, model),
        object_files=object_files,
        active=max(1, 2 * object_files // 3),
        hidden_size=100 * object_files,
        steps=12_000,
        batch_size=50,
        lr=1e-3,
        warmup=0.05,
        decay="cosine",
        features=64,
        persistence=0.03,
        information=0.003,
        surprise=1.0,
    )


def divide_six(model: str) -> Config:
    # errors that are led back through where each of several looks explode, and others may still
    return replace(divide(model, object_files=6), detach_input_query=True, clip=0.05)


def quick(model: str) -> Config:
    """Short clips, in which the dynamics change at one step of eighteen, and a small model."""
    return replace(
        divide(model),
        steps=1200,
        batch_size=8,
        hidden_size=60,
        lr=3e-3,
        frames=21,
        context=16,
        stack=3,
        features=32,
        persistence=0.06,
        persistence_lag=5,
        information=0.006,
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
            "short clips, schemata are asked to divide the work: minutes on two CPU cores",
            quick,
            ("scoff", "gru", "gru-matched"),
            seeds=1,
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
