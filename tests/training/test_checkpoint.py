"""A checkpoint is whole or not there; what is damaged or foreign is never used."""

import errno
import json
import logging
import os
import pickle
import resource
import signal
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from scoff.training import checkpoint
from scoff.training.errors import StorageError
from tests.training.helpers import as_bytes, content, die_at, ended, start


def state(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.randn(40, 30, generator=generator), "n": torch.tensor(step)},
        "optimiser": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "groups": [{"betas": (0.9, 0.99)}],
        },
        "meter": {"sums": [0.5, 1e-300, float("inf")], "count": step, "best": None},
    }


@pytest.fixture
def folder(tmp_path):
    """With checkpoints of the steps 10 and 20"""
    for step in (10, 20):
        checkpoint.save(tmp_path / "checkpoints", step, state(step))
    return tmp_path / "checkpoints"


def newest(folder):
    found = checkpoint.load_newest(folder)
    assert found is not None
    assert as_bytes(found[1]) == as_bytes(state(found[0]))
    return found[0]


# --- what goes in comes out


tensors = st.sampled_from(
    [
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(3).bfloat16(),
        torch.ones(2, 1).expand(2, 4),
    ]
)
leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats() | tensors
keys = st.integers() | st.text() | st.sampled_from(["a", "a.b", "b", "0", 0, "$tensor", "$dict"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_a_state_survives_unchanged(value):
    found: dict[str, torch.Tensor] = {}
    skeleton = json.loads(json.dumps(checkpoint.flatten(value, "state", found)))
    restored = checkpoint.restore(skeleton, found.__getitem__)
    assert repr(as_bytes(restored)) == repr(as_bytes(value))  # repr: NaN != NaN


def test_states_that_share_memory_are_saved_apart(tmp_path):
    whole = torch.arange(6.0)
    path = checkpoint.save(tmp_path, 1, {"whole": whole, "part": whole[2:4], "same": whole})
    _, loaded = checkpoint.load(path)
    assert loaded["part"].tolist() == [2, 3]
    assert loaded["whole"].tolist() == loaded["same"].tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {1, 2}}, r"state\.a: cannot be saved, for it is a set"),
        ({"a": [1, torch.Size]}, r"state\.a\.1: cannot be saved, for it is a type"),
        ({(1, 2): 3}, r"state: cannot be saved, for \(1, 2\) is one of its keys"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path, 1, value)
    assert content(tmp_path) == {}


# --- which are kept


def test_the_newest_two_are_kept(folder):
    for step in (30, 40, 100_000_000):
        checkpoint.save(folder, step, state(step))
    assert [checkpoint.step_of(path) for path in checkpoint.find(folder)] == [100_000_000, 40]


def test_damaged_ones_do_not_crowd_out_good_ones(folder):
    checkpoint.save(folder, 30, state(30))
    last = checkpoint.find(folder)[0]
    last.write_bytes(b"damaged")
    assert newest(folder) == 20
    checkpoint.save(folder, 25, state(25))  # stopped before it came to 30 again
    assert [checkpoint.step_of(path) for path in checkpoint.find(folder)] == [25, 20]

    checkpoint.find(folder)[0].write_bytes(b"damaged")
    checkpoint.save(folder, 25, state(25) | {"seconds": 9})  # another digest
    assert checkpoint.load(checkpoint.find(folder)[0])[1]["seconds"] == 9
    assert [checkpoint.step_of(path) for path in checkpoint.find(folder)] == [25, 20]


def test_other_files_are_left_alone(folder):
    others = ("notes.txt", "step-00000005.safetensors", "step-5.0123456789abcdef.safetensors")
    for name in others:
        (folder / name).write_text("mine")
    checkpoint.save(folder, 30, state(30))
    checkpoint.save(folder, 40, state(40))
    assert all((folder / name).read_text() == "mine" for name in others)


# --- killed


def save_and_die(folder, number):
    data = state(30)
    die_at(number)
    checkpoint.save(folder, 30, data)


def test_killed_at_every_call_of_a_save(tmp_path):
    seen = set()
    for number in range(1, 100):
        folder = tmp_path / str(number)
        for step in (10, 20):
            checkpoint.save(folder, step, state(step))
        code = ended(start(save_and_die, folder, number))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        seen.add(newest(folder))
        checkpoint.remove_left_overs(folder)
        checkpoint.save(folder, 40, state(40))  # nothing is in the way
        assert newest(folder) == 40
        assert not list(folder.glob(".*"))
    assert code == 0
    assert number > 8
    assert seen == {20, 30}


