"""A movie as it lies on disk: frames, what their pixels show, depth, whether it is possible."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scoff.worlds.intphys.layouts import Movie, read_json
from scoff.worlds.intphys.png import DataError, read_png
from scoff.worlds.intphys.scenes import BACKGROUND, OBJECT, OCCLUDER

STATUS = "status.json"
_FRAME = re.compile(r"[a-z]+_(\d+)\.png")


class Pictures(NamedTuple):
    frames: np.ndarray  # [T, H, W, 3] uint8
    classes: np.ndarray | None  # [T, H, W] uint8; None: there are no masks, or no names for them


def count_frames(movie: Movie) -> int:
    return len(_files(movie.path, "scene"))


def read_pictures(movie: Movie, size: int | None = None) -> Pictures:
    """Frames, and where masks and their names are there, what each pixel shows"""
    scenes = _files(movie.path, "scene")
    frames = [read_png(path, "colour", size) for path in scenes]
    _check_alike(frames, scenes)
    return Pictures(np.stack(frames), _read_classes(movie, len(frames), size))


def has_classes(movie: Movie) -> bool:
    """Whether there are masks and names for them"""
    return _masks(movie, count_frames(movie)) is not None


def visibility(movie: Movie) -> str | None:
    """As told, or by whether any wall is named; None: it cannot be known"""
    if movie.visibility is not None:
        return movie.visibility
    masks = _masks(movie, count_frames(movie))
    if masks is None:
        return None
    walls = any(_class(name) == OCCLUDER for names in masks.names for name in names.values())
    return "occluded" if walls else "visible"


def read_depth(movie: Movie, size: int | None = None) -> np.ndarray:
    """In millimetres along the line of sight; 0: sky  [T, H, W] int32"""
    files = _files(movie.path, "depth")
    stored = [read_png(path, "depth", size) for path in files]
    _check_alike(stored, files)
    raw = np.stack(stored).astype(np.int32)
    return np.where(raw == 0, 0, 65535 - raw)


def is_possible(movie: Movie) -> bool | None:
    """None: it is not told, as in the benchmark's test set"""
    for path in _status_files(movie.path):
        status = _status(path)
        header = status.get("header")
        header = header if isinstance(header, dict) else {}
        told = header.get("is_possible", status.get("possible"))
        if told is not None and not isinstance(told, bool):
            raise DataError(f"{path}: is_possible: got {told!r}, wants true or false")
        if told is not None:
            return told
    return None


def _status_files(movie: Path) -> list[Path]:
    """Its own, and the full one, which is kept apart: dev_metadata/O1/01/1/status.json"""
    if len(movie.parents) < 4:
        return [path for path in (movie / STATUS,) if path.exists()]
    split = movie.parents[2]
    apart = movie.parents[3] / f"{split.name}_metadata" / movie.relative_to(split)
    return [path for path in (movie / STATUS, apart / STATUS) if path.exists()]


def _files(movie: Path, kind: str) -> list[Path]:
    folder = movie / kind
    if not folder.is_dir():
        raise DataError(f"{folder}: is missing")
    numbered = {}
    for path in folder.iterdir():
        match = _FRAME.fullmatch(path.name)
        if match:
            numbered[int(match[1])] = path
    if not numbered:
        raise DataError(f"{folder}: has no frames; wants {kind}_001.png and so on")
    for number in range(1, max(numbered) + 1):
        if number not in numbered:
            digits = len(_digits(numbered[max(numbered)]))
            raise DataError(f"{folder / f'{kind}_{number:0{digits}}.png'}: is missing")
    return [numbered[number] for number in sorted(numbered) if number > 0]


def _digits(path: Path) -> str:
    return path.stem.rsplit("_", 1)[1]


def _check_alike(pictures: list[np.ndarray], paths: list[Path]) -> None:
    for picture, path in zip(pictures, paths, strict=True):
        if picture.shape != pictures[0].shape:
            got, wants = picture.shape[:2], pictures[0].shape[:2]
            raise DataError(f"{path}: got {got} pixels, wants {wants}, those of {paths[0].name}")


class _Masks(NamedTuple):
    kind: str
    status: Path
    names: list[dict[int, str]]


def _masks(movie: Movie, frames: int) -> _Masks | None:
    for kind in ("masks", "mask"):
        if (movie.path / kind).is_dir():
            for path in _status_files(movie.path):
                names = _mask_names(path, frames)
                if names:
                    return _Masks(kind, path, names)
    return None


def _read_classes(movie: Movie, frames: int, size: int | None) -> np.ndarray | None:
    masks = _masks(movie, frames)
    if masks is None:
        return None
    files = _files(movie.path, masks.kind)
    if len(files) != frames:
        raise DataError(
            f"{files[-1].parent}: has {len(files)} frames, wants {frames}, as scene has"
        )
    classes = []
    for path, ids in zip(files, masks.names, strict=True):
        table = np.full(256, 255, np.uint8)
        for number, name in ids.items():
            table[number] = _class(name)
        shown = table[read_png(path, "grey", size)]
        if (shown == 255).any():
            raise DataError(f"{path}: shows a number that {masks.status} has no name for")
        classes.append(shown)
    _check_alike(classes, files)
    return np.stack(classes)


def _class(name: str) -> int:
    if name.startswith("object"):
        return OBJECT
    return OCCLUDER if name.startswith("occluder") else BACKGROUND


def _mask_names(path: Path, frames: int) -> list[dict[int, str]] | None:
    """Which number is whose, frame by frame: told in three ways, by the age of the data"""
    status = _status(path)
    steps = status.get("frames")
    header = status.get("header")
    if isinstance(steps, list) and steps and all("masks" in step for step in steps):
        if len(steps) != frames:
            raise DataError(f"{path}: tells of {len(steps)} frames, wants {frames}, as scene has")
        return [_by_number(path, step["masks"].items()) for step in steps]
    if isinstance(header, dict) and isinstance(header.get("masks"), dict):
        return [_by_number(path, header["masks"].items())] * frames
    if isinstance(status.get("masks_grayscale"), list):
        pairs = [(name, number) for number, name in status["masks_grayscale"]]
        return [_by_number(path, pairs)] * frames
    return None


def _by_number(path: Path, pairs: Any) -> dict[int, str]:
    names = {}
    for name, number in pairs:
        if not isinstance(number, int) or not 0 <= number <= 255:
            raise DataError(f"{path}: mask of {name}: got {number!r}, wants from 0 to 255")
        names[number] = str(name)
    return names


def _status(path: Path) -> dict[str, Any]:
    status = read_json(path)
    if not isinstance(status, dict):
        raise DataError(f"{path}: wants a JSON object")
    return status
