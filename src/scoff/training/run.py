"""The folder of one run: what it was asked to do, what it wrote.

config.json           experiment, config, where it ran
metrics.jsonl         one line a record
checkpoints/          the newest two, for resuming
tensorboard/
training.json         steps and seconds, when training is done
weights.safetensors   then, too
evaluation.json       when it was evaluated
tracker-id            when it was logged to wandb or trackio
"""

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

import scoff
from scoff.training import checkpoint
from scoff.training.errors import StorageError, UsageError
from scoff.training.settings import Settings, flag

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights_path(self) -> Path:
        return self.path / "weights.safetensors"

    @property
    def training_path(self) -> Path:
        return self.path / "training.json"

    @property
    def evaluation_path(self) -> Path:
        return self.path / "evaluation.json"

    @classmethod
    def create(cls, path: Path, experiment: str, preset: str, config: Settings) -> "Run":
        """A folder for a new run. One that holds a run already is left as it is: a launcher that
        runs the same command again goes on with it, anyone else is told."""
        run = cls(path)
        if run.config_path.exists():
            held = run.read_config()
            difference = differences(held, experiment, config)
            if difference:
                raise UsageError(
                    f"{path} already holds another run: {difference}; choose another --out"
                )
            if restarted():
                return run
            raise UsageError(
                f"{path} already holds this run; go on with: scoff train --resume {path}"
            )
        try:
            # one that was killed right here may have left a file that it wrote aside
            if path.exists() and any(p.suffix != ".tmp" for p in path.iterdir()):
                raise UsageError(f"{path} is not empty and holds no run; choose another --out")
            path.mkdir(parents=True, exist_ok=True)
            content = {
                "experiment": experiment,
                "preset": preset,
                "config": asdict(config),
                "environment": environment(),
            }
            checkpoint.write_atomic(run.config_path, as_json(content))
        except OSError as error:
            raise UsageError(f"--out: cannot write to {path}: {error.strerror}") from error
        return run

    @classmethod
    def open(cls, path: Path, to_write: bool = False) -> "Run":
        run = cls(path)
        if not run.config_path.is_file():
            raise UsageError(f"{path} holds no run: there is no {run.config_path}")
        if to_write and not os.access(path, os.W_OK):
            raise UsageError(f"cannot write to {path}")
        return run

    def read_config(self) -> dict[str, Any]:
        try:
            content = json.loads(self.config_path.read_text())
            if not isinstance(content["experiment"], str) or not isinstance(
                content["config"], dict
            ):
                raise ValueError("no experiment or no config")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.config_path} is damaged: {error}") from error
        return content

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_records(self.metrics_path)

    def read_evaluation(self) -> dict[str, Any] | None:
        if not self.evaluation_path.exists():
            return None
        try:
            return json.loads(self.evaluation_path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.evaluation_path} is damaged; write it anew with: scoff eval {self.path}"
            ) from error

    def write_evaluation(self, content: dict[str, Any]) -> None:
        checkpoint.write_atomic(self.evaluation_path, as_json(content))

    @property
    def finished(self) -> bool:
        return self.weights_path.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder, where the system has such locks."""
        with open(self.config_path) as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is training in {self.path}") from None
            except OSError:  # not on this file system
                pass
            yield

    def step(self) -> int:
        """The newest checkpoint's."""
        found = checkpoint.find(self.checkpoints)
        return checkpoint.step_of(found[0]) if found else 0

    def seconds(self) -> float:
        """Spent in training, over all pieces."""
        return self.progress()[1]

    def progress(self) -> tuple[int, float]:
        """Step of what `read_weights` returns, and the seconds of training up to it."""
        if self.finished:
            try:
                content = json.loads(self.training_path.read_text())
                return content["steps"], content["seconds"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise StorageError(f"{self.training_path} is damaged: {error}") from error
        newest = checkpoint.load_newest(self.checkpoints)
        return (0, 0.0) if newest is None else (newest[0], newest[1]["meter"]["seconds"])

    def write_weights(self, model: nn.Module, steps: int, seconds: float) -> None:
        """The time stands apart, so that the same training gives the same file of weights."""
        checkpoint.write_atomic(self.training_path, as_json({"steps": steps, "seconds": seconds}))
        tensors = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
        checkpoint.write_atomic(self.weights_path, to_bytes(tensors))

    def read_weights(self) -> dict[str, Tensor]:
        """Of the finished run, else of its newest checkpoint."""
        if self.finished:
            try:
                return load_file(self.weights_path)
            except (SafetensorError, OSError) as error:
                raise StorageError(f"{self.weights_path} is damaged: {error}") from error
        newest = checkpoint.load_newest(self.checkpoints)
        if newest is None:
            raise UsageError(f"{self.path} has neither weights nor a checkpoint yet")
        return newest[1]["model"]


def as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines; the last may be cut off where a run was killed."""
    records = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                records.append({k: math.nan if v is None else v for k, v in record.items()})
    return records


def differences(held: dict[str, Any], experiment: str, config: Settings) -> str:
    if held["experiment"] != experiment:
        return f"its experiment is {held['experiment']}"
    wanted = json.loads(json.dumps(asdict(config)))
    found = [
        f"its --{flag(k)} is {held['config'].get(k)}, not {wanted.get(k)}"
        for k in held["config"] | wanted
        if held["config"].get(k) != wanted.get(k)
    ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "scoff": scoff.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": platform.machine(),
    }


def commit() -> str | None:
    """Of the package's own repository, where it is run from one."""
    root = Path(scoff.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def restarted() -> bool:
    """Whether a launcher runs the same command again after a failure."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or 0) > 0 for name in names)
