"""Movies on disk: what is written is what is read, and what is damaged is named."""

import hashlib
import json
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from scoff.cli import main
from scoff.worlds.intphys import quadruplets, training_clips
from scoff.worlds.intphys.answers import read_answers, write_answers
from scoff.worlds.intphys.cache import Cache, build_cache
from scoff.worlds.intphys.files import (
    is_possible,
    read_depth,
    read_pictures,
    visibility,
)
from scoff.worlds.intphys.layouts import find_movies, quadruplets_of
from scoff.worlds.intphys.png import DataError, read_png, write_png
from scoff.worlds.intphys.status import LAYOUTS
from scoff.worlds.intphys.writer import Recipe, write_movies

SMALL = {"train": 3, "dev": 2, "test": 2, "pixels": 24, "frames": 44, "seed": 4}


@pytest.fixture(scope="module", params=LAYOUTS)
def written(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("intphys") / "data"
    write_movies(out, Recipe(**SMALL, layout=request.param))
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("intphys") / "data"
    write_movies(out, Recipe(**{**SMALL, "test": 0}))
    return out


@pytest.fixture
def copied(data, tmp_path):
    return shutil.copytree(data, tmp_path / "copy")


# --- writer and reader


def test_training_movies_are_read_as_they_were_made(written):
    clips = training_clips(4, torch.arange(3), pixels=24, frames=44, depth=True)
    movies = find_movies(written / "train")
    assert len(movies) == 3
    for n, movie in enumerate(movies):
        pictures = read_pictures(movie)
        assert np.array_equal(pictures.frames, clips.frames[n])
        assert np.array_equal(pictures.classes, clips.classes[n])
        assert np.array_equal(read_depth(movie), clips.depth[n].clamp(max=65534))
        assert is_possible(movie) is True
        assert movie.block is None


@pytest.mark.parametrize("split", ["dev", "test"])
def test_tests_are_read_as_they_were_made(written, split):
    movies = find_movies(written / split)
    groups = quadruplets_of(movies)
    assert len(movies) == 24
    assert len(groups) == 6
    name = {"dev": "valid", "test": "test"}[split]
    for block in ("O1", "O2", "O3"):
        for kind in ("visible", "occluded"):
            made = quadruplets(4, torch.arange(1), block, kind, name, pixels=24, frames=44)
            clips = made.movies()
            (four,) = [g for g in groups.values() if (g[0].block, g[0].visibility) == (block, kind)]
            for k, movie in enumerate(four):
                pictures = read_pictures(movie)
                assert np.array_equal(pictures.frames, clips.frames[0, k])
                assert np.array_equal(pictures.classes, clips.classes[0, k])
                assert is_possible(movie) == bool(made.possible[0, k])
                assert movie.movement == "static"
                assert movie.objects == int(made.objects[0])
                assert visibility(movie) == kind


def test_the_whole_tree_holds_all_splits(data):
    assert len(find_movies(data)) == 27


def test_a_test_movie_tells_nothing_but_pictures(tmp_path):
    write_movies(tmp_path / "data", Recipe(**{**SMALL, "train": 0, "dev": 0, "test": 1}))
    for movie in find_movies(tmp_path / "data" / "test"):
        assert {path.name for path in movie.path.iterdir()} == {"scene", "depth", "masks"}
    shutil.rmtree(tmp_path / "data" / "test_metadata")
    (tmp_path / "data" / "test" / "metadata.json").unlink()
    for movie in find_movies(tmp_path / "data"):
        assert is_possible(movie) is None
        assert visibility(movie) is None
        assert read_pictures(movie).classes is None


def test_all_four_have_the_same_files(data):
    for four in quadruplets_of(find_movies(data / "dev")).values():
        good = [movie.path for movie in four if is_possible(movie)]
        bad = [movie.path for movie in four if not is_possible(movie)]
        for kind in ("scene", "masks", "depth"):
            for path in (good[0] / kind).iterdir():
                held = [{(m / kind / path.name).read_bytes() for m in pair} for pair in (good, bad)]
                assert held[0] == held[1]
        times = {path.stat().st_mtime for movie in four for path in movie.path.rglob("*.png")}
        assert len(times) == 1


def test_numbers_of_masks_change_with_every_frame(data):
    movie = find_movies(data / "train")[0]
    frames = json.loads((movie.path / "status.json").read_text())["frames"]
    assert len({frame["masks"]["floor"] for frame in frames}) > 20


def test_the_same_recipe_gives_the_same_files_whoever_writes_them(data, tmp_path):
    write_movies(tmp_path / "again", Recipe(**{**SMALL, "test": 0}), workers=2)
    manifest = (data / "manifest.json").read_bytes()
    assert (tmp_path / "again" / "manifest.json").read_bytes() == manifest
    told = json.loads(manifest)
    assert told["seed"] == 4
    assert len(told["movies"]) == 27
    movie = data / "train" / "2"
    digest = hashlib.sha256()
    for path in sorted(movie.rglob("*.*")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(movie)}\0{len(content)}\0".encode() + content)
    assert told["movies"]["train/2"] == digest.hexdigest()


def test_what_is_there_is_not_overwritten(copied):
    with pytest.raises(FileExistsError, match="copy exists already"):
        write_movies(copied, Recipe(**SMALL))
    assert [path.name for path in copied.parent.iterdir()] == ["copy"]


# --- what is wrong is named


def damage(path, how):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-20])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_bytes(b"not a picture")
    elif how == "flip":
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    elif how == "stream":  # checksums right, pixels wrong
        start = content.index(b"IDAT") - 4
        body = b"IDAT" + bytes(30)
        chunk = struct.pack(">I", 30) + body + struct.pack(">I", zlib.crc32(body))
        (length,) = struct.unpack(">I", content[start : start + 4])
        path.write_bytes(content[:start] + chunk + content[start + 12 + length :])
    elif how == "missing":
        path.unlink()
    elif how == "smaller":
        Image.new("RGB", (8, 8)).save(path)
    elif how == "grey":
        Image.new("L", (24, 24)).save(path)


