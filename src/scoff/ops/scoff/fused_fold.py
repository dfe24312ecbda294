"""Products of two weights, which the kernels of the `fused` backend use as one."""

import math

import torch
from torch import Tensor

from scoff.ops.scoff.fused_types import Prepared, exact
from scoff.ops.scoff.replay import empty


def fold(p: Prepared, folds: bool) -> tuple[Tensor, Tensor, Tensor]:
    """From the state to what is asked of a candidate [D, D] and by each head of a position
    [A, C, D], and from what is read to the gates [S, gates * D, V]."""
    whole = exact(p.state)
    # q~ . kappa~ = (W~^eT W~^q h) . h~
    query = p.schema_key.T.to(whole) @ p.schema_query.to(whole)
    # q . kappa = (W^eT W^q h) . a: what is asked, in the space of the input
    ask = p.input_query
    if p.input_key is not None:
        ask = scaled_bmm(p.input_key.mT.to(whole), p.input_query.to(whole), p.input_key)
    weight_ih = p.weight_ih
    if p.value is not None and folds:
        weight_ih = weight_ih.to(whole) @ p.value.to(whole)
    return query, ask, weight_ih


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=empty(a, len(a), b.shape[1]))


def scaled_bmm(a: Tensor, b: Tensor, key: Tensor) -> Tensor:
    """By what the attention has below its scores: the root of a key's size"""
    out = empty(a, *a.shape[:2], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0, alpha=1 / math.sqrt(key.shape[1]), out=out)


def unfold(
    p: Prepared, folds: bool, d_query: Tensor, d_ask: Tensor, d_weight_ih: Tensor
) -> dict[str, Tensor]:
    """The gradients of what `fold` multiplied, from those of what it made"""
    found = {
        "schema_query": product(p.schema_key.to(d_query.dtype), d_query),
        "schema_key": product(p.schema_query.to(d_query.dtype), d_query.T),
        "input_query": d_ask,
        "weight_ih": d_weight_ih,
    }
    if p.input_key is not None:
        found["input_query"] = scaled_bmm(p.input_key.to(d_ask.dtype), d_ask, p.input_key)
        found["input_key"] = scaled_bmm(p.input_query.to(d_ask.dtype), d_ask.mT, p.input_key)
    if p.value is not None and folds:
        rows = d_weight_ih.flatten(0, 1)
        # gate by gate: a single sum over them all would have twice the rounding error
        by_gate = d_weight_ih.view(-1, len(d_query), rows.shape[1])
        left = p.weight_ih.reshape(*by_gate.shape[:2], -1).mT.to(rows.dtype)
        parts = torch.bmm(left, by_gate, out=empty(rows, *left.shape[:2], rows.shape[1]))
        found["value"] = torch.sum(parts, 0, out=empty(rows, *parts.shape[1:]))
        found["weight_ih"] = product(rows, p.value.T.to(rows.dtype)).view_as(p.weight_ih)
    return found
