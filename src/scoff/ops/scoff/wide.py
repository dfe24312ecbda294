"""SCOFF with wide states: at each step a few matrix products, and Triton kernels between them.

All that multiplies the state is one matrix: the gates of every schema, the schema query, and what
is asked of the input and of other object files. What does not depend on the state, and with one
object file that is all of the input, is multiplied in large products before the loop over time.

Forward, only the states and the choices are kept. Backward, in a few chunks of steps, large
products compute again from the states what happened at all steps of a chunk; in the loop is only
what the step before depends on; and every weight gradient is one large product of what it left.

Rows of what is multiplied are padded with zeros to whole multiples of 16 bytes, which tensor cores
want. Behind a row's own numbers is a one, so that biases are a column of the weights.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from scoff.ops.scoff.batched import is_less_folded
from scoff.ops.scoff.fused_types import Ran, exact, power_of_two
from scoff.ops.scoff.kernels import wide as kernels
from scoff.ops.scoff.launch import prepared
from scoff.ops.scoff.precision import multiplied_in, precision_of
from scoff.ops.scoff.types import (
    GATES,
    CommunicationWeights,
    Inputs,
    Options,
    Run,
    Weights,
    contiguous,
    epsilon,
    returns,
)

# what is launched; to a type checker kernels are Python functions, called in the wrong way
update_kernel: Any = kernels.update_kernel
update_back_kernel: Any = kernels.update_back_kernel
look_kernel: Any = kernels.look_kernel
look_back_kernel: Any = kernels.look_back_kernel
talk_kernel: Any = kernels.talk_kernel
talk_back_kernel: Any = kernels.talk_back_kernel

# on a CPU, for tests: set before triton is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
OLDEST_TRITON = (3, 6)
MAX_FILES = 64  # a program has those of a sequence at once
CHUNK_BYTES = 256 * 2**20  # of what a chunk of steps leaves: more take more memory and less time


def why_not(inputs: Inputs, w: Weights) -> str | None:  # noqa: ARG001
    """Why this backend cannot do this; None: it can. It takes weights of any size."""
    x, files = inputs.x, inputs.state.shape[2]
    if TRITON < OLDEST_TRITON:
        return (
            f"it needs triton {'.'.join(map(str, OLDEST_TRITON))}, and this is {triton.__version__}"
        )
    if not INTERPRETED:
        if not x.is_cuda:
            return f"it runs on a CUDA device, not on {x.device}"
        if torch.cuda.get_device_capability(x.device) < (8, 0):
            return "it needs a device of compute capability 8.0 or more"
        if x.dtype == torch.float64:
            return "it has no float64"
    if files > MAX_FILES:
        return f"{files} object files are more than {MAX_FILES}"
    return None


def scoff_wide(inputs: Inputs, w: Weights, options: Options) -> Run:
    """All of `Run` but the details, which are empty: `batched` gives those."""
    alone = inputs.state.shape[2] == 1
    settings = Settings(
        options.cell == "lstm",
        options.active,
        options.reduction == "mean",
        options.temperature,
        epsilon(inputs.x.dtype),
        precision_of(inputs.x.dtype),
        w.input_query.shape[0],
        1 if w.communication is None or alone else w.communication.query.shape[0],
    )
    ran = Ran(*_forward(*prepare(inputs, w, options), *settings))
    x, (_, b, f, _) = inputs.x, ran.output.shape
    return Run(
        ran.output.to(x.dtype),
        ran.final.to(x.dtype),
        x.new_empty(0, b, f, 0, 0),
        x.new_empty(0, b, f, 0),
        ran.choice,
        ran.active,
        x.new_empty(0, b, 0, f, f),
    )


# --- what is done beforehand


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


def prepare(inputs: Inputs, w: Weights, options: Options) -> Prepared:
    """Does all that does not depend on the state, differentiably."""
    dtype = exact(inputs.x)
    x, (files, size) = inputs.x.to(dtype), inputs.state.shape[2:]
    talk = w.communication
    if talk is not None:
        talk = CommunicationWeights._make(None if y is None else y.to(dtype) for y in talk)
    w = Weights._make(None if y is None else y.to(dtype) for y in (*w[:-1], None))
    w = w._replace(communication=talk)
    keys = input_query = comm_query = comm_key = comm_say = unused = None
    # q~ . kappa~ = (W~^eT W~^q h) . h~: the query in the space of the state
    schema_query = w.schema_key.T @ w.schema_query
    weight_ih = w.weight_ih
    if files == 1:  # the softmax over one object file is 1: it reads all positions alike
        unused = torch.cat([y.flatten() for y in unused_alone(w)])
        values, weight_ih = summed_values(x, w, inputs.value_mask)
        if options.reduction == "mean":
            values = values / (x.shape[2] + epsilon(inputs.x.dtype))
    else:
        values = masked(x if w.input_value is None else x @ w.input_value.T, inputs.value_mask)
        input_query = w.input_query.flatten(0, 1)
        keys = x @ (w.input_key.flatten(0, 1) / math.sqrt(w.input_key.shape[1])).T
    if talk is not None:
        said = talk.out[None] if talk.gate is None else torch.stack([talk.out, talk.gate])
        said = said.unflatten(-1, talk.value.shape[:2])  # [1 or 2, D, heads, V']
        if files == 1:
            comm_say = torch.einsum("gdhv,hvk->gdk", said, talk.value)[None]
        else:
            comm_say = torch.einsum("gdhv,hvk->hgdk", said, talk.value)
            comm_query = talk.query.flatten(0, 1)
            comm_key = talk.key.flatten(0, 1) / math.sqrt(talk.key.shape[1])

    def by_gate(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (GATES[options.cell], size)).contiguous()

    return Prepared(
        values=values.contiguous(),
        keys=contiguous(keys),
        state=inputs.state.to(dtype).contiguous(),
        restart=None if inputs.restart is None else inputs.restart.to(dtype).contiguous(),
        weight_ih=by_gate(weight_ih),
        weight_hh=by_gate(w.weight_hh),
        bias_ih=None if w.bias_ih is None else by_gate(w.bias_ih),
        bias_hh=None if w.bias_hh is None else by_gate(w.bias_hh),
        schema_query=schema_query,
        input_query=input_query,
        comm_query=comm_query,
        comm_key=comm_key,
        comm_say=contiguous(comm_say),
        comm_bias=None if talk is None else contiguous(talk.gate_bias),
        unused=unused,
        reset=contiguous(inputs.reset),
        valid=contiguous(inputs.valid),
        noise=contiguous(inputs.noise),
        comm_mask=contiguous(inputs.comm_mask),
        choice=contiguous(inputs.choice),
    )


def unused_alone(w: Weights) -> list[Tensor]:
    """What one object file has no use for. It is not an "unused parameter" to DDP all the same."""
    talk = [] if w.communication is None else [w.communication.query, w.communication.key]
    return [w.input_query, w.input_key, *talk]


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values * mask


def summed_values(x: Tensor, w: Weights, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum over positions [T, B, 1, V], and the weights that read it"""
    if w.input_value is None:
        return masked(x, mask).sum(2, keepdim=True), w.weight_ih
    if mask is not None:
        return (x @ w.input_value.T * mask).sum(2, keepdim=True), w.weight_ih
    total = x if x.shape[2] == 1 else x.sum(2, keepdim=True)
    if is_less_folded(w):
        return total, w.weight_ih @ w.input_value
    return total @ w.input_value.T, w.weight_ih


