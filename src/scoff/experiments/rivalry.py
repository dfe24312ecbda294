"""Schemata that compete for clips: who predicts a clip best, wins it, and learns from it.

For clips that have one dynamics each. Nothing is known here of what these are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

HEAT = 0.1  # of a share, in standard deviations of what logarithms of errors differ by
FAIRNESS = 0.98  # 1: all schemata get equally many clips of a batch; 0: who is best, gets it
ROUNDS = 60
FEWEST_FRAMES = 3  # that must have been seen for a choice to count


class Contest(NamedTuple):
    errors: Tensor  # [2 * N, T], of each clip with the schemata that the layer chose
    won: Tensor  # [], error of schemata on the clips that they won
    missed: Tensor  # [], in nats: how unlikely the winner was to be chosen


def compete(
    model: nn.Module, clips: Tensor, stack: int, object_files: int, schemata: int
) -> Contest:
    """Watches clips by the layer's own choices, and with each of the schemata all along.

    A clip is won together with its image. Clips are [2 * N, T, C, H, W]: N of them, then as many
    images.
    """
    given, targets = clips[:, :-1], clips[:, stack:]
    steps, images = targets.shape[1], len(clips) // 2
    own = model(given, targets=targets, tell_choices=True)
    each = torch.arange(schemata, device=clips.device)[:, None, None, None]
    taken = each.expand(-1, len(clips), steps, object_files).flatten(0, 1)
    rivals = model(given, targets=torch.cat([targets] * schemata), tell_choices=True, choice=taken)
    errors = rivals.errors.mean(1).view(schemata, 2, images).mean(1)  # [S, N]
    winner = share_out(errors.detach())
    won = errors.gather(0, winner[None])
    # in all runs alike, so that the schema which is in use does not tell the one that is to be
    first = max(0, FEWEST_FRAMES - stack)
    missed = miss(own.choices[:, first:], winner.repeat(2))
    missed_by_rivals = miss(rivals.choices[:, first:], winner.repeat(2 * schemata))
    return Contest(own.errors, won.mean(), (missed + missed_by_rivals) / 2)


def share_out(errors: Tensor) -> Tensor:
    """Who wins which clip  [S, N] -> [N]

    The best wins, each compared with its own mean, and at prices that rise for who has won many:
    otherwise the one that learns first would win them all. Prices give way where schemata differ
    much. By logarithms: where all predict well they differ by little, and that counts as well.
    """
    schemata, clips = errors.shape
    logs = errors.clamp(min=torch.finfo(errors.dtype).tiny).log()
    merit = logs.mean(0) - logs
    merit = merit - merit.mean(1, keepdim=True)
    merit = merit / (HEAT * merit.std() + torch.finfo(errors.dtype).tiny)
    price = merit.new_zeros(schemata, 1)
    for _ in range(ROUNDS):
        shares = (merit - price).log_softmax(0)
        excess = shares.logsumexp(1, keepdim=True) - math.log(clips / schemata)
        price = FAIRNESS * (price + excess)
    return (merit - price).argmax(0)


def miss(choices: Tensor, winner: Tensor) -> Tensor:
    """[N, T, F, S], [N] -> []"""
    # below that, where a winner has no gradient either, a choice would be off by 87 nats
    likely = choices.clamp(min=torch.finfo(choices.dtype).tiny)
    index = winner[:, None, None, None].expand(*likely.shape[:-1], 1)
    return -likely.log().gather(-1, index).mean()


def move(frames: Tensor) -> Tensor:
    """Each clip turned or mirrored, in one of the eight ways a square can be, and shifted as far as
    nothing that is lit leaves the picture  [N, T, C, H, W]

    A motion stays what it is, and where and whither it goes does not.
    """
    is_crossed, is_down, is_left = (
        torch.rand(3, len(frames), 1, 1, 1, 1, device=frames.device) < 0.5
    ).unbind(0)
    frames = torch.where(is_crossed, frames.mT, frames)
    frames = torch.where(is_down, frames.flip(-2), frames)
    frames = torch.where(is_left, frames.flip(-1), frames)
    return shift(shift(frames).mT).mT


def shift(frames: Tensor) -> Tensor:
    """Down or up"""
    rows = frames.shape[-2]
    number = torch.arange(rows, device=frames.device)
    is_lit = frames.amax((1, 2, 4)) > 0  # [N, H]
    above = torch.where(is_lit, number, rows).amin(1)  # dark rows; all of them, if all are dark
    below = rows - 1 - torch.where(is_lit, number, -1).amax(1)
    chance = torch.rand(len(frames), device=frames.device)
    down = (chance * (above + below + 1)).long() - above
    source = (number - down[:, None]) % rows  # what leaves is dark, and so is what comes in
    return frames.gather(-2, source[:, None, None, :, None].expand_as(frames))
