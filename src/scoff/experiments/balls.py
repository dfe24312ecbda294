"""Several balls that bounce off each other and off the walls.

Four balls of two masses; six to eight of them; three that pass behind an invisible curtain; and the
first two in colours. The paper (section "Multiple objects with multiple dynamics", appendix
"Bouncing Ball"): SCOFF predicts 10 and 30 frames with a smaller error than GRU and RIMs, the more
so the more balls there are and the farther ahead, and its schemata are such things as collisions
and free flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.binding import (
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
from scoff.experiments.rollouts import describe_rollouts, or_none, roll_out
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
    Trajectories,
    VariantName,
    render,
    trajectories,
)
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Section

SPARE_BLOBS = 2  # looked for beyond as many as there are balls
DIMMEST = min(max(colour) for colour in COLOURS) / 255
SIMULATED_AT_ONCE = 5000


@dataclass(frozen=True)
class Config(VideoConfig):
    variant: VariantName = "4balls"
    """How many balls, and of what kind."""
    train_clips: int = 50_000
    """Size of the training set."""
    valid_clips: int = 1000
    """Size of the validation set."""
    test_clips: int = 10_000
    """Size of the test set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wants = VARIANTS[self.variant].has_colours
        if self.colour != wants:
            raise UsageError(f"--colour: got {self.colour}, but {self.variant} wants {wants}")


class BallsTask(VideoTask):
    """What happens in the clips of a set is simulated once and kept on the device, some ten
    kilobytes a clip; pictures of it are made as they are needed."""

    config: Config

    def __init__(self, config: Config, device: torch.device):
        super().__init__(config, device)
        self.sizes: dict[Split, int] = {
            "train": config.train_clips,
            "valid": config.valid_clips,
            "test": config.test_clips,
        }
        self.kept: dict[Split, Trajectories] = {}

    def clips(self, index: Tensor, split: Split) -> Clips:
        if split not in self.kept:
            self.kept[split] = self.simulate(split, index.device)
        return render(self.kept[split].select(index))

    def simulate(self, split: Split, device: torch.device) -> Trajectories:
        c = self.config
        parts = [
            trajectories(c.data_seed, index, c.variant, c.frames, split)
            for index in torch.arange(self.sizes[split], device=device).split(SIMULATED_AT_ONCE)
        ]
        joined = zip(*parts, strict=True)
        return Trajectories(*(None if p[0] is None else torch.cat(p) for p in joined))  # pyright: ignore[reportArgumentType]


# --- evaluation


class Tested(NamedTuple):
    """What a model predicts on some clips; each tensor has these first. H horizons."""

    errors: Tensor  # [N, T - stack] of next frames
    rollout: Tensor  # [N, H] errors
    squared: Tensor  # [N, H] likewise
    found: Matches  # of balls in rollouts
    still: Matches  # if the last given frame stayed
    emerged: Tensor  # [N, H, K] balls to be found that were hidden when the rollout began or since
    brightness: Tensor  # [C, 64, 64] sum over clips and predicted frames


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Rollouts, how object files bind to balls, and which schemata are chosen when."""
    assert isinstance(model, VideoModel)
    task = BallsTask(config, device)
    tested, bindings, choices = [], [], []
    for index in tqdm(chunks(config.test_clips, device), "testing", disable=None):
        clips = task.clips(index, "test")
        tested.append(predict(config, model, clips))
        binding, choice = look_inside(model, clips)
        bindings += [] if binding is None else [binding]
        choices += [] if choice is None else [choice]
    squared = horizon_errors(torch.cat([t.squared for t in tested]))
    found = join([t.found for t in tested])
    still = join([t.still for t in tested])
    result: dict[str, Any] = {
        "valid": task.validate(model),
        "next_frame": torch.cat([t.errors for t in tested]).double().mean().item(),
        "rollout": describe_rollouts(torch.cat([t.rollout for t in tested]), found)
        | {"squared": squared.each.tolist(), "squared_cumulative": squared.cumulative.tolist()},
        "still": {"f1": f1(still).tolist(), "position": or_none(position_error(still))},
    }
    if VARIANTS[config.variant].has_curtain:
        result["emerged"] = describe_emerged(found, torch.cat([t.emerged for t in tested]))
    if not config.colour:
        frames = config.test_clips * (config.frames - config.context)
        result["mean_picture"] = cross_entropy_of(
            torch.stack([t.brightness for t in tested]).sum(0) / frames
        )
    if bindings:
        result["binding"] = describe_binding(bindings)
    if choices:
        result["schemata"] = describe_choices(choices)
    return result


def predict(config: Config, model: VideoModel, clips: Clips) -> Tested:
    frames, ahead = clips.frames, slice(config.context, None)
    rollout = roll_out(model, frames, config.context)
    radius = to_pixel_units(cast(Tensor, clips.radius))
    hidden = hidden_balls(clips.identity, radius)  # [N, T, K]
    identity, optional = clips.identity[:, ahead], hidden[:, ahead]
    stays = frames[:, config.context - 1, None].expand(-1, identity.shape[1], -1, -1, -1)
    # hidden at the last given frame or since
    unseen = hidden[:, config.context - 1 :].cummax(1).values[:, 1:]
    return Tested(
        next_frame_errors(model, frames),
        rollout.errors,
        rollout.squared,
        find_balls(config, rollout.frames, identity, optional),
        find_balls(config, stays, identity, optional),
        unseen & ~optional & (radius > 0)[:, None],
        frames[:, ahead].sum((0, 1)),
    )


def find_balls(config: Config, frames: Tensor, identity: Tensor, optional: Tensor) -> Matches:
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
    return Matches(*(torch.cat(part) for part in zip(*parts, strict=True)))


def describe_emerged(found: Matches, emerged: Tensor) -> dict[str, Any]:
    """Of balls that come out from behind the curtain: where they went was not to be seen."""
    is_hit = found.distance.isfinite() & emerged
    hits, all_of_them = is_hit.sum((0, 2)), emerged.sum((0, 2))
    distance = torch.where(is_hit, found.distance, 0.0).sum((0, 2))
    return {
        "balls": all_of_them.tolist(),
        "found": or_none(hits / all_of_them),
        "position": or_none(distance / hits),
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
        steps=400,
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
)
