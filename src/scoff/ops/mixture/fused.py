"""Mixtures of pictures by Triton kernels: one pass over the pixels each way.

Nothing is kept but the inputs. Pictures and masks may be parts of one tensor: it is not copied.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scoff.ops.mixture import kernels
from scoff.ops.scoff.fused_types import power_of_two
from scoff.ops.scoff.launch import prepared, why_no_kernels

MAX_FILES = 64  # a program has those of a pixel at once

# what is launched; to a type checker kernels are Python functions, called in the wrong way
mix_kernel: Any = kernels.mix_kernel
mix_back_kernel: Any = kernels.mix_back_kernel
mix_classes_kernel: Any = kernels.mix_classes_kernel
mix_classes_back_kernel: Any = kernels.mix_classes_back_kernel


def why_not(logits: Tensor, mask_logits: Tensor) -> str | None:
    """Why kernels cannot do this; None: they can."""
    if (reason := why_no_kernels(logits)) is not None:
        return reason
    if logits.device != mask_logits.device:
        return f"pictures are on {logits.device}, masks on {mask_logits.device}"
    if not logits.dtype == mask_logits.dtype in (torch.float32, torch.float64):
        return f"it wants float32, not {logits.dtype} and {mask_logits.dtype}"
    if logits.shape[:-3] + logits.shape[-2:] != mask_logits.shape or logits.numel() == 0:
        return f"it has no {tuple(mask_logits.shape)} masks of {tuple(logits.shape)} pictures"
    files = logits.shape[-4]
    return f"{files} object files are more than {MAX_FILES}" if files > MAX_FILES else None


def mix_fused(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    return in_rows(logits, mask_logits, classes=False)


def mix_classes_fused(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    return in_rows(logits, mask_logits, classes=True)


def in_rows(logits: Tensor, mask_logits: Tensor, classes: bool) -> tuple[Tensor, Tensor]:
    *frames, files, channels, height, width = logits.shape
    rows, pixels = math.prod(frames), height * width
    mixed, masks = _Mix.apply(
        logits.reshape(rows, files, channels, pixels),
        mask_logits.reshape(rows, files, pixels),
        classes,
    )
    return mixed.view(*frames, channels, height, width), masks.view(mask_logits.shape)


# --- the operators


def launch(kernel: Any, logits: Tensor, mask_logits: Tensor, *others: Tensor | None) -> None:
    rows, files, channels, pixels = logits.shape
    # neighbouring pixels are neighbours in memory; what is around them may lie anywhere
    logits, mask_logits = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (logits, mask_logits)
    )
    padded = power_of_two(files, 1)
    block = min(power_of_two(pixels, 1), 512, max(16, 4096 // padded))
    run = prepared(
        kernel,
        rows * -(-pixels // block),
        **dict(zip(("ROW", "FILE", "CHANNEL"), logits.stride(), strict=False)),
        **dict(zip(("MASK_ROW", "MASK_FILE"), mask_logits.stride(), strict=False)),
        FILES=files,
        CHANNELS=channels,
        PIXELS=pixels,
        FP=padded,
        BLOCK=block,
    )
    with torch.cuda.device_of(logits):  # triton launches on the current device
        run(logits, mask_logits, *others)


@torch.library.custom_op(
    "scoff::mix_forward",
    mutates_args=(),
    schema="(Tensor logits, Tensor mask_logits, bool classes) -> (Tensor, Tensor)",
)
def _forward(logits, mask_logits, classes):
    mixed, masks = allocate(logits, mask_logits)
    launch(mix_classes_kernel if classes else mix_kernel, logits, mask_logits, mixed, masks)
    return mixed, masks


@_forward.register_fake
def _(logits, mask_logits, classes):  # noqa: ARG001
    return allocate(logits, mask_logits)


def allocate(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, _, channels, pixels = logits.shape
    return logits.new_empty(rows, channels, pixels), mask_logits.new_empty(mask_logits.shape)


@torch.library.custom_op(
    "scoff::mix_backward",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor mask_logits, bool classes, Tensor d_mixed, Tensor? d_masks)"
        " -> (Tensor, Tensor)"
    ),
)
def _backward(logits, mask_logits, classes, d_mixed, d_masks):
    found = logits.new_empty(logits.shape), mask_logits.new_empty(mask_logits.shape)
    kernel = mix_classes_back_kernel if classes else mix_back_kernel
    given = d_mixed.contiguous(), None if d_masks is None else d_masks.contiguous()
    launch(kernel, logits, mask_logits, *given, *found)
    return found


@_backward.register_fake
def _(logits, mask_logits, classes, d_mixed, d_masks):  # noqa: ARG001
    return logits.new_empty(logits.shape), mask_logits.new_empty(mask_logits.shape)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, mask_logits, classes):
        ctx.save_for_backward(logits, mask_logits)
        ctx.classes = classes
        ctx.set_materialize_grads(False)
        return _forward(logits, mask_logits, classes)

    @staticmethod
    def backward(ctx, d_mixed, d_masks):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, mask_logits = ctx.saved_tensors
        if d_mixed is None:
            rows, _, channels, pixels = logits.shape
            d_mixed = logits.new_zeros(rows, channels, pixels)
        return *_backward(logits, mask_logits, ctx.classes, d_mixed, d_masks), None
