"""Files of bouncing balls: what is written, what is read, and what is said of a broken one."""

import os
import resource
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch

from scoff.cli import main
from scoff.training import logs
from scoff.worlds import balls_file
from scoff.worlds.balls import VARIANTS, balls
from scoff.worlds.balls_file import GROUPS, BallsFile, BallsFileError, write_balls

from .test_balls import same

SIZES = {"train": 70, "valid": 3, "test": 5}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("balls") / "balls.h5"
    write_balls(path, SIZES, "678balls", seed=3)
    return path


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copy(written, tmp_path / "copy.h5")


def run(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


# --- writing


def test_the_layout_is_that_of_the_original(written):
    with h5py.File(written) as file:
        assert set(file) == {"training", "validation", "test"}
        for split, group in GROUPS.items():
            n = SIZES[split]
            layout = {name: (data.shape, data.dtype.name) for name, data in file[group].items()}
            picture = (51, n, 64, 64, 1)
            assert layout["features"] == (picture, "bool")
            assert layout["groups"] == (picture, "uint8")
            assert layout["collisions"] == (picture, "bool")
            assert layout["events"] == ((51, n), "int64")
            assert layout["positions"] == layout["velocities"] == ((51, n, 8, 2), "float32")
        assert dict(file.attrs) == {"variant": "678balls", "seed": 3}


def test_a_reader_of_the_original_finds_its_way(written):
    """Time first, then clips, by plain slices."""
    clips = balls(3, torch.arange(20, 30), "678balls")
    with h5py.File(written) as file:
        batch = {name: data[:30, 20:30] for name, data in file["training"].items() if data.ndim > 2}
    picture = clips.frames.movedim(2, -1).transpose(0, 1)[:30]
    assert np.array_equal(batch["features"], picture.numpy() > 0)
    assert np.array_equal(batch["groups"][..., 0], clips.identity.transpose(0, 1)[:30].numpy())
    assert np.array_equal(batch["features"], batch["groups"] > 0)
    assert np.array_equal(batch["collisions"][..., 0], clips.collisions.transpose(0, 1)[:30])
    assert np.array_equal(batch["positions"], clips.position.transpose(0, 1)[:30])


def test_the_same_options_write_the_same_bytes(written, tmp_path):
    write_balls(tmp_path / "again.h5", SIZES, "678balls", seed=3)
    assert (tmp_path / "again.h5").read_bytes() == written.read_bytes()


def test_a_file_is_not_overwritten(copied):
    before = copied.read_bytes()
    with pytest.raises(FileExistsError, match=r"copy\.h5 exists already"):
        write_balls(copied, {"train": 1})
    assert copied.read_bytes() == before


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        if list(tmp_path.glob(".*.tmp")):
            raise KeyboardInterrupt

    monkeypatch.setattr(balls_file, "_write", fail)
    with pytest.raises(KeyboardInterrupt):
        write_balls(tmp_path / "balls.h5", {"train": 1})
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_all_clips(tmp_path):
    told = []
    write_balls(tmp_path / "balls.h5", {"train": 130, "test": 1}, "curtain", progress=told.append)
    assert told == [64, 64, 2, 1]


# --- reading


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_read_is_what_was_written(variant, tmp_path):
    write_balls(tmp_path / "balls.h5", {"train": 6, "test": 4}, variant)
    with BallsFile(tmp_path / "balls.h5") as file:
        assert [file.size(split) for split in GROUPS] == [6, 0, 4]
        assert same(file.clips(range(6)), balls(0, torch.arange(6), variant))
        assert same(file.clips(range(4), "test"), balls(0, torch.arange(4), variant, split="test"))
        assert torch.equal(file.clips([2]).frames, balls(0, torch.tensor([2]), variant).frames)


@pytest.mark.parametrize("chosen", [[5, 1, 64, 1], [69], [], [10, 11, 12]])
def test_clips_come_in_the_order_asked_for(written, chosen):
    index = torch.tensor(chosen, dtype=torch.int64)
    with BallsFile(written) as file:
        assert same(file.clips(index), balls(3, index, "678balls"))
        assert same(file.clips(chosen), balls(3, index, "678balls"))


def test_a_file_of_others_is_read_as_it_is(tmp_path):
    """Six datasets, other types of number, and pictures that show less than the groups."""
    clips = balls(0, torch.arange(4), "4balls")
    features = clips.identity > 0
    features[:, :, 20:40] = False
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        group = file.create_group("training")
        for name, values in {
            "features": features[..., None].float(),
            "groups": clips.identity[..., None].float(),
            "collisions": clips.collisions[..., None].to(torch.uint8),
            "events": clips.events[..., None].double(),
            "positions": clips.position.double(),
            "velocities": clips.velocity.double(),
        }.items():
            group[name] = values.transpose(0, 1).numpy()
    with BallsFile(tmp_path / "theirs.h5") as file:
        got = file.clips([3, 0, 1])
    assert torch.equal(got.frames[:, :, 0], features[[3, 0, 1]].float())
    for name in ("identity", "collisions", "events", "position", "velocity"):
        assert torch.equal(getattr(got, name), getattr(clips, name)[[3, 0, 1]])
        assert getattr(got, name).dtype == getattr(clips, name).dtype
    assert (got.radius, got.mass, got.hits, got.colour, got.curtain) == (None,) * 5


@pytest.mark.parametrize("how", ["missing", "otherwise"])
def test_what_is_not_told_is_not_made_up(copied, how):
    others = {
        "events": (51, 70, 3),
        "positions": (51, 70, 2, 8),
        "velocities": (51, 70, 15),
        "hits": (51, 70),
        "bounces": (51, 70, 9),
        "radii": (70, 6),
        "masses": (70, 8, 2),
    }
    with h5py.File(copied, "a") as file:
        for name, shape in others.items():
            del file["training"][name]
            if how == "otherwise":
                file["training"][name] = np.ones(shape)
    with BallsFile(copied) as file:
        assert file.layout().balls == 8
        got = file.clips([3, 1])
    expected = balls(3, torch.tensor([3, 1]), "678balls")
    assert torch.equal(got.identity, expected.identity)
    assert torch.equal(got.collisions, expected.collisions)
    assert torch.equal(got.events, torch.full((2, 51), -1))
    assert got.position.shape == got.velocity.shape == (2, 51, 8, 2)
    assert got.position.isnan().all()
    assert got.velocity.isnan().all()
    assert (got.hits, got.bounces, got.radius, got.mass) == (None,) * 4


def test_all_in_one_axis(copied):
    with h5py.File(copied, "a") as file:
        for name in ("positions", "velocities"):
            values = file["training"][name][:]
            del file["training"][name]
            file["training"][name] = values.reshape(51, 70, 16)
    with BallsFile(copied) as file:
        assert file.layout().balls == 8
        assert same(file.clips([3, 1]), balls(3, torch.tensor([3, 1]), "678balls"))


# --- broken files


def test_what_is_not_hdf5(tmp_path):
    path = tmp_path / "notes.h5"
    path.write_text("not a video")
    with pytest.raises(BallsFileError, match=r"notes\.h5: cannot be read as HDF5"):
        BallsFile(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        BallsFile(tmp_path / "nowhere.h5")


def test_a_file_cut_short(copied):
    copied.write_bytes(copied.read_bytes()[:-1000])
    with pytest.raises(BallsFileError, match=r"copy\.h5: cannot be read as HDF5: .*truncated"):
        BallsFile(copied)


@pytest.mark.parametrize("name", ["features", "groups", "velocities"])
def test_damage_is_found_and_named(copied, name):
    with h5py.File(copied) as file:
        chunk = file["training"][name].id.get_chunk_info(0)
    data = bytearray(copied.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 0x55
    copied.write_bytes(data)
    with BallsFile(copied) as file:
        message = rf"copy\.h5: dataset training/{name}: is damaged"
        with pytest.raises(BallsFileError, match=message):
            file.clips([0])
        assert file.size() == 70
        file.clips([0], "test")  # what is whole can be read


@pytest.mark.parametrize("name", ["features", "groups", "collisions"])
def test_a_dataset_that_is_missing_is_named(copied, name):
    with h5py.File(copied, "a") as file:
        del file["training"][name]
    with (
        BallsFile(copied) as file,
        pytest.raises(BallsFileError, match=rf"copy\.h5: dataset training/{name}: is not there"),
    ):
        file.clips([0])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "features",
            np.zeros((51, 70, 64, 64), bool),
            r"got shape \(51, 70, 64, 64\), wants \(T, N",
        ),
        ("groups", np.zeros((51, 69, 64, 64, 1)), r"got shape .*, wants \(51, 70, 64, 64, 1\)"),
        ("collisions", np.zeros((51, 70, 32, 32, 1)), "got shape"),
        ("events", np.zeros((50, 70)), r"got shape .*, wants \(51, 70\) first"),
        ("positions", np.zeros((70, 51, 8, 2)), r"got shape .*, wants \(51, 70\)"),
        ("velocities", np.full((51, 70, 8, 2), b"fast"), "got .*, wants numbers"),
        ("radii", np.zeros((69, 8)), r"got shape .*, wants \(70,\) first"),
    ],
)
def test_a_dataset_of_another_kind_is_named(copied, name, values, message):
    with h5py.File(copied, "a") as file:
        del file["training"][name]
        file["training"][name] = values
    with (
        BallsFile(copied) as file,
        pytest.raises(BallsFileError, match=rf"copy\.h5: dataset training/{name}: {message}"),
    ):
        file.clips([0])


