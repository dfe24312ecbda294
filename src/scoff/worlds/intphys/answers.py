"""answer.txt, as the benchmark wants it: a line for each test movie, O1/0001/1 0.9751."""

import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from scoff.worlds.intphys.layouts import Movie, quadruplets_of
from scoff.worlds.intphys.png import DataError


def write_answers(path: Path, movies: list[Movie], scores: Mapping[str, float]) -> None:
    """Plausibilities, by the movies' names, as numbers from 0 to 1; and a zip of it beside.

    They are moved and scaled, all alike, which changes no measure. All digits are written: rounding
    would make ties.
    """
    quadruplets_of(movies)
    names = [movie.name for movie in movies if movie.quadruplet is not None]
    for name in names:
        if name not in scores:
            raise DataError(f"{path}: there is no score for {name}")
        if not math.isfinite(scores[name]):
            raise DataError(f"{path}: the score of {name} is {scores[name]}")
    if not names:
        raise DataError(f"{path}: there is no test movie to tell of")
    low, high = min(scores[name] for name in names), max(scores[name] for name in names)
    scale = high - low or 1.0
    lines = [f"{name} {(scores[name] - low) / scale!r}\n" for name in names]
    _replace(path, "".join(lines).encode())
    aside = path.with_name(f".{path.name}.{os.getpid()}.zip")
    with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(path, "answer.txt")
    os.replace(aside, path.with_suffix(".zip"))


def read_answers(path: Path) -> dict[str, float]:
    answers = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.split()
        try:
            name, score = parts[0], float(parts[1])
        except (IndexError, ValueError):
            raise DataError(f"{path}: line {number}: got {line!r}, wants O1/0001/1 0.5") from None
        answers[name] = score
    return answers


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(content)
    os.replace(aside, path)
