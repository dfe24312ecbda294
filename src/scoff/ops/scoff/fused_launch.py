"""Launching the kernels of the `fused` backend, and the memory that they fill."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.ops.scoff.fused_fold import fold
from scoff.ops.scoff.fused_layout import PACKED_AT_ONCE, Plan, cut, packing_of, turns_of
from scoff.ops.scoff.fused_types import (
    Halves,
    Kept,
    Prepared,
    Ran,
    Settings,
    exact,
    power_of_two,
)
from scoff.ops.scoff.kernels import (
    backward_kernel,
    forward_kernel,
    measure_kernel,
    pack_kernel,
    share_kernel,
    weigh_kernel,
)
from scoff.ops.scoff.launch import Bound, launch
from scoff.ops.scoff.replay import empty, empty_like

WEIGHED_AT_ONCE = 16  # rows


# --- the weights


def allocate_packed(p: Prepared, plan: Plan) -> Tensor:
    return empty(p.state, sum(packing_of(plan).numels), dtype=plan.packed)


def pack(p: Prepared, plan: Plan, out: Tensor) -> None:
    weights = [*fold(p, plan.folds), p.weight_hh]
    talk = [p.comm_query, p.comm_key, p.comm_value, p.comm_out, p.comm_gate]
    arguments = [*weights, *talk, out]
    launch(pack_kernel, out.numel() // PACKED_AT_ONCE, arguments, packing_of(plan).constants)


def launch_weigh(plan: Plan, rows: Tensor, halves: Halves) -> None:
    """Fills the other factor of gradients that have such scales, and the scales of the product."""
    powers, right, scale, _ = halves
    count, blocks = len(rows), -(-len(rows) // WEIGHED_AT_ONCE)
    shape, right_shape = weighing_of(plan, right.shape[1])
    scale.zero_()
    launch(measure_kernel, blocks, [rows, powers, scale, count], shape)
    launch(weigh_kernel, blocks, [rows, powers, scale, right, count], right_shape)


@functools.cache
def weighing_of(plan: Plan, stride: int) -> tuple[dict[str, Any], dict[str, Any]]:
    z, at = plan.sizes, plan.fields
    before = {"KEPT": at.end, "RIGHT": at.right, "WIDTH": z.size + z.value + 1}
    after = {"PADDED": power_of_two(stride), "BLOCK": WEIGHED_AT_ONCE}
    return {**before, **after}, {**before, "STRIDE": stride, **after}


def launch_share(plan: Plan, sums: Tensor, pairs: bool, gradients: list[Tensor | None]) -> None:
    """Fills the gradients of what was packed, and of the biases, from the sums."""
    blocks = sum(-(-x.numel() // PACKED_AT_ONCE) for x in gradients if x is not None)
    launch(share_kernel, blocks, [sums, *gradients], sharing_of(plan, pairs))


@functools.cache
def sharing_of(plan: Plan, pairs: bool) -> dict[str, Any]:
    z, at = plan.sizes, plan.fields
    return {
        "SD": z.schemata * z.size,
        "D": z.size,
        "V": z.value,
        "AC": z.heads * z.key,
        "HE": z.comm_heads * z.comm_key,
        "HU": z.heard,
        "GATES": 4 if plan.settings.lstm else 3,
        "PAIRS": pairs,
        "QUERY": at.query,
        "COMM_QUERY": at.comm_query,
        "ASK": at.ask,
        "READ": at.read,
        "MESSAGE": at.message,
        "UPDATED": at.updated - at.right,
        "HEARD": at.heard - at.right,
        "WIDTH": at.logits - at.right,
        "BLOCK": PACKED_AT_ONCE,
    }


Described = list[TensorDescriptor | None]


def describe(plan: Plan, packed: Tensor, turned: bool) -> Described:
    """The weights, or the transposed weights"""
    stacks, numels, _ = packing_of(plan)
    kinds = slice(len(stacks) // 2, None) if turned else slice(len(stacks) // 2)
    parts = packed.split(numels)[kinds]
    return [s.describe(x) for s, x in zip(stacks[kinds], parts, strict=True)]


# --- what the large kernels write, and their launches


def allocate_ran(p: Prepared, settings: Settings) -> Ran:
    t, (b, f, d) = p.keys.shape[0], p.state.shape[1:]
    whole = exact(p.state)
    return Ran(
        output=empty(p.state, t, b, f, d, dtype=whole),
        final=empty_like(p.state, whole),
        cells=empty(p.state, t, b, f, d if settings.lstm else 0, dtype=whole),
        choice=empty(p.state, t, b, f, dtype=torch.int64),
        active=empty(p.state, t, b, f, dtype=torch.bool),
    )


def allocate_kept(p: Prepared, plan: Plan, steps: int) -> Kept:
    rows = steps * p.state[0, ..., 0].numel()

    def new(*shape: int) -> Tensor:
        return empty(p.keys, *shape, dtype=exact(p.keys))

    return Kept(new(rows, plan.fields.end), new(rows, plan.sizes.heads, plan.sizes.positions))


def allocate_halves(rows: Tensor, plan: Plan) -> Halves:
    z, at = plan.sizes, plan.fields
    return Halves(
        powers=empty(rows, len(rows)),
        right=empty(rows, len(rows), at.updated - at.right, dtype=torch.float16),
        scale=empty(rows, at.updated - at.right),
        product=empty(rows, z.schemata * 4 * z.size, at.updated - at.right),
    )


def arguments_of(
    p: Prepared, plan: Plan, weights: Described, choice: Tensor | None, active: Tensor | None
) -> list[Any]:
    """What the forward kernel reads"""
    return [
        p.keys,
        p.keys if p.values is None else p.values,
        p.state,
        p.restart,
        p.reset,
        p.valid,
        p.noise,
        p.comm_mask,
        choice,
        active,
        None if plan.folds else p.value,
        *weights[:3],
        p.bias_ih,
        p.bias_hh,
        *weights[3:],
        p.comm_bias,
    ]


def launch_forward(
    p: Prepared, plan: Plan, weights: Described, ran: Ran, kept: Kept | None
) -> None:
    """Fills `ran`, and of the last steps `kept`."""
    steps, batch = p.keys.shape[:2]
    programs, shape = cut(plan, "forward", batch, p.state.device)
    last = 0 if kept is None else len(kept.rows) // ran.choice[0].numel()

    def run(part: range, start: Tensor, into: Kept | None) -> None:
        arguments = [
            *arguments_of(p._replace(state=start), plan, weights, p.choice, None),
            ran.output,
            ran.cells if plan.settings.lstm else None,
            ran.final,
            ran.choice,
            ran.active,
            *((None, None) if into is None else into),
            *(None, None, batch, len(part), batch, part.start * batch),
        ]
        launch(forward_kernel, programs, arguments, shape)

    if last < steps:
        run(range(steps - last), p.state, None)
    if kept is not None:
        run(range(steps - last, steps), ran.final if last < steps else p.state, kept)


def again_of(
    p: Prepared, plan: Plan, weights: Described, ran: Ran, kept: Kept
) -> Callable[[range], None]:
    """Fills `kept`, of some steps, all at once: choices, who was active and states are known."""
    each = p.keys.shape[1]
    arguments = [
        *arguments_of(p, plan, weights, ran.choice, ran.active),
        *(None, None, None, None, None),
        *kept,
        ran.output,
        ran.cells if plan.settings.lstm else None,
        each,
    ]
    device = p.state.device
    _, shape = cut(plan, "recompute", each, device)  # it is the same for any number of steps
    bound = Bound(forward_kernel, arguments, shape)

    def again(steps: range) -> None:
        singles = len(steps) * each
        programs, _ = cut(plan, "recompute", singles, device)
        turns = turns_of(programs, device)
        bound(-(-programs // turns), turns, singles, steps.start * each)

    return again


def backward_of(
    p: Prepared,
    plan: Plan,
    coldness: Tensor,
    weights: Described,
    ran: Ran,
    kept: Kept,
    halves: Halves | None,
    d_output: Tensor,
    d_state: Tensor,
    d_restart: Tensor | None,
    d_keys: Tensor,
    d_values: Tensor | None,
    d_z: Tensor | None,
) -> Callable[[range], None]:
    """Puts gradients into the last three, and in the place of what was kept, those of gates perhaps
    in 16 bits; carries d_state back."""
    batch = p.keys.shape[1]
    programs, shape = cut(plan, "backward", batch, p.state.device)
    arguments = [
        p.keys,
        p.keys if p.values is None else p.values,
        p.reset,
        p.valid,
        p.comm_mask,
        None if plan.folds else p.value,
        *weights,
        p.state,
        p.restart,
        ran.output,
        ran.cells if plan.settings.lstm else None,
        ran.choice,
        ran.active,
        *kept,
        *((None, None) if halves is None else (kept.rows.view(torch.int32), halves.powers)),
        d_output,
        d_state,
        d_restart,
        d_keys,
        d_values,
        d_z,
        coldness,
        batch,
    ]
    bound = Bound(backward_kernel, arguments, shape)
    return lambda steps: bound(programs, len(steps), steps.start)
