"""RMC: relational memory core, a memory whose slots attend to each other and to the input.

After Santoro et al., "Relational recurrent neural networks" (2018), with unit gates. Axis letters:
T steps, B sequences, P input positions, C input features, F memory slots, D size of one slot.
"""

import math
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from scoff.nn.checks import (
    check_divides,
    check_dtype,
    check_finite,
    check_flag,
    check_size,
)
from scoff.nn.recurrent import RecurrentCell, RecurrentLayer, cast_to
from scoff.nn.types import Outcome, Steps


class RMCOptions(TypedDict, total=False):
    """Keyword options of `RMC` and `RMCCell`, which documents them."""

    num_slots: int
    num_heads: int
    num_mlp_layers: int
    forget_bias: float
    input_bias: float


class RMCWeights(NamedTuple):
    """Parameters of a cell, under their names there."""

    embed_weight: Tensor  # W_in  [D, C]
    embed_bias: Tensor | None  # [D]
    qkv_weight: Tensor  # queries, keys, values  [3 * D, D]
    qkv_bias: Tensor | None  # [3 * D]
    qkv_norm_weight: Tensor  # [3 * D]
    qkv_norm_bias: Tensor | None  # [3 * D]
    attended_norm_weight: Tensor  # [D]
    attended_norm_bias: Tensor | None  # [D]
    mlp_weight: Tensor  # [layers, D, D]
    mlp_bias: Tensor | None  # [layers, D]
    mlp_norm_weight: Tensor  # [D]
    mlp_norm_bias: Tensor | None  # [D]
    gate_input: Tensor  # W_i, W_f  [2 * D, D]
    gate_memory: Tensor  # U_i, U_f  [2 * D, D]
    input_gate_bias: Tensor  # b_i  []
    forget_gate_bias: Tensor  # b_f  []


