"""Clips of bouncing balls that lie in a file: R-NEM's, or those of `scoff data balls`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scoff.training.errors import UsageError
from scoff.worlds.balls import PIXELS, VARIANTS, Clips, Pictures, colours
from scoff.worlds.random import Split

if TYPE_CHECKING:
    from scoff.experiments.balls import Config
    from scoff.worlds.balls_file import BallsFile

READ_AT_ONCE = 256  # clips
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@contextmanager
def opened(path: str | None) -> "Iterator[BallsFile]":
    """What is wrong with the file, now or while it is read, is told of --data."""
    assert path is not None
    try:
        from scoff.worlds.balls_file import BallsFile, BallsFileError
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--data: the package {error.name} is not installed: pip install 'scoff[data]'"
        ) from error
    try:
        with BallsFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise UsageError(f"--data: there is no file {path}") from error
    except BallsFileError as error:
        raise UsageError(f"--data: {error}") from error


def check_data(config: "Config", splits: Sequence[Split] = SPLITS) -> None:
    """Refuses a file that is not of the variant, or has less than is asked for."""
    kind, few, coloured = VARIANTS[config.variant], [], set()
    with opened(config.data) as file:
        for split in splits:
            found, asked = file.layout(split), getattr(config, f"{split}_clips")
            if (found.height, found.width) != (PIXELS, PIXELS):
                size = f"{found.height} by {found.width}"
                raise UsageError(
                    f"--data: {file.path} has frames of {size} pixels, wants {PIXELS} by {PIXELS}"
                )
            own = (found.balls, found.has_colours)
            wanted = (max(kind.counts), kind.has_colours)
            if own not in (wanted, (wanted[0], False)):  # colours that are not there are drawn
                raise UsageError(
                    f"--variant: got {config.variant}, which has {balls(*wanted)}, but "
                    f"{file.path} has {balls(*own)}"
                )
            coloured.add(found.has_colours)
            if found.frames < config.frames:
                raise UsageError(
                    f"--frames: got {config.frames}, wants at most {found.frames}, as many as "
                    f"{file.path} has"
                )
            if found.clips < asked:
                few.append(f"--{split}-clips: got {asked}, wants at most {found.clips}")
            # of no clips: what is laid out wrongly is told now, not when training is over
            if split == "test":
                file.clips([], split)
            else:
                none = torch.arange(0)
                file.pictures(none, split, drawn_colours(config, none, split))
        if len(coloured) > 1:
            raise UsageError(f"--data: {file.path} has colours in some of its groups only")
    if few:
        raise UsageError(f"{'; '.join(few)}: there are no more in {config.data}")


def balls(count: int, has_colours: bool) -> str:
    return f"{count} balls {'in colours' if has_colours else 'without colours'}"


def keep_pictures(config: "Config", split: Split, device: torch.device) -> Pictures:
    """The pictures of a whole set, on the device."""
    size = getattr(config, f"{split}_clips")
    kept: list[Tensor] = []
    with opened(config.data) as file:
        # filled piece by piece: to join pieces would take twice the memory
        for index in torch.arange(size).split(READ_AT_ONCE):
            pixels, *colour = file.pictures(index, split, drawn_colours(config, index, split))
            parts = [pixels[:, : config.frames], *(c for c in colour if c is not None)]
            if not kept:
                kept = [part.new_empty(size, *part.shape[1:], device=device) for part in parts]
            for whole, part in zip(kept, parts, strict=True):
                whole[index[0] : index[-1] + 1] = part
    return Pictures(*kept)


def drawn_colours(config: "Config", index: Tensor, split: Split) -> Tensor | None:
    """Those of generated clips with these numbers: the original's files have none."""
    if not VARIANTS[config.variant].has_colours:
        return None
    return colours(config.data_seed, index, config.variant, split)


def read_clips(config: "Config", index: Tensor, split: Split = "test") -> Clips:
    """With all that the file tells of them, on the device of `index`."""
    kind = VARIANTS[config.variant]
    with opened(config.data) as file:
        clips = file.clips(index.cpu(), split)
    if clips.colour is None:
        clips = clips._replace(colour=drawn_colours(config, index.cpu(), split))
    if clips.radius is None and len({*kind.counts}) == len({*kind.radii}) == 1:
        # as many balls in each clip, and all alike
        radius = torch.full((len(index), kind.counts[0]), kind.radii[0])
        clips = clips._replace(radius=radius)
    if clips.features is not None:  # a ball may be marked where it is not seen: behind a curtain
        clips = clips._replace(identity=clips.identity * clips.features)
    timeless = ("radius", "mass", "curtain", "colour")
    return Clips(
        **{
            name: (part if name in timeless else part[:, : config.frames]).to(index.device)
            for name, part in clips._asdict().items()
            if part is not None
        }
    )
