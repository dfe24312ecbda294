"""Which backend runs."""

import functools
import logging
from typing import Any, Literal

import torch
from torch import Tensor

from scoff.ops.exporting import is_exporting, is_transformed
from scoff.ops.scoff.batched import scoff_batched
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import Inputs, Options, Run, Weights

try:
    from scoff.ops.scoff import fused, wide
except ImportError:  # triton comes with torch's builds for CUDA, not with others
    fused = wide = None

Backend = Literal["auto", "reference", "batched", "fused", "wide"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "batched", "fused", "wide")
FEW_ROWS = 256


def run_scoff(backend: Backend, inputs: Inputs, w: Weights, options: Options, keep: bool) -> Run:
    """`keep`: whether the details of `Run` are wanted, which Triton's kernels do not give."""
    transformed = is_transformed(inputs, w)
    plain = is_exporting() or transformed or is_small_step(inputs.x, inputs.state)
    if backend == "reference" or (backend == "auto" and plain):
        if transformed and backend == "auto" and not torch.compiler.is_compiling():
            log_once(
                "SCOFF runs by its backend 'reference', which is slow: others have no derivatives "
                "by torch.func or in forward mode"
            )
        return scoff_reference(inputs, w, options)
    if transformed:
        raise ValueError(
            f"backend: got {backend!r}, but it has no derivatives by torch.func or in forward "
            "mode: 'auto' takes 'reference' for them"
        )
    on_gpu = inputs.x.is_cuda
    empty = inputs.x.shape[1] == 0
    if backend == "fused" or (backend == "auto" and on_gpu):
        reason = why_not(fused, inputs, w)
        if reason is None and not keep and not empty:
            return fused.scoff_fused(inputs, w, options)  # pyright: ignore[reportOptionalMemberAccess]
        refuse(backend, "fused", reason)
    if backend == "wide" or (backend == "auto" and on_gpu):
        reason = why_not(wide, inputs, w)
        if reason is None and not keep and not empty:
            return wide.scoff_wide(inputs, w, options)  # pyright: ignore[reportOptionalMemberAccess]
        refuse(backend, "wide", reason)
    return scoff_batched(inputs, w, options, keep)


def is_small_step(x: Tensor, state: Tensor) -> bool:
    """Whether it is faster as written: `batched` first multiplies weights with each other, and has
    room made for the way back. Only without a way back, so that derivatives do not depend on it."""
    rows = state.shape[1] * state.shape[2]  # B * F
    brief = x.shape[0] == 1 and rows <= FEW_ROWS and x.device.type == "cpu"
    return brief and not torch.is_grad_enabled()


def why_not(module: Any, inputs: Inputs, w: Weights) -> str | None:
    return "triton is not installed" if module is None else module.why_not(inputs, w)


def refuse(backend: Backend, tried: str, reason: str | None) -> None:
    """Says, if there is a reason, why a backend does not run: as an error if it was asked for."""
    if reason is None:
        return
    if backend == tried:
        raise ValueError(f"backend: got {tried!r}, but {reason}")
    if not torch.compiler.is_compiling():
        log_once(f"SCOFF does without its backend {tried!r}: {reason}")


@functools.cache
def log_once(message: str) -> None:
    logging.getLogger("scoff").warning(message)
