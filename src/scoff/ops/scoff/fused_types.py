"""What the kernels of the `fused` backend are given, and what they leave."""

from typing import NamedTuple

import torch
from torch import Tensor


class Prepared(NamedTuple):
    """What the recurrence is made of, as far as it can be computed beforehand."""

    keys: Tensor  # [T, B, P, C], or a key for each of A heads [T, B, P, A * C]
    values: Tensor | None  # [T, B, P, A * W]; None: the keys, as they are, of width W = C
    state: Tensor  # [Z, B, F, D]
    restart: Tensor | None  # [Z, B, F, D]
    from_state: Tensor  # [X, D]: schema query, communication queries, what is asked of a position
    value: Tensor | None  # [V, W] from what a head has seen to its part of z; None: it is z
    weight_ih: Tensor  # [S, gates, D, V]
    weight_hh: Tensor  # [S, gates, D, D]
    bias_ih: Tensor | None  # [S, gates, D]
    bias_hh: Tensor | None  # [S, gates, D]
    comm_read: Tensor | None  # [H * E + H * U, D] keys and values
    comm_say: Tensor | None  # [D, H * U], gated: [2 D, H * U]
    comm_bias: Tensor | None  # [D]
    reset: Tensor | None  # [T, B]
    valid: Tensor | None  # [T, B]
    noise: Tensor | None  # [T, B, F, S]
    comm_mask: Tensor | None  # [T, B, F, D]
    choice: Tensor | None  # [T, B, F]


DIFFERENTIABLE = Prepared._fields[: Prepared._fields.index("reset")]


class Settings(NamedTuple):
    lstm: bool
    active: int
    mean: bool
    temperature: float
    precision: str  # of products of float32: "tf32" or "ieee"
    input_heads: int
    comm_heads: int
    comm_key: int


class Ran(NamedTuple):
    """Results, in float32 at least. With these and `Prepared` all else can be computed again."""

    output: Tensor  # [T, B, F, D]
    final: Tensor  # [Z, B, F, D]
    cells: Tensor  # [T, B, F, D] the LSTM's c
    choice: Tensor  # [T, B, F]
    active: Tensor  # [T, B, F]


class Kept(NamedTuple):
    """What the backward pass needs of N object files: of all steps and sequences of a chunk."""

    work: Tensor  # [N, S * 4 * D + X]: gates r u m n, m = W_hn h + b_hn, or i f g o; then as asked
    look: Tensor  # [N, 2, A, P]: attention, and space for the gradient of its scores
    what: Tensor  # [N, 2, A, C or W]: space for the gradient of what is seen, and what is asked
    mass: Tensor  # [N, A] the sum of the attention over positions
    seen: Tensor  # [N, A, W]
    right: Tensor  # [N, D + V + 1, aligned]: h, z, 1
    query: Tensor  # [N, D]
    logits: Tensor  # [N, S], with noise
    updated: Tensor  # [N, D] h after Step 3
    read: Tensor | None  # [N, H * E + H * U]
    heard: Tensor | None  # [N, H * U + 1, aligned]: what is heard, 1
    message: Tensor | None  # [N, D or 2 D] what is said, and its gate


class Sizes(NamedTuple):
    """Those of `Prepared`, without padding."""

    files: int  # F
    size: int  # D
    positions: int  # P
    heads: int  # A
    key: int  # C
    seen: int  # W
    value: int  # V
    schemata: int  # S
    comm_heads: int  # H
    comm_key: int  # E
    comm_value: int  # U

    @property
    def asked(self) -> int:  # X
        return self.size + self.comm_heads * self.comm_key + self.heads * self.key

    @property
    def read(self) -> int:
        return self.comm_heads * (self.comm_key + self.comm_value)


def sizes_of(p: Prepared, settings: Settings) -> Sizes:
    files, size = p.state.shape[2:]
    heads, comm_heads = settings.input_heads, settings.comm_heads
    value = p.weight_ih.shape[-1]
    key = (p.from_state.shape[0] - size - comm_heads * settings.comm_key) // heads
    read = 0 if p.comm_read is None else p.comm_read.shape[0] // comm_heads
    return Sizes(
        files=files,
        size=size,
        positions=p.keys.shape[2],
        heads=heads,
        key=key,
        seen=key if p.values is None else value // heads,
        value=value,
        schemata=p.weight_hh.shape[0],
        comm_heads=comm_heads,
        comm_key=settings.comm_key,
        comm_value=max(1, read - settings.comm_key),
    )


def power_of_two(n: int, least: int = 16) -> int:
    """At least n. Tensor cores take no less than 16, and 64 rows at their best."""
    return max(least, 1 << (n - 1).bit_length())


def exact(x: Tensor) -> torch.dtype:
    """What states and sums are held in"""
    return torch.promote_types(x.dtype, torch.float32)
