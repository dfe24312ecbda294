"""The agents of the maze: one encoder and two heads, and between them one of several memories."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

import scoff
from scoff.models.agent import RecurrentAgent, SCOFFMemory, head
from scoff.models.tiles import TileEncoder
from scoff.nn.readout import Readout
from scoff.ops.rims import backend_like
from scoff.ops.scoff import Backend
from scoff.worlds.maze import NUM_ACTIONS

MODELS = {
    "scoff": "SCOFF",
    "scoff-sparse": "SCOFF, sparse",
    "rims": "RIMs",
    "gru": "GRU",
    "gru-matched": "GRU, as many parameters as SCOFF",
    "lstm": "LSTM",
}
VIEW_SIZE = 5


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is made of. Part of the experiment's options."""

    model: Literal["scoff", "scoff-sparse", "rims", "gru", "gru-matched", "lstm"] = "scoff"
    """The agent's memory. scoff updates all object files at each step, scoff-sparse some; gru is
    as wide as the others, gru-matched has as many parameters as scoff."""
    channels: int = 32
    """Of the convolution that reads the tiles of a view."""
    features: int = 128
    """What a view becomes, and the memory reads."""
    hidden_size: int = 510
    """Size of the whole state."""
    object_files: int = 1
    """Object files of scoff."""
    modules: int = 5
    """Object files of scoff-sparse, modules of rims."""
    active: int = 3
    """How many of these are updated at each step."""
    schemata: int = 4
    """Schemata of SCOFF."""
    input_value_size: int | None = 256
    """What an object file or module reads of the features. None: as they are."""
    input_gain: float = 1.0
    """The weights that make it start this many times as large."""
    schema_scale: float = 1.0
    """The weights that choose SCOFF's schemata start this many times as large."""
    schema_noise: float = 1.0
    """Of the Gumbel noise in the choice of a schema while it learns; 0: none."""
    temperature: float = 1.0
    """Of the choice of a schema, through which gradients go."""
    initial_std: float = 0.5
    """How far SCOFF's object files start from each other, at first."""
    communication: Literal["gated", "residual", "none"] = "gated"
    """How object files or modules read each other. A single one has nobody to read."""
    backend: Backend = "auto"
    """How SCOFF is computed."""


def make_agent(options: AgentOptions) -> RecurrentAgent:
    o = options
    width = matched_width(o) if o.model == "gru-matched" else o.hidden_size
    encoder = TileEncoder(VIEW_SIZE, o.channels, o.features)
    rnn = make_layer(o, width)
    agent = RecurrentAgent(encoder, rnn, *make_heads(o, width))
    if isinstance(agent.memory, SCOFFMemory):
        agent.memory.noise_scale = o.schema_noise
    return agent


def num_slots(options: AgentOptions) -> int:
    """Of equal standing, so that heads must not tell them apart"""
    return {"scoff": options.object_files, "scoff-sparse": options.modules}.get(options.model, 1)


def make_heads(options: AgentOptions, width: int) -> tuple[nn.Module, nn.Module]:
    """Policy and value"""
    slots = num_slots(options)
    if slots == 1:
        return head(width, NUM_ACTIONS), head(width, 1)
    policy, value = Readout(width, NUM_ACTIONS, slots), Readout(width, 1, slots)
    return policy, value


def make_layer(options: AgentOptions, width: int) -> nn.Module:
    o = options
    if o.model in ("gru", "gru-matched"):
        return nn.GRU(o.features, width)
    if o.model == "lstm":
        return nn.LSTM(o.features, width)
    communication = None if o.communication == "none" else o.communication
    if o.model == "rims":
        return scoff.RIMs(
            o.features,
            width,
            num_modules=o.modules,
            active_modules=o.active,
            communication=communication,
            backend=backend_like(o.backend),
        )
    slots = num_slots(o)
    reading: dict[str, Any] = {"value_projection": False}
    if o.input_value_size is not None:
        reading = {"input_value_size": o.input_value_size}
    rnn = scoff.SCOFF(
        o.features,
        width,
        num_object_files=slots,
        num_schemata=o.schemata,
        active_object_files=o.active if o.model == "scoff-sparse" else None,
        temperature=o.temperature,
        communication=None if slots == 1 else communication,
        backend=o.backend,
        **reading,
    )
    cell = cast(scoff.SCOFFCell, rnn.cells[0])
    nn.init.constant_(cell.initial_std, o.initial_std)
    with torch.no_grad():
        cell.schema_query.mul_(o.schema_scale)
        cell.schema_key.mul_(o.schema_scale)
        if cell.input_value is not None:
            cell.input_value.mul_(o.input_gain)
    return rnn


def count_parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def matched_width(options: AgentOptions) -> int:
    """That of the GRU whose agent has as many parameters as that of scoff, or just fewer"""
    with torch.device("meta"):  # nothing is computed

        def size(model: Any, width: int) -> int:
            own = AgentOptions(**{**vars_of(options), "model": model})
            return count_parameters(make_layer(own, width), *make_heads(own, width))

        goal = size("scoff", options.hidden_size)
        low, high = 1, 2
        while size("gru", high) <= goal:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size("gru", middle) <= goal else (low, middle)
        return low


def vars_of(options: AgentOptions) -> dict[str, Any]:
    """Those of AgentOptions alone, where `options` has more"""
    return {name: getattr(options, name) for name in AgentOptions.__dataclass_fields__}
