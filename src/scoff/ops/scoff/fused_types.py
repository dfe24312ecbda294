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
    schema_query: Tensor  # [.., D]
    schema_key: Tensor  # [.., D]
    input_query: Tensor  # [A, .., D]
    input_key: Tensor | None  # [A, .., C]; None: the query is what is asked
    value: Tensor | None  # [V, W] from what a head has seen to its part of z; None: it is z
    weight_ih: Tensor  # [S, gates * D, V]
    weight_hh: Tensor  # [S, gates * D, D]
    bias_ih: Tensor | None  # [S, gates * D]
    bias_hh: Tensor | None  # [S, gates * D]
    comm_query: Tensor | None  # [H, E, D]
    comm_key: Tensor | None  # [H, E, D]
    comm_value: Tensor | None  # [H, U, D]
    comm_out: Tensor | None  # [D, H * U]
    comm_gate: Tensor | None  # [D, H * U]
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
    precision: str  # of products of float32: "tf32" or "ieee"
    detach: bool = False  # what is asked of the input, from the state


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
    look: Tensor  # [N, A, P]: attention


class Halves(NamedTuple):
    """What it takes to sum up gradients of gates that are of 16 bits"""

    powers: Tensor  # [N] their scales
    right: Tensor  # [N, ..] the other factor, times these but for a scale of each column
    scale: Tensor  # [..] which these are
    product: Tensor  # [S * 4 * D, ..]


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
    def read(self) -> int:
        return self.comm_heads * (self.comm_key + self.comm_value)

    @property
    def heard(self) -> int:
        return self.comm_heads * self.comm_value


def sizes_of(p: Prepared, folds: bool) -> Sizes:
    files, size = p.state.shape[2:]
    heads, key = p.input_query.shape[:2]
    if p.input_key is not None:
        key = p.input_key.shape[2]
    value = p.weight_ih.shape[2]
    comm_heads, comm_key, comm_value, says = 0, 1, 1, 0
    if p.comm_query is not None and p.comm_value is not None:
        comm_heads, comm_key = p.comm_query.shape[:2]
        comm_value = p.comm_value.shape[1]
        says = size if p.comm_gate is None else 2 * size
    return Sizes(
        files=files,
        size=size,
        positions=p.keys.shape[2],
        heads=heads,
        key=key,
        seen=key if p.values is None else value // heads,
        value=key if folds else value,
        schemata=p.weight_hh.shape[0],
        comm_heads=comm_heads,
        comm_key=comm_key,
        comm_value=comm_value,
        says=says,
    )


def value_folds(p: Prepared) -> bool:
    """Whether W_ih z = (W_ih W^v) sum_p s_p a_p is multiplied out, which takes no more space."""
    if p.value is None or p.values is not None or len(p.input_query) > 1:
        return False
    read, seen = p.value.shape
    return power_of_two(seen, 64) <= power_of_two(read, 64)


class Fields(NamedTuple):
    """Where things start in a row of what is kept. Those in brackets make way for gradients.

    A weight's gradient is a sum of what is in brackets, up to `right`, times what is after it, up
    to `logits`."""

    gates: int  # [S * 4 * D: r u m n, m = W_hn h + b_hn, or i f g o]
    query: int  # [D: what is asked of candidates]
    comm_query: int  # [H * E]
    ask: int  # [A * C: what is asked of positions]
    read: int  # [H * E + H * U: keys and values of the communication]
    message: int  # [D or 2 D: what is said, and its gate]
    right: int  # D + V + 1: h, z, 1
    updated: int  # D: h after Step 3
    heard: int  # H * U
    logits: int  # S, with noise
    talk: int  # H * F: how it reads others
    mass: int  # A, for the mean: the sum of the attention over positions
    seen: int  # A * W, where it is needed
    end: int


@functools.cache
def fields_of(z: Sizes, mean: bool, seen: bool) -> Fields:
    widths = [
        z.schemata * 4 * z.size,
        z.size,
        z.comm_heads * z.comm_key,
        z.heads * z.key,
        z.read if z.says else 0,
        z.says,
        z.size + z.value + 1,
        z.size,
        z.heard if z.says else 0,
        z.schemata,
        z.comm_heads * z.files,
        z.heads if mean else 0,
        z.heads * z.seen if seen else 0,
    ]
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
    return torch.float64 if x.dtype == torch.float64 else torch.float32
