"""Which movies a folder of the benchmark holds, in any of its layouts.

    2019   train/00001/   dev/O1/01/1/ ... 4/   test/O1/0001/1/ ... 4/
    2018   00001_block_O1_train/   0001_O1_test_visible_static_nobj1/1/ ... 4/
    v1.0   folders as in 2018; another status.json

Each movie's folder has scene/scene_001.png, ..., and maybe depth/, masks/ and status.json. Numbers
have as many digits as the largest needs. The order of the four is shuffled: whether a movie is
possible is told by its status.json alone, if at all.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scoff.worlds.intphys.png import DataError

# which quadruplet is of which condition: in the folder of a split, or beside test/
METADATA = "metadata.json"
_OLD_TEST = re.compile(
    r"(\d+)_(O\d)_(?:test|dev)_(visible|occluded)_(static|dynamic_[12])_nobj(\d)"
)
_OLD_TRAIN = re.compile(r"(\d+)_block_(O\d|train)_train")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Movie:
    path: Path
    name: str
    """As in a submission, O1/0001/1; of training movies the folder's name."""
    block: str | None = None
    """O1, O2 or O3; None: a training movie."""
    quadruplet: str | None = None
    """O1/0001; None: a training movie."""
    visibility: str | None = None
    movement: str | None = None
    objects: int | None = None


def find_movies(folder: Path) -> list[Movie]:
    """All movies of a folder: of a split, of a block, or of all splits. Sorted by name."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder")
    movies = sorted(_search(folder), key=lambda movie: (_natural(movie.name), str(movie.path)))
    if not movies:
        raise DataError(
            f"{folder}: holds no movies; wants folders as train/00001, dev/O1/01/1, "
            "00001_block_O1_train or 0001_O1_test_visible_static_nobj1/1, each with a folder scene"
        )
    seen: dict[str, Path] = {}
    for movie in movies:
        if movie.name in seen:
            raise DataError(
                f"{movie.path} and {seen[movie.name]}: two movies are named {movie.name}; "
                "name one of their folders instead of one that holds both"
            )
        seen[movie.name] = movie.path
    return _with_conditions(movies)


def quadruplets_of(movies: list[Movie]) -> dict[str, list[Movie]]:
    """Test movies by quadruplet, four each"""
    groups: dict[str, list[Movie]] = {}
    for movie in movies:
        if movie.quadruplet is not None:
            groups.setdefault(movie.quadruplet, []).append(movie)
    for group in groups.values():
        if len(group) != 4:
            there = ", ".join(movie.path.name for movie in group)
            raise DataError(f"{group[0].path.parent}: wants movies 1, 2, 3, 4, got {there}")
    return groups


def _search(folder: Path, depth: int = 0) -> Iterator[Movie]:
    own = _movie(folder)
    if own is not None:
        yield own
        return
    if depth == 4:  # split, block, quadruplet, movie
        return
    for child in folder.iterdir():
        if child.is_dir() and not child.name.startswith("."):
            yield from _search(child, depth + 1)


def _movie(path: Path) -> Movie | None:
    if not (path / "scene").is_dir():
        return None
    path = path.resolve()
    old = _OLD_TEST.fullmatch(path.parent.name)
    if old:
        _, block, visibility, movement, objects = old.groups()
        # each condition counts from 1: only the folder's whole name is unique
        group = f"{block}/{path.parent.name}"
        return Movie(path, f"{group}/{path.name}", block, group, visibility, movement, int(objects))
    block = path.parent.parent.name
    if re.fullmatch(r"O\d", block) and _NUMBER.fullmatch(path.parent.name):
        group = f"{block}/{path.parent.name}"
        return Movie(path, f"{group}/{path.name}", block, group)
    if _OLD_TRAIN.fullmatch(path.name) or _NUMBER.fullmatch(path.name):
        return Movie(path, path.name)
    raise DataError(f"{path}: is a movie, but its name is not that of one of the benchmark")


def _with_conditions(movies: list[Movie]) -> list[Movie]:
    """Fills in visibility and movement from the list that comes with the test set"""
    told: dict[Path, dict[str, Any]] = {}
    filled = []
    for movie in movies:
        entry = None
        if movie.quadruplet is not None and len(movie.path.parents) > 2:
            split = movie.path.parents[2]
            if split not in told:
                told[split] = _conditions(split)
            entry = told[split].get(movie.quadruplet)
        if isinstance(entry, dict):
            movie = replace(
                movie,
                visibility=entry.get("visibility", movie.visibility),
                movement=entry.get("movement", movie.movement),
                objects=entry.get("nobjects", movie.objects),
            )
        filled.append(movie)
    return filled


def _conditions(split: Path) -> dict[str, Any]:
    # beside its folder, the list can only be that of the test set
    beside = [split.parent / METADATA] if split.name == "test" else []
    for path in [split / METADATA, *beside]:
        if path.is_file():
            told = read_json(path)
            if not isinstance(told, dict):
                raise DataError(f"{path}: wants an object whose names are as O1/0001")
            return told
    return {}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
