"""What experiments on video share: models, training on next frames, tests of rollouts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

import scoff
from scoff.experiments.division import information, persistence
from scoff.models.video import VideoModel, count_parameters, match_width
from scoff.models.video_options import LayerName, VideoOptions, VideoParts
from scoff.training.errors import UsageError
from scoff.training.settings import Settings, flag
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.experiments.base import Finished
    from scoff.report import Table

MODELS = {
    "scoff": "SCOFF",
    "scoff-sparse": "SCOFF, sparse",
    "rims": "RIMs",
    "rmc": "RMC",
    "lstm": "LSTM",
    "gru": "GRU",
    "gru-matched": "GRU, as many parameters as SCOFF",
}


@dataclass(frozen=True)
class VideoConfig(VideoParts, Settings):
    model: Literal["scoff", "scoff-sparse", "rims", "rmc", "lstm", "gru", "gru-matched"] = "scoff"
    """Recurrent layer. scoff updates all object files at each step, scoff-sparse some; gru is as
    wide as the others, gru-matched has as many parameters as scoff."""

    frames: int = 51
    """Frames of a clip."""
    train_frames: int | None = None
    """Longer training clips are cut into pieces of so many frames, each a clip of its own; frames
    that are left over at the end go unused. None: whole clips. The shorter, the more counts what
    object files make of where they start, before an untrained layer has made them alike."""
    train_clips: int = 10_000
    """Size of the training set."""
    valid_clips: int = 500
    """Size of the validation set."""
    test_clips: int = 1000
    """Size of the test set."""
    data_seed: int = 0
    """Of all three sets, apart from --seed so that all runs see the same data."""
    context: int = 15
    """Frames that are given before a rollout."""
    free_frames: int = 0
    """Frames at the end of a training clip that are predicted from predictions."""
    schema_scale: float = 1.0
    """The weights that choose SCOFF's schemata start this many times as large."""
    persistence: float = 0.0
    """Weight in the training loss of how long SCOFF's choices of a schema last within a clip. It
    falls to nothing in the course of training."""
    persistence_lag: int = 12
    """Frames over which a choice should last: about a quarter of a clip."""
    information: float = 0.0
    """Weight in the training loss of how much SCOFF's choices of a schema tell: whether all are
    chosen equally often and each for certain."""
    information_window: int = 4
    """Steps in a row for which a choice should be certain."""
    surprise: float = 0.0
    """Weight in the training loss of the frames that were predicted worst, a twentieth of a batch,
    which count besides their part in the mean: what happens seldom is otherwise learned last."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        try:
            VideoParts.__post_init__(self)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        for name, least in (
            ("train_clips", 1),
            ("valid_clips", 1),
            ("test_clips", 1),
            ("data_seed", 0),
            ("free_frames", 0),
            ("frames", self.stack + 1 + self.free_frames),
            ("context", self.stack),
            ("schema_scale", 0),
            ("persistence", 0),
            ("persistence_lag", 3),
            ("information", 0),
            ("information_window", 1),
            ("surprise", 0),
        ):
            value = getattr(self, name)
            bits = 64 if name == "data_seed" else 63
            if not least <= value < 2**bits:
                wants = f"at least {least}" if value < least else f"a number below 2^{bits}"
                raise UsageError(f"--{flag(name)}: got {value}, wants {wants}")
        if self.context >= self.frames:
            raise UsageError(
                f"--context: got {self.context}, wants less than --frames = {self.frames}"
            )
        steps = self.piece_frames - self.stack - self.free_frames
        if steps < 1:
            least = self.stack + 1 + self.free_frames
            raise UsageError(f"--train-frames: got {self.train_frames}, wants at least {least}")
        if self.persistence and self.persistence_lag >= steps:
            raise UsageError(
                f"--persistence-lag: got {self.persistence_lag}, wants less than {steps}, the "
                "steps of a clip"
            )
        if self.information and self.information_window > steps:
            raise UsageError(
                f"--information-window: got {self.information_window}, wants at most {steps}, the "
                "steps of a clip"
            )

        if self.divides and self.cell == "lstm":
            raise UsageError(
                "--cell: got lstm, wants gru with --persistence or --information, which ask for "
                "the states of all steps, and of an LSTM only h is told"
            )

    def check_world(self, world: str, frames: int, colour: bool = False) -> None:
        """Of pictures of 64 x 64 pixels, and of tests that need so many frames."""
        for name, wanted in (("frame_size", 64), ("classes", 0), ("colour", colour)):
            got = getattr(self, name)
            if got != wanted:
                raise UsageError(f"--{flag(name)}: got {got}, but {world} wants {wanted}")
        if self.frames < frames:
            raise UsageError(
                f"--frames: got {self.frames}, wants at least {frames}, for the first predictions "
                "do not count in tests"
            )

    @property
    def piece_frames(self) -> int:
        """Frames of what is trained on."""
        return self.frames if self.train_frames is None else min(self.frames, self.train_frames)

    @property
    def divides(self) -> bool:
        """Whether schemata are asked to divide the work. Other layers have none."""
        wanted = self.persistence > 0 or self.information > 0
        return wanted and self.model in ("scoff", "scoff-sparse") and self.schemata > 1


def video_options(config: VideoConfig) -> VideoOptions:
    """What is built, of the width that the name of the model stands for."""
    parts = {field.name: getattr(config, field.name) for field in fields(VideoParts)}
    if config.model == "gru-matched":
        as_large = count_parameters(VideoOptions(**parts))
        return match_width(VideoOptions(**parts, model="gru"), as_large)
    return VideoOptions(**parts, model=cast(LayerName, config.model))


def make_model(config: VideoConfig) -> VideoModel:
    model = VideoModel(video_options(config))
    if isinstance(model.rnn, scoff.SCOFF):
        cell = cast(scoff.SCOFFCell, model.rnn.cells[0])
        with torch.no_grad():
            cell.schema_query.mul_(config.schema_scale)
            cell.schema_key.mul_(config.schema_scale)
    return model


class VideoTask:
    """Next-frame prediction. An experiment says what the clips are."""

    def __init__(self, config: VideoConfig, device: torch.device):
        self.config, self.device = config, device
        self.train_size = config.train_clips
        self.model = make_model(config)
        self.left = torch.ones((), device=device)  # share of training that is still to come

    def check_new(self) -> None:
        if self.config.model != "gru-matched":
            return
        as_large = count_parameters(video_options(replace(self.config, model="scoff")))
        found = count_parameters(self.model.options)
        if abs(found / as_large - 1) > 0.05:
            raise UsageError(
                f"--model: got gru-matched, but the nearest GRU has {found:,} parameters and "
                f"SCOFF {as_large:,}; with a smaller --map-size it comes closer"
            )

    def set_progress(self, share: float) -> None:
        self.left.fill_(1 - share)

    def clips(self, index: Tensor, split: Split) -> Any:
        """With `frames` [N, T, C, H, W] and whatever else is known of them."""
        raise NotImplementedError

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        frames, length = self.clips(index, "train").frames, self.config.piece_frames
        pieces = frames.shape[1] // length
        return (frames[:, : pieces * length].unflatten(1, (pieces, length)).flatten(0, 1),)

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, ...]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        (frames,) = batch
        stack, free = self.config.stack, self.config.free_frames
        # not by the model's own method: wrappers, such as that of several GPUs, know but forward
        given = frames[:, : frames.shape[1] - 1 - free]
        divides = self.config.divides
        told = model(given, targets=frames[:, stack:], free=free, tell_choices=divides)
        error = told.errors.mean()
        if not divides and not self.config.surprise:
            return error, {}
        loss, parts = error, {"nll": error}
        if self.config.surprise:
            parts["surprise"] = worst(told.errors)
            loss = loss + self.config.surprise * parts["surprise"]
        # each alone: lags and windows that are not used may be longer than the clip
        if divides and self.config.persistence:
            parts["persistence"] = persistence(told.choices, self.config.persistence_lag)
            # once schemata are divided it may make them late: clips cut in halves have more of it
            loss = loss - self.config.persistence * self.left * parts["persistence"]
        if divides and self.config.information:
            parts["information"] = information(told.choices, self.config.information_window)
            loss = loss - self.config.information * parts["information"]
        return loss, parts

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Mean error of the next frame, in nats."""
        total = 0.0
        for index in chunks(self.config.valid_clips, self.device):
            frames = self.clips(index, "valid").frames
            total += next_frame_errors(cast(VideoModel, model), frames).mean(1).sum().item()
        return {"nll": total / self.config.valid_clips}


