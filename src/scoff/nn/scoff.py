"""SCOFF: object files that share schemata, as a layer."""

from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from scoff.nn.checks import check_indices, check_size, check_tensor
from scoff.nn.recurrent import RecurrentLayer
from scoff.nn.scoff_cell import Backend, SCOFFCell, SCOFFOptions
from scoff.nn.types import State, Trace


class SCOFF(RecurrentLayer[SCOFFCell]):
    """Recurrent layer of object files and schemata: a drop-in for nn.GRU and nn.LSTM.

    ```python
    rnn = scoff.SCOFF(64, 400, num_object_files=4, num_schemata=4, batch_first=True)
    output, h_n = rnn(x)       # (N, L, 64) -> (N, L, 400), (1, N, 400)
    trace = rnn.trace(x)       # who attended to what, which schema each object file chose
    ```

    Takes the arguments of nn.GRU in their order, then the options of `SCOFFCell` as keywords.
    Object file k is `output[..., k * size : (k + 1) * size]` with size = hidden_size /
    num_object_files. A layer above the first reads the object files below it as positions, so that
    their order does not matter there either.
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
        **options: Unpack[SCOFFOptions],
    ):
        super().__init__(
            SCOFFCell,
            SCOFFOptions.__annotations__,
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
            slots_as_positions=True,
        )

    @property
    def num_object_files(self) -> int:
        return self._cell(0).num_object_files

    @property
    def num_schemata(self) -> int:
        return self._cell(0).num_schemata

    @property
    def active_object_files(self) -> int:
        return self._cell(0).active_object_files

    @property
    def temperature(self) -> float:
        """Of the softened choice of a schema; may be changed, say to anneal it."""
        return self._cell(0).temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        for index in range(len(self.cells)):
            self._cell(index).temperature = value

    @property
    def backend(self) -> Backend:
        return self._cell(0).backend

    @backend.setter
    def backend(self, value: Backend) -> None:
        for index in range(len(self.cells)):
            self._cell(index).backend = value

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        restart: State | None = None,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
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
            noise: Gumbel noise, (layers * directions, L, N, F, S), L and N in the input's order.
                Default: fresh in training, none in evaluation.
            choice: schemata to take, (layers * directions, L, N, F), whatever their merit. Default:
                those of most merit. On a GPU, and compiled, it is not checked: of those that do
                not exist the nearest are taken.
        """
        noise = self._check_per_file("noise", noise, input)
        choice = self._check_per_file("choice", choice, input)
        output, state, _ = self._run(input, hx, reset, restart, noise, choice=choice)
        return output, state

    def choose(
        self,
        input: Tensor,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        restart: State | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Any, State, Tensor]:
        """`forward` of a single step, and the schemata that were chosen in it.

        With these as its `choice` a step can be repeated when weights have changed a little, and a
        choice that was a close one would turn out another way.
        """
        noise = self._check_per_file("noise", noise, input)
        if input.ndim < 3 or input.shape[1 if self.batch_first else 0] != 1:
            raise ValueError(f"input: got shape {tuple(input.shape)}, wants a batch of one step")
        output, state, outcomes = self._run(input, hx, reset, restart, noise)
        chosen = torch.stack([outcome.schema for outcome in outcomes])
        return output, state, chosen.transpose(1, 2) if self.batch_first else chosen

    def trace(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        reset: Tensor | None = None,
        restart: State | None = None,
        noise: Tensor | None = None,
        choice: Tensor | None = None,
        layer: int = 0,
        reverse: bool = False,
    ) -> Trace:
        """Runs as `forward` does and tells what happened inside one layer, in one direction."""
        noise = self._check_per_file("noise", noise, input)
        choice = self._check_per_file("choice", choice, input)
        return self._trace(layer, reverse, input, hx, reset, restart, noise, choice)

    def _check_per_file(
        self, name: str, given: Tensor | None, input: Tensor | PackedSequence
    ) -> Tensor | None:
        """Noise or choices, for each object file at each step"""
        if given is None:
            return None
        like = self._cell(0).like
        if isinstance(input, PackedSequence):
            sizes = input.batch_sizes
            lead = (len(sizes), int(sizes[0]))
            lead = lead[::-1] if self.batch_first else lead
        else:
            check_tensor("input", input, like)
            lead = tuple(input.shape[: 1 if input.ndim == 2 else 2])
        shape = (len(self.cells), *lead, self.num_object_files)
        if name == "noise":
            check_tensor(name, given, like, (*shape, self.num_schemata))
            return given
        return check_indices(name, given, like, shape, self.num_schemata)

    @classmethod
    def from_gru(
        cls,
        gru: nn.GRU,
        **options: Unpack[SCOFFOptions],
    ) -> "SCOFF":
        """A SCOFF that starts from a one-layer GRU.

        With one object file and one schema, the default, it computes the same function. With more,
        every schema is a copy of the GRU and every object file holds a state of its size, so that
        hidden_size is num_object_files times the GRU's; attention starts uniform, so that from a
        zero state each object file still computes the GRU's function. Their own initial states
        differ a little, or they would stay alike for ever. There is no communication unless asked
        for.
        """
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"gru: got {type(gru).__name__}, wants an nn.GRU")
        if gru.num_layers != 1:
            raise ValueError(f"gru: got num_layers = {gru.num_layers}, wants 1")
        num_object_files = options.get("num_object_files", 1)
        check_size("num_object_files", num_object_files)
        settings: SCOFFOptions = {
            "num_object_files": 1,
            "num_schemata": 1,
            "communication": None,
            "value_projection": num_object_files != 1,
            "input_value_size": gru.input_size,
            **options,
        }
        for name, wants in (("cell", "gru"), ("input_value_size", gru.input_size)):
            if settings.get(name, wants) != wants:
                raise ValueError(f"{name}: got {settings.get(name)!r}, wants {wants!r}, the GRU's")
        if num_object_files > 1 and not settings.get("value_projection"):
            raise ValueError(
                "value_projection: got False, wants True, for it makes up for the input's being "
                "shared among several object files"
            )
        weight = cast(Tensor, gru.weight_ih_l0)
        rnn = cls(
            gru.input_size,
            num_object_files * gru.hidden_size,
            1,
            gru.bias,
            gru.batch_first,
            gru.dropout,
            gru.bidirectional,
            weight.device,
            weight.dtype,
            **settings,
        )
        with torch.no_grad():
            for index, suffix in enumerate(("_l0", "_l0_reverse")[: len(rnn.cells)]):
                cell = rnn._cell(index)
                for name in (
                    "weight_ih",
                    "weight_hh",
                    *(("bias_ih", "bias_hh") if gru.bias else ()),
                ):
                    getattr(cell, name).copy_(getattr(gru, name + suffix))
                nn.init.zeros_(cell.input_query)
                nn.init.constant_(cell.initial_std, 0.1 if num_object_files > 1 else 0.0)
                if cell.input_value is not None:
                    # uniform attention gives each object file its share of the sum, or the mean
                    whole = num_object_files if cell.input_reduction == "sum" else 1
                    cell.input_value.copy_(torch.eye(gru.input_size) * whole)
        return rnn.train(gru.training)
