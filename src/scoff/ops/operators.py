"""A recurrence, written as loops there and back, as a `torch.library` operator with a gradient.

To `torch.compile` and CUDA graphs it is a single node, so that nothing is unrolled however long the
sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scoff.ops.exporting import refuse_second_derivatives
from scoff.ops.scoff.types import contiguous, returns


class Loops(NamedTuple):
    """Two functions, and the kinds of tuples that they take and return."""

    prepared: Any  # tensors that go in, some of them optional; `state` is one
    settings: Any  # numbers that go in
    kept: Any  # tensors that come out: `output`, `state`, then what the way back needs
    gradients: Any  # of those of `prepared` with the same names; empty where there is nothing
    details: tuple[str, ...]  # of `kept`, what has a gradient beside the first two
    choices: tuple[str, ...]  # of `kept`, what has none; the first is small, of all steps
    allocate: Callable[..., Any]  # prepared, settings -> kept, not filled
    forward: Callable[..., Any]  # prepared, settings -> kept
    backward: Callable[..., Any]  # prepared, settings, kept, gradients of kept -> gradients


def operator(name: str, loops: Loops) -> Callable[..., tuple[Tensor, ...]]:
    """Takes the tensors of `prepared` and the numbers of `settings`, returns those of `kept`."""
    optional = {n for n, kind in loops.prepared.__annotations__.items() if kind == Tensor | None}
    names: tuple[str, ...] = loops.prepared._fields
    given = [f"Tensor{'?' * (n in optional)} {n}" for n in names]
    given += [f"{kind.__name__} {n}" for n, kind in loops.settings.__annotations__.items()]
    kept_there = [f"Tensor kept_{n}" for n in loops.kept._fields]
    come_back = [f"Tensor? d_{n}" for n in ("output", "state", *loops.details)]
    there, and_back = (", ".join(x) for x in (given, given + kept_there + come_back))
    p, m, k = (len(kind._fields) for kind in (loops.prepared, loops.settings, loops.kept))

    def read(args: tuple[Any, ...]) -> tuple[Any, Any]:
        return loops.prepared(*args[:p]), loops.settings(*args[p : p + m])

    @torch.library.custom_op(
        f"scoff::{name}_forward", mutates_args=(), schema=f"({there}) -> {returns(k)}"
    )
    def forward(*args):
        return tuple(loops.forward(*read(args)))

    @forward.register_fake
    def _(*args):
        return tuple(loops.allocate(*read(args)))

    @torch.library.custom_op(
        f"scoff::{name}_backward",
        mutates_args=(),
        schema=f"({and_back}) -> {returns(len(loops.gradients._fields))}",
    )
    def backward(*args):
        prepared, settings = read(args)
        kept = loops.kept(*args[p + m : p + m + k])
        # it may be called where the forward pass was not, and casts some products only
        with torch.autocast(prepared.state.device.type, enabled=False):
            return tuple(loops.backward(prepared, settings, kept, *args[p + m + k :]))

    refuse_second_derivatives(backward)

    @backward.register_fake
    def _(*args):
        prepared, _ = read(args)
        wanted = (getattr(prepared, n) for n in loops.gradients._fields)
        return tuple(
            prepared.state.new_empty(0) if x is None else torch.empty_like(x) for x in wanted
        )

    def save(ctx, inputs, output) -> None:
        kept = loops.kept(*output)
        ctx.settings = inputs[p:]
        # the output is in what was kept of the next step; saved, it would be held twice
        small = getattr(kept, loops.choices[0])
        ctx.save_for_backward(*inputs[:p], *(kept._replace(output=small, state=small)))
        ctx.mark_non_differentiable(*(getattr(kept, n) for n in loops.choices))
        ctx.set_materialize_grads(False)

    def differentiate(ctx, *grads):
        saved, d = ctx.saved_tensors, loops.kept(*grads)
        wanted = (contiguous(getattr(d, n)) for n in loops.details)
        found = backward(*saved[:p], *ctx.settings, *saved[p:], d.output, d.state, *wanted)
        by_name = dict(zip(loops.gradients._fields, found, strict=True))
        prepared = zip(names, saved[:p], strict=True)
        return *(None if x is None else by_name.get(n) for n, x in prepared), *([None] * m)

    forward.register_autograd(differentiate, setup_context=save)
    return forward
