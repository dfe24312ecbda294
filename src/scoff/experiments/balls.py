"""Several balls that bounce off each other and off the walls.

Four balls of two masses; six to eight of them; three that pass behind an invisible curtain; and the
first two in colours. The paper (section "Multiple objects with multiple dynamics", appendix
"Bouncing Ball"): SCOFF predicts 10 and 30 frames with a smaller error than GRU and RIMs, the more
so the more balls there are and the farther ahead, and its schemata are such things as collisions
and free flight.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from scoff.experiments.balls_data import SPLITS, check_data, keep_pictures, opened, read_clips
from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.binding import (
    BURN_IN,
    describe_binding,
    describe_choices,
    look_inside,
    to_pixel_units,
)
from scoff.experiments.blobs import (
    Matches,
    f1,
    find_blobs,
    match_blobs,
    position_error,
    true_centres,
)
from scoff.experiments.measures import or_none
from scoff.experiments.rollouts import describe_rollouts, roll_out
from scoff.experiments.video import MODELS, VideoConfig, VideoTask, chunks, next_frame_errors
from scoff.experiments.video_measures import hidden_balls, horizon_errors
from scoff.models.video import VideoModel
from scoff.training.errors import UsageError
from scoff.worlds.balls import (
    BOX,
    COLOURS,
    PIXELS,
    VARIANTS,
    Clips,
    Pictures,
    Trajectories,
    VariantName,
    render,
    trajectories,
)
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Section, Table

SPARE_BLOBS = 2  # looked for beyond as many as there are balls
DIMMEST = min(max(colour) for colour in COLOURS) / 255
SIMULATED_AT_ONCE = 5000


@dataclass(frozen=True)
class Config(VideoConfig):
    variant: VariantName = "4balls"
    """How many balls, and of what kind."""
    data: str | None = None
    """HDF5 file in R-NEM's layout, such as scoff data balls writes, whose training, validation and
    test sets are taken instead of generated clips, the first of each."""
    train_clips: int = 50_000
    """Size of the training set."""
    valid_clips: int = 1000
    """Size of the validation set."""
    test_clips: int = 10_000
    """Size of the test set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # the last of the predictions that count may have another owner than the one before
        colour = VARIANTS[self.variant].has_colours
        self.check_world(self.variant, self.stack + BURN_IN + 2, colour)
        if self.data is not None:  # to be found from wherever the run is resumed or tested
            object.__setattr__(self, "data", os.path.abspath(self.data))


class BallsTask(VideoTask):
    """What happens in the clips of a set is simulated once and kept on the device, some ten
    kilobytes a clip; pictures of it are made as they are needed. Of a file, pictures are kept, a
    byte a pixel, and test clips, which are watched once, are read as they are needed."""

    config: Config

    def __init__(self, config: Config, device: torch.device, splits: Sequence[Split] = SPLITS):
        """Of a file, only these sets are asked for."""
        if config.data is not None:
            check_data(config, splits)
        super().__init__(config, device)
        self.kept: dict[Split, Trajectories | Pictures] = {}

    def clips(self, index: Tensor, split: Split) -> Clips | Pictures:
        """Of a file, training and validation sets are but Pictures."""
        from_file = self.config.data is not None
        if from_file and split == "test":
            return read_clips(self.config, index)
        if split not in self.kept:
            keep = keep_pictures if from_file else simulate
            self.kept[split] = keep(self.config, split, index.device)
        kept = self.kept[split].select(index)
        return kept if isinstance(kept, Pictures) else render(kept)


def simulate(config: Config, split: Split, device: torch.device) -> Trajectories:
    size = getattr(config, f"{split}_clips")
    parts = [
        trajectories(config.data_seed, index, config.variant, config.frames, split)
        for index in torch.arange(size, device=device).split(SIMULATED_AT_ONCE)
    ]
    joined = zip(*parts, strict=True)
    return Trajectories(*(None if p[0] is None else torch.cat(p) for p in joined))  # pyright: ignore[reportArgumentType]


# --- evaluation


