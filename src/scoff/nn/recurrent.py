"""What all layers share: the interface of nn.GRU and nn.LSTM around a recurrence of their own.

Axis letters: T steps, B sequences, P input positions, C input features, H hidden size, Z tensors
that make up a state (1 for h, 2 for h and c).
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from scoff.nn.checks import (
    autocast_dtype,
    check_features,
    check_flag,
    check_flags,
    check_positions,
    check_rate,
    check_size,
    check_tensor,
)
from scoff.nn.types import Outcome, State, Steps, Trace, backwards


class RecurrentCell(nn.Module):
    """One step of a recurrence, with the shapes of nn.GRUCell or nn.LSTMCell."""

    input_size: int
    hidden_size: int
    num_states: int  # Z
    slot_size: int  # hidden_size / slots

    @property
    def like(self) -> Tensor:
        """A parameter, for its device and dtype: replicas of nn.DataParallel list none."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def draw_state(self, batch_size: int) -> Tensor:
        """The state that a sequence starts from  [Z, B, H]"""
        raise NotImplementedError

    def run(self, steps: Steps) -> Outcome:
        raise NotImplementedError

    def _cast(self, names: Iterable[str], dtype: torch.dtype) -> list[Any]:
        """Parameters by their names, once for all steps"""
        own = self._parameters  # to look there first takes a tenth of what getattr takes
        found = [own[name] if name in own else getattr(self, name) for name in names]
        return [cast_to(dtype, x) for x in found]

    def _dropout_mask(self, rate: float, like: Tensor, *shape: int) -> Tensor | None:
        if not self.training or rate == 0:
            return None
        return nn.functional.dropout(like.new_ones(shape), rate)

    def initial_state(self, batch_size: int) -> State:
        """A fresh state of shape (batch_size, hidden_size), or for an LSTM a pair of them."""
        check_size("batch_size", batch_size)
        return as_public(self.draw_state(batch_size), self.num_states)

    def run_step(self, input: Tensor, hx: State | None, noise: Tensor | None = None) -> State:
        like = self.like
        check_tensor("input", input, like)
        if not 1 <= input.ndim <= 3:
            raise ValueError(
                f"input: got {input.ndim} axes, wants (C), (N, C) or with positions (N, P, C)"
            )
        check_features(input, self.input_size)
        batched = input.ndim > 1
        if not batched:
            input = input[None]
        if input.ndim == 2:
            input = input[:, None]
        check_positions(input)
        batch = input.shape[0]
        if hx is None:
            state = self.draw_state(batch)
        else:
            shape = (batch, self.hidden_size) if batched else (self.hidden_size,)
            state = stack_state(hx, self.num_states, like, shape)
            state = state if batched else state[:, None]
        dtype = autocast_dtype(like)
        with without_autocast(dtype, like.device.type):
            noise = None if noise is None else noise[None]
            x, state = cast_to(dtype, input)[None], cast_to(dtype, state)
            outcome = self.run(Steps(x, state, noise=noise))
        state = outcome.state if batched else outcome.state[:, 0]
        return as_public(state, self.num_states)


CellT = TypeVar("CellT", bound=RecurrentCell)