@pytest.mark.parametrize(
    "how", ["cut", "empty", "text", "flip", "stream", "missing", "smaller", "grey"]
)
def test_a_damaged_frame_is_named(copied, how):
    movie = find_movies(copied / "train")[1]
    path = movie.path / "scene" / "scene_020.png"
    damage(path, how)
    with pytest.raises(DataError, match=r"scene_020\.png"):
        read_pictures(movie)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: shutil.rmtree(path / "scene"), "holds no movies"),
        (lambda path: (path / "status.json").write_text("{"), r"status\.json: cannot be read"),
        (lambda path: (path / "status.json").write_text("[]"), r"status\.json: wants a JSON obj"),
        (lambda path: (path / "masks" / "masks_003.png").unlink(), r"masks_003\.png: is missing"),
        (lambda path: (path / "masks" / "masks_044.png").unlink(), "masks: has 43 frames, wants"),
    ],
)
def test_what_else_is_wrong_is_named(copied, change, said):
    path = copied / "train" / "1"
    for other in ("2", "3"):
        shutil.rmtree(copied / "train" / other)
    change(path)
    with pytest.raises(DataError, match=said):
        read_pictures(find_movies(copied / "train")[0])


def test_a_mask_without_a_name_is_named(copied):
    movie = find_movies(copied / "train")[0]
    path = movie.path / "status.json"
    status = json.loads(path.read_text())
    del status["frames"][6]["masks"]["floor"]
    path.write_text(json.dumps(status))
    with pytest.raises(DataError, match=r"masks_007\.png: shows a number that"):
        read_pictures(movie)


def test_wrong_folders_are_told(copied, tmp_path):
    with pytest.raises(DataError, match="nowhere: is no folder"):
        find_movies(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="bare: holds no movies; wants folders as train/00001"):
        find_movies(tmp_path / "bare")
    (tmp_path / "bare" / "holiday" / "scene").mkdir(parents=True)
    with pytest.raises(DataError, match="holiday: is a movie, but its name"):
        find_movies(tmp_path / "bare")
    shutil.rmtree(copied / "dev" / "O2" / "1" / "3")
    with pytest.raises(DataError, match=r"O2/1: wants movies 1, 2, 3, 4, got 1, 2, 4"):
        quadruplets_of(find_movies(copied / "dev"))


def test_pictures_are_made_smaller_without_a_shift(tmp_path):
    line = np.arange(36, dtype=np.uint8) * 7
    picture = np.stack([np.broadcast_to(line, (36, 36))] * 3, -1)
    for kind, values, mode in (("colour", picture, "BOX"), ("grey", picture[..., 0], "NEAREST")):
        whole = np.ascontiguousarray(values)
        wants = np.asarray(Image.fromarray(whole).resize((8, 8), Image.Resampling[mode]))
        (tmp_path / "a.png").write_bytes(write_png(whole))
        assert np.array_equal(read_png(tmp_path / "a.png", kind, 8), wants)


# --- the cache


def test_a_cache_holds_what_the_reader_reads(data, tmp_path):
    told = []
    cache = build_cache(data / "dev", tmp_path / "cache", 12, 2, lambda *at: told.append(at))
    assert told[0] == (0, 24)
    assert told[-1] == (24, 24)
    frames, shown = cache.read(range(24))
    for number, movie in enumerate(cache.movies):
        pictures = read_pictures(movie, 12)
        assert np.array_equal(frames[number], pictures.frames)
        assert np.array_equal(shown[number], pictures.classes)
        assert cache.possible[number] == is_possible(movie)
    again = Cache.open(tmp_path / "cache")
    assert again.movies == cache.movies
    assert {movie.visibility for movie in again.movies} == {"visible", "occluded"}


