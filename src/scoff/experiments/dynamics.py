"""One ball that moves in one of three ways all along.

It accelerates, keeps its velocity, or walks at random. The paper (section "Single object with fixed
dynamics"): after some five frames SCOFF has settled on a schema, and schemata and dynamics
correspond one to one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from scoff.experiments.rivalry import FEWEST_FRAMES, compete, move
from scoff.experiments.rollouts import (
    describe_rollouts,
    estimate_known,
    roll_out,
    within,
)
from scoff.experiments.video import (
    MODELS,
    VideoConfig,
    VideoTask,
    chunks,
    next_frame_errors,
)
from scoff.models.video import VideoModel
from scoff.training.errors import UsageError
from scoff.training.settings import flag
from scoff.worlds.dynamics import Clips, three_dynamics
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Section, Table
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

DYNAMICS = ("accelerates", "constant velocity", "random walk")
BURN_IN = 5  # frames by which nothing counts yet: the paper's "after about five video frames"
HORIZONS = (1, 5, 10)
# Weight, where schemata compete, of the error with the schemata that the layer chose. Little: those
# that are chosen by mistake learn from it what others won, until all can do everything.
OWN = 0.1


@dataclass(frozen=True)
class Config(VideoConfig):
    frames: int = 20
    """Frames of a clip."""
    context: int = 8
    """Frames that are given before a rollout."""
    object_files: int = 1
    """Object files of SCOFF, modules of RIMs, memory slots of RMC."""
    active: int = 1
    """How many object files or modules are updated at each step (scoff-sparse, rims)."""
    schemata: int = 3
    """Schemata of SCOFF."""
    hidden_size: int = 100
    """Size of the whole state."""
    rivalry: float = 0.0
    """Weight in the training loss of choosing the schema that predicts a clip best, for which those
    of SCOFF then compete. 0: they do not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_world("one ball", max(BURN_IN + 1, self.stack) + 1)
        if not 0 <= self.rivalry < math.inf:
            raise UsageError(f"--rivalry: got {self.rivalry}, wants at least 0")
        for name, wanted in (
            ("cell", "gru"),
            ("free_frames", 0),
            ("persistence", 0),
            ("information", 0),
            ("surprise", 0),
        ):
            got = getattr(self, name)
            if self.rivalry and got != wanted:
                raise UsageError(f"--{flag(name)}: got {got}, wants {wanted} with --rivalry")
        least = max(self.stack, FEWEST_FRAMES) + 1
        if self.rivalry and self.piece_frames < least:
            raise UsageError(
                f"--train-frames: got {self.train_frames}, wants at least {least} with --rivalry, "
                "so that there is a choice to make"
            )

    @property
    def has_rivals(self) -> bool:
        """Whether schemata compete for clips. Other layers have none."""
        return self.rivalry > 0 and self.model in ("scoff", "scoff-sparse") and self.schemata > 1


class DynamicsTask(VideoTask):
    config: Config

    def clips(self, index: Tensor, split: Split) -> Clips:
        return three_dynamics(self.config.data_seed, index, self.config.frames, split)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, ...]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        c = self.config
        if not c.rivalry:
            return super().loss(model, batch)
        clips = torch.cat([batch[0], move(batch[0])])
        if not c.has_rivals:  # the same data for all layers
            return super().loss(model, (clips,))
        contest = compete(model, clips, c.stack, c.object_files, c.schemata)
        error = contest.errors.mean()
        loss = OWN * error + contest.won + c.rivalry * contest.missed
        return loss, {"nll": error, "won": contest.won, "missed": contest.missed}


# --- evaluation


class Tested(NamedTuple):
    """What a model predicts on some clips; each tensor has these first."""

    dynamics: Tensor  # [N]
    errors: Tensor  # [N] of next frames, a mean after the burn-in
    least: Tensor  # [N] that they have to be
    rollout: Tensor  # [N, T - context] errors
    distance: Tensor  # [N, T - context, 1] of the ball in rollouts, and so are those below
    hits: Tensor
    missed: Tensor
    extra: Tensor