def save_and_die_inside(folder, size):
    """The system kills it when the file has this many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoint.save(folder, 30, state(30))


@pytest.mark.parametrize("size", [0, 1, 700, 4000])
def test_killed_inside_the_write(folder, size):
    before = content(folder)
    assert ended(start(save_and_die_inside, folder, size)) == -signal.SIGXFSZ
    (torn,) = folder.glob(".*.tmp")
    assert torn.stat().st_size == size
    assert newest(folder) == 20
    torn.unlink()
    assert content(folder) == before


# --- damaged


def damages(data: bytes):
    random = Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    flips = [random.randrange(header) for _ in range(20)]
    flips += [random.randrange(header, len(data)) for _ in range(20)]
    for place in flips:
        damaged = bytearray(data)
        damaged[place] ^= 1 << random.randrange(8)
        yield bytes(damaged)
    for _ in range(20):
        yield data[: random.randrange(len(data))]
    yield from (b"", data + b"\0", bytes(len(data)))


def test_the_one_before_a_damaged_one_is_used(folder, caplog):
    last, _ = checkpoint.find(folder)
    data = last.read_bytes()
    for damaged in damages(data):
        last.write_bytes(damaged)
        caplog.clear()
        assert newest(folder) == 10
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert str(last) in record.getMessage()
        assert "does not match the digest" in record.getMessage()
    last.write_bytes(data)
    caplog.clear()
    assert newest(folder) == 20
    assert not caplog.records


def test_one_that_cannot_be_read_is_passed_over(folder, caplog):
    last, _ = checkpoint.find(folder)
    last.unlink()
    last.mkdir()
    assert newest(folder) == 10
    assert "Is a directory" in caplog.text


def test_all_damaged(folder):
    for path in checkpoint.find(folder):
        path.write_bytes(b"")
    with pytest.raises(StorageError, match=f"all checkpoints in {folder} are damaged"):
        checkpoint.load_newest(folder)


def test_none_at_all(tmp_path):
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "nowhere") is None


# --- foreign


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def foreign(folder, write):
    """A file of the right name, as the newest"""
    path = folder / "foreign"
    write(path)
    digest = checkpoint.digest(path.read_bytes())
    return path.rename(folder / f"step-00000030.{digest}.safetensors")


def test_a_pickle_is_refused_not_run(folder, tmp_path, caplog):
    ran = tmp_path / "ran"
    torch.save(Payload(tmp_path / "really-a-payload"), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "really-a-payload").exists()

    for write in (
        lambda path: torch.save({"model": Payload(ran)}, path),
        lambda path: torch.save(Payload(ran), path, _use_new_zipfile_serialization=False),
        lambda path: path.write_bytes(pickle.dumps(Payload(ran))),
    ):
        caplog.clear()
        path = foreign(folder, write)
        assert newest(folder) == 20
        assert f"{path} is damaged (it is no safetensors file of a run" in caplog.text
        path.unlink()
    assert not ran.exists()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"other": "1"},
        {"scoff": "no json"},
        {"scoff": "[]"},
        {"scoff": '{"step": 30}'},
        {"scoff": '{"state": 1}'},
        {"scoff": '{"step": 30, "state": {"$tensor": "y"}}'},
        {"scoff": '{"step": 30, "state": {"$dict": 3}}'},
        {"scoff": '{"step": 30, "state": {"$dict": [], "more": 1}}'},
        {"scoff": '{"step": 30, "state": {"$dict": [[[], 1]]}}'},
        {"scoff": '{"step": 30, "state": ' + "[" * 5000 + "]" * 5000 + "}"},
    ],
)
def test_safetensors_of_others_are_refused(folder, metadata, caplog):
    path = foreign(folder, lambda path: save_file({"x": torch.zeros(1)}, path, metadata))
    assert newest(folder) == 20
    assert f"{path} is damaged (it is no safetensors file of a run" in caplog.text


# --- a full disk


class Full:
    """A file on a disk that is full in the middle of it"""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_destroys_nothing(folder, monkeypatch, call):
    before = content(folder)
    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(checkpoint, "open", lambda *a: Full(open(*a)), raising=False)  # noqa: SIM115
        else:
            patch.setattr(os, call, full)
        last = checkpoint.find(folder)[0]
        message = f"cannot write .*step-00000030.*: No space left.*; the last good .* is {last}"
        with pytest.raises(StorageError, match=message):
            checkpoint.save(folder, 30, state(30))
    assert content(folder) == before
    assert newest(folder) == 20
    checkpoint.save(folder, 30, state(30))
    assert newest(folder) == 30


def test_a_full_disk_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left.*; there is no checkpoint yet"):
        checkpoint.save(tmp_path, 30, state(30))
    assert content(tmp_path) == {}


def save_too_much(folder, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    with pytest.raises(StorageError, match="File too large; the last good checkpoint is"):
        checkpoint.save(folder, 30, state(30))


@pytest.mark.parametrize("size", [0, 700, 4000])
def test_a_disk_that_is_full_in_the_middle_of_a_write(folder, size):
    before = content(folder)
    assert ended(start(save_too_much, folder, size)) == 0
    assert content(folder) == before


def test_what_cannot_be_removed_is_told(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match=f"cannot write to {folder}: Operation not permitted"):
        checkpoint.save(folder, 30, state(30))
    assert newest(folder) == 30
