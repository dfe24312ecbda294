"""What a video model predicts, how its object files bind and what its schemata do, in numbers.

Functions of tensors alone. N clips, T frames, F object files, K balls, S schemata, D dynamics.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.experiments.matching import assign
from scoff.experiments.measures import entropy, exactly, joint_counts, mutual_information

EVENTS = ("free flight", "collision", "wall", "occluded")
FREE, COLLISION, WALL, OCCLUDED = range(4)
NOTHING = -1  # no such ball, or no object file for it


# --- schemata and true dynamics


class Agreement(NamedTuple):
    information: float
    """Normalised mutual information: 1 if each tells the other, 0 if neither tells anything."""
    accuracy: float
    """Share of steps that the best one-to-one match gets right."""
    match: tuple[int, ...]
    """For each schema, the dynamics that it stands for; -1: none."""


def agreement(counts: Tensor) -> Agreement:
    """Of chosen schemata and true dynamics, from how often each pair occurs  [S, D]

    Mutual information is divided by the mean of both entropies. Where neither varies it is 1. Of
    no steps at all both are NaN.
    """
    match = assign(counts)
    matched = counts.gather(1, match.clamp(min=0)[:, None])[:, 0] * (match >= 0)
    mean = (entropy(counts.sum(0)) + entropy(counts.sum(1))) / 2
    return Agreement(
        1.0 if mean == 0 else mutual_information(counts) / mean,
        (matched.sum() / counts.sum()).item(),
        tuple(match.tolist()),
    )


class SwitchErrors(NamedTuple):
    after: Tensor
    """[settle], mean error of the first, second, ... frame that follows from new dynamics."""
    steady: float
    """Mean error of those that come later; none of before any switch, for that it is to come, or
    what tells of it, may be impossible to foresee."""

    @property
    def ratio(self) -> float:
        """Of the first frame after a switch to steady state."""
        return self.after[0].item() / self.steady


def switch_errors(
    errors: Tensor, dynamics: Tensor, burn_in: int = 0, settle: int = 5
) -> SwitchErrors:
    """Errors just after the dynamics changed, and steady ones.

    Args:
        errors: [N, T], of predicted frames.
        dynamics: [N, T], by which each of these frames came from the one before it.
        burn_in: first frames that do not count.
        settle: frames after a switch that are not steady.
    """
    changed = torch.zeros_like(dynamics, dtype=torch.bool)
    changed[:, 1:] = dynamics[:, 1:] != dynamics[:, :-1]
    since = steps_since(changed)
    counts = torch.arange(errors.shape[1], device=errors.device) >= burn_in
    after = [errors[(since == delay) & counts].mean() for delay in range(settle)]
    later = (since >= settle) & (changed.cumsum(1) > 0) & counts
    return SwitchErrors(torch.stack(after), errors[later].mean().item())


def steps_since(happened: Tensor) -> Tensor:
    """Steps since it last happened, 0 where it does; very many before it ever did  [N, T]"""
    step = torch.arange(happened.shape[1], device=happened.device)
    never = -(1 << 30)
    return step - torch.where(happened, step, never).cummax(1).values


# --- rollouts


class HorizonErrors(NamedTuple):
    each: Tensor  # [T], mean over clips
    cumulative: Tensor  # [T], mean over clips and over frames up to this one


def horizon_errors(errors: Tensor) -> HorizonErrors:
    """Of a rollout's first, second, ... frame  [N, T]"""
    each = errors.double().mean(0)
    frames = torch.arange(1, len(each) + 1, device=each.device)
    return HorizonErrors(each, each.cumsum(0) / frames)


# --- object files and balls


def to_pixels(attention: Tensor, size: int) -> Tensor:
    """From a map of positions to pixels  [..., h, w] -> [..., size, size]"""
    times = size // attention.shape[-1]
    return attention.repeat_interleave(times, -1).repeat_interleave(times, -2)


def adjusted_rand(a: Tensor, b: Tensor, num_a: int, num_b: int, where: Tensor) -> Tensor:
    """How alike two ways to group things are: 1 if the same, 0 on average if at random  [..., M]

    Of foreground pixels (`where` identity > 0) it tells whether object files share out the balls:
    with one frame in the last axis, or all frames of a clip, where they must also stay. NaN where
    there are no two things to group.
    """
    of_a = (a[..., None] == torch.arange(num_a, device=a.device)) & where[..., None]
    of_b = (b[..., None] == torch.arange(num_b, device=b.device)) & where[..., None]
    table = of_a.mT.double() @ of_b.double()  # [..., num_a, num_b]
    together = _pairs(table).sum((-2, -1))
    in_a, in_b = _pairs(table.sum(-1)).sum(-1), _pairs(table.sum(-2)).sum(-1)
    everything = _pairs(table.sum((-2, -1)))
    expected = in_a * in_b / everything
    most = (in_a + in_b) / 2
    # both put all in one group, or each thing in its own
    is_trivial = (most == expected) & (everything > 0)
    return torch.where(is_trivial, 1.0, (together - expected) / (most - expected))


