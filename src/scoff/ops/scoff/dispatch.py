"""Which backend runs."""

from typing import Literal

import torch

from scoff.ops.scoff.batched import scoff_batched
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import Inputs, Options, Run, Weights

try:
    from scoff.ops.scoff import fused
except ImportError:  # triton comes with torch's builds for CUDA, not with others
    fused = None

Backend = Literal["auto", "reference", "batched", "fused"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "batched", "fused")


def run_scoff(backend: Backend, inputs: Inputs, w: Weights, options: Options, keep: bool) -> Run:
    """`keep`: whether the details of `Run` are wanted, which `fused` does not give."""
    # an exported program is to run without this package, hence without its operators; the flag
    # itself, for up to torch 2.11 `is_exporting()` is true inside torch.compile as well
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    if backend == "reference" or (backend == "auto" and exporting):
        return scoff_reference(inputs, w, options)
    if backend == "fused":
        reason = "triton is not installed" if fused is None else fused.why_not(inputs, w)
        if fused is None or reason is not None:
            raise ValueError(f"backend: got 'fused', but {reason}")
        if not keep and inputs.x.shape[1] > 0:
            return fused.scoff_fused(inputs, w, options)
    return scoff_batched(inputs, w, options, keep)