def test_a_cache_that_was_stopped_goes_on(copied, tmp_path):
    path = find_movies(copied / "train")[2].path / "scene" / "scene_007.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"3/scene/scene_007\.png: is cut off"):
        build_cache(copied / "train", cache, 12)
    with pytest.raises(DataError, match="cache: is half-written, 1 of 3 movies are missing"):
        Cache.open(cache)
    path.write_bytes(whole)
    with open(cache / "done.txt", "a") as record:
        record.write("2 12")  # the machine went down while it was written
    told = []
    done = build_cache(copied / "train", cache, 12, 1, lambda *at: told.append(at))
    assert told == [(2, 3), (3, 3)]
    assert np.array_equal(done.read([2])[0][0], read_pictures(done.movies[2], 12).frames)


def test_a_cache_whose_bytes_have_changed_is_refused(data, tmp_path):
    cache = tmp_path / "cache"
    build_cache(data / "train", cache, 12)
    with open(cache / "frames.bin", "r+b") as file:
        file.seek(44 * 12 * 12 * 3 + 1000)
        file.write(b"\x01\x02\x03")
    opened = Cache.open(cache)
    opened.read([0, 2])
    with pytest.raises(DataError, match="cache: the bytes of 2 have changed"):
        opened.read([1])
    with open(cache / "frames.bin", "ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"frames\.bin: has \d+ bytes, wants"):
        Cache.open(cache)
    with pytest.raises(DataError, match=r"cache: holds another cache \(size differ\)"):
        build_cache(data / "train", cache, 16)
    with pytest.raises(DataError, match=r"cache\.json: is missing"):
        Cache.open(tmp_path)


def test_a_cache_is_not_made_of_movies_of_different_lengths(copied, tmp_path):
    movie = find_movies(copied / "train")[1]
    (movie.path / "scene" / "scene_044.png").unlink()
    with pytest.raises(DataError, match="2/scene: has 43 frames, wants 44"):
        build_cache(copied / "train", tmp_path / "cache", 12)


# --- the command


def run(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


def test_the_command_writes_movies_and_caches_them(tmp_path, capsys):
    out, cache = tmp_path / "data", tmp_path / "cache"
    small = ["--train", 1, "--dev", 1, "--test", 0, "--pixels", 16, "--frames", 40]
    assert run("data", "intphys", "--out", out, *small, "--visibilities", "visible") == 0
    assert len(find_movies(out)) == 13
    assert run("data", "intphys", "--out", out, *small) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert run("data", "intphys-cache", out / "dev", "--out", cache, "--size", 8) == 0
    assert Cache.open(cache).frames.shape == (12, 40, 8, 8, 3)
    assert "cache: movie 12/12" in capsys.readouterr().err
    assert run("data", "intphys-cache", tmp_path / "no", "--out", cache) == 1
    assert capsys.readouterr().err == f"scoff: {tmp_path / 'no'}: is no folder\n"
    hard = ["--train", 0, "--dev", 1, "--test", 0, "--pixels", 8, "--min-hidden", 95]
    hard += ["--visibilities", "occluded"]
    assert run("data", "intphys", "--out", tmp_path / "hard", *hard) == 2
    assert "min_hidden is too large" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"data", "cache"}


# --- answers


def test_answers_keep_the_order_and_the_size_of_differences(data, tmp_path):
    movies = find_movies(data / "dev")
    scores = {movie.name: -3.0 + 0.01 * n * n for n, movie in enumerate(movies)}
    write_answers(tmp_path / "answer.txt", movies, scores)
    assert (tmp_path / "answer.zip").exists()
    answers = read_answers(tmp_path / "answer.txt")
    assert list(answers) == [movie.name for movie in movies]
    assert min(answers.values()) == 0
    assert max(answers.values()) == 1
    got, was = np.array(list(answers.values())), np.array(list(scores.values()))
    assert np.allclose((got - got[0]) * (was[-1] - was[0]), was - was[0])


def test_no_answer_is_left_out(data, tmp_path):
    movies = find_movies(data / "dev")
    scores = {movie.name: 0.5 for movie in movies}
    missing = movies[7].name
    with pytest.raises(DataError, match=f"the score of {missing} is nan"):
        write_answers(tmp_path / "answer.txt", movies, {**scores, missing: float("nan")})
    del scores[missing]
    with pytest.raises(DataError, match=f"there is no score for {missing}"):
        write_answers(tmp_path / "answer.txt", movies, scores)
    assert not list(tmp_path.iterdir())