class RMCCell(RecurrentCell):
    """One step of a relational memory core, with the shapes of nn.GRUCell.

    `RMC` is made of these: `rnn.cells[0]` is the cell of a one-layer `rnn`, weights shared.

    Args:
        input_size: features of the input, at each position.
        hidden_size: size of the whole memory; each slot holds hidden_size / num_slots.
        bias: whether linear maps and norms have biases. The gates always have theirs.
        num_slots: rows of the memory.
        num_heads: heads of the attention, which share out the size of a slot.
        num_mlp_layers: linear maps of the MLP that follows it.
        forget_bias: of the forget gate at first: the larger, the longer the memory.
        input_bias: of the input gate at first.

    Each position of the input becomes one more row that the slots attend to. The gates see the mean
    of these rows, which with a single position is the row itself.

    The initial memory is the identity matrix, cut or padded with zeros to the size of a slot. Slots
    share all parameters and differ only by it: with more slots than numbers in one, the last ones
    start alike and stay alike.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_slots: int = 4,
        num_heads: int = 4,
        num_mlp_layers: int = 2,
        forget_bias: float = 1.0,
        input_bias: float = 0.0,
    ):
        super().__init__()
        sizes = {
            "input_size": input_size,
            "hidden_size": hidden_size,
            "num_slots": num_slots,
            "num_heads": num_heads,
            "num_mlp_layers": num_mlp_layers,
        }
        for name, value in sizes.items():
            check_size(name, value)
        check_divides("hidden_size", hidden_size, "num_slots", num_slots)
        self.slot_size = size = hidden_size // num_slots
        check_divides("hidden_size / num_slots", size, "num_heads", num_heads)
        check_flag("bias", bias)
        check_dtype(dtype)
        check_finite("forget_bias", forget_bias)
        check_finite("input_bias", input_bias)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_states = 1
        self.num_slots = num_slots
        self.num_heads = num_heads
        self.num_mlp_layers = num_mlp_layers
        self.forget_bias = float(forget_bias)
        self.input_bias = float(input_bias)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.embed_weight = parameter(size, input_size)
        self.embed_bias = parameter(size) if bias else None
        self.qkv_weight = parameter(3 * size, size)
        self.qkv_bias = parameter(3 * size) if bias else None
        self.qkv_norm_weight = parameter(3 * size)
        self.qkv_norm_bias = parameter(3 * size) if bias else None
        self.attended_norm_weight = parameter(size)
        self.attended_norm_bias = parameter(size) if bias else None
        self.mlp_weight = parameter(num_mlp_layers, size, size)
        self.mlp_bias = parameter(num_mlp_layers, size) if bias else None
        self.mlp_norm_weight = parameter(size)
        self.mlp_norm_bias = parameter(size) if bias else None
        self.gate_input = parameter(2 * size, size)
        self.gate_memory = parameter(2 * size, size)
        self.input_gate_bias = parameter()
        self.forget_gate_bias = parameter()
        memory = torch.empty(num_slots, size, device=device, dtype=dtype)
        self.register_buffer("initial_memory", memory)
        self.initial_memory: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew: as torch's own linear maps and norms do."""
        for name, weight in self.named_parameters():
            if name.endswith("norm_weight"):
                nn.init.ones_(weight)
            elif name.endswith("norm_bias"):
                nn.init.zeros_(weight)
            else:
                fan_in = self.input_size if name.startswith("embed") else self.slot_size
                nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        nn.init.constant_(self.input_gate_bias, self.input_bias)
        nn.init.constant_(self.forget_gate_bias, self.forget_bias)
        nn.init.eye_(self.initial_memory)

    @property
    def like(self) -> Tensor:
        return self.embed_weight

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_slots={self.num_slots}, "
            f"num_heads={self.num_heads}, num_mlp_layers={self.num_mlp_layers}"
        )

    def draw_state(self, batch_size: int) -> Tensor:
        return self.initial_memory.flatten().repeat(1, batch_size, 1)

    def weights(self, dtype: torch.dtype) -> RMCWeights:
        """The parameters, cast once for all steps."""
        return RMCWeights(*(cast_to(dtype, getattr(self, name)) for name in RMCWeights._fields))

    def run(self, steps: Steps) -> Outcome:
        x, reset, valid = steps.x, steps.reset, steps.valid
        w = self.weights(x.dtype)
        rows = nn.functional.linear(x, w.embed_weight, w.embed_bias)  # [T, B, P, D]
        _, input_keys, input_values = self._queries_keys_values(rows, w)
        gate_bias = torch.stack([w.input_gate_bias, w.forget_gate_bias])
        gate_bias = gate_bias.repeat_interleave(self.slot_size)
        input_gates = nn.functional.linear(rows.mean(2), w.gate_input, gate_bias)  # [T, B, 2 * D]

        memory = self._by_slot(steps.state[0])  # [B, F, D]
        restart = None if steps.restart is None else self._by_slot(steps.restart[0])
        outputs, kept = [], []
        for t in range(x.shape[0]):
            if reset is not None and restart is not None:
                memory = torch.where(reset[t][:, None, None], restart, memory)
            query, key, value = self._queries_keys_values(memory, w)
            key = torch.cat([key, input_keys[t]], -2)
            value = torch.cat([value, input_values[t]], -2)
            attention = (query @ key.mT / math.sqrt(key.shape[-1])).softmax(-1)
            attended = (attention @ value).transpose(1, 2).flatten(2)
            candidate = normalise(memory + attended, w.attended_norm_weight, w.attended_norm_bias)
            candidate = candidate + mlp(candidate, w.mlp_weight, w.mlp_bias)
            candidate = normalise(candidate, w.mlp_norm_weight, w.mlp_norm_bias)

            gates = input_gates[t][:, None] + memory.tanh() @ w.gate_memory.T
            take, hold = gates.sigmoid().chunk(2, -1)  # i, f
            updated = hold * memory + take * candidate.tanh()
            memory = (
                updated if valid is None else torch.where(valid[t][:, None, None], updated, memory)
            )

            outputs.append(memory.flatten(1))
            if not steps.keep:
                kept.clear()
            kept.append(attention)
        attention = torch.stack(kept)  # [T, B, heads, F, F + P]
        among_slots, to_input = attention.tensor_split([self.num_slots], -1)
        marks = (*attention.shape[:2], self.num_slots)
        return Outcome(
            output=torch.stack(outputs),
            state=memory.flatten(1)[None],
            input_attention=to_input.mean(2),
            # all slots are updated, and by the same dynamics
            schema_probs=x.new_ones(*marks, 1),
            schema=x.new_zeros(marks, dtype=torch.int64),
            active=x.new_ones(marks, dtype=torch.bool),
            communication=among_slots,
        )

    def _by_slot(self, state: Tensor) -> Tensor:
        return state.unflatten(-1, (self.num_slots, self.slot_size))

    def _queries_keys_values(self, rows: Tensor, w: RMCWeights) -> list[Tensor]:
        """[..., rows, D] -> three of [..., heads, rows, D / heads]"""
        # the norm is over all three, so that not even rows that ask nothing can do without queries
        qkv = nn.functional.linear(rows, w.qkv_weight, w.qkv_bias)
        qkv = normalise(qkv, w.qkv_norm_weight, w.qkv_norm_bias)
        by_head = qkv.unflatten(-1, (3, self.num_heads, -1))  # [..., rows, 3, heads, D / heads]
        return [part.transpose(-3, -2) for part in by_head.unbind(-3)]

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The state after one step, (N, hidden_size).

        Args:
            input: (N, C), unbatched (C), or with positions (N, P, C).
            hx: the state before, shaped as what is returned. Default: the initial memory.
        """
        state = self.run_step(input, hx)
        assert isinstance(state, Tensor)
        return state


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.layer_norm(x, weight.shape, weight, bias)


def mlp(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    for layer in range(weight.shape[0]):
        x = x if layer == 0 else x.relu()
        x = nn.functional.linear(x, weight[layer], None if bias is None else bias[layer])
    return x


class RMC(RecurrentLayer[RMCCell]):
    """Recurrent layer with a relational memory: a drop-in for nn.GRU.

    ```python
    rnn = scoff.RMC(64, 400, num_slots=4, num_heads=4, batch_first=True)
    output, h_n = rnn(x)       # (N, L, 64) -> (N, L, 400), (1, N, 400)
    trace = rnn.trace(x)       # which slot attended to the input, which to which slot
    ```

    Takes the arguments of nn.GRU in their order, then the options of `RMCCell` as keywords. Slot k
    is `output[..., k * size : (k + 1) * size]` with size = hidden_size / num_slots. A layer above
    the first reads the whole memory below it as one vector.

    In a trace, slots stand for object files, and there is one schema. The weights by which a slot
    attends are in two parts that sum to 1: those of the input's rows and, as communication, those
    of the slots.
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
        **options: Unpack[RMCOptions],
    ):
        super().__init__(
            RMCCell,
            RMCOptions.__annotations__,
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
    def num_slots(self) -> int:
        return self._cell(0).num_slots
