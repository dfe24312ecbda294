"""Bouncing balls in HDF5 files, in the layout of those of R-NEM.

A file has the groups `training`, `validation` and `test`; T frames of N clips are, in each,

    features     (T, N, 64, 64, 1)  bool     the picture
    groups       (T, N, 64, 64, 1)  uint8    whose pixel it is, from 1; 0: background
    collisions   (T, N, 64, 64, 1)  bool     pixels of balls that hit another since the frame before
    events       (T, N)             int64    how often balls hit each other since the frame before
    positions    (T, N, K, 2)       float32  x to the right, y down, in a box of 10 units
    velocities   (T, N, K, 2)       float32  in units a frame

Files written here tell more, in datasets that readers of the original do not look at: `hits`,
`bounces`, `radii`, `masses`, and `curtain` or `colours`, as they are in Clips. The pictures of
coloured balls are made from `groups` and `colours`.

Files of others may lack events, positions and velocities, or have them in another layout: they are
then not told, and never made up.

h5py is needed, and imported only here.
"""

import io
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import h5py
import numpy as np
import torch
from torch import Tensor

from scoff.worlds.balls import FRAMES, Clips, Pictures, VariantName, balls
from scoff.worlds.random import Split

GROUPS: dict[Split, str] = {"train": "training", "valid": "validation", "test": "test"}
# dataset: field of Clips, and whether it has an axis of time
MORE = {
    "hits": ("hits", True),
    "bounces": ("bounces", True),
    "radii": ("radius", False),
    "masses": ("mass", False),
    "curtain": ("curtain", False),
    "colours": ("colour", False),
}
CLIPS_AT_ONCE = 64


class BallsFileError(ValueError):
    """A file is damaged, or not one of bouncing balls."""


# --- writing


