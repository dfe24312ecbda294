"""The backward pass of the `wide` backend."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.fused_types import Ran
from scoff.ops.scoff.wide_forward import (
    active_of,
)
from scoff.ops.scoff.wide_launch import (
    launch_look,
    launch_look_back,
    launch_talk,
    launch_update,
    launch_update_back,
    talk_back_kernel,
)
from scoff.ops.scoff.wide_layout import (
    Layout,
    Matrices,
    Prepared,
    Settings,
    chunks,
    gradients_of,
    layout_of,
    matrices_of,
    reset_after,
    with_ones,
)


class Kept(NamedTuple):
    """What happened at N steps, computed again; gradients take its place."""

    work: Tensor  # [N, rows, work]
    before: Tensor  # [Z, N, rows, state] what the steps started from
    seen: Tensor  # [N, rows, read]
    attention: Tensor | None  # [N, rows, A, P]; None: one object file
    updated: Tensor | None  # [N, rows, state] h after Step 3; None: no communication
    told: Tensor | None  # [N, rows, told]

    def first(self, steps: int) -> "Kept":
        """Space for fewer steps, as if it had been allocated for them"""
        z, _, rows, width = self.before.shape
        before = self.before.flatten(0, 2)[: z * steps * rows].view(z, steps, rows, width)
        by_step = (None if x is None else x[:steps] for x in self._replace(before=before[0]))
        return Kept._make(by_step)._replace(before=before)


def allocate_kept(p: Prepared, z: Layout, steps: int) -> Kept:
    new = p.state.new_empty
    return Kept(
        work=new(steps, z.rows, z.work),
        before=with_ones(p.state, z.size, len(p.state), steps, z.rows),
        seen=with_ones(p.state, z.value, steps, z.rows),
        attention=new(steps, z.rows, z.heads, z.positions) if z.files > 1 else None,
        updated=with_ones(p.state, z.size, steps, z.rows) if z.says else None,
        told=new(steps, z.rows, z.told) if z.says else None,
    )


def run_back(
    p: Prepared, settings: Settings, ran: Ran, d_output: Tensor, d_final: Tensor
) -> dict[str, Tensor]:
    """The gradients of what is differentiable in `p`, by name."""
    z = layout_of(p, settings)
    weights = matrices_of(p, z, settings)
    # tensor cores take both factors along what is summed over
    turned = Matrices._make(None if x is None else x.T.contiguous().T for x in weights)
    sums = Matrices.zeros(p.state, z)
    parts = chunks(z, z.work + z.read + (2 + 2 * settings.lstm) * z.state + z.told, p.state)
    length = parts[0].stop
    kept = allocate_kept(p, z, length)
    d_before = p.state.new_empty(len(p.state), length + 1, z.rows, z.state)
    d_restart = None if p.restart is None else torch.zeros_like(p.restart)
    d_keys = None if p.keys is None else torch.empty_like(p.keys)
    d_values = torch.empty_like(p.values)
    later = d_final.flatten(1, 2)
    for part in reversed(parts):
        n = part.stop - part.start
        here = kept.first(n)
        recompute(p, z, settings, weights, ran, here, part)
        d_before[:, n, :, : z.size] = later
        steps_back(p, z, settings, turned, ran, here, part, d_output, d_before, d_keys, d_values)
        later = d_before[:, 0, :, : z.size]
        add_products(sums, here)
        if z.files == 1:
            d_seen = here.work[..., : z.given].flatten(0, 1) @ turned.given
            d_values[part] = d_seen[:, : z.value].view_as(d_values[part])
        if d_restart is not None and p.reset is not None:
            d_each = d_before[:, :n, :, : z.size].unflatten(2, (z.batch, z.files))
            d_restart += torch.where(p.reset[part, :, None, None], d_each, 0).sum(1)
    d_state = later.clone(memory_format=torch.contiguous_format).view_as(p.state)
    if p.reset is not None and p.restart is not None:
        d_state = torch.where(p.reset[0, :, None, None], 0, d_state)
    found = gradients_of(sums, p, z, settings)
    others = {"state": d_state, "restart": d_restart, "keys": d_keys, "values": d_values}
    others["unused"] = None if p.unused is None else torch.zeros_like(p.unused)
    return found | {name: x for name, x in others.items() if x is not None}


def fill_before(before: Tensor, p: Prepared, z: Layout, ran: Ran, part: slice) -> None:
    """What each of the steps started from"""
    for index, history in zip(range(len(before)), (ran.output, ran.cells), strict=False):
        out = before[index, ..., : z.size].unflatten(1, (z.batch, z.files))
        if part.start == 0:
            out[0] = p.state[index]
            out[1:] = history[: part.stop - 1]
        else:
            out.copy_(history[part.start - 1 : part.stop - 1])
        if p.reset is not None and p.restart is not None:
            out.copy_(torch.where(p.reset[part, :, None, None], p.restart[index], out))


def recompute(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
) -> None:
    """Fills `kept`."""
    fill_before(kept.before, p, z, ran, part)
    work, h, seen = (x.flatten(0, 1) for x in (kept.work, kept.before[0], kept.seen))
    torch.mm(h, weights.hidden.T, out=work[:, z.inner :])
    if p.keys is None:
        seen[:, : z.value] = p.values[part].flatten(0, 2)
    else:
        look = launch_look(z, settings, len(work) // z.files, z.work)
        asked = work[:, z.asked :]
        look(asked, p.keys[part], p.values[part], kept.attention, kept.seen, None, 0)
    if z.inner > 0:  # the GRU's n, to which the state adds nothing
        torch.mm(seen, weights.given[: z.inner].T, out=work[:, : z.inner])
    work[:, z.inner : z.given].addmm_(seen, weights.given[z.inner :].T)
    if weights.told is None or kept.updated is None or kept.told is None:
        return
    active = active_of(ran, z, settings)
    update = launch_update(z, settings, len(work), choose=False, add=False)
    update(
        work,
        work[:, z.inner :],
        kept.before,
        kept.updated,
        ran.choice[part],
        None,
        None if active is None else active[part],
        None if p.valid is None else p.valid[part],
        None,
        None,
        None,
        None,
        0,
    )
    torch.mm(kept.updated.flatten(0, 1), weights.told.T, out=kept.told.flatten(0, 1))


def steps_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
    d_output: Tensor,
    d_before: Tensor,
    d_keys: Tensor | None,
    d_values: Tensor,
) -> None:
    """Runs a chunk of steps back: puts gradients in the place of `kept` and into `d_before`,
    [Z, N + 1, rows, state], behind whose last step is what comes from later steps."""
    active, reset = active_of(ran, z, settings), reset_after(p)
    update_back = launch_update_back(z, settings)
    work, hidden = kept.work.unbind(0), kept.work[..., z.inner :].unbind(0)
    h, d_h = kept.before[0].unbind(0), d_before[0].unbind(0)
    c = d_c = [None] * len(d_h)
    if settings.lstm:
        c, d_c = kept.before[1].unbind(0), d_before[1].unbind(0)
    given = (p.noise, active, p.valid, reset)
    look_back = talk_back = None
    if kept.attention is not None:
        look_back = prepare_look_back(p, z, settings, turned, kept, part, d_keys, d_values)
    if kept.told is not None:
        talk_back = prepare_talk_back(p, z, settings, turned, ran, kept, part, d_output, d_h)
    for i in reversed(range(len(work))):
        t = part.start + i
        if talk_back is None:
            d_new, d_out = d_h[i + 1], d_output
        else:
            d_new, d_out = talk_back(i), None
        gradients = (d_new, d_c[i + 1], d_out, d_h[i], d_c[i])
        update_back(work[i], h[i], c[i], *gradients, ran.choice, *given, t, settings.temperature)
        if look_back is not None:
            look_back(i)
        d_h[i].addmm_(hidden[i], turned.hidden)


def prepare_talk_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    ran: Ran,
    kept: Kept,
    part: slice,
    d_output: Tensor,
    d_h: tuple[Tensor, ...],
) -> Callable[[int], Tensor]:
    """Step 4 of a step, back: to the gradient of h after Step 3"""
    assert turned.told is not None
    assert kept.told is not None
    assert kept.updated is not None
    told_t = turned.told
    told, updated = kept.told.unbind(0), kept.updated.unbind(0)
    d_updated = p.state.new_empty(z.rows, z.state)
    # one object file is told its own message, whose gradient takes its place right away
    asked, attention, d_message = [None] * len(told), None, told
    if z.files > 1:
        asked = kept.work[..., z.comm_asked :].unbind(0)
        attention = p.state.new_empty(z.rows, z.comm_heads, z.files)
        d_message = [p.state.new_empty(z.rows, z.message)] * len(told)
    rest = (active_of(ran, z, settings), p.valid, p.comm_mask, reset_after(p))
    launch = launch_talk(talk_back_kernel, z, z.work)

    def talk_back(i: int) -> Tensor:
        gradients = (d_h[i + 1], d_output, d_updated, d_message[i])
        launch(asked[i], told[i], attention, updated[i], *gradients, *rest, part.start + i)
        return d_updated.addmm_(told[i], told_t)

    return talk_back


def prepare_look_back(
    p: Prepared,
    z: Layout,
    settings: Settings,
    turned: Matrices,
    kept: Kept,
    part: slice,
    d_keys: Tensor | None,
    d_values: Tensor,
) -> Callable[[int], None]:
    """Step 2 of a step, back: to the gradients of what was asked, of keys and of values"""
    assert kept.attention is not None
    asked, given = kept.work[..., z.asked :].unbind(0), kept.work[..., : z.given].unbind(0)
    attention, seen = kept.attention.unbind(0), kept.seen.unbind(0)
    d_seen = p.state.new_empty(z.rows, z.read)
    launch = launch_look_back(z, settings)

    def look_back(i: int) -> None:
        torch.mm(given[i], turned.given, out=d_seen)
        gradients = (d_seen, d_keys, d_values)
        launch(asked[i], p.keys, p.values, attention[i], seen[i], *gradients, part.start + i)

    return look_back


def add_products(sums: Matrices, kept: Kept) -> None:
    """Adds the gradients of the weights: one large product each"""
    inner = kept.work.shape[-1] - len(sums.hidden)
    work, h, seen = (x.flatten(0, 1).T for x in (kept.work, kept.before[0], kept.seen))
    sums.hidden.addmm_(work[inner:], h.T)
    sums.given.addmm_(work[: len(sums.given)], seen.T)
    if sums.told is not None and kept.told is not None and kept.updated is not None:
        sums.told.addmm_(kept.told.flatten(0, 1).T, kept.updated.flatten(0, 1))
