"""One step of SCOFF: its parameters, and the recurrence of `scoff.ops.scoff` run on them."""

import math
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from scoff.nn.checks import (
    autocast_dtype,
    check_choice,
    check_divides,
    check_dtype,
    check_features,
    check_flag,
    check_rate,
    check_size,
    check_tensor,
)
from scoff.nn.noise import gumbel_
from scoff.nn.recurrent import (
    RecurrentCell,
    cast_to,
    stack_state,
    without_autocast,
)
from scoff.nn.types import Outcome, State, Steps
from scoff.ops.scoff import (
    BACKENDS,
    Backend,
    CommunicationWeights,
    Inputs,
    Options,
    Weights,
    run_scoff,
)
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import GATES, CellName, Communication, Reduction

CLOSED_GATE = -3.0  # at first an object file takes over about a twentieth of what it hears
INITIAL_STD = 0.5  # within the range of a GRU's state


COMMUNICATION_NAMES = tuple(f"comm_{name}" for name in CommunicationWeights._fields)


class SCOFFOptions(TypedDict, total=False):
    """Keyword options of `SCOFF` and `SCOFFCell`, which documents them."""

    num_object_files: int
    num_schemata: int
    cell: CellName
    active_object_files: int | None
    input_heads: int
    input_key_size: int
    input_value_size: int | None
    value_projection: bool
    input_reduction: Reduction
    input_dropout: float
    detach_input_query: bool
    schema_key_size: int
    temperature: float
    communication: Communication | None
    comm_heads: int
    comm_key_size: int
    comm_value_size: int
    comm_dropout: float
    backend: Backend


