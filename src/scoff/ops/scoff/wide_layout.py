"""What the `wide` backend is given, and how it lies in memory."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.fused_types import Ran

CHUNK_BYTES = 256 * 2**20  # of what a chunk of steps leaves: more take more memory and less time


class Prepared(NamedTuple):
    """What the recurrence is made of, as far as it can be computed beforehand.

    A input heads of size E, H heads of communication of size E'. One object file attends to
    everything and hears only itself: it has no keys and no queries, and one head.
    """

    values: Tensor  # [T, B, P, V]; of one object file their sum or mean [T, B, 1, V]
    keys: Tensor | None  # [T, B, P, A * E], scaled
    state: Tensor  # [Z, B, F, D]
    restart: Tensor | None  # [Z, B, F, D]
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
    unused: Tensor | None  # weights that one object file has no use for: their gradient is zero
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
    epsilon: float
    precision: str  # of products of float32: "tf32" or "ieee"
    input_heads: int
    comm_heads: int


def aligned(n: int) -> int:
    return -(-n // 8) * 8


class Layout(NamedTuple):
    """Sizes, and the widths of rows, in numbers.

    Rows of `work` are n r u m | queries, or i f g o | queries; see `kernels.wide`. Products fill
    its parts: `given` from its start, `hidden` from `inner` on.
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
    asks = 0 if p.input_query is None else p.input_query.shape[0]
    comm_asks = 0 if p.comm_query is None else p.comm_query.shape[0]
    return Layout(
        steps=p.values.shape[0],
        batch=p.state.shape[1],
        files=p.state.shape[2],
        size=p.state.shape[3],
        positions=p.values.shape[2],
        heads=settings.input_heads,
        key=asks // settings.input_heads,
        value=p.values.shape[3],
        schemata=p.weight_hh.shape[0],
        gates=p.weight_hh.shape[1],
        comm_heads=settings.comm_heads,
        comm_key=comm_asks // settings.comm_heads,
        says=0 if p.comm_say is None else p.comm_say.shape[1],
    )


class Matrices(NamedTuple):
    """Weights, or their gradients, as they are multiplied; biases are in a column of their own."""

    hidden: Tensor  # [hidden, state]
    given: Tensor  # [given, read]
    told: Tensor | None  # [told, state] keys and what is said, from h after Step 3

    @classmethod
    def zeros(cls, like: Tensor, z: Layout) -> "Matrices":
        told = like.new_zeros(z.told, z.state) if z.says else None
        return cls(like.new_zeros(z.hidden, z.state), like.new_zeros(z.given, z.read), told)

    def views(self, p: Prepared, z: Layout) -> dict[str, Tensor]:
        """Where in them the tensors of `Prepared` are, by name"""
        d = z.size
        hidden, given = (
            x[: z.given].unflatten(0, (z.gates, z.schemata, z.state)).transpose(0, 1)[:, :, :d]
            for x in (self.hidden, self.given)
        )
        asks = self.hidden[z.given :]
        found = {
            "weight_hh": hidden[..., :d],
            "weight_ih": given[..., : z.value],
            "bias_hh": hidden[..., d],
            "bias_ih": given[..., z.value],
            "schema_query": asks[:d, :d],
            "comm_query": asks[z.state :][: z.comm_heads * z.comm_key, :d],
            "input_query": asks[z.state + z.comm_keys :][: z.heads * z.key, :d],
        }
        if self.told is not None:
            said = self.told[z.comm_keys :].unflatten(0, (z.comm_heads, z.says, z.state))
            found["comm_key"] = self.told[: z.comm_heads * z.comm_key, :d]
            found["comm_say"] = said[:, :, :d, :d]
            # in one head's messages: the weights that a reader gives them add up to one
            found["comm_bias"] = said[0, -1, :d, d]
        return {name: x for name, x in found.items() if getattr(p, name) is not None}


def turn_gates(x: Tensor, lstm: bool, by: int) -> Tensor:
    """[S, gates, ..]: by 1 from torch's order of the GRU, r u n, to that of `given`, n r u"""
    return x if lstm else x.roll(by, 1)


def matrices_of(p: Prepared, z: Layout, settings: Settings) -> Matrices:
    matrices = Matrices.zeros(p.state, z)
    for name, view in matrices.views(p, z).items():
        value = getattr(p, name)
        if name in ("weight_ih", "bias_ih"):
            value = turn_gates(value, settings.lstm, 1)
        view.copy_(value)
    return matrices


def gradients_of(sums: Matrices, p: Prepared, z: Layout, settings: Settings) -> dict[str, Tensor]:
    found = {}
    for name, view in sums.views(p, z).items():
        if name in ("weight_ih", "bias_ih"):
            view = turn_gates(view, settings.lstm, -1)
        found[name] = view.clone(memory_format=torch.contiguous_format)
    return found


def with_ones(like: Tensor, width: int, *shape: int) -> Tensor:
    """Zeros, but for a one behind the first `width` numbers of each row"""
    out = like.new_zeros(*shape, aligned(width + 1))
    out[..., width] = 1
    return out


def allocate_ran(p: Prepared, settings: Settings) -> Ran:
    t, (b, f, d) = p.values.shape[0], p.state.shape[1:]
    new = p.state.new_empty
    return Ran(
        output=new(t, b, f, d),
        final=new(p.state.shape),
        cells=new(t, b, f, d if settings.lstm else 0),
        choice=new((t, b, f), dtype=torch.int64),
        active=new((t, b, f), dtype=torch.bool),
    )


def chunks(z: Layout, width: int, like: Tensor) -> list[slice]:
    """Steps whose rows of so many numbers are held at once"""
    count = math.ceil(z.steps * z.rows * width * like.element_size() / CHUNK_BYTES)
    length = math.ceil(z.steps / min(count, z.steps))
    return [slice(i, min(i + length, z.steps)) for i in range(0, z.steps, length)]


def reset_after(p: Prepared) -> Tensor | None:
    """Whether the state is replaced behind each step, not before it  [T, B]"""
    if p.reset is None or p.restart is None:
        return None
    return torch.cat([p.reset[1:], torch.zeros_like(p.reset[:1])])
