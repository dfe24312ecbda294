"""Algorithm 1 of the paper, line by line: slow, plain, any dtype, differentiable to any order.

Beyond Algorithm 1 there are only heads, the optional sparse activation, the gated form of Step 4,
the LSTM, and what a layer needs: resets, padding, dropout.
"""

import math

import torch
from torch import Tensor

from scoff.ops.scoff.types import CommunicationWeights, Inputs, Options, Run, Weights, epsilon


def scoff_reference(inputs: Inputs, w: Weights, options: Options) -> Run:
    x, state = inputs.x, inputs.state
    num_object_files = state.shape[2]
    steps = []
    for t in range(x.shape[0]):
        if inputs.reset is not None and inputs.restart is not None:
            state = torch.where(inputs.reset[t][None, :, None, None], inputs.restart, state)
        h = state[0]  # h_{t-1,k}  [B, F, D]

        # Step 2: soft competition among object files to select regions of the input
        a = x[t]  # [B, P, C]
        asking = h.detach() if options.detach_input_query else h
        q = torch.einsum("bkd,hed->bkhe", asking, w.input_query)
        kappa = torch.einsum("bpc,hec->bphe", a, w.input_key)
        score = torch.einsum("bkhe,bphe->bkhp", q, kappa) / math.sqrt(kappa.shape[-1])
        s = score.softmax(dim=1)  # over the object files k
        v = a if w.input_value is None else a @ w.input_value.T
        if inputs.value_mask is not None:
            v = v * inputs.value_mask[t]
        v = v.unflatten(-1, (s.shape[2], -1))  # [B, P, heads, V / heads]
        share = s
        if options.reduction == "mean":
            share = s / (s.sum(-1, keepdim=True) + epsilon(s.dtype))
        z = torch.einsum("bkhp,bphv->bkhv", share, v).flatten(2)  # [B, F, V]
        active = most_attended(s.sum((2, 3)), options.active)  # [B, F]
        update = active if inputs.valid is None else active & inputs.valid[t][:, None]

        # Step 3: each object file picks the most relevant schema and updates
        candidates = torch.stack(  # h~_{t,k,j}, and for the LSTM c~_{t,k,j}  [Z, B, F, S, D]
            [schema_update(options.cell, w, j, z, state) for j in range(w.weight_hh.shape[0])], -2
        )
        schema_q = h @ w.schema_query.T
        schema_kappa = candidates[0] @ w.schema_key.T
        logits = torch.einsum("bke,bkje->bkj", schema_q, schema_kappa)
        noisy = logits if inputs.noise is None else logits + inputs.noise[t]
        probs = (noisy / options.temperature).softmax(-1)
        i = noisy.argmax(-1) if inputs.choice is None else inputs.choice[t]
        new_state = torch.einsum("bkj,zbkjd->zbkd", straight_through(probs, i), candidates)
        new_state = torch.where(update[None, :, :, None], new_state, state)

        # Step 4: soft competition among object files to transmit information to each
        new_h = new_state[0]
        if w.communication is None:
            talk = h.new_zeros(h.shape[0], 0, num_object_files, num_object_files)
        else:
            talk, heard = listen(h, new_h, w.communication)
            mask = None if inputs.comm_mask is None else inputs.comm_mask[t]
            new_h = join(new_h, heard, w.communication, mask)
            new_h = torch.where(update[:, :, None], new_h, h)

        state = torch.cat([new_h[None], new_state[1:]])
        steps.append((new_h, s, probs, i, active, talk))
    output, *details = (torch.stack(column) for column in zip(*steps, strict=True))
    return Run(output, state, *details)


def most_attended(mass: Tensor, count: int) -> Tensor:
    """Marks the `count` entries of the last axis with the largest mass; of equals, the first."""
    k = torch.arange(mass.shape[-1], device=mass.device)
    other, own = mass[..., None, :], mass[..., :, None]
    ahead = (other > own) | ((other == own) & (k[None, :] < k[:, None]))
    return ahead.sum(-1) < count


def schema_update(cell: str, w: Weights, j: int, z: Tensor, state: Tensor) -> Tensor:
    """The hypothetical update of every object file by schema j."""
    input_gates = z @ w.weight_ih[j].T
    hidden_gates = state[0] @ w.weight_hh[j].T
    if w.bias_ih is not None and w.bias_hh is not None:
        input_gates = input_gates + w.bias_ih[j]
        hidden_gates = hidden_gates + w.bias_hh[j]
    return cell_update(cell, input_gates, hidden_gates, state)


def cell_update(cell: str, input_gates: Tensor, hidden_gates: Tensor, state: Tensor) -> Tensor:
    """torch's GRU or LSTM cell, from W_ih z + b_ih and W_hh h + b_hh  [Z, ...]"""
    if cell == "gru":
        r_in, u_in, n_in = input_gates.chunk(3, -1)
        r_hid, u_hid, n_hid = hidden_gates.chunk(3, -1)
        r, u = torch.sigmoid(r_in + r_hid), torch.sigmoid(u_in + u_hid)
        n = torch.tanh(n_in + r * n_hid)
        return torch.stack([(1 - u) * n + u * state[0]])
    i, f, g, o = (input_gates + hidden_gates).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.stack([torch.sigmoid(o) * torch.tanh(c), c])


def straight_through(probs: Tensor, choice: Tensor) -> Tensor:
    """One-hot of the choice going forward, the gradient of the probabilities going back."""
    hard = torch.zeros_like(probs).scatter(-1, choice[..., None], 1.0)
    return hard + (probs - probs.detach())


def listen(h: Tensor, new_h: Tensor, w: CommunicationWeights) -> tuple[Tensor, Tensor]:
    """Who reads whom [B, heads, F, F], and what each object file hears [B, F, heads * V']."""
    q = torch.einsum("bkd,hed->bhke", h, w.query)
    kappa = torch.einsum("bkd,hed->bhke", new_h, w.key)
    v = torch.einsum("bkd,hvd->bhkv", new_h, w.value)
    s = (q @ kappa.mT / math.sqrt(kappa.shape[-1])).softmax(-1)  # over those who are read, k'
    return s, (s @ v).transpose(1, 2).flatten(2)


def join(new_h: Tensor, heard: Tensor, w: CommunicationWeights, mask: Tensor | None) -> Tensor:
    """Adds what was heard: as the paper has it, or bounded and gated."""
    message = heard @ w.out.T
    if mask is not None:
        message = message * mask
    if w.gate is None or w.gate_bias is None:
        return new_h + message
    gate = torch.sigmoid(heard @ w.gate.T + w.gate_bias)
    return new_h + gate * (torch.tanh(message) - new_h)