def uncounted(stack: int) -> int:
    """Predictions that are made from no more frames than BURN_IN; the first has seen the stack."""
    return max(0, BURN_IN + 1 - stack)


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Errors and rollouts with each dynamics, and what schemata have to do with them."""
    assert isinstance(model, VideoModel)
    task = DynamicsTask(config, device)
    burn_in = uncounted(config.stack)
    tested, used = [], []
    for index in tqdm(chunks(config.test_clips, device), "testing", disable=None):
        clips = task.clips(index, "test")
        errors, _, frames = roll_out(model, clips.frames, config.context)
        found = find_ball(frames, clips.identity[:, config.context :])
        next_frames = next_frame_errors(model, clips.frames)[:, burn_in:].mean(1)
        least = least_errors(clips.frames[:, config.stack :], config.doubt)[:, burn_in:].mean(1)
        tested.append(Tested(clips.dynamics[:, 0], next_frames, least, errors, *found))
        if isinstance(model.rnn, scoff.SCOFF):
            used.append(count_use(model, clips, len(DYNAMICS), burn_in))
    every = Tested(*(torch.cat(parts) for parts in zip(*tested, strict=True)))

    def rollouts(of: Tested) -> dict[str, Any]:
        return describe_rollouts(of.rollout, Matches(*of[4:]))

    by_dynamics = []
    for number in range(len(DYNAMICS)):
        own = Tested(*(part[every.dynamics == number] for part in every))
        if len(own.dynamics):
            by_dynamics.append(
                {
                    "next_frame": own.errors.double().mean().item(),
                    "least": own.least.double().mean().item(),
                    "rollout": rollouts(own),
                }
            )
    result: dict[str, Any] = {
        "valid": task.validate(model),
        "rollout": rollouts(every),
        "by_dynamics": by_dynamics,
    }
    if used:
        result["schemata"] = describe_use(used)
    return result


# --- report


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.comparison import group_runs
    from scoff.experiments.films import film_figures, lane_figures
    from scoff.report import Section

    groups = group_runs(runs, MODELS, TASK)
    config: Config = runs[0].config
    sections = []
    drawn = film_figures(groups, example)
    known = with_schemata(groups)
    if known:
        looks = [
            figure
            for number, name in enumerate(DYNAMICS)
            for figure in lane_figures(
                known, partial(example, number=number), partial(story, number=number), name
            )
        ]
        named = ", ".join(f"{number + 1}: {name}" for number, name in enumerate(DYNAMICS))
        text = (
            f"Counted from frame {BURN_IN + 1} on, which is the first that is predicted from more "
            f"than {BURN_IN}. The paper reports that schemata and "
            "dynamics correspond one to one: that would be 1 in both. A schema that is always "
            f"chosen has an information of 0 and an accuracy of a third. Dynamics: {named}."
        )
        tables = [agreement_table(known), seeds_table(known)]
        sections.append(Section("Schemata and dynamics", text, tables, looks))
    return [
        *sections,
        Section(
            "Each dynamics",
            "Mean error of the next frame, in nats a pixel, and how far off the ball is in "
            "rollouts. Where a random walk goes cannot be told.",
            tables=[dynamics_table(groups)],
        ),
        *closing_sections(groups, config, HORIZONS, drawn),
    ]


def dynamics_table(groups: Mapping[str, list[Finished]]) -> "Table":
    from scoff.report import Estimate, Table

    shown = within(groups, (5, 10))
    rows: list[list[Any]] = []
    for number, dynamics in enumerate(DYNAMICS):
        own: list[list[Any]] = []
        for name, group in groups.items():
            parts = [run.evaluation["by_dynamics"][number:] for run in group]
            found = [part[0] for part in parts if part]
            if not found:
                continue
            off = [
                estimate_known([part["rollout"]["position"][n - 1] for part in found])
                for n in shown
            ]
            f1 = [Estimate.of([part["rollout"]["f1"][n - 1] for part in found]) for n in shown]
            pairs = [cell for pair in zip(f1, off, strict=True) for cell in pair]
            errors = [
                Estimate.of([part["next_frame"] for part in found]),
                estimate_known([added_error(part) for part in found]),
            ]
            own.append([name, *errors, *pairs])
        rows += [[dynamics], *own] if own else []
    ahead = [f"{what} at {n}" for n in shown for what in ("F1", "pixels off")]
    columns = ["", "next frame", "of it added", *ahead]
    return Table(
        "Errors by dynamics",
        columns,
        rows,
        note="Added: to what known frames cost, whose grey pixels are uncertain by themselves.",
    )


def added_error(part: dict[str, Any]) -> float | None:
    """To the least there can be; None: of a run that was tested before this was"""
    return part["next_frame"] - part["least"] if "least" in part else None


def example(config: Config, number: int = 0) -> Clips:
    """A test clip; the first three have the three dynamics."""
    return three_dynamics(config.data_seed, torch.tensor([number]), config.frames, "test")


def story(run: Finished, number: int = 0) -> "list[Lane]":
    """Which dynamics is in force."""
    return [dynamics_lane(run, example(run.config, number).dynamics[0], DYNAMICS)]


# --- presets


def paper(model: str) -> Config:
    """One object file and as many schemata as dynamics. Neither sizes nor the length of training
    are told: those of the paper's switching dynamics."""
    return Config(
        model=cast(Any, model),
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


def divide(model: str) -> Config:
    """Trained faster, each object file painted by itself, and schemata compete for clips.

    The last three frames are read at each step, which in a few runs was better than one, by which
    it takes longer until a ball that accelerates is told from one that does not, and than five, by
    which any schema soon predicted both."""
    return Config(
        model=cast(Any, model),
        stack=3,
        keep_bias=2.0,
        steps=2400,
        batch_size=48,
        lr=2e-3,
        warmup=0.05,
        decay="cosine",
        features=64,
        schema_scale=3.0,
        rivalry=0.05,
    )


def quick(model: str) -> Config:
    return replace(
        Config(model=cast(Any, model)),
        steps=400,
        batch_size=8,
        lr=3e-3,
        warmup=0.05,
        decay="cosine",
        features=64,
        valid_clips=33,
        test_clips=66,
        validate_every=100,
        checkpoint_every=200,
    )


EXPERIMENT = Experiment(
    name="dynamics",
    title="A ball with one of three dynamics",
    summary="Predict the next frame of a ball with one of three dynamics, each a schema.",
    claim="A ball accelerates, keeps its velocity or walks at random. Models predict the next "
    "frame. The question is whether each schema comes to stand for one of the dynamics.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "few steps, which are too few for schemata: a minute or two each on a CPU core",
            quick,
            ("scoff", "gru", "gru-matched"),
            seeds=1,
        ),
        "divide": Preset(
            "schemata compete for clips; one object file", divide, ("scoff", "gru", "gru-matched")
        ),
        "paper": Preset("one object file, three schemata: hours", paper, tuple(MODELS)),
    },
    make_task=DynamicsTask,
    evaluate=evaluate,
    report=report,
)
