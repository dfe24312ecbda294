"""The backward pass of the `wide` backend."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.kernels.blocks import WEIGHT_SCALE
from scoff.ops.scoff.precision import multiply
from scoff.ops.scoff.replay import empty, empty_like
from scoff.ops.scoff.wide_fold import unfold
from scoff.ops.scoff.wide_forward import (
    active_of,
    inner_gates,
)
from scoff.ops.scoff.wide_launch import (
    launch_look,
    launch_look_back,
    launch_talk_back,
    launch_update_back,
    launch_weigh,
)
from scoff.ops.scoff.wide_layout import (
    Layout,
    Left,
    Matrices,
    Prepared,
    Settings,
    chunks,
    gradients_of,
    layout_of,
    longest_chunk,
    reset_after,
    with_ones,
)


class Kept(NamedTuple):
    """What happened at N steps; gradients take its place."""

    work: Tensor  # [N, rows, work]
    message: Tensor | None  # [N, rows, told]; None: no communication
    seen: Tensor | None  # [N, rows, read]; None: one object file
    attention: Tensor | None  # [N, rows, A, P]; likewise

    def first(self, steps: int) -> "Kept":
        return Kept._make(None if x is None else x[:steps] for x in self)

    def gradients(self, z: Layout) -> tuple[Tensor, Tensor | None]:
        """Those of `work` and `message`: in their place, of 16 bits in the first half of a row"""
        if not z.half:
            return self.work, self.message
        message = None if self.message is None else halves(self.message)
        return halves(self.work), message


def halves(x: Tensor) -> Tensor:
    return x.view(torch.float16)[..., : x.shape[-1]]


class Through(NamedTuple):
    """Gradients of 16 bits that went through weights, and what undoes the scales of all of them.

    Of states, to which they are added at the step before; and of what is told, added at once."""

    states: Tensor  # [rows, state]
    told: Tensor  # [rows, state]
    undo: Tensor  # [T + 1, rows]
    undo_told: Tensor  # [T, rows]
    # how much a row counts in sums over rows at most: so far, and before this chunk of steps
    largest: Tensor  # [2, 1]
    largest_told: Tensor  # [2, 1]

    @classmethod
    def empty(cls, p: Prepared, z: Layout) -> "Through":
        new = functools.partial(empty, p.state)
        found = cls(
            new(z.rows, z.state).zero_(),
            new(z.rows if z.says else 0, z.state),
            new(z.steps + 1, z.rows),
            new(z.steps if z.says else 0, z.rows),
            new(2, 1).zero_(),
            new(2, 1).zero_(),
        )
        found.undo[-1] = 0  # nothing comes from behind the last step
        return found

    def scales(self) -> tuple[Tensor, Tensor]:
        """What is left to undo of sums: those of weights, and one that all rows have"""
        return self.largest[0] * WEIGHT_SCALE.value, self.largest_told[0] * WEIGHT_SCALE.value


class Pass(NamedTuple):
    """What all chunks of steps have in common"""

    p: Prepared
    z: Layout
    settings: Settings
    left: Left
    turned: Matrices  # tensor cores take both factors along what is summed over
    d_output: Tensor
    d_h: list[Tensor]  # of T + 1 steps [rows, state]
    d_c: list[Tensor] | list[None]
    coldness: Tensor  # [1] one over the temperature
    d_keys: Tensor | None
    d_values: Tensor
    reset: Tensor | None  # as `reset_after` has it
    through: Through | None


def run_back(
    p: Prepared,
    settings: Settings,
    left: Left,
    fresh: bool,
    coldness: Tensor,
    d_output: Tensor,
    d_final: Tensor | None,
) -> dict[str, Tensor]:
    """The gradients of what is differentiable in `p`, by name. `fresh`: what `left` has of the last
    chunk of steps is there still; its place is taken in any case."""
    z = layout_of(p, settings)
    # of each step only where something depends on it; otherwise two take turns
    slots = 2 if p.restart is None else z.steps + 1
    d_before = empty(p.state, len(p.state), slots, z.rows, z.state)
    d_before[:, z.steps % slots, :, : z.size] = 0 if d_final is None else d_final.flatten(1, 2)
    d_h, *d_c = ([x[t % slots] for t in range(z.steps + 1)] for x in map(torch.unbind, d_before))
    back = Pass(
        p,
        z,
        settings,
        left,
        turned=left.matrices if z.half else Matrices._make(by_columns(x) for x in left.matrices),
        d_output=d_output,
        d_h=d_h,
        d_c=d_c[0] if d_c else [None] * len(d_h),
        coldness=coldness,
        d_keys=None if p.keys is None else empty_like(p.keys),
        d_values=empty_like(p.values),
        reset=reset_after(p),
        through=Through.empty(p, z) if z.half else None,
    )
    sums = Matrices.empty(p.state, z)
    kept = allocate_kept(p, z, left)
    parts = chunks(z.steps, len(kept.work))
    for part in reversed(parts):
        last = part.stop == z.steps
        here = kept.first(part.stop - part.start)
        if not (z.alone and fresh and last):
            recompute(back, here, part)
        steps_back(back, here, part)
        add_products(back, sums, here, part, last)
        if z.alone:
            values_back(back, here, part)
    if back.through is not None:
        d_h[0].addcmul_(back.through.states, back.through.undo[0, :, None])
    scales = None if back.through is None else back.through.scales()
    found = unfold(p, z, gradients_of(sums, p, z, scales)) | {"values": back.d_values}
    d_state = empty_like(p.state)
    d_state.flatten(1, 2).copy_(d_before[:, 0, :, : z.size])
    if p.reset is not None and p.restart is not None:
        d_each = d_before[:, :-1, :, : z.size].unflatten(2, (z.batch, z.files))
        d_again = torch.where(p.reset[..., None, None], d_each, 0)
        found["restart"] = torch.sum(d_again, 1, out=empty_like(p.restart))
        d_state.masked_fill_(p.reset[0, :, None, None], 0)
    elif p.restart is not None:
        found["restart"] = empty_like(p.restart).zero_()
    if back.d_keys is not None:
        found["keys"] = back.d_keys
    return found | {"state": d_state}


def by_columns(x: Tensor) -> Tensor:
    """The same matrix, column after column"""
    return empty(x, x.shape[1], x.shape[0]).copy_(x.T).T


def allocate_kept(p: Prepared, z: Layout, left: Left) -> Kept:
    if z.alone:
        return Kept(left.work, left.message if z.says else None, None, None)
    new, steps = functools.partial(empty, p.state), longest_chunk(p, z)
    return Kept(
        work=new(steps, z.rows, z.work),
        message=new(steps, z.rows, z.told) if z.says else None,
        seen=with_ones(new(steps, z.rows, z.read), z.value),
        attention=new(steps, z.rows, z.heads, z.positions),
    )


def recompute(back: Pass, kept: Kept, part: slice) -> None:
    """Fills `kept`."""
    p, z, settings, left, *_ = back
    before, work = left.factor[part], kept.work.flatten(0, 1)
    multiply(before.flatten(0, 1), left.hidden.T, work[:, z.inner :])
    if kept.seen is None or p.keys is None:
        inner_gates(z, left.matrices, before, kept.work)
    else:
        look = launch_look(z, settings, len(work) // z.files, z.work)
        asked = work[:, z.asked :]
        look(asked, p.keys[part], p.values[part], kept.attention, kept.seen, None, 0)
        seen = kept.seen.flatten(0, 1)
        if z.inner > 0:  # the GRU's n, to which the state adds nothing
            torch.mm(seen, left.given[: z.inner].T, out=work[:, : z.inner])
        work[:, z.inner : z.given].addmm_(seen, left.given[z.inner :].T)
    if kept.message is not None:
        updated = left.updated_factor[part].flatten(0, 1)
        multiply(updated, left.told.T, kept.message.flatten(0, 1))


def steps_back(back: Pass, kept: Kept, part: slice) -> None:
    """Runs a chunk of steps back: puts gradients in the place of `kept`, and into `d_h`, `d_c`."""
    p, z, settings, left, turned, d_output, d_h, d_c, *_, through = back
    update_back = launch_update_back(z, settings)
    end = z.asked if settings.detach else z.work  # of what is led back to the state
    d_work, _ = kept.gradients(z)
    work, hidden = kept.work.unbind(0), d_work[..., z.inner : end].unbind(0)
    h = left.before.unbind(0)
    c = left.cells.unbind(0) if settings.lstm else [None] * len(h)
    given = (left.choice, p.noise, active_of(left, z, settings), p.valid, back.reset)
    look_back = None if kept.seen is None else prepare_look_back(back, kept, part)
    talk_back = None if kept.message is None else prepare_talk_back(back, kept, part)
    hidden_t = turned.hidden[: end - z.inner, : z.state]
    halves, arrived = None, (None, None)
    if through is not None:
        halves = d_work.unbind(0)
        arrived = (through.states, through.undo)
        if talk_back is not None:
            arrived = (through.told, through.undo_told)
    for i in reversed(range(len(work))):
        t = part.start + i
        if talk_back is None:
            d_new, d_out = d_h[t + 1], d_output
        else:
            d_new, d_out = talk_back(i), None
        gradients = (d_new, d_c[t + 1], d_out, d_h[t], d_c[t])
        scaled = (None, None, None, None)
        if through is not None and halves is not None:
            scaled = (left.scales, halves[i], through.undo, through.largest)
        rest = (*scaled, *arrived, back.coldness, t)
        update_back(work[i], h[t], c[t], *gradients, *given, *rest)
        if look_back is not None:
            look_back(i)
        if through is None:
            multiply(hidden[i], hidden_t, d_h[t], add=True)
        else:
            multiply(hidden[i], hidden_t, through.states)


def prepare_talk_back(back: Pass, kept: Kept, part: slice) -> Callable[[int], Tensor]:
    """Step 4 of a step, back: to the gradient of h after Step 3"""
    p, z, settings, left, turned, d_output, d_h, *_, through = back
    _, d_told = kept.gradients(z)
    assert kept.message is not None
    assert d_told is not None
    told_t, d_told = turned.told, d_told.unbind(0)
    told, updated = kept.message.unbind(0), left.updated[part].unbind(0)
    d_updated = empty(p.state, z.rows, z.state)
    # one object file is told its own message, whose gradient takes its place right away
    asked, attention, d_message = [None] * len(told), None, told
    if not z.alone:
        asked = kept.work[..., z.comm_asked :].unbind(0)
        attention = empty(p.state, z.rows, z.comm_heads, z.files)
        d_message = [empty(p.state, z.rows, z.message)] * len(told)
    rest = (active_of(left, z, settings), p.valid, p.comm_mask, back.reset)
    launch = launch_talk_back(z)

    def talk_back(i: int) -> Tensor:
        t = part.start + i
        gradients = (d_h[t + 1], d_output, d_updated, d_message[i])
        scaled = (None, None, None, None, None, None)
        if through is not None:
            leaves = (d_told[i], through.undo_told, through.largest_told)
            scaled = (left.updated_scales, *leaves, through.states, through.undo)
        launch(asked[i], told[i], attention, updated[i], *gradients, *rest, *scaled, t)
        if through is None:
            multiply(told[i], told_t, d_updated, add=True)
        else:
            multiply(d_told[i], told_t, through.told)
        return d_updated

    return talk_back


def prepare_look_back(back: Pass, kept: Kept, part: slice) -> Callable[[int], None]:
    """Step 2 of a step, back: to the gradients of what was asked, of keys and of values"""
    p, z, settings, _, turned, *_, d_keys, d_values, _, _ = back
    assert kept.attention is not None
    assert kept.seen is not None
    asked, given = kept.work[..., z.asked :].unbind(0), kept.work[..., : z.given].unbind(0)
    attention, seen = kept.attention.unbind(0), kept.seen.unbind(0)
    d_seen = empty(p.state, z.rows, z.read)
    launch = launch_look_back(z, settings)

    def look_back(i: int) -> None:
        torch.mm(given[i], turned.given, out=d_seen)
        gradients = (d_seen, d_keys, d_values)
        launch(asked[i], p.keys, p.values, attention[i], seen[i], *gradients, part.start + i)

    return look_back


def values_back(back: Pass, kept: Kept, part: slice) -> None:
    """To the gradient of what one object file has read"""
    z, turned = back.z, back.turned
    work = kept.gradients(z)[0].flatten(0, 1)
    d_values = back.d_values[part].view(-1, z.value)
    both = turned.hidden[: z.given - z.inner, z.state : z.state + z.value]
    multiply(work[:, z.inner : z.given], both, d_values)
    if z.inner > 0:
        multiply(work[:, : z.inner], turned.given[:, : z.value], d_values, add=True)
    if back.through is not None:
        d_values.mul_(back.through.undo[part].view(-1, 1))


def add_products(back: Pass, sums: Matrices, kept: Kept, part: slice, last: bool) -> None:
    """Adds the gradients of the weights: one large product each. The last chunk's are the first."""
    z, left, through = back.z, back.left, back.through
    work, message = kept.gradients(z)
    work, before = (x.flatten(0, 1) for x in (work, left.factor[part]))
    ratio = None
    if through is not None:
        before, ratio = weighed(before, through.undo[part], left.scales[part], through.largest)
    seen = before[:, z.state :] if kept.seen is None else kept.seen.flatten(0, 1)
    add_product(sums.hidden, work[:, z.inner :].T, before, ratio, last)
    add_product(sums.given, work[:, : len(sums.given)].T, seen, ratio, last)
    if message is not None:
        updated, ratio = left.updated_factor[part].flatten(0, 1), None
        if through is not None:
            undo = through.undo_told[part]
            scales = left.updated_scales[part]
            updated, ratio = weighed(updated, undo, scales, through.largest_told)
        add_product(sums.told, message.flatten(0, 1).T, updated, ratio, last)


def weighed(factor: Tensor, undo: Tensor, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """For sums over rows of 16 bits: the factor without scales but one, and by what to multiply the
    sums so far, that it may be theirs"""
    out = empty_like(factor)
    launch_weigh(*factor.shape)(factor, undo, scales, largest, out)
    ratio = largest[1] / largest[0]
    largest[1] = largest[0]
    return out, ratio


def add_product(total: Tensor, a: Tensor, b: Tensor, ratio: Tensor | None, first: bool) -> None:
    if ratio is not None and not first:
        total.mul_(ratio)
    multiply(a, b, total, add=not first)