class RecurrentLayer(nn.Module, Generic[CellT]):
    """Cells stacked in layers and directions behind the interface of nn.GRU and nn.LSTM."""

    def __init__(
        self,
        make_cell: Callable[..., CellT],
        known_options: Mapping[str, Any],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        device: Any,
        dtype: torch.dtype | None,
        options: Mapping[str, Any],
        slots_as_positions: bool = False,
    ):
        """`slots_as_positions`: whether a layer reads the slots of the layer below as positions, so
        that their order does not matter, or as one vector."""
        super().__init__()
        for name in options.keys() - known_options.keys():
            raise TypeError(
                f"{type(self).__name__}: got the unknown option {name!r}, knows "
                + ", ".join(known_options)
            )
        check_size("input_size", input_size)
        check_size("hidden_size", hidden_size)
        check_size("num_layers", num_layers)
        check_rate("dropout", dropout)
        for name, value in (
            ("bias", bias),
            ("batch_first", batch_first),
            ("bidirectional", bidirectional),
        ):
            check_flag(name, value)
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"dropout: got {dropout}, which acts between layers, of which there is one",
                stacklevel=3,
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.slots_as_positions = slots_as_positions
        self.cells = nn.ModuleList()
        directions = 2 if bidirectional else 1
        for layer in range(num_layers):
            size = input_size
            if layer > 0:
                below = self._cell(0).slot_size
                size = below if slots_as_positions else directions * hidden_size
            self.cells.extend(
                make_cell(size, hidden_size, bias, device, dtype, **options)
                for _ in range(directions)
            )

    @property
    def num_states(self) -> int:
        return self._cell(0).num_states

    def _cell(self, index: int) -> CellT:
        return cast(CellT, self.cells[index])

    def _all_cells(self) -> list[CellT]:
        return cast("list[CellT]", list(self.cells))  # a string: dynamo of torch 2.6

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for cell in self._all_cells():
            cell.reset_parameters()

    def flatten_parameters(self) -> None:
        """Does nothing; here because code written for nn.GRU calls it."""

    def extra_repr(self) -> str:
        names = ("num_layers", "batch_first", "dropout", "bidirectional")
        defaults = (1, False, 0.0, False)
        shown = [f"{self.input_size}, {self.hidden_size}"]
        for name, default in zip(names, defaults, strict=True):
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)

    def initial_state(self, batch_size: int) -> State:
        """A fresh state of shape (layers * directions, batch_size, hidden_size), or a pair."""
        check_size("batch_size", batch_size)
        return as_public(stack_layers(self._draw_states(batch_size)), self.num_states)

    def _draw_states(self, batch_size: int) -> list[Tensor]:
        """[Z, B, H] of each cell"""
        return [cell.draw_state(batch_size) for cell in self._all_cells()]

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        restart: State | None = None,
    ) -> tuple[Any, State]:
        """As nn.GRU's: the output, and the state after the last step.

        Args:
            input: (L, N, C), with batch_first (N, L, C), unbatched (L, C), or a PackedSequence;
                with positions (L, N, P, C) or (N, L, P, C).
            hx: state to start from, (layers * directions, N, H), for an LSTM a pair. Default: a
                fresh one.
            reset: boolean, shaped as the input without positions and features: True where a new
                sequence starts, so that the state starts anew before that step.
            restart: state to start anew from, shaped as hx. Default: a fresh one, drawn once.
        """
        output, state, _ = self._run(input, hx, reset, restart)
        return output, state

    def trace(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        restart: State | None = None,
        layer: int = 0,
        reverse: bool = False,
    ) -> Trace:
        """Runs as `forward` does and tells what happened inside one layer, in one direction."""
        return self._trace(layer, reverse, input, hx, reset, restart)

    def _trace(
        self, layer: int, reverse: bool, input: Tensor | PackedSequence, *args: Any
    ) -> Trace:
        check_size("layer", layer, least=0)
        if layer >= self.num_layers:
            raise ValueError(f"layer: got {layer}, wants less than num_layers = {self.num_layers}")
        if reverse and not self.bidirectional:
            raise ValueError("reverse: got True, wants False, for the layer is not bidirectional")
        directions = 2 if self.bidirectional else 1
        index = layer * directions + int(reverse)
        output, _, outcomes = self._run(input, *args, keep=index)
        details = [x.flip(0) if reverse else x for x in outcomes[index][2:]]
        batched = isinstance(input, PackedSequence) or input.ndim > 2
        return Trace(output, *(x.transpose(0, 1) if batched else x[:, 0] for x in details))

    def _run(
        self,
        input: Tensor | PackedSequence,
        hx: State | None,
        reset: Tensor | None,
        restart: State | None,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
        keep: int | None = None,
    ) -> tuple[Any, State, list[Outcome]]:
        """Output, state and what came of each cell, in detail if its index is `keep`."""
        cells = self._all_cells()  # once: torch takes its time to find one
        like = cells[0].like
        x, valid, lead, batched = self._read_input(input, like)
        batch = x.shape[1]
        states = self._read_states("hx", hx, like, batch, batched)
        if reset is not None:
            check_flags("reset", reset, like, lead)
            reset = self._time_major(reset, batched)
            if valid is not None:
                reset = reset & valid
            if restart is not None:
                starts = self._read_states("restart", restart, like, batch, batched)
            else:
                starts = states if hx is None else self._draw_states(batch)
        elif restart is not None:
            raise ValueError("restart: got a state, wants none without reset")
        else:
            starts = [None for _ in states]
        if noise is not None:
            noise = torch.stack([self._time_major(n, batched) for n in noise])
        if choice is not None:
            choice = torch.stack([self._time_major(c, batched) for c in choice])

        output = x
        finals: list[Tensor] = []
        outcomes: list[Outcome] = []
        dtype = autocast_dtype(like)
        with without_autocast(dtype, like.device.type):
            x = cast_to(dtype, x)
            for layer in range(self.num_layers):
                if layer > 0:
                    x = output.unsqueeze(2)
                    if self.slots_as_positions:
                        x = output.unflatten(-1, (-1, cells[0].slot_size))
                    if self.dropout > 0:
                        x = nn.functional.dropout(x, self.dropout, self.training)
                outputs = []
                for reverse in range(2 if self.bidirectional else 1):
                    index = len(finals)
                    steps = Steps(
                        x,
                        cast_to(dtype, states[index]),
                        reset,
                        cast_to(dtype, starts[index]),
                        valid,
                        None if noise is None else noise[index],
                        keep == index,
                        None if choice is None else choice[index],
                    )
                    outcome = cells[index].run(backwards(steps) if reverse else steps)
                    outputs.append(outcome.output.flip(0) if reverse else outcome.output)
                    finals.append(outcome.state)
                    outcomes.append(outcome)
                output = torch.cat(outputs, -1) if self.bidirectional else outputs[0]

        final = stack_layers(finals)
        final = as_public(final if batched else final[:, :, 0], cells[0].num_states)
        if isinstance(input, PackedSequence):
            return repack(output, input), final, outcomes
        if not batched:
            return output[:, 0], final, outcomes
        return output.transpose(0, 1) if self.batch_first else output, final, outcomes

    def _time_major(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x[:, None]
        return x.transpose(0, 1) if self.batch_first else x

    def _read_input(
        self, input: Tensor | PackedSequence, like: Tensor
    ) -> tuple[Tensor, Tensor | None, tuple[int, ...], bool]:
        """x [T, B, P, C], valid [T, B], the input's shape without its last axes, whether batched"""
        if isinstance(input, PackedSequence):
            check_tensor("input", input.data, like)
            if input.data.ndim not in (2, 3):
                raise ValueError(
                    f"input: got packed data of {input.data.ndim} axes, wants (rows, C) or "
                    "(rows, P, C)"
                )
            check_features(input.data, self.input_size)
            x, lengths = pad_packed_sequence(input)
            lengths = lengths.to(like.device)
            valid = torch.arange(len(x), device=like.device)[:, None] < lengths
            x = x[:, :, None] if x.ndim == 3 else x
            check_positions(x)
            lead = (x.shape[1], x.shape[0]) if self.batch_first else (x.shape[0], x.shape[1])
            return x, valid, lead, True
        check_tensor("input", input, like)
        order = "N, L" if self.batch_first else "L, N"
        if input.ndim not in (2, 3, 4):
            raise ValueError(
                f"input: got {input.ndim} axes, wants ({order}, C), unbatched (L, C), or with "
                f"positions ({order}, P, C)"
            )
        check_features(input, self.input_size)
        batched = input.ndim > 2
        lead = tuple(input.shape[: 2 if batched else 1])
        x = self._time_major(input, batched)
        if x.shape[0] == 0:
            raise ValueError(f"input: got shape {tuple(input.shape)}, wants at least one step")
        x = x[:, :, None] if x.ndim == 3 else x
        check_positions(x)
        return x, None, lead, batched

    def _read_states(
        self, name: str, hx: State | None, like: Tensor, batch: int, batched: bool
    ) -> list[Tensor]:
        """[Z, B, H] of each cell"""
        if hx is None:
            return self._draw_states(batch)
        count = len(self.cells)
        shape = (count, batch, self.hidden_size) if batched else (count, self.hidden_size)
        state = stack_state(hx, self.num_states, like, shape, name)
        return [x if batched else x[:, None] for x in state.unbind(1)]


def stack_state(
    hx: object, num_states: int, like: Tensor, shape: tuple[int, ...], name: str = "hx"
) -> Tensor:
    """The public form of a state, checked  ->  [Z, ...]"""
    if num_states == 1:
        check_tensor(name, hx, like, shape)
        return cast(Tensor, hx)[None]
    if not isinstance(hx, (tuple, list)) or len(hx) != num_states:
        got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
        raise TypeError(f"{name}: got {got}, wants the pair (h, c) of an LSTM")
    for part, value in zip("hc", hx, strict=True):
        check_tensor(f"{name}[{part}]", value, like, shape)
    return torch.stack([value.to(like.dtype) for value in hx])


def stack_layers(states: list[Tensor]) -> Tensor:
    """[Z, B, H] each -> [Z, layers * directions, B, H]"""
    return torch.stack(states, 1) if len(states) > 1 else states[0][:, None]


def as_public(state: Tensor, num_states: int) -> State:
    return state[0] if num_states == 1 else (state[0], state[1])


def repack(output: Tensor, like: PackedSequence) -> PackedSequence:
    """[T, B, H] -> packed as `like`"""
    if like.sorted_indices is not None:
        output = output.index_select(1, like.sorted_indices)
    rows = torch.arange(output.shape[1])
    data = output[(rows[None, :] < like.batch_sizes[:, None]).to(output.device)]
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def without_autocast(dtype: torch.dtype | None, device: str) -> Any:
    return nullcontext() if dtype is None else torch.autocast(device, enabled=False)


def cast_to(dtype: torch.dtype | None, x: Any) -> Any:
    # to ask takes less than to call
    return x if dtype is None or x is None or x.dtype == dtype else x.to(dtype)
