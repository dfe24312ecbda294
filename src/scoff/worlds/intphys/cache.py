"""Movies of a folder as one array of bytes, at the size that a model takes: made once, then mapped.

A cache is a folder: frames.bin [N, T, S, S, 3] and, where masks are told, classes.bin [N, T, S, S],
cache.json, which says what is in them, and done.txt, a line for each movie that is whole, with the
checksums of its bytes. Making one can be stopped at any moment, and goes on where it was.
"""

import json
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from scoff.worlds.intphys.files import (
    count_frames,
    has_classes,
    is_possible,
    read_pictures,
    visibility,
)
from scoff.worlds.intphys.layouts import Movie, find_movies, read_json
from scoff.worlds.intphys.png import DataError

VERSION = 1
HEAD, DONE = "cache.json", "done.txt"


@dataclass(frozen=True)
class Cache:
    """Open with Cache.open; refuses what is not whole."""

    path: Path
    movies: list[Movie]
    possible: list[bool | None]
    frames: np.ndarray  # [N, T, S, S, 3] uint8, mapped
    classes: np.ndarray | None  # [N, T, S, S] uint8, mapped
    checksums: list[tuple[int, int]]

    @classmethod
    def open(cls, path: Path) -> "Cache":
        head = _read_head(path)
        done = _read_done(path, len(head["movies"]))
        if len(done) < len(head["movies"]):
            left = len(head["movies"]) - len(done)
            raise DataError(
                f"{path}: is half-written, {left} of {len(head['movies'])} movies are missing; "
                "making it again goes on where it stopped"
            )
        layers = _map(path, head, "r")
        return cls(
            path,
            [_movie(entry) for entry in head["movies"]],
            [entry["possible"] for entry in head["movies"]],
            layers[0],
            layers[1],
            [done[number] for number in range(len(done))],
        )

    def read(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """Frames and classes of some movies, their checksums compared"""
        for number in numbers:
            if _checksums(self.frames, self.classes, number) != self.checksums[number]:
                raise DataError(
                    f"{self.path}: the bytes of {self.movies[number].name} have changed since they "
                    "were written; delete the cache and make it again"
                )
        chosen = list(numbers)
        return self.frames[chosen], None if self.classes is None else self.classes[chosen]


def build_cache(
    folder: Path,
    path: Path,
    size: int = 64,
    workers: int = 1,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Cache:
    """Fills a cache with all movies of a folder, or what is missing of it, and opens it.

    `progress` is called with how many movies are done, and of how many.
    """
    if size < 1:
        raise ValueError(f"size: got {size}, wants an integer of at least 1")
    head = _describe(folder, size)
    path.mkdir(parents=True, exist_ok=True)
    if (path / HEAD).exists():
        held = _read_head(path)
        if held != head:
            different = next(key for key in head if held.get(key) != head[key])
            raise DataError(
                f"{path}: holds another cache ({different} differ); delete it, or name another"
            )
    else:
        _start(path, head)
    total = len(head["movies"])
    done = _read_done(path, total)
    progress(len(done), total)
    left = [number for number in range(total) if number not in done]
    jobs = [(path, number) for number in left]
    with open(path / DONE, "a") as record:

        def note(number: int, sums: tuple[int, int]) -> None:
            record.write(f"{number} {sums[0]} {sums[1]}\n")
            record.flush()
            done[number] = sums
            progress(len(done), total)

        if workers <= 1 or len(left) <= 1:
            for job in jobs:
                note(job[1], _fill(*job))
        else:
            _in_parallel(jobs, workers, note)
    return Cache.open(path)


def _in_parallel(
    jobs: list[tuple[Path, int]], workers: int, note: Callable[[int, tuple[int, int]], None]
) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_fill, *job): job[1] for job in jobs}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for one in finished:
                    note(waiting.pop(one), one.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _describe(folder: Path, size: int) -> dict[str, Any]:
    movies = find_movies(folder)
    lengths = {movie.name: count_frames(movie) for movie in movies}
    length = lengths[movies[0].name]
    for movie in movies:
        if lengths[movie.name] != length:
            raise DataError(
                f"{movie.path / 'scene'}: has {lengths[movie.name]} frames, wants {length}, "
                f"as {movies[0].path} has"
            )
    return {
        "version": VERSION,
        "folder": str(folder.resolve()),
        "size": size,
        "frames": length,
        "has_classes": all(has_classes(movie) for movie in movies),
        "movies": [
            {
                "path": str(movie.path),
                "name": movie.name,
                "block": movie.block,
                "quadruplet": movie.quadruplet,
                "visibility": None if movie.block is None else visibility(movie),
                "movement": movie.movement,
                "objects": movie.objects,
                "possible": is_possible(movie),
            }
            for movie in movies
        ],
    }


def _start(path: Path, head: dict[str, Any]) -> None:
    if any(path.iterdir()):
        raise DataError(f"{path}: is not empty, and no cache; name another folder")
    count, length, size = len(head["movies"]), head["frames"], head["size"]
    sizes = {"frames.bin": 3}
    if head["has_classes"]:
        sizes["classes.bin"] = 1
    for name, depth in sizes.items():
        with open(path / name, "wb") as file:
            file.truncate(count * length * size * size * depth)
    aside = path / f".{HEAD}.tmp"
    aside.write_text(json.dumps(head, indent=1) + "\n")
    os.replace(aside, path / HEAD)


def _fill(path: Path, number: int) -> tuple[int, int]:
    """Writes one movie; gives its checksums"""
    head = _read_head(path)
    frames, classes = _map(path, head, "r+")
    movie = _movie(head["movies"][number])
    pictures = read_pictures(movie, head["size"])
    if len(pictures.frames) != head["frames"]:
        got = len(pictures.frames)
        raise DataError(f"{movie.path / 'scene'}: has {got} frames, wants {head['frames']}")
    frames[number] = pictures.frames
    frames.flush()
    if classes is not None:
        if pictures.classes is None:
            raise DataError(f"{movie.path}: has no masks any more, or no names for them")
        classes[number] = pictures.classes
        classes.flush()
    return _checksums(frames, classes, number)


def _map(path: Path, head: dict[str, Any], mode: Any) -> tuple[np.memmap, np.memmap | None]:
    shape = (len(head["movies"]), head["frames"], head["size"], head["size"])
    layers = []
    for name, trailing in (("frames.bin", (3,)), ("classes.bin", ())):
        if name == "classes.bin" and not head["has_classes"]:
            layers.append(None)
            continue
        file, wants = path / name, int(np.prod(shape + trailing))
        if not file.exists():
            raise DataError(f"{file}: is missing")
        if file.stat().st_size != wants:
            raise DataError(f"{file}: has {file.stat().st_size} bytes, wants {wants}")
        layers.append(np.memmap(file, np.uint8, mode, shape=shape + trailing))
    return layers[0], layers[1]


def _checksums(frames: np.ndarray, classes: np.ndarray | None, number: int) -> tuple[int, int]:
    one = zlib.crc32(frames[number].tobytes())
    return one, 0 if classes is None else zlib.crc32(classes[number].tobytes())


def _read_head(path: Path) -> dict[str, Any]:
    head = read_json(path / HEAD)
    if not isinstance(head, dict) or head.get("version") != VERSION:
        raise DataError(f"{path / HEAD}: is not that of a cache of version {VERSION}")
    return head


def _read_done(path: Path, total: int) -> dict[int, tuple[int, int]]:
    """A last line that is cut off does not count"""
    file = path / DONE
    if not file.exists():
        return {}
    done = {}
    text = file.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:  # so that the next line does not continue it
        file.write_text(f"{whole}\n" if whole else "")
    for line in whole.splitlines():
        parts = line.split()
        if len(parts) != 3 or not all(part.isdigit() for part in parts) or int(parts[0]) >= total:
            raise DataError(f"{file}: got a line {line!r}, wants a movie's number and checksums")
        done[int(parts[0])] = (int(parts[1]), int(parts[2]))
    return done


def _movie(entry: dict[str, Any]) -> Movie:
    told = {key: value for key, value in entry.items() if key not in ("path", "possible")}
    return Movie(Path(entry["path"]), **told)
