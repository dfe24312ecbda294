"""The backward pass of the `fused` backend, and the sums over steps that it leaves."""

import torch
from torch import Tensor

from scoff.ops.scoff.fused_fold import unfold
from scoff.ops.scoff.fused_launch import (
    again_of,
    allocate_halves,
    allocate_kept,
    backward_of,
    describe,
    launch_share,
    launch_weigh,
)
from scoff.ops.scoff.fused_layout import Plan, chunks_of, plan_for
from scoff.ops.scoff.fused_types import Halves, Kept, Prepared, Ran, Settings, Sizes, exact
from scoff.ops.scoff.precision import multiplies_halves, multiply
from scoff.ops.scoff.replay import empty, empty_like
from scoff.ops.scoff.streams import pipeline

MANY_ROWS = 16384  # of what is kept: fewer are multiplied in one piece


def run_back(
    p: Prepared,
    settings: Settings,
    coldness: Tensor,
    packed: Tensor,
    ran: Ran,
    d_output: Tensor,
    d_final: Tensor | None,
    given: Kept | None,
) -> dict[str, Tensor]:
    """The gradients of what is differentiable in `p`, by name. What is given of the last steps is
    overwritten."""
    plan = plan_for(p, settings)
    z, at = plan.sizes, plan.fields
    steps, files = p.keys.shape[0], ran.choice[0].numel()
    chunks = chunks_of(p, plan)
    ends = range(steps, 0, -chunks.steps)
    parts = [range(max(0, end - chunks.steps), end) for end in ends]
    times = min(chunks.times, len(parts))
    kept = [given] if given else [allocate_kept(p, plan, chunks.steps) for _ in range(times)]
    d_state = empty_like(p.state, exact(p.state))
    d_state = d_state.zero_() if d_final is None else d_state.copy_(d_final)
    d_restart = None if p.restart is None else empty_like(d_state).zero_()
    d_keys = input_gradient(p.keys, z)
    d_values = None if p.values is None else input_gradient(p.values, z)
    upright, turned = (describe(plan, packed, turned) for turned in (False, True))
    like_rows = kept[0].rows
    sums = empty(like_rows, at.right, at.logits - at.right).zero_()
    d_value = None
    d_z: list[Tensor | None] = [None for _ in kept]
    if p.value is not None and not plan.folds:
        d_value = empty(like_rows, z.heads, z.value // z.heads, z.seen).zero_()
        d_z = [empty(like_rows, len(like_rows), z.value) for _ in kept]
    half = plan.packed == torch.float16 and chunks.steps * files > MANY_ROWS
    half = half and multiplies_halves(p.state)
    halves = [allocate_halves(k.rows, plan) if half else None for k in kept]
    gradients = (d_output, d_state, d_restart, d_keys, d_values)
    again = [again_of(p, plan, upright, ran, k) for k in kept]
    back = [
        backward_of(p, plan, coldness, turned, ran, k, x, *gradients, d)
        for k, x, d in zip(kept, halves, d_z, strict=True)
    ]

    def prepare(n: int) -> None:
        if n > 0 or given is None:
            again[n % len(kept)](parts[n])

    def run(n: int) -> None:
        back[n % len(kept)](parts[n])

    def finish(n: int) -> None:
        rows = kept[n % len(kept)].rows[: len(parts[n]) * files]
        add_products(sums, rows, halves[n % len(kept)], plan)
        if d_value is not None and (d := d_z[n % len(kept)]) is not None:
            seen = rows[:, at.seen : at.seen + z.heads * z.seen].unflatten(1, (z.heads, z.seen))
            by_head = d[: len(rows)].unflatten(1, (z.heads, -1)).permute(1, 2, 0)
            d_value.baddbmm_(by_head, seen.transpose(0, 1))

    if len(kept) == 2:
        pipeline(p.state.device, len(parts), prepare, run, finish)
    else:
        for n in range(len(parts)):
            prepare(n)
            run(n)
            finish(n)
    found = weight_gradients(sums, half, p, plan)
    if d_value is not None:
        found["value"] = d_value
    others = {"keys": d_keys, "values": d_values, "state": d_state, "restart": d_restart}
    found |= {name: x for name, x in others.items() if x is not None}
    return {name: like(x, getattr(p, name)) for name, x in found.items()}


def like(x: Tensor, other: Tensor) -> Tensor:
    if x.dtype != other.dtype:
        x = empty_like(x, other.dtype).copy_(x)
    return x if x.shape == other.shape else x.reshape(other.shape)


def input_gradient(x: Tensor, z: Sizes) -> Tensor:
    """Space for it; if it is a sum over heads, with all digits"""
    shared = z.heads > 1 and x.shape[3] in (z.key, z.seen)
    return empty_like(x, exact(x) if shared else x.dtype)


def add_products(sums: Tensor, rows: Tensor, halves: Halves | None, plan: Plan) -> None:
    """What is left times what is right: in one product, or, if there are many rows, only those of
    which gradients are made. Those of gates may be of 16 bits, and have scales then."""
    at, first = plan.fields, 0
    if halves is not None:
        _, right, scale, product = halves
        launch_weigh(plan, rows, halves)
        multiply(rows.view(torch.float16)[:, : len(product)].T, right[: len(rows)], product)
        sums[: len(product), : product.shape[1]].addcmul_(product, scale)
        first = at.query
    factors = [(first, at.right, at.right, at.logits)]
    if len(rows) > MANY_ROWS:
        factors = [(first, at.read, at.right, at.updated)]
        if at.read < at.right:
            factors.append((at.read, at.message, at.updated, at.heard))
            factors.append((at.message, at.right, at.updated - 8, at.logits))
    for top, bottom, left, right in factors:
        part = sums[top:bottom, left - at.right : right - at.right]
        part.addmm_(rows[:, top:bottom].T, rows[:, left:right])


def weight_gradients(sums: Tensor, pairs: bool, p: Prepared, plan: Plan) -> dict[str, Tensor]:
    """Out of all products of what is left and what is right in `Fields`"""
    z, gates = plan.sizes, p.weight_hh.shape[:2]
    folded = {
        "query": empty(sums, z.size, z.size),
        "ask": empty(sums, z.heads, z.key, z.size),
        "weight_ih": empty(sums, *gates, z.value),
    }
    names = ("weight_hh", "bias_ih", "bias_hh", "comm_query", "comm_key", "comm_value")
    names += ("comm_out", "comm_gate", "comm_bias")
    others = {n: empty_like(x) for n in names if (x := getattr(p, n)) is not None}
    launch_share(plan, sums, pairs, [*folded.values(), *(others.get(n) for n in names)])
    return unfold(p, plan.folds, *folded.values()) | others
