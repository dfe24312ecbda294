"""RIMs: recurrent independent mechanisms, modules that each have their own parameters.

After Goyal et al., "Recurrent Independent Mechanisms" (2019). Axis letters: T steps, B sequences, P
input positions, C input features, F modules, D size of one module, Z tensors that make up a state.
"""

import math
from typing import Any, TypedDict, Unpack

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
from scoff.nn.recurrent import RecurrentCell, RecurrentLayer
from scoff.nn.scoff_cell import CLOSED_GATE, COMMUNICATION_NAMES
from scoff.nn.types import Outcome, State, Steps
from scoff.ops.rims import BACKENDS, Backend, Inputs, Options, Weights, run_rims
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
    backend: Backend


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
        backend: "batched" (few large operations), "reference" (plain), or "auto": the faster one
            that can.

    The initial state is zero. From it no module asks for anything, so that all attend alike and the
    first `active_modules` of them take the first step.
    """

    _backend: Backend = "auto"  # of cells that were pickled before there was another

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
        backend: Backend = "auto",
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
        self.backend = backend

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
    def backend(self) -> Backend:
        return self._backend

    @backend.setter
    def backend(self, value: Backend) -> None:
        check_choice("backend", value, BACKENDS)
        self._backend = value

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

    def weights(self, dtype: torch.dtype) -> Weights:
        """The parameters as the ops take them."""
        communication = None
        if self.communication is not None:
            communication = CommunicationWeights(*self._cast(COMMUNICATION_NAMES, dtype))
        return Weights(*self._cast(Weights._fields[:-1], dtype), communication=communication)

    def run(self, steps: Steps) -> Outcome:
        x = steps.x
        t, b, p, _ = x.shape
        slots = self.num_modules, self.slot_size
        inputs = Inputs(
            x,
            steps.state.unflatten(-1, slots),
            steps.reset,
            None if steps.restart is None else steps.restart.unflatten(-1, slots),
            steps.valid,
            self._dropout_mask(self.input_dropout, x, t, b, p, len(self.input_value)),
            self._dropout_mask(self.comm_dropout, x, t, b, *slots),
        )
        options = Options(self.cell, self.active_modules)
        run = run_rims(self.backend, inputs, self.weights(x.dtype), options, steps.keep)
        module = torch.arange(self.num_modules, device=x.device)
        return Outcome(
            output=run.output.flatten(2),
            state=run.state.flatten(2),
            input_attention=run.input_attention,
            # each module is its own dynamics
            schema_probs=(module[:, None] == module).to(x.dtype).expand(*run.active.shape, -1),
            schema=module.expand_as(run.active),
            active=run.active,
            communication=run.communication,
        )

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """The state after one step, (N, hidden_size), or for an LSTM a pair.

        Args:
            input: (N, C), unbatched (C), or with positions (N, P, C).
            hx: the state before, shaped as what is returned. Default: zeros.
        """
        return self.run_step(input, hx)


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

    @property
    def backend(self) -> Backend:
        return self._cell(0).backend

    @backend.setter
    def backend(self, value: Backend) -> None:
        for cell in self._all_cells():
            cell.backend = value
