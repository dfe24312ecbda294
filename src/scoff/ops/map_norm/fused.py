"""Normalisation over whole maps, then ELU, by Triton kernels: one each way.

Mean and standard deviation are kept, and the input; all else is computed again. Numbers of half
precision are computed with as float32.
"""

from typing import Any

import torch
from torch import Tensor

from scoff.ops.map_norm import kernels
from scoff.ops.scoff.fused_types import exact, power_of_two
from scoff.ops.scoff.launch import prepared, why_no_kernels

MAX_CHANNELS = 4096  # a program has those of a position at once
TILE = 16384  # numbers of a map that a program has at once
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# what is launched; to a type checker kernels are Python functions, called in the wrong way
map_norm_elu_kernel: Any = kernels.map_norm_elu_kernel
map_norm_elu_back_kernel: Any = kernels.map_norm_elu_back_kernel


def why_not(x: Tensor, gain: Tensor, bias: Tensor) -> str | None:
    """Why kernels cannot do this; None: they can."""
    if (reason := why_no_kernels(x)) is not None:
        return reason
    if x.dtype not in TYPES or not {gain.dtype, bias.dtype} <= {x.dtype, torch.float32}:
        return f"it has no {gain.dtype} and {bias.dtype} for {x.dtype}"
    if not x.device == gain.device == bias.device:
        return f"it wants one device, not {x.device}, {gain.device} and {bias.device}"
    if x.ndim != 4 or x.numel() == 0 or not gain.shape == bias.shape == x.shape[3:]:
        return f"it has no {tuple(gain.shape)} and {tuple(bias.shape)} for {tuple(x.shape)}"
    channels = x.shape[3]
    return f"{channels} channels are more than {MAX_CHANNELS}" if channels > MAX_CHANNELS else None


def map_norm_elu_fused(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _MapNormELU.apply(x.contiguous(), gain, bias, eps)


# --- the operators


def launch(kernel: Any, x: Tensor, *others: Tensor, **constants: float) -> None:
    maps, height, width, channels = x.shape
    positions, padded = height * width, power_of_two(channels, 1)
    block = min(power_of_two(positions, 1), max(1, TILE // padded))
    run = prepared(
        kernel,
        maps,
        **constants,
        POSITIONS=positions,
        CHANNELS=channels,
        BLOCK=block,
        CP=padded,
        # 32 numbers a thread: of both tensors that the backward pass reads, they fit in registers
        num_warps=min(max(block * padded // 1024, 1), 16),
    )
    with torch.cuda.device_of(x):  # triton launches on the current device
        run(x, *others)


@torch.library.custom_op(
    "scoff::map_norm_elu_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor gain, Tensor bias, float eps) -> (Tensor, Tensor)",
)
def _forward(x, gain, bias, eps):
    y, statistics = allocate(x)
    launch(map_norm_elu_kernel, x, gain.contiguous(), bias.contiguous(), y, statistics, EPS=eps)
    return y, statistics


@_forward.register_fake
def _(x, gain, bias, eps):  # noqa: ARG001
    return allocate(x)


def allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(x), 2, dtype=exact(x))


@torch.library.custom_op(
    "scoff::map_norm_elu_backward",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor gain, Tensor bias, Tensor statistics, Tensor d_y) -> (Tensor, Tensor)"
    ),
)
def _backward(x, gain, bias, statistics, d_y):
    d_x = x.new_empty(x.shape)
    parts = statistics.new_empty(len(x), 2, x.shape[3])
    given = gain.contiguous(), bias.contiguous(), statistics, d_y.contiguous()
    launch(map_norm_elu_back_kernel, x, *given, d_x, parts)
    return d_x, parts.sum(0)  # in the same order each time


@_backward.register_fake
def _(x, gain, bias, statistics, d_y):  # noqa: ARG001
    return x.new_empty(x.shape), statistics.new_empty(2, x.shape[3])


class _MapNormELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, bias, eps):
        y, statistics = _forward(x, gain, bias, eps)
        ctx.save_for_backward(x, gain, bias, statistics)
        return y

    @staticmethod
    def backward(ctx, d_y):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, bias, statistics = ctx.saved_tensors
        d_x, (d_gain, d_bias) = _backward(x, gain, bias, statistics, d_y)
        return d_x, d_gain.to(gain.dtype), d_bias.to(bias.dtype), None
