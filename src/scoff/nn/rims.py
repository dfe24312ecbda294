"""RIMs: recurrent independent mechanisms, modules that each have their own parameters.

After Goyal et al., "Recurrent Independent Mechanisms" (2019). Axis letters: T steps, B sequences, P
input positions, C input features, F modules, D size of one module, Z tensors that make up a state.
"""

import math
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from scoff.nn.checks import (
    check_choice,
    check_divides,
    check_dtype,
    check_flag,
    check_rate,
    check_size,
)
from scoff.nn.recurrent import RecurrentCell, RecurrentLayer, cast_to
from scoff.nn.scoff_cell import CLOSED_GATE
from scoff.nn.types import Outcome, State, Steps
from scoff.ops.scoff.reference import cell_update, most_attended
from scoff.ops.scoff.types import GATES, CellName, Communication, CommunicationWeights


class RIMsOptions(TypedDict, total=False):
    """Keyword options of `RIMs` and `RIMsCell`, which documents them."""

    num_modules: int
    active_modules: int | None
    cell: CellName
    input_heads: int
    input_key_size: int
    input_value_size: int | None
    input_dropout: float
    communication: Communication | None
    comm_heads: int
    comm_key_size: int
    comm_value_size: int
    comm_dropout: float


class RIMsWeights(NamedTuple):
    """Parameters of a cell. All but the keys and values of the input belong to a module."""

    input_query: Tensor  # [F, heads, K, D]
    input_key: Tensor  # [heads, K, C]
    input_value: Tensor  # [V, C]
    weight_ih: Tensor  # [F, gates * D, V]
    weight_hh: Tensor  # [F, gates * D, D]
    bias_ih: Tensor | None  # [F, gates * D]
    bias_hh: Tensor | None  # [F, gates * D]
    communication: CommunicationWeights | None  # each of them with a leading axis F


