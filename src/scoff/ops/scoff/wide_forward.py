"""The forward pass of the `wide` backend."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scoff.ops.scoff.precision import multiply
from scoff.ops.scoff.replay import empty, empty_like
from scoff.ops.scoff.wide_fold import fold
from scoff.ops.scoff.wide_launch import (
    launch_begin,
    launch_look,
    launch_talk,
    launch_update,
)
from scoff.ops.scoff.wide_layout import (
    Layout,
    Left,
    Matrices,
    Prepared,
    Settings,
    allocate_left,
    chunks,
    fill,
    layout_of,
    longest_chunk,
    reset_after,
    with_ones,
)


def run_forward(p: Prepared, settings: Settings) -> tuple[Tensor, Tensor, Left]:
    z, reset = layout_of(p, settings), reset_after(p)
    output = empty(p.state, z.steps, *p.state.shape[1:])
    final = empty_like(p.state)
    left = allocate_left(p, z, longest_chunk(p, z))
    fill(left.matrices, p, fold(p, z), z)
    active = active_of(left, z, settings)
    if active is None:
        left.active.fill_(True)
    if p.choice is not None:
        left.choice.copy_(p.choice)
    start(p, z, left)
    if z.alone:
        gates, listen = gates_alone(z, left), message_alone(left)
    else:
        hidden = empty(p.state, z.rows, z.hidden)
        gates = gates_competing(p, z, settings, left, hidden)
        listen = message_asked(p, z, left, hidden)
    update = launch_update(z, settings, choose=p.choice is None)
    talk = launch_talk(z) if z.says else None
    shown = None if talk else output
    scales = left.scales if z.half else None
    updated_scales = left.updated_scales if z.half and talk else scales
    to_choose = (left.choice, p.noise, active, p.valid, shown, reset, p.restart, scales)
    to_join = (active, p.valid, p.comm_mask, output, reset, p.restart, updated_scales)
    h = left.before.unbind(0)
    c = left.cells.unbind(0) if settings.lstm else [None] * len(h)
    factor = left.before_half.unbind(0) if z.half else [None] * len(h)
    updated = left.updated.unbind(0) if talk else h[1:]
    updated_factor = left.updated_half.unbind(0) if z.half and talk else factor[1:]
    for t, (given, hidden) in enumerate(gates):
        state = (h[t], c[t], updated[t], c[t + 1])
        update(given, hidden, *state, *to_choose, updated_factor[t], updated_scales, t)
        if talk is not None:
            talk(*listen(t), updated[t], h[t + 1], *to_join, factor[t + 1], scales, t)
    final[0] = output[-1]
    if settings.lstm:
        final[1] = left.cells[-1, :, : z.size].view_as(final[1])
    return output, final, left


def active_of(left: Left, z: Layout, settings: Settings) -> Tensor | None:
    """None: all are active, always"""
    return left.active if settings.active < z.files else None


def start(p: Prepared, z: Layout, left: Left) -> None:
    """Fills in what the first step starts from, and all that is known of the others."""
    state, anew = p.state, (None, None)
    if p.reset is not None and p.restart is not None:
        anew = (p.restart, p.reset)
        state = torch.where(p.reset[0, :, None, None], p.restart, p.state)
    if z.half:
        if len(p.state) == 2:
            left.cells[0, :, : z.size] = state[1].flatten(0, 1)
        updated = (left.updated_half, left.updated_scales) if z.says else (None, None)
        places = (left.before, left.before_half, updated[0], left.scales, updated[1])
        launch_begin(z)(p.values, p.state, *anew, *places, z.rows, z.steps)
        return
    with_ones(left.before[..., : z.state], z.size)
    for history, first in zip((left.before, left.cells), state, strict=False):
        history[0, :, : z.size] = first.flatten(0, 1)
    if z.says:
        with_ones(left.updated, z.size)
    if z.alone:
        seen = with_ones(left.before[..., z.state :], z.value)
        seen[:-1, :, : z.value] = p.values.flatten(1, 2)


def gates_alone(z: Layout, left: Left) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of every step, and the schema query. What one object file reads is known."""
    before, hidden_t = left.factor.unbind(0), left.hidden.T
    work, hidden = left.work.unbind(0), left.work[..., z.inner :].unbind(0)
    for part in chunks(z.steps, len(work)):
        inner_gates(z, left.matrices, left.factor[part], left.work)
        for i, t in enumerate(range(part.start, part.stop)):
            multiply(before[t], hidden_t, hidden[i])
            yield work[i], hidden[i]


def inner_gates(z: Layout, weights: Matrices, before: Tensor, work: Tensor) -> None:
    """The GRU's n of one object file, as far as it does not depend on the state"""
    if z.inner > 0:
        seen = before[..., z.state :].flatten(0, 1)
        multiply(seen, weights.given.T, work.flatten(0, 1)[: len(seen), : z.inner])


def message_alone(left: Left) -> Callable[[int], tuple[None, Tensor, None]]:
    """What it tells itself at a step"""
    updated, told_t = left.updated_factor.unbind(0), left.told.T
    message, length = left.message.unbind(0), len(left.work)

    def listen(t: int) -> tuple[None, Tensor, None]:
        told = message[t % length]
        multiply(updated[t], told_t, told)
        return None, told, None

    return listen


def gates_competing(
    p: Prepared, z: Layout, settings: Settings, left: Left, hidden: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The input's part and the state's, step by step; behind the latter is what is asked."""
    before, hidden_t, given_t = left.before.unbind(0), left.hidden.T, left.given.T
    given = empty(p.state, z.rows, z.given)
    seen = with_ones(empty(p.state, z.rows, z.read), z.value)
    attention = empty(p.state, z.rows, z.heads, z.positions)
    look = launch_look(z, settings, z.batch, z.hidden)
    asked, active = hidden[:, z.asked - z.inner :], active_of(left, z, settings)
    for t in range(z.steps):
        torch.mm(before[t], hidden_t, out=hidden)
        look(asked, p.keys, p.values, attention, seen, active, t)
        torch.mm(seen, given_t, out=given)
        yield given, hidden


def message_asked(
    p: Prepared, z: Layout, left: Left, hidden: Tensor
) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """What is asked of others at a step, what they tell, and space for the attention"""
    updated, told_t = left.updated.unbind(0), left.told.T
    told = empty(p.state, z.rows, z.told)
    asked = hidden[:, z.comm_asked - z.inner :]
    attention = empty(p.state, z.rows, z.comm_heads, z.files)

    def listen(t: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.mm(updated[t], told_t, out=told)
        return asked, told, attention

    return listen
