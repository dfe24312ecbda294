"""`scoff bench`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes

from scoff.commands.arguments import parse
from scoff.training.errors import ScoffError, StorageError, UsageError


@dataclass(frozen=True)
class BenchSizes:
    """Replace those of every setting."""

    batch: int | None = None
    """Sequences."""
    length: int | None = None
    """Steps."""
    object_files: int | None = None
    """Object files."""
    size: int | None = None
    """Size of one object file."""
    schemata: int | None = None
    """Schemata."""
    positions: int | None = None
    """Input positions, which SCOFF attends to."""


@dataclass(frozen=True)
class Bench:
    """Speed and memory of SCOFF's backends against torch's layers and the least time possible.

    A backend whose output or gradients are not the reference's gets no times, and the command then
    ends with exit code 1.
    """

    sizes: OmitArgPrefixes[BenchSizes]
    settings: tuple[str, ...] = ()
    """adding, balls, balls-512, maze. Default: all on a GPU, adding on a CPU."""
    backends: tuple[str, ...] = ()
    """fused, wide, batched, reference, of SCOFF: by default the first three on a GPU, the others on
    a CPU. rims, rims-reference: those of RIMs, with all modules active."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the layers and their inputs."""
    tf32: Literal["default", "on", "off"] = "default"
    """Whether cuBLAS and cuDNN may round float32 to TF32. Default: as torch has it, which is cuDNN
    only."""
    rounds: int = 11
    """Times that each layer takes its turn with nn.GRU."""
    stages: bool = False
    """Tell where forward and backward go on a GPU: its time and launches by stage, the host's
    time."""
    json: Path | None = None
    """File to write all measures to."""


def bench(args: list[str]) -> None:
    parsed = parse(Bench, args, "scoff bench")
    if parsed.rounds < 1:
        raise UsageError(f"--rounds: got {parsed.rounds}, wants at least 1")
    if parsed.json is not None and (parsed.json.is_dir() or not parsed.json.parent.is_dir()):
        raise UsageError(f"--json: got {parsed.json}, wants a file in a folder that there is")
    import torch

    import scoff.bench as work
    from scoff.training.devices import pick_device

    device = pick_device(parsed.device)
    settings = work.choose_settings(parsed.settings, device.type, asdict(parsed.sizes))
    backends = work.choose_backends(parsed.backends, device.type)
    if parsed.tf32 != "default":
        torch.backends.cuda.matmul.allow_tf32 = parsed.tf32 == "on"
        torch.backends.cudnn.allow_tf32 = parsed.tf32 == "on"
    dtype = getattr(torch, parsed.dtype)
    report = work.bench(settings, backends, work.Place(device, dtype, parsed.rounds, parsed.stages))
    if parsed.json is not None:
        try:
            parsed.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write {parsed.json}: {error.strerror}") from error
    if report.failures:
        names = ", ".join(f"{row.layer} at {row.setting}" for row in report.failures)
        raise ScoffError(f"not fit for use, see the table: {names}")