def write_balls(
    path: Path,
    sizes: Mapping[Split, int],
    variant: VariantName = "4balls",
    seed: int = 0,
    frames: int = FRAMES,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes the first clips of each split; calls `progress` with how many more there are.

    The file appears when it is whole. One that is there already is not overwritten.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _signals_wait() as heed_signals, _Sink(aside, "w+") as sink:
            with h5py.File(sink, "w") as file:
                file.attrs.update(variant=variant, seed=seed)
                for split, size in sizes.items():
                    if size == 0:
                        continue
                    group = file.create_group(GROUPS[split])
                    for start in range(0, size, CLIPS_AT_ONCE):
                        stop = min(start + CLIPS_AT_ONCE, size)
                        index = torch.arange(start, stop, device=device)
                        clips = balls(seed, index, variant, frames, split)
                        for name, (values, time) in as_arrays(clips).items():
                            _write(group, name, values, time, start, size)
                        sink.check()
                        heed_signals()
                        progress(stop - start)
            sink.check()
            os.fsync(sink.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def _signals_wait() -> Iterator[Callable[[], None]]:
    """Python heeds signals when what is yielded is called, and at the end: what it raises for them
    while HDF5 writes to a `_Sink` crashes HDF5."""
    if threading.current_thread() is not threading.main_thread():  # signals are not for it
        yield lambda: None
        return
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}

    def wait() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # one of Python's
                handlers[number] = handler
                signal.signal(number, lambda *given: came.append(given))

    def heed() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        while came:
            number, frame = came.pop(0)
            handlers[number](number, frame)

    def heed_and_wait() -> None:
        try:
            heed()
        finally:
            wait()

    wait()
    try:
        yield heed_and_wait
    finally:
        heed()


class _Sink(io.FileIO):
    """A file for HDF5, which crashes when the process ends if it could not write: it is not told
    what fails, `check` tells it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self.error is None and len(rest):
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = error
            return size or 0

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def as_arrays(clips: Clips) -> dict[str, tuple[np.ndarray, bool]]:
    """The datasets of a group, and whether they have an axis of time, which is then the first."""
    arrays = {
        "features": ((clips.identity > 0)[..., None], True),
        "groups": (clips.identity[..., None], True),
        "collisions": (clips.collisions[..., None], True),
        "events": (clips.events, True),
        "positions": (clips.position, True),
        "velocities": (clips.velocity, True),
    }
    for name, (field, time) in MORE.items():
        values = getattr(clips, field)
        if values is not None:
            arrays[name] = (values if values.is_floating_point() else values.byte(), time)
    return {
        name: ((values.transpose(0, 1) if time else values).cpu().numpy(), time)
        for name, (values, time) in arrays.items()
    }


def _write(
    group: h5py.Group, name: str, values: np.ndarray, time: bool, start: int, size: int
) -> None:
    axis = 1 if time else 0
    if start == 0:
        shape, chunk = list(values.shape), list(values.shape)
        shape[axis] = size
        # pictures clip by clip, as they are read; what is small many at once
        chunk[axis] = 1 if values.ndim == 5 else min(CLIPS_AT_ONCE, size)
        group.create_dataset(
            name,
            tuple(shape),
            values.dtype,
            chunks=tuple(chunk),
            compression="gzip",
            compression_opts=1,
            fletcher32=True,
        )
    place = slice(start, start + values.shape[axis])
    dataset = cast(h5py.Dataset, group[name])
    dataset[(slice(None), place) if time else place] = values


# --- reading


class Layout(NamedTuple):
    """What there is of one split."""

    frames: int
    clips: int
    height: int
    width: int
    balls: int
    has_colours: bool


class BallsFile:
    """Clips of a file, by their numbers.

    with BallsFile("balls4mass64.h5") as file:
        clips = file.clips(range(64), "train")
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._highest: dict[Split, int] = {}
        if self.path.is_dir():
            raise BallsFileError(f"{self.path}: is a folder, wants an HDF5 file")
        try:
            self._file = h5py.File(self.path, "r")
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {self.path}") from None
        except OSError as error:
            raise BallsFileError(f"{self.path}: cannot be read as HDF5: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def size(self, split: Split = "train") -> int:
        """How many clips there are; 0 if the file has no such group."""
        return self._shape(split)[1] if GROUPS[split] in self._file else 0

    def layout(self, split: Split = "train") -> Layout:
        frames, size, height, width, _ = self._shape(split)
        balls, has_colours = self._balls(split), "colours" in self._group(split)
        # of the truth this alone is needed for pictures
        if has_colours and (shape := self._dataset(split, "colours").shape) != (size, balls):
            raise self._wrong(split, "colours", f"got shape {shape}, wants {(size, balls)}")
        return Layout(frames, size, height, width, balls, has_colours)

    def pictures(
        self,
        index: Tensor | Sequence[int],
        split: Split = "train",
        colours: Tensor | None = None,
    ) -> Pictures:
        """Those with these numbers, on the CPU, without the truth behind them.

        Args:
            colours: [N, K] int64, of balls where the file has none. Default: no colours.
        """
        index = self._index(index, split)
        if "colours" in self._group(split):
            colours = self._read(split, "colours", index, time=False).long()
        if colours is None:
            return Pictures(self._picture("features", index, split) != 0)
        seen = self._picture("features", index, split) != 0
        return Pictures(self._picture("groups", index, split).to(torch.uint8) * seen, colours)

    def clips(self, index: Tensor | Sequence[int], split: Split = "train") -> Clips:
        """Those with these numbers, on the CPU; positions and velocities as the file has them.

        Where these are not told they are NaN, and events are -1. Other truth is None then.
        """
        index = self._index(index, split)
        layout = self.layout(split)
        frames, balls = layout.frames, layout.balls

        def read(name: str, time: bool, *each: int) -> Tensor | None:
            return self._truth(name, index, split, time, each)

        def or_unknown(values: Tensor | None, unknown: Tensor) -> Tensor:
            return unknown if values is None else values.to(unknown.dtype)

        features = self._picture("features", index, split) != 0
        identity = self._picture("groups", index, split).to(torch.uint8)
        collisions = self._picture("collisions", index, split) != 0
        more = {
            field: read(name, time, 2 if name == "curtain" else balls)
            for name, (field, time) in MORE.items()
        }
        more = {k: v if v is None or v.is_floating_point() else v.long() for k, v in more.items()}
        nowhere = torch.full((len(index), frames, balls, 2), torch.nan)
        return Clips(
            identity,
            collisions,
            or_unknown(read("events", True), torch.full((len(index), frames), -1)),
            or_unknown(read("positions", True, balls, 2), nowhere),
            or_unknown(read("velocities", True, balls, 2), nowhere),
            **more,
            features=None if torch.equal(features, identity > 0) else features,
        )

    def _index(self, index: Tensor | Sequence[int], split: Split) -> Tensor:
        if split not in GROUPS:
            raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, GROUPS))}")
        size = self._shape(split)[1]
        index = torch.as_tensor(index, dtype=torch.int64)
        if index.dim() != 1:
            raise IndexError(f"index: got shape {tuple(index.shape)}, wants a row of numbers")
        wrong = index[(index < 0) | (index >= size)]
        if len(wrong):
            raise IndexError(
                f"index: got {wrong[0]}, wants numbers from 0 to {size - 1}, those of "
                f"{GROUPS[split]} in {self.path}"
            )
        return index

    def _balls(self, split: Split) -> int:
        """As positions tell or, where they do not, the highest number in the first groups."""
        if "positions" in self._group(split):
            shape = self._dataset(split, "positions").shape
            if len(shape) == 4 and shape[3] == 2:
                return shape[2]
        if split not in self._highest:
            first = torch.arange(min(CLIPS_AT_ONCE, self._shape(split)[1]))
            groups = self._picture("groups", first, split)
            self._highest[split] = int(groups.max()) if len(groups) else 0
        return self._highest[split]

    def _truth(
        self, name: str, index: Tensor, split: Split, time: bool, each: tuple[int, ...]
    ) -> Tensor | None:
        """[N, T, *each], or [N, *each]; None where the file does not tell it so"""
        if name not in self._group(split):
            return None
        shape, wants = self._dataset(split, name).shape, self._shape(split)[0 if time else 1 : 2]
        if shape[: len(wants)] != wants:
            raise self._wrong(split, name, f"got shape {shape}, wants {wants} first")
        if shape[len(wants) :] not in (each, (math.prod(each),)):  # the latter: all in one axis
            return None
        values = self._read(split, name, index, time)
        return values.reshape(*values.shape[: len(wants)], *each)

    def _picture(self, name: str, index: Tensor, split: Split) -> Tensor:
        """[N, T, H, W]"""
        shape, wants = self._dataset(split, name).shape, self._shape(split)
        if shape != wants:
            raise self._wrong(split, name, f"got shape {shape}, wants {wants}")
        return self._read(split, name, index, time=True)[..., 0]

    def _shape(self, split: Split) -> tuple[int, ...]:
        shape = self._dataset(split, "features").shape
        if len(shape) != 5 or shape[-1] != 1:
            raise self._wrong(split, "features", f"got shape {shape}, wants (T, N, H, W, 1)")
        return shape

    def _group(self, split: Split) -> h5py.Group:
        group = self._file.get(GROUPS[split])
        if not isinstance(group, h5py.Group):
            there = ", ".join(self._file) or "nothing"
            raise BallsFileError(f"{self.path}: no group {GROUPS[split]!r}; there is {there}")
        return group

    def _dataset(self, split: Split, name: str) -> h5py.Dataset:
        group = self._group(split)
        dataset = group.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise self._wrong(
                split, name, f"is not there; there is {', '.join(group) or 'nothing'}"
            )
        if dataset.dtype.kind not in "biuf":
            raise self._wrong(split, name, f"got {dataset.dtype}, wants numbers")
        return dataset

    def _read(self, split: Split, name: str, index: Tensor, time: bool) -> Tensor:
        """[N, ...]"""
        dataset = self._dataset(split, name)
        # h5py takes increasing numbers, and is fast if they follow one another
        numbers, place = index.unique(return_inverse=True)
        first, count = (int(numbers[0]), len(numbers)) if len(numbers) else (0, 0)
        follow = count == 0 or int(numbers[-1]) - first + 1 == count
        chosen: Any = slice(first, first + count) if follow else numbers.numpy()
        with self._telling(split, name):
            values = dataset[(slice(None), chosen) if time else chosen]
        values = torch.from_numpy(np.asarray(values))
        return (values.transpose(0, 1) if time else values)[place]

    @contextmanager
    def _telling(self, split: Split, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._wrong(split, name, f"is damaged: {error}") from error

    def _wrong(self, split: Split, name: str, what: str) -> BallsFileError:
        return BallsFileError(f"{self.path}: dataset {GROUPS[split]}/{name}: {what}")
