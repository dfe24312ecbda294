"""What goes into a cell and what comes out, and the trace of a layer."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

State = Tensor | tuple[Tensor, Tensor]


class Trace(NamedTuple):
    """Who attended to what, which schema each object file chose, who read whom.

    N sequences, L steps, F object files, P positions, S schemata; unbatched input has no N. At
    padding of a packed batch the values mean nothing.
    """

    output: Tensor | PackedSequence
    """The output that `forward` returns."""
    input_attention: Tensor
    """[N, L, F, P], mean over heads."""
    schema_probs: Tensor
    """[N, L, F, S], noise and temperature included."""
    schema: Tensor
    """[N, L, F], the schema that was chosen."""
    active: Tensor
    """[N, L, F], whether the object file was updated."""
    communication: Tensor
    """[N, L, heads, F, F], reader before read; no heads without communication."""


class Steps(NamedTuple):
    """What a cell is run on."""

    x: Tensor  # [T, B, P, C]
    state: Tensor  # [Z, B, H]
    reset: Tensor | None = None  # [T, B]: start anew, from `restart`, before this step
    restart: Tensor | None = None  # [Z, B, H]
    valid: Tensor | None = None  # [T, B]: False is padding, where the state stands still
    noise: Tensor | None = None  # [T, B, F, S], SCOFF only
    keep: bool = False  # whether the details are wanted
    choice: Tensor | None = None  # [T, B, F], SCOFF only: the schemata to take


class Outcome(NamedTuple):
    """What a run of a cell returns; the details are time-major and as in `Trace`."""

    output: Tensor  # [T, B, H]
    state: Tensor  # [Z, B, H]
    input_attention: Tensor
    schema_probs: Tensor
    schema: Tensor
    active: Tensor
    communication: Tensor


def backwards(steps: Steps) -> Steps:
    """The same steps from the last to the first.

    Where a new sequence starts at step t, the way back leaves it between t and t - 1: the state
    starts anew before step t - 1.
    """
    reset = steps.reset
    if reset is not None:
        reset = torch.cat([reset[1:], torch.zeros_like(reset[:1])]).flip(0)
    flipped = (None if y is None else y.flip(0) for y in (steps.valid, steps.noise, steps.choice))
    valid, noise, choice = flipped
    # not by _replace, into which dynamo of torch 2.6 does not look
    return Steps(
        steps.x.flip(0), steps.state, reset, steps.restart, valid, noise, steps.keep, choice
    )
