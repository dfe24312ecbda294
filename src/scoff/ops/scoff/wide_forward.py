"""The forward pass of the `wide` backend."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from scoff.ops.scoff.fused_types import Ran
from scoff.ops.scoff.wide_launch import (
    launch_look,
    launch_talk,
    launch_update,
    talk_kernel,
)
from scoff.ops.scoff.wide_layout import (
    Layout,
    Matrices,
    Prepared,
    Settings,
    allocate_ran,
    chunks,
    layout_of,
    matrices_of,
    reset_after,
    with_ones,
)


def run_forward(p: Prepared, settings: Settings) -> Ran:
    ran = allocate_ran(p, settings)
    z, reset = layout_of(p, settings), reset_after(p)
    weights = matrices_of(p, z, settings)
    active = active_of(ran, z, settings)
    if active is None:
        ran.active.fill_(True)
    if p.choice is not None:
        ran.choice.copy_(p.choice)
    state = with_ones(p.state, z.size, len(p.state), z.rows)
    state[..., : z.size] = first_state(p).flatten(1, 2)
    h, hidden_t = state[0], weights.hidden.T
    hidden = p.state.new_empty(z.rows, z.hidden)
    if z.files == 1:
        given = read_alone(p, z, weights)
    else:
        given = read_competing(p, z, settings, weights, hidden, active)
    update = launch_update(z, settings, z.rows, choose=p.choice is None, add=True)
    communicate = (
        None if weights.told is None else prepare_talk(p, z, settings, weights, ran, h, hidden)
    )
    output = ran.output if communicate is None else None
    cells = ran.cells if settings.lstm else None
    to_choose = (ran.choice, p.noise, active, p.valid, output, cells, reset, p.restart)
    for t in range(z.steps):
        torch.mm(h, hidden_t, out=hidden)
        update(next(given), hidden, state, state, *to_choose, t)
        if communicate is not None:
            communicate(t)
    for final, history in zip(ran.final, (ran.output, ran.cells), strict=False):
        final.copy_(history[-1])
    return ran


def active_of(ran: Ran, z: Layout, settings: Settings) -> Tensor | None:
    """None: all are active, always"""
    return ran.active if settings.active < z.files else None


def first_state(p: Prepared) -> Tensor:
    """What the first step starts from"""
    if p.reset is None or p.restart is None:
        return p.state
    return torch.where(p.reset[0, :, None, None], p.restart, p.state)


def read_alone(p: Prepared, z: Layout, weights: Matrices) -> Iterator[Tensor]:
    """W_ih z + b_ih of every step, in large products: what one object file reads is known."""
    parts = chunks(z, z.given, p.state)
    length = parts[0].stop
    seen = with_ones(p.state, z.value, length * z.rows)
    given = p.state.new_empty(length, z.rows, z.given)
    for part in parts:
        n = part.stop - part.start
        rows = seen[: n * z.rows]
        rows[:, : z.value] = p.values[part].flatten(0, 2)
        torch.mm(rows, weights.given.T, out=given[:n].flatten(0, 1))
        yield from given[:n].unbind(0)


def read_competing(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    hidden: Tensor,
    active: Tensor | None,
) -> Iterator[Tensor]:
    """W_ih z + b_ih, step by step, each when the queries of its step are in `hidden`"""
    given_t = weights.given.T
    given = p.state.new_empty(z.rows, z.given)
    seen = with_ones(p.state, z.value, z.rows)
    attention = p.state.new_empty(z.rows, z.heads, z.positions)
    look = launch_look(z, settings, z.batch, z.hidden)
    asked = hidden[:, z.asked - z.inner :]
    for t in range(z.steps):
        look(asked, p.keys, p.values, attention, seen, active, t)
        yield torch.mm(seen, given_t, out=given)


def prepare_talk(
    p: Prepared,
    z: Layout,
    settings: Settings,
    weights: Matrices,
    ran: Ran,
    h: Tensor,
    hidden: Tensor,
) -> Callable[[int], None]:
    """Step 4 of a step, on h in its place"""
    assert weights.told is not None
    told_t = weights.told.T
    told = p.state.new_empty(z.rows, z.told)
    asked = attention = None  # one object file hears only itself
    if z.files > 1:
        asked = hidden[:, z.comm_asked - z.inner :]
        attention = p.state.new_empty(z.rows, z.comm_heads, z.files)
    active, reset = active_of(ran, z, settings), reset_after(p)
    talk = launch_talk(talk_kernel, z, z.hidden)
    to_join = (active, p.valid, p.comm_mask, ran.output, reset, p.restart)

    def communicate(t: int) -> None:
        torch.mm(h, told_t, out=told)
        talk(asked, told, attention, h, *to_join, t)

    return communicate