def test_a_file_of_something_else(tmp_path):
    with h5py.File(tmp_path / "maze.h5", "w") as file:
        file["maps"] = np.zeros(3)
    with BallsFile(tmp_path / "maze.h5") as file:
        assert file.size() == 0
        with pytest.raises(BallsFileError, match=r"maze\.h5: no group 'training'; there is maps"):
            file.clips([0])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([70], "index: got 70, wants numbers from 0 to 69"),
        ([-1], "index: got -1, wants numbers from 0 to 69"),
        ([3, 99, 100], "index: got 99, wants numbers from 0 to 69"),
        ([[1, 2]], r"index: got shape \(1, 2\), wants a row"),
    ],
)
def test_a_clip_that_is_not_there(written, index, message):
    with BallsFile(written) as file, pytest.raises(IndexError, match=message):
        file.clips(torch.tensor(index))


def test_a_split_goes_by_the_name_it_has_elsewhere(written):
    with BallsFile(written) as file, pytest.raises(ValueError, match="split: got 'training', want"):
        file.clips([0], "training")  # pyright: ignore[reportArgumentType]


# --- the command


def test_the_command_writes_a_file(tmp_path, capsys):
    out = tmp_path / "balls.h5"
    command = ["data", "balls", "--variant", "coloured678balls", "--clips", 11, "--seed", 4]
    assert run(*command, "--out", out, "--device", "cpu", "--test-clips", 1) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert list(tmp_path.iterdir()) == [out]
    with BallsFile(out) as file:
        assert [file.size(split) for split in GROUPS] == [11, 2, 1]
        assert same(file.clips(range(11)), balls(4, torch.arange(11), "coloured678balls"))