class RIMsCell(RecurrentCell):
    """One step of RIMs, with the shapes of nn.GRUCell, for control loops and streaming.

    `RIMs` is made of these: `rnn.cells[0]` is the cell of a one-layer `rnn`, weights shared.

    Args:
        input_size: features of the input, at each position.
        hidden_size: size of the whole state; each module holds hidden_size / num_modules.
        bias: whether the modules' cells have biases.
        num_modules: modules, each with its own parameters.
        active_modules: how many modules, those that attend least to the null input, are updated at
            each step; the others keep their state, and can still be read. None: all.
        cell: what a module is, "gru" or "lstm".
        input_heads: heads of the input attention.
        input_key_size: size of the input attention's queries and keys, per head.
        input_value_size: size of what a module reads, over all heads. Default: its own size.
        input_dropout: dropout on the values.
        communication: "gated" (bounded), "residual" (as in the paper; may diverge) or None.
        comm_heads: heads of the communication.
        comm_key_size: size of its queries and keys, per head.
        comm_value_size: size of its values, per head.
        comm_dropout: dropout on the messages.

    The initial state is zero. From it no module asks for anything, so that all attend alike and the
    first `active_modules` of them take the first step.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_modules: int = 6,
        active_modules: int | None = 4,
        cell: CellName = "gru",
        input_heads: int = 1,
        input_key_size: int = 64,
        input_value_size: int | None = None,
        input_dropout: float = 0.0,
        communication: Communication | None = "gated",
        comm_heads: int = 4,
        comm_key_size: int = 32,
        comm_value_size: int = 32,
        comm_dropout: float = 0.0,
    ):
        super().__init__()
        sizes = {
            "input_size": input_size,
            "hidden_size": hidden_size,
            "num_modules": num_modules,
            "input_heads": input_heads,
            "input_key_size": input_key_size,
            "comm_heads": comm_heads,
            "comm_key_size": comm_key_size,
            "comm_value_size": comm_value_size,
        }
        for name, value in sizes.items():
            check_size(name, value)
        check_divides("hidden_size", hidden_size, "num_modules", num_modules)
        check_choice("cell", cell, list(GATES))
        check_choice("communication", communication, ["gated", "residual", None])
        check_rate("input_dropout", input_dropout)
        check_rate("comm_dropout", comm_dropout)
        check_flag("bias", bias)
        check_dtype(dtype)
        self.slot_size = size = hidden_size // num_modules
        read = size if input_value_size is None else input_value_size
        check_size("input_value_size", read)
        check_divides("input_value_size", read, "input_heads", input_heads)
        active = num_modules if active_modules is None else active_modules
        check_size("active_modules", active)
        if active > num_modules:
            raise ValueError(
                f"active_modules: got {active}, wants at most num_modules = {num_modules}"
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_modules = num_modules
        self.active_modules = active
        self.cell: CellName = cell
        self.num_states = 2 if cell == "lstm" else 1
        self.input_dropout = float(input_dropout)
        self.communication = communication
        self.comm_dropout = float(comm_dropout)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        gates = GATES[cell] * size
        self.input_query = parameter(num_modules, input_heads, input_key_size, size)
        self.input_key = parameter(input_heads, input_key_size, input_size)
        self.input_value = parameter(read, input_size)
        self.weight_ih = parameter(num_modules, gates, read)
        self.weight_hh = parameter(num_modules, gates, size)
        self.bias_ih = parameter(num_modules, gates) if bias else None
        self.bias_hh = parameter(num_modules, gates) if bias else None
        talks, gated = communication is not None, communication == "gated"
        heard = comm_heads * comm_value_size
        asked = (num_modules, comm_heads, comm_key_size, size)
        self.comm_query = parameter(*asked) if talks else None
        self.comm_key = parameter(*asked) if talks else None
        said = (num_modules, comm_heads, comm_value_size, size)
        self.comm_value = parameter(*said) if talks else None
        self.comm_out = parameter(num_modules, size, heard) if talks else None
        self.comm_gate = parameter(num_modules, size, heard) if gated else None
        self.comm_gate_bias = parameter(num_modules, size) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew: as torch's own cells and linear maps do."""
        for name, weight in self.named_parameters():
            fan_in = self.slot_size if "_hh" in name or "_ih" in name else weight.shape[-1]
            nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        if self.comm_gate_bias is not None:
            nn.init.constant_(self.comm_gate_bias, CLOSED_GATE)

    @property
    def like(self) -> Tensor:
        return self.weight_hh

    def extra_repr(self) -> str:
        shown = [
            f"{self.input_size}, {self.hidden_size}",
            f"num_modules={self.num_modules}",
            f"active_modules={self.active_modules}",
            f"cell={self.cell!r}",
            f"communication={self.communication!r}",
        ]
        return ", ".join(shown)

    def draw_state(self, batch_size: int) -> Tensor:
        return self.weight_hh.new_zeros(self.num_states, batch_size, self.hidden_size)

    def weights(self, dtype: torch.dtype) -> RIMsWeights:
        """The parameters, cast once for all steps."""

        def get(*names: str) -> list[Any]:
            return [cast_to(dtype, getattr(self, name)) for name in names]

        communication = None
        if self.communication is not None:
            names = (f"comm_{name}" for name in CommunicationWeights._fields)
            communication = CommunicationWeights(*get(*names))
        return RIMsWeights(*get(*RIMsWeights._fields[:-1]), communication=communication)

    def run(self, steps: Steps) -> Outcome:
        x, reset, valid = steps.x, steps.reset, steps.valid
        w = self.weights(x.dtype)
        keys, values = self._project_input(x, w)
        state = self._by_module(steps.state)
        restart = None if steps.restart is None else self._by_module(steps.restart)
        silence = x.new_empty(x.shape[1], 0, self.num_modules, self.num_modules)
        outputs, kept = [], []
        for t in range(x.shape[0]):
            if reset is not None and restart is not None:
                state = torch.where(reset[t][None, :, None, None], restart, state)
            null, attention, read = attend(state[0], keys[t], values[t], w)
            active = most_attended(-null, self.active_modules)  # [B, F]
            update = active if valid is None else active & valid[t][:, None]

            new_state = torch.where(
                update[None, :, :, None], update_modules(self.cell, w, read, state), state
            )
            talk = silence
            if w.communication is not None:
                talk, new_h = self._communicate(new_state[0], w.communication)
                new_h = torch.where(update[:, :, None], new_h, state[0])
                new_state = torch.stack([new_h, *new_state[1:]])
            state = new_state

            outputs.append(state[0].flatten(1))
            if not steps.keep:
                kept.clear()
            kept.append((attention, active, talk))
        attention, active, talk = (torch.stack(column) for column in zip(*kept, strict=True))
        module = torch.arange(self.num_modules, device=x.device)
        return Outcome(
            output=torch.stack(outputs),
            state=state.flatten(2),
            input_attention=attention,
            # each module is its own dynamics
            schema_probs=(module[:, None] == module).to(x.dtype).expand(*active.shape, -1),
            schema=module.expand_as(active),
            active=active,
            communication=talk,
        )

    def _by_module(self, state: Tensor) -> Tensor:
        return state.unflatten(-1, (self.num_modules, self.slot_size))

    def _project_input(self, x: Tensor, w: RIMsWeights) -> tuple[Tensor, Tensor]:
        """Keys, scaled [T, B, heads, P, K], and values [T, B, heads, P, V / heads]."""
        heads, key_size, _ = w.input_key.shape
        keys = torch.einsum("tbpc,hec->tbhpe", x, w.input_key) / math.sqrt(key_size)
        values = nn.functional.dropout(x @ w.input_value.T, self.input_dropout, self.training)
        return keys, values.unflatten(-1, (heads, -1)).transpose(2, 3)

    def _communicate(self, h: Tensor, w: CommunicationWeights) -> tuple[Tensor, Tensor]:
        """Who reads whom [B, heads, F, F], and every module with what it heard [B, F, D]."""
        query = torch.einsum("bkd,khed->bhke", h, w.query)
        key = torch.einsum("bkd,khed->bhke", h, w.key)
        value = torch.einsum("bkd,khvd->bhkv", h, w.value)
        talk = (query @ key.mT / math.sqrt(key.shape[-1])).softmax(-1)  # over those who are read
        heard = (talk @ value).transpose(1, 2).flatten(2)
        message = torch.einsum("bkv,kdv->bkd", heard, w.out)
        message = nn.functional.dropout(message, self.comm_dropout, self.training)
        if w.gate is None or w.gate_bias is None:
            return talk, h + message
        gate = torch.einsum("bkv,kdv->bkd", heard, w.gate) + w.gate_bias
        return talk, h + gate.sigmoid() * (message.tanh() - h)

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """The state after one step, (N, hidden_size), or for an LSTM a pair.

        Args:
            input: (N, C), unbatched (C), or with positions (N, P, C).
            hx: the state before, shaped as what is returned. Default: zeros.
        """
        return self.run_step(input, hx)


