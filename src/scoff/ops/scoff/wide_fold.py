"""Weights of the `wide` backend that are multiplied with each other before they meet the state."""

import math

import torch
from torch import Tensor

from scoff.ops.scoff.fused_fold import product
from scoff.ops.scoff.replay import empty, empty_like
from scoff.ops.scoff.wide_layout import Folded, Layout, Prepared


def fold(p: Prepared, z: Layout) -> Folded:
    # q~ . kappa~ = (W~^eT W~^q h) . h~: the query in the space of the state
    schema_query = p.schema_key.T @ p.schema_query
    weight_ih = p.weight_ih if p.value is None else p.weight_ih @ p.value
    comm_key = comm_say = None
    if p.comm_key is not None:
        comm_key = p.comm_key.flatten(0, 1) / math.sqrt(z.comm_key)
    if z.says:
        said, value = by_head(p, z)
        comm_say = (said @ value).unflatten(1, (z.says, z.size))

    def by_gate(x: Tensor) -> Tensor:
        return x.unflatten(1, (z.gates, z.size))

    return Folded(
        by_gate(weight_ih),
        by_gate(p.weight_hh),
        None if p.bias_ih is None else by_gate(p.bias_ih),
        None if p.bias_hh is None else by_gate(p.bias_hh),
        schema_query,
        None if p.input_query is None else p.input_query.flatten(0, 1),
        None if p.comm_query is None else p.comm_query.flatten(0, 1),
        comm_key,
        comm_say,
        p.comm_bias,
    )


def by_head(p: Prepared, z: Layout) -> tuple[Tensor, Tensor]:
    """What is made of values [H, says * D, U], and the values [H, U, D]; of one object file all
    heads are one: they say what it tells itself."""
    assert p.comm_out is not None
    assert p.comm_value is not None
    said = p.comm_out if p.comm_gate is None else torch.cat([p.comm_out, p.comm_gate])
    value = p.comm_value.view(z.comm_heads, -1, z.size)
    return said.unflatten(1, value.shape[:2]).transpose(0, 1), value


def unfold(p: Prepared, z: Layout, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of the weights, from those of what `fold` made of them"""
    d_query, d_weight_ih = found["schema_query"], found["weight_ih"].flatten(1, 2)
    raw = {
        "schema_query": product(p.schema_key, d_query),
        "schema_key": product(p.schema_query, d_query.T),
    }
    if p.value is not None:
        rows = d_weight_ih.flatten(0, 1)
        raw["weight_ih"] = product(rows, p.value.T)
        raw["value"] = product(p.weight_ih.flatten(0, 1).T, rows)
    if "comm_key" in found:
        raw["comm_key"] = found["comm_key"].div_(math.sqrt(z.comm_key))
    if z.says:
        assert p.comm_out is not None
        d_say = found.pop("comm_say").flatten(1, 2)  # [H, says * D, D]
        said, value = by_head(p, z)
        d_said = torch.bmm(d_say, value.mT, out=empty(d_say, *said.shape))
        d_said = d_said.transpose(0, 1).flatten(1)
        raw["comm_out"] = empty_like(p.comm_out).copy_(d_said[: z.size])
        if p.comm_gate is not None:
            raw["comm_gate"] = empty_like(p.comm_gate).copy_(d_said[z.size :])
        d_value = empty(value, *value.shape)
        raw["comm_value"] = torch.bmm(said.mT, d_say, out=d_value)
    return {name: x.view(getattr(p, name).shape) for name, x in (found | raw).items()}
