"""Checkpoints: whole or not there at all, and never unpickled.

A checkpoint is one safetensors file, `step-00001000.3f2a9c1b6d5e4f70.safetensors`. Its tensors are
those found anywhere in the saved state; the rest of the state is JSON in the file's metadata. The
name carries the first half of the file's SHA-256, so that damage anywhere in it is found. It is
written aside, flushed to the disk and renamed, and only then are older ones removed.
"""

import hashlib
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from scoff.training.errors import StorageError

KEPT = 2
NAME = re.compile(r"step-(\d{8,})\.([0-9a-f]{16})\.safetensors")

log = logging.getLogger(__name__)


def write_atomic(path: Path, data: bytes) -> None:
    """Either all of `data` is at `path` in the end, or what was there before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def remove_left_overs(folder: Path) -> None:
    """Of processes that were killed while they wrote."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename survive a power failure."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes a checkpoint and removes all but the newest two."""
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps({"step": step, "state": flatten(state, "state", tensors)})
    data = to_bytes(tensors, {"scoff": skeleton})
    path = folder / f"step-{step:08d}.{digest(data)}.safetensors"
    try:
        folder.mkdir(exist_ok=True)
        write_atomic(path, data)
        # a run that has come to this step found the later ones damaged
        others = [other for other in find(folder) if other != path]
        later = [other for other in others if step_of(other) >= step]
        for old in later + others[len(later) + KEPT - 1 :]:
            old.unlink(missing_ok=True)
    except StorageError as error:
        raise StorageError(f"{error}; {last_good(folder)}") from error
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error.strerror or error}") from error
    return path


def last_good(folder: Path) -> str:
    """For error messages."""
    kept = find(folder)
    return f"the last good checkpoint is {kept[0]}" if kept else "there is no checkpoint yet"


def find(folder: Path) -> list[Path]:
    """All checkpoints, the newest first."""
    found = [path for path in folder.glob("*") if NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])


def load_newest(folder: Path) -> tuple[int, dict[str, Any], Path] | None:
    """Step, state and path of the newest that is whole; warns of those that are not.

    None: there are none at all.
    """
    paths = find(folder)
    for path in paths:
        try:
            return *load(path), path
        except (ValueError, OSError) as error:
            log.warning("%s is damaged (%s): trying the one before it", path, error)
    if paths:
        raise StorageError(f"all checkpoints in {folder} are damaged")
    return None


def load(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and state. Raises ValueError where the file is not what was saved."""
    named = NAME.fullmatch(path.name)
    if named is None:
        raise ValueError("not a checkpoint's name")
    if digest(path.read_bytes()) != named[2]:
        raise ValueError("its content does not match the digest in its name")
    try:
        with safe_open(path, "pt") as file:
            content = json.loads(file.metadata()["scoff"])
            return content["step"], restore(content["state"], file.get_tensor)
    except (SafetensorError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"it is no safetensors file of a run: {error}") from error


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors moved into `tensors`."""
    if isinstance(value, Tensor):
        name = f"{len(tensors)} {path}"  # the keys "a.b" and "a", "b" make the same path
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (int, str)):
                raise TypeError(f"{path}: cannot be saved, for {key!r} is one of its keys")
        # JSON's keys are strings; the keys of an optimiser's state are numbers
        items = [[k, flatten(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return {"$dict": items}
    if isinstance(value, (list, tuple)):
        items = [flatten(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path}: cannot be saved, for it is a {type(value).__name__}")


def restore(value: Any, get_tensor: Any) -> Any:
    """The inverse of `flatten`"""
    if isinstance(value, list):
        return [restore(v, get_tensor) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$tensor":
        return get_tensor(content)
    if kind == "$tuple":
        return tuple(restore(v, get_tensor) for v in content)
    return {k: restore(v, get_tensor) for k, v in content}
