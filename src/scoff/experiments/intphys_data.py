"""Judging movies that lie in a folder: real ones, or those of `scoff data intphys`."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scoff.experiments.intphys import Config, surprise
from scoff.experiments.intphys_scores import as_json, plausibilities
from scoff.models.video import VideoModel
from scoff.report import Table
from scoff.training.errors import UsageError
from scoff.training.logs import Progress
from scoff.worlds.intphys.answers import write_answers
from scoff.worlds.intphys.cache import Cache
from scoff.worlds.intphys.layouts import quadruplets_of
from scoff.worlds.intphys.metrics import measure_groups
from scoff.worlds.intphys.oracles import copy_scores

if TYPE_CHECKING:
    from collections.abc import Mapping

READ_AT_ONCE = 32  # movies


def judge_cache(
    config: Config, model: VideoModel, device: torch.device, cache: Cache
) -> dict[str, float]:
    """Plausibility of each movie by its name: mean log-likelihood of its frames."""
    size, length = cache.frames.shape[2], cache.frames.shape[1]
    if size != config.frame_size:
        raise UsageError(f"--cache: got pictures of {size} pixels, wants {config.frame_size}")
    watched = -(-length // config.skip)
    if watched <= config.context + config.window:
        raise UsageError(f"--data: got movies of {length} frames, too few for --skip {config.skip}")
    if config.observe == "classes" and cache.classes is None:
        raise UsageError(
            "--data: not all movies have masks with names, which a model trained with --observe "
            "classes needs; one trained with --observe rgb does without"
        )
    scores: dict[str, float] = {}
    numbers = range(len(cache.movies))
    with closing(Progress(len(numbers), 0, "judging", "auto", "movie")) as progress:
        for start in numbers[::READ_AT_ONCE]:
            chosen = numbers[start : start + READ_AT_ONCE]
            frames, classes = cache.read(chosen)
            told = classes if config.observe == "classes" and classes is not None else frames
            seen = torch.from_numpy(told[:, :: config.skip]).to(device)
            found = plausibilities(surprise(config, model, seen), config.window)[:, 0].tolist()
            scores |= {cache.movies[n].name: value for n, value in zip(chosen, found, strict=True)}
            progress.update(chosen.stop, {})
    return scores


class Labelled(NamedTuple):
    """Quadruplets of which it is known what is possible, in the order of their names."""

    numbers: Tensor  # [N, 4], of movies in the cache
    possible: Tensor  # [N, 4] bool
    kinds: list[str]  # block and visibility


def labelled(cache: Cache) -> Labelled | None:
    place = {movie.name: number for number, movie in enumerate(cache.movies)}
    rows, kinds = [], []
    for four in quadruplets_of(cache.movies).values():
        numbers = [place[movie.name] for movie in four]
        flags = [cache.possible[number] for number in numbers]
        if None in flags or sum(map(bool, flags)) != 2:
            continue
        rows.append(numbers)
        kinds.append(f"{four[0].visibility or 'all'}/{four[0].block}")
    if not rows:
        return None
    numbers = torch.tensor(rows)
    possible = torch.tensor([[bool(cache.possible[n]) for n in row] for row in rows])
    return Labelled(numbers, possible, kinds)


def answer(path: Path, cache: Cache, scores: "Mapping[str, float]") -> dict[str, Any] | None:
    """Writes answer.txt, and tells the measures where it is known what is possible."""
    write_answers(path, cache.movies, scores)
    known = labelled(cache)
    if known is None:
        return None
    names = [movie.name for movie in cache.movies]
    own = torch.tensor([[scores[names[n]] for n in row] for row in known.numbers.tolist()])
    copies = torch.cat(
        [copy_scores(torch.from_numpy(cache.read(row)[0])[None]) for row in known.numbers.tolist()]
    )
    groups = {
        kind: torch.tensor([mine == kind for mine in known.kinds])
        for kind in sorted(set(known.kinds))
    }
    return {
        name: {
            kind: as_json(measures)
            for kind, measures in measure_groups(values, known.possible, groups).items()
        }
        for name, values in (("model", own.double()), ("copy, 1 frame before", copies))
    }


def data_table(name: str, told: "Mapping[str, Any]") -> Table:
    kinds = list(told["model"])
    rows: list[list[Any]] = []
    for label, values in told.items():
        for measure in ("relative", "absolute"):
            cells = [values[kind][measure] for kind in kinds]
            rows.append([f"{label}, {measure}", *(with_interval(cell) for cell in cells)])
    return Table(f"Errors of {name}, by their kind", ["", *kinds], rows)


def with_interval(cell: "list[float]") -> str:
    return f"{cell[0]:.2f} ({cell[1]:.2f} to {cell[2]:.2f})"
