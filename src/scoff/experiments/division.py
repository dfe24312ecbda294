"""What may be added to a loss so that schemata divide the work, as functions of the choices.

Choices are probabilities [N, T, F, S] of N clips, T steps, F object files, S schemata. Nothing is
known here of the true dynamics.
"""

import math

import torch
from torch import Tensor

TINY = 1e-4  # of a variance, below which there is nothing to share out


def persistence(probs: Tensor, lag: int) -> Tensor:
    """How long a choice lasts that does not last for the whole clip; at most 1.

    It is the covariance, within a clip, of the scores of choices about `lag` steps apart, divided
    by the variance of all. Of scores, the logarithms of the probabilities, for these still tell
    something where choices are certain. A choice that is always the same counts for nothing, be it
    of all object files or of one, and so does one that all clips make at the same time, for that is
    a clock. What alternates counts for nothing because lags, down to two thirds of `lag`, come in
    pairs.
    """
    lags = range(lag - 2 * max(1, lag // 6), lag)
    scores = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    scores = scores - scores.mean(-1, keepdim=True)
    own = scores - scores.mean(0, keepdim=True)
    own = own - own.mean(1, keepdim=True)
    steps = probs.shape[1]
    last = [(own[:, : steps - n] * own[:, n:]).mean((0, 1, 2)).sum() for n in lags]
    return torch.stack(last).mean() / (scores.var((0, 1, 2), correction=0).sum() + TINY)


def information(probs: Tensor, window: int) -> Tensor:
    """How much choices tell of the clip in which they were made, as a share of the most they could.

    Of the mean choice of `window` steps in a row: the entropy over all clips together less that of
    each. It is 1 if at each time all schemata are chosen equally often, and each for certain; 0 if
    all clips choose alike, or if schemata take turns.
    """
    mean = probs.unfold(1, window, 1).mean(-1)
    together = entropy(mean.mean((0, 2))).mean()
    return (together - entropy(mean).mean()) / math.log(probs.shape[-1])


def entropy(probs: Tensor) -> Tensor:
    """In nats  [..., S] -> [...]"""
    return torch.special.entr(probs.clamp(min=torch.finfo(probs.dtype).tiny)).sum(-1)