def test_few_clips_have_one_of_each_split(tmp_path):
    out = tmp_path / "balls.h5"
    assert run("data", "balls", "--clips", 1, "--out", out, "--device", "cpu") == 0
    with BallsFile(out) as file:
        assert [file.size(split) for split in GROUPS] == [1, 1, 1]


def test_the_command_does_not_overwrite(copied, capsys):
    before = copied.read_bytes()
    assert run("data", "balls", "--out", copied) == 2
    assert "is there already, and is not overwritten" in capsys.readouterr().err
    assert copied.read_bytes() == before


def test_the_command_says_why_it_cannot_write(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(balls_file, "_write", full)
    assert run("data", "balls", "--clips", 5, "--out", tmp_path / "balls.h5") == 1
    assert capsys.readouterr().err.endswith("balls.h5: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [10_000, 100_000, 340_000])
def test_a_full_disk_is_told_in_a_line(tmp_path, size):
    """Not as HDF5 does, which crashes once the process ends."""
    command = [sys.executable, "-m", "scoff", "data", "balls", "--clips", "100", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", "balls.h5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "scoff: cannot write balls.h5: File too large\n"
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import io, os, signal, torch
from pathlib import Path
from scoff.worlds import balls_file

write = balls_file._Sink.write
def interrupted(sink, data):
    signal.raise_signal(signal.SIGINT)  # Python heeds it here, within HDF5
    return write(sink, data)
balls_file._Sink.write = interrupted
try:
    balls_file.write_balls(Path("balls.h5"), {"train": 70})
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("interrupted")
"""


def test_an_interrupt_while_hdf5_writes_leaves_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_the_command_leaves_nothing_behind_when_it_is_stopped(
    tmp_path, capsys, monkeypatch, number, code
):
    """While it writes the second of three parts."""
    write, parts = balls_file._write, set()

    def signalled(group, name, values, time, start, size):
        if start == 64 and start not in parts:
            assert list(tmp_path.glob(".*.tmp"))
            os.kill(os.getpid(), number)
        parts.add(start)
        write(group, name, values, time, start, size)

    monkeypatch.setattr(balls_file, "_write", signalled)
    before = signal.getsignal(number)
    command = ["data", "balls", "--clips", 130, "--test-clips", 0, "--valid-clips", 0]
    assert run(*command, "--device", "cpu", "--out", tmp_path / "balls.h5") == code
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "scoff: stopped; nothing was written\n")
    assert parts == {0, 64}
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_lines_tell_how_far_it_is_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logs, "SECONDS_BETWEEN_LINES", 0.0)
    command = ["data", "balls", "--clips", 10, "--test-clips", 3, "--device", "cpu"]
    assert run(*command, "--out", tmp_path / "balls.h5") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"4balls: clip {n}/15" for n in (10, 12, 15)]
    assert all("clips/s" in line and line.endswith("left") for line in lines)