class SCOFFCell(RecurrentCell):
    """One step of SCOFF, with the shapes of nn.GRUCell, for control loops and streaming.

    `SCOFF` is made of these: `rnn.cells[0]` is the cell of a one-layer `rnn`, weights shared.

    Args:
        input_size: features of the input, at each position.
        hidden_size: size of the whole state; each object file holds hidden_size / num_object_files.
        bias: whether the schemata have biases.
        num_object_files: slots, all alike but for what they hold.
        num_schemata: sets of parameters of the update, of which each object file picks one a step.
        cell: what a schema parametrises, "gru" or "lstm".
        active_object_files: how many object files, those that attend most to the input, are updated
            at each step; the others keep their state. Default: all.
        input_heads: heads of the input attention.
        input_key_size: size of the input attention's queries and keys, per head.
        input_value_size: size of what an object file reads, over all heads. Default: its own size.
        value_projection: False takes the inputs themselves as values.
        input_reduction: what an object file reads from the positions: their "sum" weighted by its
            attention, as in the paper, or their weighted "mean", the better choice for images. On a
            single position the mean is that position, whatever the attention.
        input_dropout: dropout on the values.
        detach_input_query: whether errors of what an object file reads are not led back, through
            where it looks, to its state. They still train its queries and keys. Where object files
            compete for a scene, gradients may otherwise explode.
        schema_key_size: size of the queries and keys by which a schema is picked.
        temperature: of the softened choice of a schema, through which gradients go.
        communication: "gated" (bounded), "residual" (as in the paper; may diverge) or None.
        comm_heads: heads of the communication.
        comm_key_size: size of its queries and keys, per head.
        comm_value_size: size of its values, per head.
        comm_dropout: dropout on the messages.
        backend: "batched" (PyTorch, anywhere), "fused" (Triton kernels on CUDA devices, for object
            files of up to 128 numbers), "wide" (likewise, of any size), "reference" (slow, plain),
            or "auto": the fastest that can.

    In training, choices are drawn with fresh Gumbel noise and initial states with fresh noise; in
    evaluation neither is random.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        num_object_files: int = 4,
        num_schemata: int = 4,
        cell: CellName = "gru",
        active_object_files: int | None = None,
        input_heads: int = 1,
        input_key_size: int = 64,
        input_value_size: int | None = None,
        value_projection: bool = True,
        input_reduction: Reduction = "sum",
        input_dropout: float = 0.0,
        detach_input_query: bool = False,
        schema_key_size: int = 16,
        temperature: float = 1.0,
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
            "num_object_files": num_object_files,
            "num_schemata": num_schemata,
            "input_heads": input_heads,
            "input_key_size": input_key_size,
            "schema_key_size": schema_key_size,
            "comm_heads": comm_heads,
            "comm_key_size": comm_key_size,
            "comm_value_size": comm_value_size,
        }
        for name, value in sizes.items():
            check_size(name, value)
        check_divides("hidden_size", hidden_size, "num_object_files", num_object_files)
        check_choice("cell", cell, list(GATES))
        check_choice("input_reduction", input_reduction, ["sum", "mean"])
        check_choice("communication", communication, ["gated", "residual", None])
        check_rate("input_dropout", input_dropout)
        check_rate("comm_dropout", comm_dropout)
        check_flag("bias", bias)
        check_flag("value_projection", value_projection)
        check_flag("detach_input_query", detach_input_query)
        check_dtype(dtype)
        self.slot_size = size = hidden_size // num_object_files
        if not value_projection:
            if input_value_size not in (None, input_size):
                raise ValueError(
                    f"input_value_size: got {input_value_size}, wants None or input_size = "
                    f"{input_size}, for without value_projection the values are the inputs"
                )
            input_value_size = input_size
        elif input_value_size is None:
            input_value_size = size
        check_size("input_value_size", input_value_size)
        check_divides("input_value_size", input_value_size, "input_heads", input_heads)
        active = num_object_files if active_object_files is None else active_object_files
        check_size("active_object_files", active)
        if active > num_object_files:
            raise ValueError(
                f"active_object_files: got {active}, wants at most num_object_files = "
                f"{num_object_files}"
            )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_object_files = num_object_files
        self.num_schemata = num_schemata
        self.cell: CellName = cell
        self.num_states = 2 if cell == "lstm" else 1
        self.active_object_files = active
        self.input_reduction: Reduction = input_reduction
        self.input_dropout = float(input_dropout)
        self.detach_input_query = detach_input_query
        self.communication = communication
        self.comm_dropout = float(comm_dropout)
        self.temperature = temperature
        self.backend = backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        gates = GATES[cell] * size
        self.input_query = parameter(input_heads, input_key_size, size)
        self.input_key = parameter(input_heads, input_key_size, input_size)
        self.input_value = parameter(input_value_size, input_size) if value_projection else None
        self.weight_ih = parameter(num_schemata, gates, input_value_size)
        self.weight_hh = parameter(num_schemata, gates, size)
        self.bias_ih = parameter(num_schemata, gates) if bias else None
        self.bias_hh = parameter(num_schemata, gates) if bias else None
        self.schema_query = parameter(schema_key_size, size)
        self.schema_key = parameter(schema_key_size, size)
        talks, gated = communication is not None, communication == "gated"
        heard = comm_heads * comm_value_size
        self.comm_query = parameter(comm_heads, comm_key_size, size) if talks else None
        self.comm_key = parameter(comm_heads, comm_key_size, size) if talks else None
        self.comm_value = parameter(comm_heads, comm_value_size, size) if talks else None
        self.comm_out = parameter(size, heard) if talks else None
        self.comm_gate = parameter(size, heard) if gated else None
        self.comm_gate_bias = parameter(size) if gated else None
        self.initial_mean = parameter(self.num_states, size)
        self.initial_std = parameter(self.num_states, size)
        # object files that start alike stay alike, so that evaluation needs noise too, always this
        noise = torch.empty(self.num_states, num_object_files, size, device=device, dtype=dtype)
        self.register_buffer("initial_noise", noise)
        self.initial_noise: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew: as torch's own cells and linear maps do."""
        for name, weight in self.named_parameters():
            fan_in = self.slot_size if "_hh" in name or "_ih" in name else weight.shape[-1]
            nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        if self.comm_gate_bias is not None:
            nn.init.constant_(self.comm_gate_bias, CLOSED_GATE)
        nn.init.zeros_(self.initial_mean)
        nn.init.constant_(self.initial_std, INITIAL_STD)
        nn.init.normal_(self.initial_noise)

    @property
    def temperature(self) -> float:
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"temperature: got {value!r}, wants a number above 0")
        if not 0 < value < math.inf:
            raise ValueError(f"temperature: got {value}, wants a number above 0")
        self._temperature = float(value)

    @property
    def backend(self) -> Backend:
        return self._backend

    @backend.setter
    def backend(self, value: Backend) -> None:
        check_choice("backend", value, BACKENDS)
        self._backend: Backend = value

    @property
    def like(self) -> Tensor:
        return self.weight_hh

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *args: Any
    ) -> None:
        """Weights fit any number of object files; only the noise of evaluation is per slot."""
        name = prefix + "initial_noise"
        saved, own = state_dict.get(name), self.initial_noise
        if saved is not None and saved.ndim == 3 and saved.shape[1] != own.shape[1]:
            count = min(saved.shape[1], own.shape[1])
            fitted = own.clone()
            fitted[:, :count] = saved[:, :count]
            state_dict = {**state_dict, name: fitted}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        shown = [
            f"{self.input_size}, {self.hidden_size}",
            f"num_object_files={self.num_object_files}",
            f"num_schemata={self.num_schemata}",
            f"cell={self.cell!r}",
        ]
        if self.active_object_files < self.num_object_files:
            shown.append(f"active_object_files={self.active_object_files}")
        return ", ".join([*shown, f"communication={self.communication!r}"])

    def draw_state(self, batch_size: int) -> Tensor:
        noise = self.initial_noise
        z, f, d = noise.shape
        if self.training:
            noise = torch.randn(z, batch_size, f, d, dtype=noise.dtype, device=noise.device)
        else:
            noise = noise[:, None].expand(z, batch_size, f, d)
        mean, std = self.initial_mean.view(z, 1, 1, d), self.initial_std.view(z, 1, 1, d)
        return torch.addcmul(mean, std, noise).view(z, batch_size, f * d)

    def weights(self, dtype: torch.dtype) -> Weights:
        """The parameters as the ops take them."""
        communication = None
        if self.communication is not None:
            communication = CommunicationWeights(*self._cast(COMMUNICATION_NAMES, dtype))
        return Weights(*self._cast(Weights._fields[:-1], dtype), communication=communication)

    def run(self, steps: Steps) -> Outcome:
        x = steps.x
        t, b, p, _ = x.shape
        f, d = self.num_object_files, self.slot_size
        noise = steps.noise
        if noise is not None:
            noise = noise.detach().to(x.dtype)
        elif self.training and self.num_schemata > 1:
            exact = torch.promote_types(x.dtype, torch.float32)
            noise = gumbel_(x.new_empty(t, b, f, self.num_schemata, dtype=exact))
            noise = cast_to(x.dtype, noise)

        inputs = Inputs(
            x,
            steps.state.unflatten(-1, (f, d)),
            steps.reset,
            None if steps.restart is None else steps.restart.unflatten(-1, (f, d)),
            steps.valid,
            noise,
            self._dropout_mask(self.input_dropout, x, t, b, p, self.weight_ih.shape[-1]),
            self._dropout_mask(self.comm_dropout, x, t, b, f, d),
            steps.choice,
        )
        options = self._options(self.temperature)
        run = run_scoff(self.backend, inputs, self.weights(x.dtype), options, steps.keep)
        return Outcome(
            run.output.flatten(2),
            run.state.flatten(2),
            run.input_attention.mean(3) if steps.keep else run.input_attention,
            run.schema_probs,
            run.schema,
            run.active,
            run.communication,
        )

    def _options(self, temperature: float) -> Options:
        return Options(
            self.cell,
            self.active_object_files,
            self.input_reduction,
            temperature,
            self.detach_input_query,
        )

    def schema_probs(self, input: Tensor, hx: State) -> Tensor:
        """How likely each schema is to be chosen in one step, at temperature 1  (N, F, S)

        For terms of a loss: it carries gradients, whatever the backend. The N steps may be all
        those of a batch, each with the state before it.

        Args:
            input: (N, C), or with positions (N, P, C).
            hx: the states before, (N, hidden_size), for an LSTM a pair.
        """
        check_tensor("input", input, self.like)
        if input.ndim not in (2, 3):
            raise ValueError(f"input: got {input.ndim} axes, wants (N, C) or (N, P, C)")
        check_features(input, self.input_size)
        x = input[:, None] if input.ndim == 2 else input
        state = stack_state(hx, self.num_states, self.like, (x.shape[0], self.hidden_size))
        dtype = autocast_dtype(self.like)
        with without_autocast(dtype, self.like.device.type):
            x, state = cast_to(dtype, x), cast_to(dtype, state)
            state = state.unflatten(-1, (self.num_object_files, self.slot_size))
            # communication comes after the choice
            weights = self.weights(x.dtype)._replace(communication=None)
            options = self._options(1.0)
            return scoff_reference(Inputs(x[None], state), weights, options).schema_probs[0]

    def forward(
        self, input: Tensor, hx: State | None = None, *, noise: Tensor | None = None
    ) -> State:
        """The state after one step, (N, hidden_size), or for an LSTM a pair.

        Args:
            input: (N, C), unbatched (C), or with positions (N, P, C).
            hx: the state before, shaped as what is returned. Default: a fresh one.
            noise: Gumbel noise (N, F, S), unbatched (F, S). Default: fresh in training, none in
                evaluation.
        """
        if noise is not None:
            check_tensor("input", input, self.like)
            batch = input.shape[:1] if input.ndim > 1 else ()
            shape = (*batch, self.num_object_files, self.num_schemata)
            check_tensor("noise", noise, self.weight_hh, shape)
            noise = noise if batch else noise[None]
        return self.run_step(input, hx, noise)