class Tested(NamedTuple):
    """What a model predicts on some clips; each tensor has these first. H horizons."""

    errors: Tensor  # [N, T - stack] of next frames
    rollout: Tensor  # [N, H] errors
    squared: Tensor  # [N, H] likewise
    brightness: Tensor  # [C, 64, 64] sum over clips and predicted frames
    found: Matches  # of balls in rollouts
    still: Matches  # if the last given frame stayed
    # [N, H, K] balls to be found that were hidden when the rollout began or since; None: without a
    # curtain nothing hides a ball
    emerged: Tensor | None


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Rollouts, how object files bind to balls, and which schemata are chosen when."""
    assert isinstance(model, VideoModel)
    task = BallsTask(config, device)
    return {"valid": task.validate(model), **measure(task, model)}


def measure_file(
    config: Config, model: nn.Module, device: torch.device, path: Path
) -> "tuple[dict[str, Any], Sequence[Table]]":
    """On as many test clips of the file as of generated ones, or as many as there are."""
    from scoff.experiments.balls_report import tables_of

    assert isinstance(model, VideoModel)
    with opened(str(path)) as file:
        clips = min(config.test_clips, file.layout("test").clips)
    config = replace(config, data=str(path), test_clips=clips)
    measures = {"clips": clips, **measure(BallsTask(config, device, ["test"]), model)}
    return measures, tables_of({MODELS[config.model]: [Finished("", config, measures, [])]})


@torch.no_grad()
def measure(task: BallsTask, model: VideoModel) -> dict[str, Any]:
    """On test clips. What needs truth that the clips of a file do not tell is left out."""
    config = task.config
    tested, bindings, choices = [], [], []
    for index in tqdm(chunks(config.test_clips, task.device), "testing", disable=None):
        clips = cast(Clips, task.clips(index, "test"))
        tested.append(predict(config, model, clips))
        binding, choice = look_inside(model, clips)
        bindings += [] if binding is None else [binding]
        choices += [] if choice is None else [choice]
    squared = horizon_errors(torch.cat([t.squared for t in tested]))
    found = join([t.found for t in tested])
    still = join([t.still for t in tested])
    emerged = [t.emerged for t in tested if t.emerged is not None]
    result: dict[str, Any] = {
        "next_frame": torch.cat([t.errors for t in tested]).double().mean().item(),
        "rollout": describe_rollouts(torch.cat([t.rollout for t in tested]), found)
        | {"squared": squared.each.tolist(), "squared_cumulative": squared.cumulative.tolist()},
        "still": {
            "f1": f1(still).tolist(),
            "position": [*map(or_none, position_error(still).tolist())],
        },
    }
    if emerged:
        result["emerged"] = describe_emerged(found, torch.cat(emerged))
        result["still"]["emerged"] = describe_emerged(still, torch.cat(emerged))
    if not config.colour:
        frames = config.test_clips * (config.frames - config.context)
        mean = torch.stack([t.brightness for t in tested]).sum(0) / frames
        result["mean_picture"] = cross_entropy_of(mean)
        # of pixels that are 0 or 1
        result["mean_picture_squared"] = (mean * (1 - mean)).double().mean().item()
    if bindings:
        result["binding"] = describe_binding(bindings)
    if choices:
        result["schemata"] = describe_choices(choices)
    return result


def predict(config: Config, model: VideoModel, clips: Clips) -> Tested:
    frames, ahead = clips.frames, slice(config.context, None)
    rollout = roll_out(model, frames, config.context)
    optional = emerged = None
    if VARIANTS[config.variant].has_curtain:
        radius = to_pixel_units(cast(Tensor, clips.radius))
        hidden = hidden_balls(clips.identity, radius)  # [N, T, K]
        # hidden at the last given frame or since
        unseen = hidden[:, config.context - 1 :].cummax(1).values[:, 1:]
        optional = hidden[:, ahead]
        emerged = unseen & ~optional & (radius > 0)[:, None]
    identity = clips.identity[:, ahead]
    stays = frames[:, config.context - 1, None].expand(-1, identity.shape[1], -1, -1, -1)
    return Tested(
        next_frame_errors(model, frames),
        rollout.errors,
        rollout.squared,
        frames[:, ahead].sum((0, 1)),
        find_balls(config, rollout.frames, identity, optional),
        find_balls(config, stays, identity, optional),
        emerged,
    )


def find_balls(
    config: Config, frames: Tensor, identity: Tensor, optional: Tensor | None
) -> Matches:
    """[N, H, C, 64, 64], [N, H, 64, 64], [N, H, K]"""
    kind = VARIANTS[config.variant]
    light = frames.amax(2)
    if kind.has_colours:
        light = (light / DIMMEST).clamp(max=1)
    balls, radius = max(kind.counts), smallest_radius(config.variant)
    found = find_blobs(light, radius, balls + SPARE_BLOBS)
    return match_blobs(found, true_centres(identity, balls), radius, optional)


def smallest_radius(variant: VariantName) -> float:
    """In pixels"""
    return min(VARIANTS[variant].radii) * PIXELS / BOX


def join(parts: Sequence[Matches]) -> Matches:
    return Matches(*map(torch.cat, zip(*parts, strict=True)))


def describe_emerged(found: Matches, emerged: Tensor) -> dict[str, Any]:
    """Of balls that come out from behind the curtain: where they went was not to be seen."""
    is_hit = found.distance.isfinite() & emerged
    hits, all_of_them = is_hit.sum((0, 2)), emerged.sum((0, 2))
    distance = torch.where(is_hit, found.distance, 0.0).sum((0, 2))
    return {
        "balls": all_of_them.tolist(),
        "found": [*map(or_none, (hits / all_of_them).tolist())],
        "position": [*map(or_none, (distance / hits).tolist())],
    }


def cross_entropy_of(mean: Tensor) -> float:
    """Of pictures whose pixels are lit as often as this, predicted by just this, in nats"""
    mean = mean.double().clamp(1e-12, 1 - 1e-12)
    return -(mean * mean.log() + (1 - mean) * (1 - mean).log()).mean().item()


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.balls_report import report_variants

    return report_variants(runs)


# --- presets


def sizes(variant: str) -> dict[str, Any]:
    """The paper's text: four object files, eight for six to eight balls. Its appendix: 100 each."""
    if variant not in VARIANTS:
        raise UsageError(f"--variant: got {variant!r}, wants one of {', '.join(VARIANTS)}")
    kind = VARIANTS[cast(VariantName, variant)]
    files = 8 if max(kind.counts) > 4 else 4
    return {
        "variant": variant,
        "colour": kind.has_colours,
        "object_files": files,
        "active": round(2 * files / 3),
        "hidden_size": 100 * files,
    }


