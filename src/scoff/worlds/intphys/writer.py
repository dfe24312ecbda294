"""Generated movies as files, in the benchmark's layouts.

OUT/manifest.json            what it was made from, and a sha256 of each movie's files
OUT/train/00001/             scene/ depth/ masks/ status.json
OUT/dev/O1/01/1/ ... 4/      status.json says only whether it is possible
OUT/test/O1/0001/1/ ... 4/   no status.json
OUT/dev_metadata/, OUT/test_metadata/   the whole truth, apart from what a model may see
OUT/dev/metadata.json, OUT/test/metadata.json   of which condition each quadruplet is
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scoff.worlds.intphys.layouts import METADATA
from scoff.worlds.intphys.png import write_png
from scoff.worlds.intphys.quadruplets import MIN_HIDDEN, Quadruplets, quadruplets
from scoff.worlds.intphys.render import PIXELS, render
from scoff.worlds.intphys.scenes import FRAMES
from scoff.worlds.intphys.stages import BLOCKS, MOVEMENTS, VISIBILITIES, Block, Visibility
from scoff.worlds.intphys.status import Layout, full_status, mask_numbers, shown_in
from scoff.worlds.intphys.training import training_scenes
from scoff.worlds.random import STREAMS, Split

VERSION = 1
MANIFEST = "manifest.json"
SPLITS: dict[str, Split] = {"train": "train", "dev": "valid", "test": "test"}


@dataclass(frozen=True)
class Recipe:
    """What a data set is made from: the same, the same files."""

    train: int = 15_000
    """Training movies."""
    dev: int = 30
    """Quadruplets of each block, with labels."""
    test: int = 1080
    """Quadruplets of each block, whose labels are kept apart."""
    visibilities: tuple[Visibility, ...] = VISIBILITIES
    """Of the quadruplets, in turn."""
    seed: int = 0
    """Of all movies."""
    pixels: int = PIXELS
    """Height and width of a frame."""
    frames: int = FRAMES
    """Of each movie."""
    min_hidden: int = MIN_HIDDEN
    """Frames for which objects are hidden at least, where they are."""
    layout: Layout = "2019"
    """Names of folders, and what status.json tells."""


class Chunk(NamedTuple):
    """Movies that are made in one go: the training ones, or quadruplets, from one number on"""

    split: str
    block: Block | None
    visibility: Visibility | None
    numbers: list[int]
    folders: list[str]

    @property
    def movies(self) -> int:
        return len(self.numbers) * (1 if self.block is None else 4)


def write_movies(
    out: Path,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Writes a data set; calls `progress` with how many more movies there are.

    The folder appears when it is whole. One that is there already is not overwritten.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    on_gpu = torch.device(device).type == "cuda"
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    hashes: dict[str, str] = {}
    conditions: dict[str, dict[str, Any]] = {}
    try:
        aside.mkdir(parents=True)
        chunks = list(_chunks(recipe, 32 if on_gpu else 6))
        for chunk, (sums, told) in _work(aside, recipe, chunks, str(device), workers, on_gpu):
            hashes.update(sums)
            if chunk.block is not None:
                conditions.setdefault(chunk.split, {}).update(told)
            progress(chunk.movies)
        for split in conditions if recipe.layout == "2019" else ():
            _write_json(aside / split / METADATA, dict(sorted(conditions[split].items())))
        made_from = {"version": VERSION, **asdict(recipe)}
        _write_json(aside / MANIFEST, {**made_from, "movies": dict(sorted(hashes.items()))})
        os.rename(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


Done = tuple[dict[str, str], dict[str, Any]]


def _work(
    out: Path, recipe: Recipe, chunks: list[Chunk], device: str, workers: int, on_gpu: bool
) -> Iterator[tuple[Chunk, Done]]:
    if workers <= 1:
        for chunk in chunks:
            yield chunk, _write_chunk(out, recipe, chunk, device)
        return
    # on a GPU one process does all, and threads pack the files
    pool: Executor = (
        ThreadPoolExecutor(workers)
        if on_gpu
        else ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
    )
    with pool:
        todo = iter(chunks)
        waiting = {}
        try:
            while True:
                for chunk in todo:
                    waiting[pool.submit(_write_chunk, out, recipe, chunk, device)] = chunk
                    if len(waiting) >= 2 * workers:
                        break
                if not waiting:
                    return
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for one in finished:
                    yield waiting.pop(one), one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _chunks(recipe: Recipe, at_once: int) -> Iterator[Chunk]:
    names = [_train_name(i, recipe) for i in range(recipe.train)]
    for start in range(0, recipe.train, at_once):
        numbers = list(range(recipe.train))[start : start + at_once]
        yield Chunk("train", None, None, numbers, names[start : start + at_once])
    kinds = recipe.visibilities
    for split, size in (("dev", recipe.dev), ("test", recipe.test)):
        digits = len(str(size))
        for block in BLOCKS:
            for place, visibility in enumerate(kinds):
                folders = range(place, size, len(kinds))
                every = [(i, f"{f + 1:0{digits}}") for i, f in enumerate(folders)]
                for start in range(0, len(every), at_once):
                    part = every[start : start + at_once]
                    yield Chunk(
                        split, block, visibility, [i for i, _ in part], [f for _, f in part]
                    )


def _train_name(number: int, recipe: Recipe) -> str:
    name = f"{number + 1:0{len(str(recipe.train))}}"
    return name if recipe.layout == "2019" else f"{number + 1:05}_block_{BLOCKS[number % 3]}_train"


def _write_chunk(out: Path, recipe: Recipe, chunk: Chunk, device: str) -> Done:
    index = torch.tensor(chunk.numbers, device=device)
    if chunk.block is None:
        return _write_training(out, recipe, chunk, index), {}
    assert chunk.visibility is not None
    four = quadruplets(
        recipe.seed,
        index,
        chunk.block,
        chunk.visibility,
        SPLITS[chunk.split],
        recipe.min_hidden,
        recipe.pixels,
        recipe.frames,
        depth=True,
    )
    return _write_quadruplets(out, recipe, chunk, four)


def _write_training(out: Path, recipe: Recipe, chunk: Chunk, index: torch.Tensor) -> dict[str, str]:
    scenes = training_scenes(recipe.seed, index, "train", recipe.frames, recipe.min_hidden)
    clips = render(scenes, recipe.pixels, depth=True)
    scenes = scenes.to("cpu")
    assert clips.depth is not None
    parts = (clips.frames, clips.identity, clips.depth)
    frames, identity, depth = (part.cpu().numpy() for part in parts)
    hashes = {}
    for n, (number, folder) in enumerate(zip(chunk.numbers, chunk.folders, strict=True)):
        greys = mask_numbers(recipe.seed, 0, number, recipe.frames, recipe.layout)
        files = _files(frames[n], identity[n], depth[n], greys, recipe.layout)
        header = {"block_name": "train", "block_type": "train", "is_possible": True}
        status = full_status(
            scenes,
            n,
            header,
            greys,
            shown_in(identity[n]),
            recipe.layout,
            scenes.kind[n].expand(recipe.frames, -1),
            scenes.centre[n],
        )
        files["status.json"] = _json(status)
        place = f"train/{folder}"
        hashes[place] = _write_movie(out / place, files)
    return hashes


def _write_quadruplets(out: Path, recipe: Recipe, chunk: Chunk, four: Quadruplets) -> Done:
    assert four.runs.depth is not None
    parts = (four.runs.frames, four.runs.identity, four.runs.depth)
    frames, identity, depth = (part.cpu().numpy() for part in parts)
    scenes = [run.to("cpu") for run in four.scenes]
    kind = torch.stack([run.kind[:, None].expand(-1, recipe.frames, -1) for run in scenes])
    centre = torch.stack([run.centre for run in scenes])
    source, possible = four.source.cpu(), four.possible.tolist()
    hashes, conditions = {}, {}
    split = SPLITS[chunk.split]
    stream = 1 + STREAMS[split] + 8 * BLOCKS.index(chunk.block or "O1")
    stream += 64 * VISIBILITIES.index(chunk.visibility or "visible")
    time = torch.arange(recipe.frames)
    for n, (number, folder) in enumerate(zip(chunk.numbers, chunk.folders, strict=True)):
        greys = mask_numbers(recipe.seed, stream, number, recipe.frames, recipe.layout)
        # one file for each frame of a run: movies are copies, byte by byte
        runs = [
            _files(frames[r, n], identity[r, n], depth[r, n], greys, recipe.layout)
            for r in range(2)
        ]
        movement = MOVEMENTS[int(four.movement[n])]
        told = {
            "movement": movement,
            "visibility": chunk.visibility,
            "nobjects": int(four.objects[n]),
        }
        if recipe.layout == "2019":
            place = f"{chunk.split}/{chunk.block}/{folder}"
        else:
            mark = f"{chunk.visibility}_{movement}_nobj{told['nobjects']}"
            place = f"{chunk.split}/{folder}_{chunk.block}_{chunk.split}_{mark}"
        conditions[f"{chunk.block}/{folder}"] = told
        for movie in range(4):
            where = source[n, movie]
            files = {name: runs[where[t]][name] for t in time.tolist() for name in _names(t)}
            is_possible = possible[n][movie]
            header: dict[str, Any] = {
                "block_name": chunk.block,
                "block_type": chunk.split,
                "is_possible": is_possible,
            }
            if not is_possible:
                cuts = [cut for cut in four.cuts[n].tolist() if cut]
                ticks = cuts[0] if len(cuts) == 1 else cuts
                header["magic"] = {"actor": f"object_{int(four.magic[n]) + 1}", "tick": ticks}
            shown = shown_in(identity[where.numpy(), n, time.numpy()])
            spliced = kind[where, n, time], centre[where, n, time]
            status = full_status(scenes[0], n, header, greys, shown, recipe.layout, *spliced)
            truth = _json(status)
            name = f"{place}/{movie + 1}"
            if recipe.layout != "2019":
                files["status.json"] = truth
            elif chunk.split == "dev":
                files["status.json"] = _json({"header": {"is_possible": is_possible}})
            if recipe.layout == "2019":
                apart = out / f"{chunk.split}_metadata" / name.split("/", 1)[1]
                _write_movie(apart, {"status.json": truth})
            hashes[name] = _write_movie(out / name, files)
    return hashes, conditions


def _names(t: int) -> list[str]:
    return [f"{kind}/{kind}_{t + 1:03}.png" for kind in ("scene", "masks", "depth")]


def _files(
    frames: np.ndarray, identity: np.ndarray, depth: np.ndarray, greys: np.ndarray, layout: Layout
) -> dict[str, bytes]:
    """All pictures of a run, by their names"""
    files = {}
    far = np.where(depth == 0, 0, 65535 - np.minimum(depth, 65534)).astype(np.uint16)
    for t, (scene, who) in enumerate(zip(frames, identity, strict=True)):
        if layout != "2019":  # older renders have an opacity
            scene = np.concatenate([scene, np.full_like(scene[..., :1], 255)], -1)
        files[f"scene/scene_{t + 1:03}.png"] = write_png(scene)
        files[f"masks/masks_{t + 1:03}.png"] = write_png(greys[t][who])
        files[f"depth/depth_{t + 1:03}.png"] = write_png(far[t])
    return files


def _write_movie(folder: Path, files: dict[str, bytes]) -> str:
    """Gives a sha256 of all names and contents"""
    digest = hashlib.sha256()
    for name in sorted({Path(name).parent for name in files}):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in sorted(files.items()):
        path = folder / name
        path.write_bytes(content)
        # when files were written must not tell which were made together
        os.utime(path, (0, 0))
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