def foreground_ari(
    weights: Tensor, identity: Tensor, balls: int, whole_clip: bool = False
) -> Tensor:
    """Whether object files share out the pixels of balls as the balls do  -> [N, T], or [N]

    Args:
        weights: [N, T, F, H, W], masks, or attention in pixels: the largest has the pixel.
        identity: [N, T, H, W], whose pixel it is, from 1.
        whole_clip: over all frames together, where an object file must stay with its ball.
    """
    first = 1 if whole_clip else 2
    slot, ball = weights.argmax(2).flatten(first), identity.long().flatten(first)
    return adjusted_rand(slot, ball, weights.shape[2], balls + 1, ball > 0)


@exactly
def owners(weights: Tensor, identity: Tensor, balls: int) -> Tensor:
    """The object file with the largest weight on each ball's pixels; -1: none is seen  [N, T, K]"""
    ball = torch.arange(1, balls + 1, device=identity.device)
    own = (identity.flatten(2)[:, :, None] == ball[:, None]).to(weights.dtype)  # [N, T, K, H * W]
    mass = own @ weights.flatten(3).mT  # [N, T, K, F]
    return torch.where(own.sum(-1) > 0, mass.argmax(-1), NOTHING)


def distinct_owners(owner: Tensor, object_files: int) -> Tensor:
    """How many object files have a ball at all  [N, T, K] -> [N, T]"""
    return (owner[..., None] == torch.arange(object_files, device=owner.device)).any(-2).sum(-1)


def identity_switches(owner: Tensor) -> Tensor:
    """How often a ball that is seen has another owner than when it was last seen  [N, T, K] -> [N]

    As a share of the times when it could.
    """
    last = torch.full_like(owner[:, 0], NOTHING)
    switches = torch.zeros(len(owner), device=owner.device)
    chances = torch.zeros_like(switches)
    for now in owner.unbind(1):
        both = (now >= 0) & (last >= 0)
        switches += (both & (now != last)).sum(-1)
        chances += both.sum(-1)
        last = torch.where(now >= 0, now, last)
    return switches / chances


# --- what schemata do


def schema_use(schema: Tensor, active: Tensor, schemata: int) -> Tensor:
    """How often each is chosen by object files that are updated  [N, T, F] both -> [S]

    `entropy` of it tells how many are in use: 2 bits are as much as four chosen equally often.
    """
    return torch.bincount(schema[active], minlength=schemata)


def ball_events(hits: Tensor, bounces: Tensor, hidden: Tensor, is_present: Tensor) -> Tensor:
    """What happens to each ball, as a number of EVENTS; -1: there is no such ball  [N, T, K]

    A ball that hits another counts as that even if it is hidden or at a wall.
    """
    event = torch.where(hidden, OCCLUDED, FREE)
    event = torch.where(bounces > 0, WALL, event)
    event = torch.where(hits > 0, COLLISION, event)
    return torch.where(is_present, event, NOTHING)


def schema_by_event(
    schema: Tensor, active: Tensor, owner: Tensor, event: Tensor, schemata: int
) -> Tensor:
    """How often the owner of a ball chose each schema when that happened to it  [events, S]

    Args:
        schema: [N, T, F]
        active: [N, T, F], who was updated: of others a choice brings about nothing.
        owner: [N, T, K], as from `owners`. A hidden ball has no owner unless the caller says who it
            was; see `last_owners`.
        event: [N, T, K], as from `ball_events`.
    """
    whose = owner.clamp(min=0)
    chosen = schema.gather(-1, whose)
    known = (owner >= 0) & (event >= 0) & active.gather(-1, whose)
    return joint_counts(event[known], chosen[known], len(EVENTS), schemata)


def last_owners(owner: Tensor) -> Tensor:
    """Of balls that are not seen, who had them when they were; -1: nobody yet  [N, T, K]"""
    step = torch.arange(owner.shape[1], device=owner.device)[:, None]
    seen = torch.where(owner >= 0, step, -1).cummax(1).values
    return torch.where(seen >= 0, owner.gather(1, seen.clamp(min=0)), NOTHING)


def hidden_balls(identity: Tensor, radius: Tensor, share: float = 0.5) -> Tensor:
    """Whether less than this share of a ball is seen  [N, T, H, W], [N, K] -> [N, T, K]

    Args:
        radius: in pixels; 0: there is no such ball.
    """
    ball = torch.arange(1, radius.shape[1] + 1, device=identity.device)
    area = (identity.flatten(2)[:, :, None] == ball[:, None]).sum(-1)
    return area < share * torch.pi * radius[:, None].square()


def _pairs(count: Tensor) -> Tensor:
    return count * (count - 1) / 2