def paper(model: str, variant: str = "4balls") -> Config:
    """The table of the paper's appendix; 100 epochs. Of four RIMs all are active, as in the names
    of the authors' logs."""
    own = sizes(variant)
    if model == "rims" and own["object_files"] == 4:
        own["active"] = 4
    return Config(
        model=cast(Any, model),
        **own,
        schemata=4,
        steps=100 * 50_000 // 64,
        batch_size=64,
        lr=1e-4,
        input_heads=1,
        input_dropout=0.1,
        comm_dropout=0.1,
        decoder="attention",
        painter="deconvolution",
        validate_every=2500,
        checkpoint_every=2500,
    )


def tuned(model: str, variant: str = "4balls") -> Config:
    """Object files that start at places which stand out, and are painted by themselves; three short
    clips of each, for object files that forget what they started with may never bind; a learning
    rate that rises and falls."""
    return replace(
        paper(model, variant),
        start="places",
        train_frames=17,
        steps=20_000,
        lr=1e-3,
        warmup=0.05,
        decay="cosine",
        input_dropout=0.0,
        comm_dropout=0.0,
        detach_input_query=True,
        clip=0.05,
        decoder="masks",
        painter="patches",
        test_clips=2000,
        validate_every=1000,
        checkpoint_every=2000,
    )


def quick(model: str, variant: str = "4balls") -> Config:
    """A small model and short clips: enough to bind object files to balls, not for rollouts."""
    files = sizes(variant)["object_files"]
    return replace(
        tuned(model, variant),
        detach_input_query=False,  # nothing explodes, and with it all is learned a little slower
        steps=800,
        batch_size=4,
        hidden_size=files * 40,
        features=32,
        frames=16,
        train_frames=None,
        context=6,
        train_clips=2000,
        valid_clips=16,
        test_clips=48,
        validate_every=100,
        checkpoint_every=200,
    )


COMPARED = ("scoff", "scoff-sparse", "rims", "gru", "gru-matched")

EXPERIMENT = Experiment(
    name="balls",
    title="Bouncing balls",
    summary="Predict frames of balls that bounce; tested on rollouts of 30 frames and more.",
    claim="Models see a few frames of balls that collide with each other and the walls, and "
    "predict what follows, frame by frame. The question is whether object files bind to balls, "
    "whether schemata stand for what happens to them, and whether that makes rollouts better than "
    "those of a GRU.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "short clips, few steps: a minute or two each on a CPU core",
            quick,
            ("scoff", "gru"),
            seeds=1,
            grid={"variant": ("4balls",)},
        ),
        "tuned": Preset(
            "masks, a higher learning rate, 26 epochs: minutes on a GPU",
            tuned,
            COMPARED,
            grid={"variant": ("4balls", "curtain", "678balls")},
        ),
        "paper": Preset(
            "the paper's sizes, decoder, learning rate and 100 epochs: hours",
            paper,
            tuple(MODELS),
            grid={"variant": tuple(VARIANTS)},
        ),
    },
    make_task=BallsTask,
    evaluate=evaluate,
    report=report,
    defaults_by=("variant",),
    measure_file=measure_file,
)
