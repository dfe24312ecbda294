"""What every backend of the SCOFF recurrence takes and returns.

Axis letters, here and in the backends: T steps, B sequences, P input positions, C input features,
F object files, D size of one object file, S schemata, Z tensors that make up a state (1: h; 2: h
and c).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

CellName = Literal["gru", "lstm"]
Communication = Literal["gated", "residual"]
Reduction = Literal["sum", "mean"]

GATES = {"gru": 3, "lstm": 4}  # r z n; i f g o: the order of torch's own cells


def epsilon(dtype: torch.dtype) -> float:
    """Keeps the weighted mean finite where an object file attends to nothing."""
    return max(1e-8, torch.finfo(dtype).tiny)


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def returns(count: int) -> str:
    """That many tensors, in an operator's schema"""
    return "(" + ", ".join(["Tensor"] * count) + ")"


class Weights(NamedTuple):
    """Parameters of one layer. None of them belongs to a slot."""

    input_query: Tensor  # W^q  [heads, K, D]
    input_key: Tensor  # W^e  [heads, K, C]
    input_value: Tensor | None  # W^v  [V, C]; None: the values are the inputs
    weight_ih: Tensor  # theta_j  [S, gates * D, V]
    weight_hh: Tensor  # theta_j  [S, gates * D, D]
    bias_ih: Tensor | None  # theta_j  [S, gates * D]
    bias_hh: Tensor | None  # theta_j  [S, gates * D]
    schema_query: Tensor  # W~^q  [E, D]
    schema_key: Tensor  # W~^e  [E, D]
    communication: "CommunicationWeights | None"


class CommunicationWeights(NamedTuple):
    query: Tensor  # W^^q  [heads, K', D]
    key: Tensor  # W^^e  [heads, K', D]
    value: Tensor  # W^^v  [heads, V', D]
    out: Tensor  # joins the heads  [D, heads * V']
    gate: Tensor | None  # [D, heads * V']; None: the paper's plain residual
    gate_bias: Tensor | None  # [D]


class Options(NamedTuple):
    """What is not a tensor."""

    cell: CellName
    active: int  # object files that are updated at each step
    reduction: Reduction
    temperature: float
    detach_input_query: bool = False  # errors are not led back to the state that asks


class Inputs(NamedTuple):
    """Everything else a run depends on: given these and the weights, it is a pure function."""

    x: Tensor  # [T, B, P, C]
    state: Tensor  # [Z, B, F, D]
    reset: Tensor | None = None  # [T, B] bool: start anew, from `restart`, before this step
    restart: Tensor | None = None  # [Z, B, F, D]
    valid: Tensor | None = None  # [T, B] bool: False is padding, where the state stands still
    noise: Tensor | None = None  # [T, B, F, S] Gumbel noise; None: the plain argmax
    value_mask: Tensor | None = None  # [T, B, P, V] dropout on the input values, scaled
    comm_mask: Tensor | None = None  # [T, B, F, D] dropout on the messages, scaled
    choice: Tensor | None = None  # [T, B, F] the schemata to take; None: those of most merit


class Run(NamedTuple):
    """What happened. All but `schema` and `active` carry gradients."""

    output: Tensor  # [T, B, F, D]
    state: Tensor  # [Z, B, F, D]
    input_attention: Tensor  # [T, B, F, heads, P], softmax over F
    schema_probs: Tensor  # [T, B, F, S]
    schema: Tensor  # [T, B, F] int64
    active: Tensor  # [T, B, F] bool
    communication: Tensor  # [T, B, heads, F, F], reader before read; no heads without communication
