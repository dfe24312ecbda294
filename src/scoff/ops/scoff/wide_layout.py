"""What the `wide` backend is given, and how it lies in memory."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.fused_types import power_of_two
from scoff.ops.scoff.kernels.blocks import WEIGHT_SCALE
from scoff.ops.scoff.precision import multiplies_halves
from scoff.ops.scoff.replay import empty

BLOCK = 2048  # numbers of a gate, of all schemata, that one program has at once
CHUNK_BYTES = 96 * 2**20  # of what a chunk of steps leaves: more take more memory and less time


class Prepared(NamedTuple):
    """What the recurrence is made of, as far as it can be computed beforehand.

    A input heads of size E, H heads of communication of size E' that say U numbers. One object file
    attends to everything and hears only itself: it has no keys and no queries.
    """

    values: Tensor  # [T, B, P, V]; of one object file their sum or mean [T, B, 1, V]
    keys: Tensor | None  # [T, B, P, A * E], scaled
    state: Tensor  # [Z, B, F, D]
    restart: Tensor | None  # [Z, B, F, D]
    weight_ih: Tensor  # [S, gates * D, V], or of what `value` makes of V
    value: Tensor | None  # [.., V]
    weight_hh: Tensor  # [S, gates * D, D]
    bias_ih: Tensor | None  # [S, gates * D]
    bias_hh: Tensor | None  # [S, gates * D]
    schema_query: Tensor  # [.., D]
    schema_key: Tensor  # [.., D]
    input_query: Tensor | None  # [A, E, D]
    comm_query: Tensor | None  # [H, E', D]
    comm_key: Tensor | None  # [H, E', D]
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


class Folded(NamedTuple):
    """What multiplies states and inputs, in the shapes of `Matrices.places`"""

    weight_ih: Tensor  # [S, gates, D, V]
    weight_hh: Tensor  # [S, gates, D, D]
    bias_ih: Tensor | None  # [S, gates, D]
    bias_hh: Tensor | None  # [S, gates, D]
    schema_query: Tensor  # [D, D]
    input_query: Tensor | None  # [A * E, D]
    comm_query: Tensor | None  # [H * E', D]
    comm_key: Tensor | None  # [H * E', D], scaled
    comm_say: Tensor | None  # [H, 1 or 2, D, D] what each head says of a state, and its gate
    comm_bias: Tensor | None  # [D] of the gate


class Settings(NamedTuple):
    lstm: bool
    active: int
    mean: bool
    epsilon: float
    precision: str  # of products of float32: "tf32" or "ieee"
    input_heads: int
    comm_heads: int
    detach: bool = False  # what is asked of the input, from the state


def aligned(n: int) -> int:
    return -(-n // 8) * 8


class Layout(NamedTuple):
    """Sizes, and the widths of rows, in numbers.

    Rows of `work` are n r u m | queries, or i f g o | queries; see `kernels.wide_blocks`. Products
    fill its parts: `given` from its start, `hidden` from `inner` on.
    """

    steps: int  # T
    batch: int  # B
    files: int  # F
    size: int  # D
    positions: int  # P
    heads: int  # A
    key: int  # E
    value: int  # V
    schemata: int  # S
    gates: int
    comm_heads: int  # H
    comm_key: int  # E'
    says: int  # 0: no communication; 1: messages; 2: and gates
    half: bool = False  # whether products are of 16-bit numbers

    @property
    def alone(self) -> bool:
        return self.files == 1

    @property
    def rows(self) -> int:
        return self.batch * self.files

    @property
    def state(self) -> int:  # h, 1
        return aligned(self.size + 1)

    @property
    def read(self) -> int:  # z, 1
        return aligned(self.value + 1)

    @property
    def row(self) -> int:  # h, 1, and what one object file reads: that is known before
        return self.state + self.read * self.alone

    @property
    def kept(self) -> int:  # of the history of states: the rows that are multiplied, or h alone
        return self.state if self.half else self.row

    @property
    def gate(self) -> int:
        return self.schemata * self.state

    @property
    def inner(self) -> int:
        return (4 - self.gates) * self.gate

    @property
    def given(self) -> int:
        return self.gates * self.gate

    @property
    def comm_asked(self) -> int:  # where in `work` the queries of the communication are
        return 4 * self.gate + self.state

    @property
    def asked(self) -> int:  # and those of the input
        return self.comm_asked + self.comm_keys

    @property
    def work(self) -> int:
        return self.asked + aligned(self.heads * self.key)

    @property
    def hidden(self) -> int:
        return self.work - self.inner

    @property
    def comm_keys(self) -> int:  # before what is said
        return aligned(self.comm_heads * self.comm_key)

    @property
    def message(self) -> int:
        return self.says * self.state

    @property
    def told(self) -> int:
        return self.comm_keys + self.comm_heads * self.message


def layout_of(p: Prepared, settings: Settings) -> Layout:
    z = Layout(
        steps=p.values.shape[0],
        batch=p.state.shape[1],
        files=p.state.shape[2],
        size=p.state.shape[3],
        positions=p.values.shape[2],
        heads=settings.input_heads,
        key=0 if p.input_query is None else p.input_query.shape[1],
        value=p.values.shape[3],
        schemata=p.weight_hh.shape[0],
        gates=p.weight_hh.shape[1] // p.state.shape[3],
        comm_heads=settings.comm_heads,
        comm_key=0 if p.comm_query is None else p.comm_query.shape[1],
        says=0 if p.comm_out is None else 1 if p.comm_gate is None else 2,
    )
    return z._replace(half=in_half(p, z, settings))


def in_half(p: Prepared, z: Layout, settings: Settings) -> bool:
    """Numbers of 16 bits have as many digits as tf32, and are multiplied twice as fast. They have
    less range: it has to be known how large states can become."""
    bounded = z.says != 1  # a message that is added may add up
    at_once = z.size * power_of_two(z.schemata, 1) <= BLOCK
    rounds = settings.precision == "tf32" and p.state.dtype == torch.float32
    return z.alone and bounded and at_once and rounds and multiplies_halves(p.state)


TOLD = ("comm_key", "comm_say", "comm_bias")  # what is in that matrix


class Place(NamedTuple):
    """Where in matrices a tensor of `Folded` is, or those of its gates"""

    name: str
    gates: slice | None
    view: Tensor

    def of(self, x: Tensor) -> Tensor:
        return x if self.gates is None else x[:, self.gates]


class Matrices(NamedTuple):
    """Weights, or their gradients, as they are multiplied; biases are in a column of their own."""

    hidden: Tensor  # [hidden, row]
    given: Tensor  # [given, read]; of one object file what `hidden` does not give [inner, read]
    told: Tensor  # [told, state] keys and what is said, from h after Step 3

    @classmethod
    def empty(cls, like: Tensor, z: Layout, dtype: torch.dtype | None = None) -> "Matrices":
        given = z.inner if z.alone else z.given
        return cls(
            empty(like, z.hidden, z.row, dtype=dtype),
            empty(like, given, z.read, dtype=dtype),
            empty(like, z.told if z.says else 0, z.state, dtype=dtype),
        )

    def places(self, p: Prepared, z: Layout) -> list[Place]:
        d, v = z.size, z.value

        def by_gate(matrix: Tensor) -> Tensor:  # [S, gates, D, ..]
            return matrix.unflatten(0, (-1, z.schemata, z.state)).transpose(0, 1)[:, :, :d]

        hidden, asks = by_gate(self.hidden[: z.given]), self.hidden[z.given :]
        found = [
            Place("weight_hh", None, hidden[..., :d]),
            Place("bias_hh", None, hidden[..., d]),
            Place("schema_query", None, asks[:d, :d]),
        ]
        if z.alone:
            both = by_gate(self.hidden[: z.given - z.inner, z.state :])
        else:
            both = by_gate(self.given[z.inner :])
        # torch's order of the GRU is r u n, that of `given` is n r u
        gates = None if z.inner == 0 else slice(0, 2)
        found.append(Place("weight_ih", gates, both[..., :v]))
        found.append(Place("bias_ih", gates, both[..., v]))
        if z.inner > 0:
            inner = by_gate(self.given[: z.inner])
            found.append(Place("weight_ih", slice(2, 3), inner[..., :v]))
            found.append(Place("bias_ih", slice(2, 3), inner[..., v]))
        if not z.alone:
            comm_query, query = asks[z.state :], asks[z.state + z.comm_keys :]
            found.append(Place("comm_query", None, comm_query[: z.comm_heads * z.comm_key, :d]))
            found.append(Place("input_query", None, query[: z.heads * z.key, :d]))
            found.append(Place("comm_key", None, self.told[: z.comm_heads * z.comm_key, :d]))
        if z.says:
            said = self.told[z.comm_keys :].unflatten(0, (z.comm_heads, z.says, z.state))
            found.append(Place("comm_say", None, said[:, :, :d, :d]))
            # in one head's messages: the weights that a reader gives them add up to one
            found.append(Place("comm_bias", None, said[0, -1, :d, d]))
        given = p._asdict() | {"comm_say": p.comm_out}
        return [place for place in found if given[place.name] is not None]


def fill(matrices: Matrices, p: Prepared, folded: Folded, z: Layout) -> None:
    for matrix in matrices:
        matrix.zero_()
    for place in matrices.places(p, z):
        weights = place.of(getattr(folded, place.name))
        if z.half:
            torch.mul(weights, WEIGHT_SCALE.value, out=place.view)
        else:
            place.view.copy_(weights)
    if z.half:  # more than these hold would be infinite
        most = torch.finfo(torch.float16).max
        for matrix in matrices:
            matrix.clamp_(-most, most)


def gradients_of(
    sums: Matrices, p: Prepared, z: Layout, scales: Sequence[Tensor] | None
) -> dict[str, Tensor]:
    """Of `Folded`, by name. `scales`: what undoes those of the sums, and of those of `told`"""
    found = {}
    for place in sums.places(p, z):
        if place.name not in found:
            shape = place.view.shape
            if place.gates is not None:
                shape = (shape[0], z.gates, *shape[2:])
            found[place.name] = empty(place.view, *shape)
        to = place.of(found[place.name])
        if scales is None:
            to.copy_(place.view)
        else:
            torch.mul(place.view, scales[int(place.name in TOLD)], out=to)
    return found


class Left(NamedTuple):
    """What the forward pass leaves beside its outputs: what the backward pass takes"""

    choice: Tensor  # [T, B, F]
    active: Tensor  # [T, B, F]
    hidden: Tensor  # the matrices
    given: Tensor
    told: Tensor
    before: Tensor  # [T + 1, rows, kept] what each step starts from
    cells: Tensor  # [T + 1, rows, state] its c of the LSTM
    updated: Tensor  # [T, rows, state] h after Step 3, if Step 4 follows
    before_half: Tensor  # [T + 1, rows, row] both in 16 bits, if those are multiplied
    updated_half: Tensor  # [T, rows, state]
    scales: Tensor  # [T + 1, rows] by which the first is
    updated_scales: Tensor  # [T, rows]
    work: Tensor  # [N, rows, work] of one object file in the last chunk of steps
    message: Tensor  # [N, rows, told] likewise

    @property
    def matrices(self) -> Matrices:
        return Matrices(self.hidden, self.given, self.told)

    @property
    def factor(self) -> Tensor:  # [T + 1, rows, row]
        return self.before_half if self.before_half.numel() else self.before

    @property
    def updated_factor(self) -> Tensor:  # [T, rows, state]
        return self.updated_half if self.updated_half.numel() else self.updated


def allocate_left(p: Prepared, z: Layout, length: int) -> Left:
    """Space; `length`: that of a chunk of steps"""
    t, b, f, new = z.steps, z.batch, z.files, functools.partial(empty, p.state)
    keeps = length if z.alone else 0
    half = torch.float16
    return Left(
        new(t, b, f, dtype=torch.int64),
        new(t, b, f, dtype=torch.bool),
        *Matrices.empty(p.state, z, half if z.half else None),
        before=new(t + 1, z.rows, z.kept),
        cells=new(t + 1 if len(p.state) == 2 else 0, z.rows, z.state),
        updated=new(t if z.says else 0, z.rows, z.state),
        before_half=new((t + 1) * z.half, z.rows, z.row, dtype=half),
        updated_half=new(t * z.half if z.says else 0, z.rows, z.state, dtype=half),
        scales=new((t + 1) * z.half, z.rows),
        updated_scales=new(t * z.half if z.says else 0, z.rows),
        work=new(keeps, z.rows, z.work),
        message=new(keeps if z.says else 0, z.rows, z.told),
    )


def longest_chunk(p: Prepared, z: Layout) -> int:
    """How many steps are held at once"""
    width = z.work + z.told + (0 if z.alone else z.read)
    at_most = CHUNK_BYTES // (z.rows * width * p.state.element_size())
    return -(-z.steps // -(-z.steps // max(1, at_most)))


def chunks(steps: int, length: int) -> list[slice]:
    return [slice(i, min(i + length, steps)) for i in range(0, steps, length)]


def with_ones(out: Tensor, width: int) -> Tensor:
    """Puts a one behind the first `width` numbers of each row, and zeros behind that."""
    out[..., width:] = 0
    out[..., width] = 1
    return out


def reset_after(p: Prepared) -> Tensor | None:
    """Whether the state is replaced behind each step, not before it  [T, B]"""
    if p.reset is None or p.restart is None:
        return None
    return torch.cat([p.reset[1:], torch.zeros_like(p.reset[:1])])