# --- how it lies in memory


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


# --- launching


Launch = Callable[..., None]


def update_blocks(z: Layout) -> dict[str, int]:
    schemata = power_of_two(z.schemata, 1)
    return {"SP": schemata, "DB": min(power_of_two(z.size), max(16, 2048 // schemata))}


def launch_update(z: Layout, settings: Settings, rows: int, choose: bool, add: bool) -> Launch:
    """`add`: what is given has not been added to what is hidden, and both lie on their own"""
    return prepared(
        update_kernel,
        rows,
        F=z.files,
        D=z.size,
        DP=z.state,
        S=z.schemata,
        GIVEN=z.given if add else z.work,
        HIDDEN=z.hidden if add else z.work,
        LSTM=settings.lstm,
        ADD=add,
        CHOOSE=choose,
        **update_blocks(z),
    )


def launch_update_back(z: Layout, settings: Settings) -> Launch:
    return prepared(
        update_back_kernel,
        z.rows,
        temperature=settings.temperature,
        F=z.files,
        D=z.size,
        DP=z.state,
        S=z.schemata,
        WORK=z.work,
        LSTM=settings.lstm,
        **update_blocks(z),
    )


def look_constants(z: Layout, settings: Settings, asked: int) -> dict[str, Any]:
    files = power_of_two(z.files)
    block = 64 if files == 16 else 32  # a program has as many registers for more object files
    return {
        "epsilon": settings.epsilon,
        "F": z.files,
        "P": z.positions,
        "A": z.heads,
        "E": z.key,
        "V": z.value,
        "VP": z.read,
        "ASKED": asked,
        "MEAN": settings.mean,
        "FP": files,
        "PB": min(block, power_of_two(z.positions)),
        "EB": min(block, power_of_two(z.key)),
        "VB": min(block, power_of_two(z.value // z.heads)),
    }


def launch_look(z: Layout, settings: Settings, sequences: int, asked: int) -> Launch:
    constants = look_constants(z, settings, asked)
    return prepared(look_kernel, sequences, ACTIVE=settings.active, **constants)


def launch_look_back(z: Layout, settings: Settings) -> Launch:
    return prepared(look_back_kernel, z.batch, **look_constants(z, settings, z.work))


def launch_talk(kernel: Any, z: Layout, asked: int) -> Launch:
    files = 1 if z.files == 1 else power_of_two(z.files)
    return prepared(
        kernel,
        z.batch,
        F=z.files,
        D=z.size,
        DP=z.state,
        H=z.comm_heads,
        E=z.comm_key,
        SAID=z.comm_keys,
        ASKED=asked,
        READ=z.told,
        GATED=z.says == 2,
        FP=files,
        DB=min(1024 if files == 1 else 2048 // files, power_of_two(z.size)),
        EB=min(64, power_of_two(max(1, z.comm_key))),
    )


# --- forward


def run_forward(p: Prepared, settings: Settings) -> Ran:
    ran = allocate_ran(p, settings)
    z, reset = layout_of(p, settings), reset_after(p)
    weights = matrices_of(p, z, settings)
    active = active_of(ran, z, settings)
    if active is None:
        ran.active.fill_(True)
    if p.choice is not None:
        ran.choice.copy_(p.choice)
    state = with_ones(p.state, z.size, len(p.state), z.rows)
    state[..., : z.size] = first_state(p).flatten(1, 2)
    h, hidden_t = state[0], weights.hidden.T
    hidden = p.state.new_empty(z.rows, z.hidden)
    if z.files == 1:
        given = read_alone(p, z, weights)
    else:
        given = read_competing(p, z, settings, weights, hidden, active)
    update = launch_update(z, settings, z.rows, choose=p.choice is None, add=True)
    communicate = (
        None if weights.told is None else prepare_talk(p, z, settings, weights, ran, h, hidden)
    )
    output = ran.output if communicate is None else None
    cells = ran.cells if settings.lstm else None
    to_choose = (ran.choice, p.noise, active, p.valid, output, cells, reset, p.restart)
    for t in range(z.steps):
        torch.mm(h, hidden_t, out=hidden)
        update(next(given), hidden, state, state, *to_choose, t)
        if communicate is not None:
            communicate(t)
    for final, history in zip(ran.final, (ran.output, ran.cells), strict=False):
        final.copy_(history[-1])
    return ran


def active_of(ran: Ran, z: Layout, settings: Settings) -> Tensor | None:
    """None: all are active, always"""
    return ran.active if settings.active < z.files else None


def first_state(p: Prepared) -> Tensor:
    """What the first step starts from"""
    if p.reset is None or p.restart is None:
        return p.state
    return torch.where(p.reset[0, :, None, None], p.restart, p.state)


def read_alone(p: Prepared, z: Layout, weights: Matrices) -> Iterator[Tensor]:
    """W_ih z + b_ih of every step, in large products: what one object file reads is known."""
    parts = chunks(z, z.given, p.state)
    length = parts[0].stop
    seen = with_ones(p.state, z.value, length * z.rows)
    given = p.state.new_empty(length, z.rows, z.given)
    for part in parts:
        n = part.stop - part.start
        rows = seen[: n * z.rows]
        rows[:, : z.value] = p.values[part].flatten(0, 2)
        torch.mm(rows, weights.given.T, out=given[:n].flatten(0, 1))
        yield from given[:n].unbind(0)


def read_competing(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    hidden: Tensor,
    active: Tensor | None,
) -> Iterator[Tensor]:
    """W_ih z + b_ih, step by step, each when the queries of its step are in `hidden`"""
    given_t = weights.given.T
    given = p.state.new_empty(z.rows, z.given)
    seen = with_ones(p.state, z.value, z.rows)
    attention = p.state.new_empty(z.rows, z.heads, z.positions)
    look = launch_look(z, settings, z.batch, z.hidden)
    asked = hidden[:, z.asked - z.inner :]
    for t in range(z.steps):
        look(asked, p.keys, p.values, attention, seen, active, t)
        yield torch.mm(seen, given_t, out=given)


def prepare_talk(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    ran: Ran,
    h: Tensor,
    hidden: Tensor,
) -> Callable[[int], None]:
    """Step 4 of a step, on h in its place"""
    assert weights.told is not None
    told_t = weights.told.T
    told = p.state.new_empty(z.rows, z.told)
    asked = attention = None  # one object file hears only itself
    if z.files > 1:
        asked = hidden[:, z.comm_asked - z.inner :]
        attention = p.state.new_empty(z.rows, z.comm_heads, z.files)
    active, reset = active_of(ran, z, settings), reset_after(p)
    talk = launch_talk(talk_kernel, z, z.hidden)
    to_join = (active, p.valid, p.comm_mask, ran.output, reset, p.restart)

    def communicate(t: int) -> None:
        torch.mm(h, told_t, out=told)
        talk(asked, told, attention, h, *to_join, t)

    return communicate


# --- backward


class Kept(NamedTuple):
    """What happened at N steps, computed again; gradients take its place."""

    work: Tensor  # [N, rows, work]
    before: Tensor  # [Z, N, rows, state] what the steps started from
    seen: Tensor  # [N, rows, read]
    attention: Tensor | None  # [N, rows, A, P]; None: one object file
    updated: Tensor | None  # [N, rows, state] h after Step 3; None: no communication
    told: Tensor | None  # [N, rows, told]

    def first(self, steps: int) -> "Kept":
        """Space for fewer steps, as if it had been allocated for them"""
        z, _, rows, width = self.before.shape
        before = self.before.flatten(0, 2)[: z * steps * rows].view(z, steps, rows, width)
        by_step = (None if x is None else x[:steps] for x in self._replace(before=before[0]))
        return Kept._make(by_step)._replace(before=before)


def allocate_kept(p: Prepared, z: Layout, steps: int) -> Kept:
    new = p.state.new_empty
    return Kept(
        work=new(steps, z.rows, z.work),
        before=with_ones(p.state, z.size, len(p.state), steps, z.rows),
        seen=with_ones(p.state, z.value, steps, z.rows),
        attention=new(steps, z.rows, z.heads, z.positions) if z.files > 1 else None,
        updated=with_ones(p.state, z.size, steps, z.rows) if z.says else None,
        told=new(steps, z.rows, z.told) if z.says else None,
    )


def run_back(
    p: Prepared, settings: Settings, ran: Ran, d_output: Tensor, d_final: Tensor
) -> dict[str, Tensor]:
    """The gradients of what is differentiable in `p`, by name."""
    z = layout_of(p, settings)
    weights = matrices_of(p, z, settings)
    # tensor cores take both factors along what is summed over
    turned = Matrices._make(None if x is None else x.T.contiguous().T for x in weights)
    sums = Matrices.zeros(p.state, z)
    parts = chunks(z, z.work + z.read + (2 + 2 * settings.lstm) * z.state + z.told, p.state)
    length = parts[0].stop
    kept = allocate_kept(p, z, length)
    d_before = p.state.new_empty(len(p.state), length + 1, z.rows, z.state)
    d_restart = None if p.restart is None else torch.zeros_like(p.restart)
    d_keys = None if p.keys is None else torch.empty_like(p.keys)
    d_values = torch.empty_like(p.values)
    later = d_final.flatten(1, 2)
    for part in reversed(parts):
        n = part.stop - part.start
        here = kept.first(n)
        recompute(p, z, settings, weights, ran, here, part)
        d_before[:, n, :, : z.size] = later
        steps_back(p, z, settings, turned, ran, here, part, d_output, d_before, d_keys, d_values)
        later = d_before[:, 0, :, : z.size]
        add_products(sums, here)
        if z.files == 1:
            d_seen = here.work[..., : z.given].flatten(0, 1) @ turned.given
            d_values[part] = d_seen[:, : z.value].view_as(d_values[part])
        if d_restart is not None and p.reset is not None:
            d_each = d_before[:, :n, :, : z.size].unflatten(2, (z.batch, z.files))
            d_restart += torch.where(p.reset[part, :, None, None], d_each, 0).sum(1)
    d_state = later.clone(memory_format=torch.contiguous_format).view_as(p.state)
    if p.reset is not None and p.restart is not None:
        d_state = torch.where(p.reset[0, :, None, None], 0, d_state)
    found = gradients_of(sums, p, z, settings)
    others = {"state": d_state, "restart": d_restart, "keys": d_keys, "values": d_values}
    others["unused"] = None if p.unused is None else torch.zeros_like(p.unused)
    return found | {name: x for name, x in others.items() if x is not None}


def fill_before(before: Tensor, p: Prepared, z: Layout, ran: Ran, part: slice) -> None:
    """What each of the steps started from"""
    for index, history in zip(range(len(before)), (ran.output, ran.cells), strict=False):
        out = before[index, ..., : z.size].unflatten(1, (z.batch, z.files))
        if part.start == 0:
            out[0] = p.state[index]
            out[1:] = history[: part.stop - 1]
        else:
            out.copy_(history[part.start - 1 : part.stop - 1])
        if p.reset is not None and p.restart is not None:
            out.copy_(torch.where(p.reset[part, :, None, None], p.restart[index], out))


def recompute(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
) -> None:
    """Fills `kept`."""
    fill_before(kept.before, p, z, ran, part)
    work, h, seen = (x.flatten(0, 1) for x in (kept.work, kept.before[0], kept.seen))
    torch.mm(h, weights.hidden.T, out=work[:, z.inner :])
    if p.keys is None:
        seen[:, : z.value] = p.values[part].flatten(0, 2)
    else:
        look = launch_look(z, settings, len(work) // z.files, z.work)
        asked = work[:, z.asked :]
        look(asked, p.keys[part], p.values[part], kept.attention, kept.seen, None, 0)
    if z.inner > 0:  # the GRU's n, to which the state adds nothing
        torch.mm(seen, weights.given[: z.inner].T, out=work[:, : z.inner])
    work[:, z.inner : z.given].addmm_(seen, weights.given[z.inner :].T)
    if weights.told is None or kept.updated is None or kept.told is None:
        return
    active = active_of(ran, z, settings)
    update = launch_update(z, settings, len(work), choose=False, add=False)
    update(
        work,
        work[:, z.inner :],
        kept.before,
        kept.updated,
        ran.choice[part],
        None,
        None if active is None else active[part],
        None if p.valid is None else p.valid[part],
        None,
        None,
        None,
        None,
        0,
    )
    torch.mm(kept.updated.flatten(0, 1), weights.told.T, out=kept.told.flatten(0, 1))


def steps_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
    d_output: Tensor,
    d_before: Tensor,
    d_keys: Tensor | None,
    d_values: Tensor,
) -> None:
    """Runs a chunk of steps back: puts gradients in the place of `kept` and into `d_before`,
    [Z, N + 1, rows, state], behind whose last step is what comes from later steps."""
    active, reset = active_of(ran, z, settings), reset_after(p)
    update_back = launch_update_back(z, settings)
    work, hidden = kept.work.unbind(0), kept.work[..., z.inner :].unbind(0)
    h, d_h = kept.before[0].unbind(0), d_before[0].unbind(0)
    c = d_c = [None] * len(d_h)
    if settings.lstm:
        c, d_c = kept.before[1].unbind(0), d_before[1].unbind(0)
    given = (p.noise, active, p.valid, reset)
    look_back = talk_back = None
    if kept.attention is not None:
        look_back = prepare_look_back(p, z, settings, turned, kept, part, d_keys, d_values)
    if kept.told is not None:
        talk_back = prepare_talk_back(p, z, settings, turned, ran, kept, part, d_output, d_h)
    for i in reversed(range(len(work))):
        t = part.start + i
        if talk_back is None:
            d_new, d_out = d_h[i + 1], d_output
        else:
            d_new, d_out = talk_back(i), None
        update_back(
            work[i], h[i], c[i], d_new, d_c[i + 1], d_out, d_h[i], d_c[i], ran.choice, *given, t
        )
        if look_back is not None:
            look_back(i)
        d_h[i].addmm_(hidden[i], turned.hidden)


def prepare_talk_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
    d_output: Tensor,
    d_h: tuple[Tensor, ...],
) -> Callable[[int], Tensor]:
    """Step 4 of a step, back: to the gradient of h after Step 3"""
    assert turned.told is not None
    assert kept.told is not None
    assert kept.updated is not None
    told_t = turned.told
    told, updated = kept.told.unbind(0), kept.updated.unbind(0)
    d_updated = p.state.new_empty(z.rows, z.state)
    # one object file is told its own message, whose gradient takes its place right away
    asked, attention, d_message = [None] * len(told), None, told
    if z.files > 1:
        asked = kept.work[..., z.comm_asked :].unbind(0)
        attention = p.state.new_empty(z.rows, z.comm_heads, z.files)
        d_message = [p.state.new_empty(z.rows, z.message)] * len(told)
    rest = (active_of(ran, z, settings), p.valid, p.comm_mask, reset_after(p))
    launch = launch_talk(talk_back_kernel, z, z.work)

    def talk_back(i: int) -> Tensor:
        gradients = (d_h[i + 1], d_output, d_updated, d_message[i])
        launch(asked[i], told[i], attention, updated[i], *gradients, *rest, part.start + i)
        return d_updated.addmm_(told[i], told_t)

    return talk_back


def prepare_look_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    kept: Kept,
    part: slice,
    d_keys: Tensor | None,
    d_values: Tensor,
) -> Callable[[int], None]:
    """Step 2 of a step, back: to the gradients of what was asked, of keys and of values"""
    assert kept.attention is not None
    asked, given = kept.work[..., z.asked :].unbind(0), kept.work[..., : z.given].unbind(0)
    attention, seen = kept.attention.unbind(0), kept.seen.unbind(0)
    d_seen = p.state.new_empty(z.rows, z.read)
    launch = launch_look_back(z, settings)

    def look_back(i: int) -> None:
        torch.mm(given[i], turned.given, out=d_seen)
        gradients = (d_seen, d_keys, d_values)
        launch(asked[i], p.keys, p.values, attention[i], seen[i], *gradients, part.start + i)

    return look_back


def add_products(sums: Matrices, kept: Kept) -> None:
    """Adds the gradients of the weights: one large product each"""
    inner = kept.work.shape[-1] - len(sums.hidden)
    work, h, seen = (x.flatten(0, 1).T for x in (kept.work, kept.before[0], kept.seen))
    sums.hidden.addmm_(work[inner:], h.T)
    sums.given.addmm_(work[: len(sums.given)], seen.T)
    if sums.told is not None and kept.told is not None and kept.updated is not None:
        sums.told.addmm_(kept.told.flatten(0, 1).T, kept.updated.flatten(0, 1))


# --- the operators

_SETTINGS = (
    "bool lstm, int active, bool mean, float temperature, float epsilon, str precision, "
    "int input_heads, int comm_heads"
)
_OPTIONAL = {name for name, kind in Prepared.__annotations__.items() if kind == Tensor | None}
_PREPARED = ", ".join(f"Tensor{'?' * (n in _OPTIONAL)} {n}" for n in Prepared._fields)
_RAN = ", ".join(f"Tensor ran_{name}" for name in Ran._fields)
_N, _M, _R, _G = (len(x) for x in (Prepared._fields, Settings._fields, Ran._fields, DIFFERENTIABLE))


@torch.library.custom_op(
    "scoff::wide_forward",
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}) -> {returns(_R)}",
)
def _forward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N:])
    # triton launches on the current device
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        return tuple(run_forward(p, settings))


