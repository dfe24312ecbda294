"""RIMs step by step: slow, plain, any dtype, differentiable to any order."""

import math

import torch
from torch import Tensor

from scoff.ops.rims.types import Inputs, Options, Run, Weights
from scoff.ops.scoff.reference import cell_update, most_attended
from scoff.ops.scoff.types import CellName, CommunicationWeights


def rims_reference(inputs: Inputs, w: Weights, options: Options) -> Run:
    x, state = inputs.x, inputs.state
    modules = state.shape[2]
    silence = x.new_empty(x.shape[1], 0, modules, modules)
    keys, values = project_input(inputs, w)
    steps = []
    for t in range(x.shape[0]):
        if inputs.reset is not None and inputs.restart is not None:
            state = torch.where(inputs.reset[t][None, :, None, None], inputs.restart, state)
        null, attention, read = attend(state[0], keys[t], values[t], w)
        active = most_attended(-null, options.active)  # [B, F]
        update = active if inputs.valid is None else active & inputs.valid[t][:, None]

        new_state = update_modules(options.cell, w, read, state)
        new_state = torch.where(update[None, :, :, None], new_state, state)
        talk, new_h = silence, new_state[0]
        if w.communication is not None:
            mask = None if inputs.comm_mask is None else inputs.comm_mask[t]
            talk, new_h = communicate(new_h, w.communication, mask)
            new_h = torch.where(update[:, :, None], new_h, state[0])
        state = torch.cat([new_h[None], new_state[1:]])
        steps.append((new_h, attention, active, talk))
    output, *details = (torch.stack(column) for column in zip(*steps, strict=True))
    return Run(output, state, *details)


def project_input(inputs: Inputs, w: Weights) -> tuple[Tensor, Tensor]:
    """Keys, scaled [T, B, heads, P, K], and values [T, B, heads, P, V / heads]."""
    heads, key_size, _ = w.input_key.shape
    keys = torch.einsum("tbpc,hec->tbhpe", inputs.x, w.input_key) / math.sqrt(key_size)
    values = inputs.x @ w.input_value.T
    if inputs.value_mask is not None:
        values = values * inputs.value_mask
    return keys, values.unflatten(-1, (heads, -1)).transpose(2, 3)


def attend(h: Tensor, keys: Tensor, values: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Input attention of every module, over the null input and the positions.

    Returns the weight of the null input [B, F] and those of the positions [B, F, P], means over
    heads, and what was read [B, F, V].
    """
    query = torch.einsum("bkd,khed->bhke", h, w.input_query)
    # the null input is zero and so, without biases, are its key, its score and its value
    weight = torch.nn.functional.pad(query @ keys.mT, (1, 0)).softmax(-1)  # [B, heads, F, 1 + P]
    read = (weight[..., 1:] @ values).transpose(1, 2).flatten(2)
    mean = weight.mean(1)
    return mean[..., 0], mean[..., 1:], read


def update_modules(cell: CellName, w: Weights, read: Tensor, state: Tensor) -> Tensor:
    """torch's GRU or LSTM cell, one for each module  [Z, B, F, D]"""
    input_gates = torch.einsum("bkv,kgv->bkg", read, w.weight_ih)
    hidden_gates = torch.einsum("bkd,kgd->bkg", state[0], w.weight_hh)
    if w.bias_ih is not None and w.bias_hh is not None:
        input_gates = input_gates + w.bias_ih
        hidden_gates = hidden_gates + w.bias_hh
    return cell_update(cell, input_gates, hidden_gates, state)


def communicate(h: Tensor, w: CommunicationWeights, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Who reads whom [B, heads, F, F], and every module with what it heard [B, F, D]."""
    query = torch.einsum("bkd,khed->bhke", h, w.query)
    key = torch.einsum("bkd,khed->bhke", h, w.key)
    value = torch.einsum("bkd,khvd->bhkv", h, w.value)
    talk = (query @ key.mT / math.sqrt(key.shape[-1])).softmax(-1)  # over those who are read
    heard = (talk @ value).transpose(1, 2).flatten(2)
    message = torch.einsum("bkv,kdv->bkd", heard, w.out)
    if mask is not None:
        message = message * mask
    if w.gate is None or w.gate_bias is None:
        return talk, h + message
    gate = torch.einsum("bkv,kdv->bkd", heard, w.gate) + w.gate_bias
    return talk, h + gate.sigmoid() * (message.tanh() - h)
