"""How well plausibilities tell possible from impossible movies.

Scores are [N, 4] for N quadruplets, the higher the more plausible; `possible` [N, 4] says which two
are. All but pairwise accuracy are errors: 0 is perfect, 0.5 is chance. A difference that is smaller
than rounding counts one half, as a tie does.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-6  # of the largest score: what sums in another order may differ by
RESAMPLES = 2000


class Interval(NamedTuple):
    value: float
    low: float
    high: float
    quadruplets: int


def relative_errors(scores: Tensor, possible: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """1 where the impossible two are together the more plausible; 0.5: a tie  -> [N] float64"""
    scores = _check(scores, possible)
    good = torch.where(possible, scores, 0.0).sum(1)
    bad = torch.where(possible, 0.0, scores).sum(1)
    return _loses(good, bad, tolerance * scores.abs().amax(1))


def pairwise_accuracies(
    scores: Tensor, possible: Tensor, start: Tensor, tolerance: float = TOLERANCE
) -> Tensor:
    """Share of impossible movies less plausible than the possible one that starts alike -> [N]

    `start` [N, 4] has the same number for the two that start alike.
    """
    scores = _check(scores, possible)
    alike = start[:, :, None] == start[:, None, :]
    pair = possible[:, :, None] & ~possible[:, None, :] & alike  # [N, good, bad]
    if not (pair.flatten(1).sum(1) == 2).all():
        raise ValueError("start: wants one possible for each impossible movie that starts alike")
    bound = tolerance * scores.abs().amax(1)[:, None, None]
    wins = 1 - _loses(scores[:, :, None], scores[:, None, :], bound)
    return torch.where(pair, wins, 0.0).flatten(1).sum(1) / 2


def absolute_error(scores: Tensor, possible: Tensor, tolerance: float = TOLERANCE) -> float:
    """1 - AUC: how often an impossible movie of any quadruplet beats a possible one of any"""
    scores = _check(scores, possible)
    good, bad = scores[possible], scores[~possible]
    bound = tolerance * scores.abs().amax() if scores.numel() else 0.0
    bad = bad.sort().values
    above = len(bad) - torch.searchsorted(bad, good + bound, right=True)
    tied = len(bad) - torch.searchsorted(bad, good - bound) - above
    return float((above + 0.5 * tied).double().mean() / len(bad))


def bootstrap(
    measure: Callable[[Tensor], Tensor], quadruplets: int, seed: int = 0, level: float = 0.95
) -> Interval:
    """`measure` of all quadruplets, and its interval when these are drawn again and again.

    It gets numbers of quadruplets [R, N] and gives R values.
    """
    if quadruplets < 1:
        raise ValueError("there is no quadruplet to measure")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(quadruplets, (RESAMPLES, quadruplets), generator=generator)
    values = measure(drawn).double()
    tail = (1 - level) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    value = float(measure(torch.arange(quadruplets)[None])[0])
    return Interval(value, low, high, quadruplets)


class Measures(NamedTuple):
    relative: Interval
    absolute: Interval
    pairwise: Interval | None  # None: it is not known which movies start alike


def measure(
    scores: Tensor, possible: Tensor, start: Tensor | None = None, seed: int = 0
) -> Measures:
    """All three, with intervals over quadruplets"""
    scores, possible = scores.cpu(), possible.cpu()
    relative = relative_errors(scores, possible)
    size = len(scores)
    pairwise = None
    if start is not None:
        pairs = pairwise_accuracies(scores, possible, start.cpu())
        pairwise = bootstrap(lambda drawn: pairs[drawn].mean(1), size, seed)
    return Measures(
        bootstrap(lambda drawn: relative[drawn].mean(1), size, seed),
        bootstrap(_absolute_errors(scores, possible), size, seed),
        pairwise,
    )


def measure_groups(
    scores: Tensor,
    possible: Tensor,
    groups: Mapping[str, Tensor],
    start: Tensor | None = None,
    seed: int = 0,
) -> dict[str, Measures]:
    """Of each group of quadruplets, such as those of a block or movement, by flags [N] bool"""
    return {
        name: measure(
            scores[chosen], possible[chosen], None if start is None else start[chosen], seed
        )
        for name, chosen in groups.items()
        if bool(chosen.any())
    }


def _absolute_errors(scores: Tensor, possible: Tensor) -> Callable[[Tensor], Tensor]:
    """Of many resamples at once: who beats whom is counted once, for all pairs of quadruplets"""
    scores = _check(scores, possible)
    size = len(scores)
    good, bad = scores[possible].view(size, 2), scores[~possible].view(size, 2)
    bound = TOLERANCE * scores.abs().amax()
    beats = torch.zeros(size, size, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            beats += _loses(good[:, i, None], bad[None, :, j], bound) / 4

    def errors(drawn: Tensor) -> Tensor:
        weight = torch.zeros(len(drawn), size, dtype=torch.float64)
        weight.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        weight /= drawn.shape[1]
        return ((weight @ beats) * weight).sum(1)

    return errors


def _loses(good: Tensor, bad: Tensor, bound: Tensor) -> Tensor:
    margin = good - bad
    return torch.where(margin.abs() <= bound, 0.5, (margin < 0).double())


def _check(scores: Tensor, possible: Tensor) -> Tensor:
    if scores.dim() != 2 or scores.shape[1] != 4 or scores.shape != possible.shape:
        got = f"{tuple(scores.shape)} and {tuple(possible.shape)}"
        raise ValueError(f"scores, possible: got shapes {got}, want (N, 4) both")
    if not (possible.sum(1) == 2).all():
        raise ValueError("possible: wants two of each four")
    if not scores.isfinite().all():
        raise ValueError("scores: got one that is not finite")
    return scores.double()