@_forward.register_fake
def _(*args):
    return tuple(allocate_ran(Prepared(*args[:_N]), Settings(*args[_N:])))


@torch.library.custom_op(
    "scoff::wide_backward",
    mutates_args=(),
    schema=f"({_PREPARED}, {_SETTINGS}, {_RAN}, Tensor d_output, Tensor d_final) -> {returns(_G)}",
)
def _backward(*args):
    p, settings = Prepared(*args[:_N]), Settings(*args[_N : _N + _M])
    ran = Ran(*args[_N + _M : _N + _M + _R])
    with torch.cuda.device_of(p.state), multiplied_in(settings.precision, p.state):
        found = run_back(p, settings, ran, *args[_N + _M + _R :])
    return tuple(found.get(name, p.state.new_empty(0)) for name in DIFFERENTIABLE)


@_backward.register_fake
def _(*args):
    wanted = args[:_G]
    return tuple(args[0].new_empty(0) if x is None else torch.empty_like(x) for x in wanted)


def _save(ctx, inputs, output) -> None:
    ran = Ran(*output)
    ctx.settings = Settings(*inputs[_N:])
    ctx.save_for_backward(*inputs[:_N], *ran._replace(final=ran.choice))
    ctx.mark_non_differentiable(ran.cells, ran.choice, ran.active)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_output, d_final, *_):
    saved = ctx.saved_tensors
    p, ran = Prepared(*saved[:_N]), Ran(*saved[_N:])
    d_output = torch.zeros_like(ran.output) if d_output is None else d_output.contiguous()
    d_final = torch.zeros_like(p.state) if d_final is None else d_final.contiguous()
    found = _backward(*p, *ctx.settings, *ran, d_output, d_final)
    gradients = [g if x is not None else None for g, x in zip(found, p[:_G], strict=True)]
    return *gradients, *([None] * (_N - _G + _M))


_forward.register_autograd(_differentiate, setup_context=_save)
