"""Intuitive physics: possible movies are learned, and impossible ones are to be found out.

Objects roll behind walls, and some vanish there, change their shape or jump to another place. The
paper (section "Modeling physical laws in a multi-object environment", appendix "Intuitive
Physics"): trained to predict the next state of possible movies, SCOFF's likelihood tells possible
from impossible ones better than that of RMC and than the benchmark's own baseline.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

import scoff
from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.intphys_scores import (
    Judged,
    Surprise,
    describe,
    describe_following,
    follow,
    join,
    judge,
)
from scoff.experiments.video import MODELS, VideoConfig, VideoTask
from scoff.models.video import VideoModel
from scoff.nn.noise import gumbel_
from scoff.training.errors import UsageError
from scoff.training.settings import flag
from scoff.worlds.intphys import BLOCKS, Clips, Quadruplets, quadruplets, render, training_scenes
from scoff.worlds.intphys.quadruplets import MARGIN
from scoff.worlds.intphys.scenes import OBJECT
from scoff.worlds.intphys.stages import Block, Visibility
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.report import Section
    from scoff.worlds.intphys.cache import Cache

CLASSES = 3  # background, object, wall
FEWEST_FRAMES = 40  # of a movie, so that there is time to hide and to come out
# movies rendered, quadruplets made and movies watched at a time
RENDERED = {"cpu": 50, "cuda": 1000}
MADE = {"cpu": 18, "cuda": 90}
WATCHED = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True)
class Config(VideoConfig):
    observe: Literal["classes", "rgb"] = "classes"
    """What is seen and predicted: whether a pixel is background, object or wall, or its colour."""
    frames: int = 25
    """Frames of a movie that are watched."""
    skip: int = 4
    """Every so many-th frame of a movie is watched; it has --frames times --skip of them."""
    context: int = 4
    """Frames at the start of a movie whose errors do not count."""
    window: int = 3
    """Frames over which the windowed score averages errors."""
    draws: int = 8
    """How often SCOFF's schemata are drawn to judge a movie, as they are in training; a pixel is as
    likely as it is on average. 0: once, those of most merit."""
    min_hidden: int = 5
    """For so many frames of a whole movie at least the object is hidden in occluded tests."""
    train_clips: int = 6000
    """Size of the training set."""
    valid_clips: int = 200
    """Size of the validation set."""
    test_clips: int = 540
    """Occluded quadruplets of each block in the test."""
    visible_clips: int = 90
    """Visible quadruplets of each block in the test. 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_rgb = self.observe == "rgb"
        if self.colour != is_rgb or self.classes != (0 if is_rgb else CLASSES):
            wants = f"{is_rgb} and {0 if is_rgb else CLASSES}"
            raise UsageError(
                f"--colour, --classes: got {self.colour} and {self.classes}, but --observe "
                f"{self.observe} wants {wants}"
            )
        shown = self.frames - self.context
        for name, least in (
            ("skip", 1),
            ("draws", 0),
            ("visible_clips", 0),
            ("min_hidden", 2 * MARGIN),
        ):
            if getattr(self, name) < least:
                raise UsageError(
                    f"--{flag(name)}: got {getattr(self, name)}, wants at least {least}"
                )
        if not 1 <= self.window <= shown:
            raise UsageError(f"--window: got {self.window}, wants from 1 to {shown}")
        if self.length < FEWEST_FRAMES:
            raise UsageError(
                f"--frames: got {self.frames} with --skip {self.skip}, wants at least "
                f"{FEWEST_FRAMES} frames of a movie"
            )

    @property
    def length(self) -> int:
        """Frames of a whole movie."""
        return self.frames * self.skip


# --- what is seen


def observe(config: Config, clips: Clips) -> Tensor:
    """As bytes  -> [..., T, H, W] classes or [..., T, H, W, 3] colours"""
    return clips.classes if config.observe == "classes" else clips.frames


def as_frames(config: Config, seen: Tensor) -> Tensor:
    """What a model takes  -> [..., T, 3, H, W] from 0 to 1"""
    if config.observe == "rgb":
        return seen.movedim(-1, -3).float() / 255
    kind = torch.arange(CLASSES, dtype=torch.uint8, device=seen.device)[:, None, None]
    return (seen[..., None, :, :] == kind).float()


def training_movies(config: Config, index: Tensor, split: Split) -> Tensor:
    """Only the frames that are watched are rendered  -> as `observe`"""
    scenes = training_scenes(config.data_seed, index, split, config.length, config.min_hidden)
    every = slice(None, None, config.skip)
    scenes = scenes._replace(centre=scenes.centre[:, every], tilt=scenes.tilt[:, every])
    return observe(config, render(scenes, config.frame_size))


