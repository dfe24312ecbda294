"""What the kernels of the `fused` backend are given, and what they leave."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.types import Run


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

    rows: Tensor  # [N, ..]: what is where, say `Fields`
    look: Tensor  # [N, 2, A, P]: attention, and space for the gradient of its scores
    what: Tensor  # [N, 2, A, C or W]: space for the gradient of what is seen, and what is asked


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
    says: int  # SAY: D, or gated 2 D, or nothing

    @property
    def asked(self) -> int:  # X
        return self.size + self.comm_heads * self.comm_key + self.heads * self.key

    @property
    def read(self) -> int:
        return self.comm_heads * (self.comm_key + self.comm_value)

    @property
    def heard(self) -> int:
        return self.comm_heads * self.comm_value


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
        says=0 if p.comm_say is None else p.comm_say.shape[0],
    )


class Fields(NamedTuple):
    """Where things start in a row of what is kept. Those in brackets make way for gradients."""

    work: int  # [S * 4 * D: gates r u m n, m = W_hn h + b_hn, or i f g o; then X of what is asked]
    mass: int  # A: the sum of the attention over positions
    seen: int  # A * W
    right: int  # D + V + 1: h, z, 1
    logits: int  # S, with noise
    updated: int  # D: h after Step 3
    read: int  # [H * E + H * U]
    heard: int  # H * U + 1: what is heard, 1
    message: int  # [D or 2 D: what is said, and its gate]
    end: int


@functools.cache
def fields_of(z: Sizes) -> Fields:
    talks = z.says > 0
    widths = (
        z.schemata * 4 * z.size + z.asked,
        z.heads,
        z.heads * z.seen,
        z.size + z.value + 1,
        z.schemata,
        z.size,
        z.read,
        z.heard + 1 if talks else 0,
        z.says,
    )
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + -(-width // 8) * 8)  # as matrix products like it
    return Fields(*starts)


def run_of(output: Tensor, final: Tensor, choice: Tensor, active: Tensor, x: Tensor) -> Run:
    """What `batched` would give in its details is empty."""
    _, b, f, _ = output.shape
    return Run(
        output.to(x.dtype),
        final.to(x.dtype),
        x.new_empty(0, b, f, 0, 0),
        x.new_empty(0, b, f, 0),
        choice,
        active,
        x.new_empty(0, b, 0, f, f),
    )


def tensors_of(kind: type, prefix: str = "") -> str:
    """The fields of a tuple of tensors, as an operator's schema has them"""
    return ", ".join(
        f"Tensor{'?' * (annotation == Tensor | None)} {prefix}{name}"
        for name, annotation in kind.__annotations__.items()
    )


def power_of_two(n: int, least: int = 16) -> int:
    """At least n. Tensor cores take no less than 16, and 64 rows at their best."""
    return max(least, 1 << (n - 1).bit_length())


def exact(x: Tensor) -> torch.dtype:
    """What states and sums are held in"""
    return torch.promote_types(x.dtype, torch.float32)