def attend(
    h: Tensor, keys: Tensor, values: Tensor, w: RIMsWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Input attention of every module, over the null input and the positions.

    Returns the weight of the null input [B, F] and those of the positions [B, F, P], means over
    heads, and what was read [B, F, V].
    """
    query = torch.einsum("bkd,khed->bhke", h, w.input_query)
    # the null input is zero and so, without biases, are its key, its score and its value
    weight = nn.functional.pad(query @ keys.mT, (1, 0)).softmax(-1)  # [B, heads, F, 1 + P]
    read = (weight[..., 1:] @ values).transpose(1, 2).flatten(2)
    mean = weight.mean(1)
    return mean[..., 0], mean[..., 1:], read


def update_modules(cell: CellName, w: RIMsWeights, read: Tensor, state: Tensor) -> Tensor:
    """torch's GRU or LSTM cell, one for each module  [Z, B, F, D]"""
    input_gates = torch.einsum("bkv,kgv->bkg", read, w.weight_ih)
    hidden_gates = torch.einsum("bkd,kgd->bkg", state[0], w.weight_hh)
    if w.bias_ih is not None and w.bias_hh is not None:
        input_gates = input_gates + w.bias_ih
        hidden_gates = hidden_gates + w.bias_hh
    return cell_update(cell, input_gates, hidden_gates, state)


class RIMs(RecurrentLayer[RIMsCell]):
    """Recurrent layer of independent mechanisms: a drop-in for nn.GRU and nn.LSTM.

    ```python
    rnn = scoff.RIMs(64, 600, num_modules=6, active_modules=4, batch_first=True)
    output, h_n = rnn(x)       # (N, L, 64) -> (N, L, 600), (1, N, 600)
    trace = rnn.trace(x)       # who attended to what, who was active, who read whom
    ```

    Takes the arguments of nn.GRU in their order, then the options of `RIMsCell` as keywords. Module
    k is `output[..., k * size : (k + 1) * size]` with size = hidden_size / num_modules. A layer
    above the first reads the modules below it as one vector, for they are not interchangeable.

    In a trace, modules stand for object files and for schemata: the schema of a module is the
    module itself. The input attention leaves out the null input, whose weight is what is missing to
    1.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[RIMsOptions],
    ):
        super().__init__(
            RIMsCell,
            RIMsOptions.__annotations__,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            options,
        )

    @property
    def num_modules(self) -> int:
        return self._cell(0).num_modules

    @property
    def active_modules(self) -> int:
        return self._cell(0).active_modules
