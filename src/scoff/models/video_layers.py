"""The recurrent layer of a video model, as its options say."""

from typing import cast

import torch
from torch import nn

import scoff
from scoff.models.video_options import VideoOptions
from scoff.ops.rims import backend_like


def make_layer(options: VideoOptions, input_size: int) -> nn.Module:
    o = options
    communication = None if o.communication == "none" else o.communication
    if o.model in ("scoff", "scoff-sparse"):
        layer = scoff.SCOFF(
            input_size,
            o.hidden_size,
            batch_first=True,
            num_object_files=o.object_files,
            num_schemata=o.schemata,
            active_object_files=o.active if o.model == "scoff-sparse" else None,
            cell=o.cell,
            temperature=o.temperature,
            communication=communication,
            input_heads=o.input_heads,
            input_reduction=o.input_reduction,
            input_value_size=o.input_value_size,
            input_dropout=o.input_dropout,
            detach_input_query=o.detach_input_query,
            comm_dropout=o.comm_dropout,
            backend=o.backend,
        )
        cell = cast(scoff.SCOFFCell, layer.cells[0])
        nn.init.constant_(cell.initial_std, o.initial_std)
        with torch.no_grad():
            cell.input_query.mul_(o.attention_scale)
            cell.input_key.mul_(o.attention_scale)
        return layer
    if o.model == "rims":
        return scoff.RIMs(
            input_size,
            o.hidden_size,
            batch_first=True,
            num_modules=o.object_files,
            active_modules=o.active,
            cell=o.cell,
            communication=communication,
            input_heads=o.input_heads,
            input_value_size=o.input_value_size,
            input_dropout=o.input_dropout,
            comm_dropout=o.comm_dropout,
            backend=backend_like(o.backend),
        )
    if o.model == "rmc":
        return scoff.RMC(input_size, o.hidden_size, batch_first=True, num_slots=o.object_files)
    kind = nn.LSTM if o.model == "lstm" else nn.GRU
    return kind(input_size, o.hidden_size, batch_first=True)


@torch.no_grad()
def keep_more(layer: nn.Module, bias: float) -> None:
    """Opens gates that keep the state: the second of a GRU's three and of an LSTM's four."""
    for name, gates in layer.named_parameters():
        if name.endswith("forget_gate_bias"):  # RMC's
            gates += bias
        if "bias_ih" in name:
            size = layer.get_parameter(name.replace("bias_ih", "weight_hh")).shape[-1]
            gates[..., size : 2 * size] += bias