class Movies(NamedTuple):
    frames: Tensor  # [N, T, 3, H, W]


class IntphysTask(VideoTask):
    """A set is rendered once and kept on the device as bytes."""

    config: Config

    def __init__(self, config: Config, device: torch.device):
        super().__init__(config, device)
        self.sizes: dict[Split, int] = {"train": config.train_clips, "valid": config.valid_clips}
        self.kept: dict[Split, Tensor] = {}

    def clips(self, index: Tensor, split: Split) -> Movies:
        if split not in self.kept:
            numbers = torch.arange(self.sizes[split], device=index.device)
            parts = numbers.split(at_once(RENDERED, index.device))
            self.kept[split] = torch.cat(
                [training_movies(self.config, part, split) for part in parts]
            )
        return Movies(as_frames(self.config, self.kept[split][index]))


def at_once(sizes: dict[str, int], device: torch.device) -> int:
    return sizes.get(device.type, sizes["cuda"])


# --- evaluation


def surprise(config: Config, model: VideoModel, seen: Tensor) -> Tensor:
    """Errors of frames `context` to the last  [..., T, H, W(, 3)] bytes -> [..., T - context]"""
    return pixel_surprise(config, model, seen).mean((-2, -1))


@torch.no_grad()
def pixel_surprise(config: Config, model: VideoModel, seen: Tensor) -> Tensor:
    """Where the errors are  [..., T, H, W(, 3)] bytes -> [..., T - context, H, W]

    In single precision whatever a model was trained in: what differs between movies is small.
    """
    trailing = 3 if config.observe == "classes" else 4
    movies = seen.reshape(-1, *seen.shape[-trailing:])
    stack = model.options.stack
    with torch.autocast(seen.device.type, enabled=False):
        errors = [
            frame_errors(model, as_frames(config, part), config.draws)
            for part in movies.split(at_once(WATCHED, seen.device))
        ]
    counted = torch.cat(errors)[:, config.context - stack :]
    return counted.reshape(*seen.shape[:-trailing], *counted.shape[1:])


def frame_errors(model: VideoModel, frames: Tensor, draws: int) -> Tensor:
    """Of each pixel of frames `stack` to the last  [N, T, 3, H, W] -> [N, T - stack, H, W]"""
    stack = model.options.stack
    targets = frames[:, stack:]
    drawn = [
        model.likelihood.pixels(model(frames[:, :-1], noise=noise).logits, targets)
        for noise in draw_noise(model, targets.shape[:2], draws)
    ]
    if len(drawn) == 1:
        return drawn[0]
    # errors of colours are means over channels, of which a pixel's likelihood is the product
    factors = 1 if model.options.classes else model.options.channels
    likely = (-factors * torch.stack(drawn)).logsumexp(0) - math.log(len(drawn))
    return -likely / factors


def draw_noise(model: VideoModel, steps: Sequence[int], draws: int) -> Iterator[Tensor | None]:
    """Of each draw of schemata [N, T, F, S], or None where there is nothing to draw

    The same for all movies, so that it tells none of them from another, and at each call.
    """
    if not draws or not isinstance(model.rnn, scoff.SCOFF) or model.rnn.num_schemata == 1:
        yield None
        return
    cell = cast(scoff.SCOFFCell, model.rnn.cells[0])
    movies, length = steps
    shape = (length, cell.num_object_files, cell.num_schemata)
    generator = torch.Generator().manual_seed(0)  # of the CPU, which is the same everywhere
    for _ in range(draws):
        noise = gumbel_(torch.empty(shape), generator)
        yield noise.to(cell.like).expand(movies, -1, -1, -1)


def make_tests(config: Config, index: Tensor, block: Block, visibility: Visibility) -> Quadruplets:
    return quadruplets(
        config.data_seed,
        index,
        block,
        visibility,
        min_hidden=config.min_hidden,
        pixels=config.frame_size,
        frames=config.length,
    )


def cells(config: Config) -> Iterator[tuple[Visibility, Block, int]]:
    """What is tested, and by how many quadruplets"""
    for block in BLOCKS:
        yield "occluded", block, config.test_clips
    for block in BLOCKS if config.visible_clips else ():
        yield "visible", block, config.visible_clips