def worst(errors: Tensor) -> Tensor:
    """Mean of the largest twentieth."""
    return errors.flatten().topk(math.ceil(errors.numel() / 20)).values.mean()


def chunks(size: int, device: torch.device) -> Sequence[Tensor]:
    """Numbers of clips in pieces that fit into memory"""
    return torch.arange(size, device=device).split(16 if device.type == "cpu" else 64)


def next_frame_errors(model: VideoModel, frames: Tensor) -> Tensor:
    """Of frames `stack` to the last  [N, T - stack]"""
    return cast(Tensor, model(frames[:, :-1], targets=frames[:, model.options.stack :]).errors)


def training_table(groups: "Mapping[str, list[Finished]]") -> "Table":
    from scoff.report import Estimate, Table

    rows = []
    for name, group in groups.items():
        first = group[0]
        width = video_options(first.config).hidden_size
        seconds = Estimate.of([run.evaluation["seconds"]["training"] for run in group])
        valid = Estimate.of([run.evaluation["valid"]["nll"] for run in group])
        steps = min(run.evaluation["steps"] for run in group)
        sizes = [width, first.evaluation["parameters"], steps, first.config.batch_size]
        rows.append([name, len(group), *sizes, seconds, valid])
    columns = ["", "seeds", "width", "parameters", "steps", "batch", "seconds", "validation error"]
    return Table("Size, time and validation error", columns, rows)