@torch.no_grad()
def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Whether plausibilities tell possible from impossible movies, and who follows the hidden."""
    assert isinstance(model, VideoModel)
    judged: dict[str, Judged] = {}
    followed = []
    for visibility, block, size in tqdm([*cells(config)], "testing", disable=None):
        parts = []
        for index in torch.arange(size, device=device).split(at_once(MADE, device)):
            tests = make_tests(config, index, block, visibility)
            movies = tests.movies()
            whole = observe(config, movies)
            seen = whole[:, :, :: config.skip]
            is_object = movies.classes[:, :, config.context * config.skip :: config.skip] == OBJECT
            errors = pixel_surprise(config, model, seen)
            told = Surprise(errors.mean((-2, -1)), (errors * is_object).mean((-2, -1)))
            parts.append(judge(tests, movies.identity, whole, seen, told, config.window))
            if visibility == "occluded":
                followed.append(follow(config, model, tests, movies.identity, seen))
        judged[f"{visibility}/{block}"] = join(parts)
    result = {
        "valid": IntphysTask(config, device).validate(model),
        **describe(judged, config.length),
    }
    following = describe_following([part for part in followed if part is not None])
    return result | ({} if following is None else {"following": following})


def judge_data(
    config: Config, model: nn.Module, device: torch.device, cache: "Cache"
) -> dict[str, float]:
    """Plausibility of every movie of a folder, by its name."""
    from scoff.experiments.intphys_data import judge_cache

    assert isinstance(model, VideoModel)
    return judge_cache(config, model, device, cache)


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.intphys_report import report_runs

    return report_runs(runs)


# --- presets


def pixels(observe: str) -> dict[str, Any]:
    if observe not in ("classes", "rgb"):
        raise UsageError(f"--observe: got {observe!r}, wants one of classes, rgb")
    is_rgb = observe == "rgb"
    return {"observe": observe, "colour": is_rgb, "classes": 0 if is_rgb else CLASSES}


def paper(model: str, observe: str = "classes") -> Config:
    """The table of the paper's appendix. It has 85 values for four heads, which does not divide:
    here 84. What it does not tell, the size of object files, frames and steps, is chosen here."""
    return Config(
        model=cast(Any, model),
        **pixels(observe),
        object_files=6,
        schemata=6,
        active=4,
        hidden_size=600,
        input_heads=4,
        input_value_size=84,
        input_dropout=0.1,
        comm_dropout=0.1,
        frames=50,
        skip=2,
        train_clips=15_000,
        steps=50 * 15_000 // 64,
        batch_size=64,
        lr=3e-4,
        decoder="attention",
        painter="deconvolution",
        validate_every=1000,
        checkpoint_every=1000,
    )


def tuned(model: str, observe: str = "classes") -> Config:
    """Object files that start at places which stand out and are painted by themselves, every fourth
    frame, and a learning rate that rises and falls.

    And what makes memories, for all layers alike: errors are led back to the first frame (no
    `settle`), and gates that keep the state start more open."""
    return replace(
        paper(model, observe),
        start="places",
        input_heads=1,
        input_value_size=None,
        input_dropout=0.0,
        comm_dropout=0.0,
        detach_input_query=True,
        clip=0.05,
        keep_bias=2.0,
        frames=25,
        skip=4,
        train_clips=6000,
        steps=6000,
        batch_size=32,
        lr=1e-3,
        warmup=0.05,
        decay="cosine",
        decoder="masks",
        painter="patches",
        validate_every=500,
        checkpoint_every=500,
    )


def quick(model: str, observe: str = "classes") -> Config:
    """Small pictures, one for all object files, and few steps: it shows that all works."""
    return replace(
        tuned(model, observe),
        hidden_size=240,
        features=64,
        decoder="attention",
        frame_size=32,
        map_size=8,
        train_clips=600,
        valid_clips=32,
        test_clips=36,
        visible_clips=36,
        steps=400,
        batch_size=8,
        validate_every=100,
        checkpoint_every=200,
    )


EXPERIMENT = Experiment(
    name="intphys",
    title="Intuitive physics",
    summary="Learn from possible movies; tell them from impossible ones by likelihood.",
    claim="Models watch objects that roll and rest before and behind walls, and predict the next "
    "frame. Then they are shown movies in which an object vanished, changed its shape or jumped "
    "while it was hidden. The question is whether these surprise them: whether something "
    "remembered what was behind the wall.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "32 by 32 pixels, few steps: some minutes each on a CPU core",
            quick,
            ("scoff", "gru"),
            seeds=1,
            grid={"observe": ("classes",)},
        ),
        "tuned": Preset(
            "masks, every fourth frame, a higher learning rate: minutes on a GPU",
            tuned,
            ("scoff", "rmc", "gru", "rims"),
            grid={"observe": ("classes",)},
        ),
        "paper": Preset(
            "the paper's sizes, learning rate and batch, 50 epochs of 15,000 movies: hours",
            paper,
            ("scoff", "scoff-sparse", "rmc", "rims", "lstm", "gru"),
            grid={"observe": ("classes",)},
        ),
    },
    make_task=IntphysTask,
    evaluate=evaluate,
    report=report,
    defaults_by=("observe",),
    judge_data=judge_data,
)
