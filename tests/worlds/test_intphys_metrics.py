"""Relative, absolute and pairwise measures: by their definitions, on random scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.worlds.intphys.metrics import (
    absolute_error,
    bootstrap,
    measure,
    measure_groups,
    pairwise_accuracies,
    relative_errors,
)


def draw(seed, size=30, levels=4):
    """Few levels, so that there are ties"""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (size, 4), generator=generator).double()
    order = torch.rand(size, 4, generator=generator).argsort(1)
    return scores, order < 2, order % 2


seeds = st.integers(0, 10**6)


def half_or(a, b):
    return 0.5 if a == b else float(a < b)


@given(seeds)
def test_all_are_as_defined(seed):
    scores, possible, start = draw(seed)
    rows = list(zip(scores.tolist(), possible.tolist(), start.tolist(), strict=True))
    relative, pairwise = [], []
    good, bad = [], []
    for s, is_good, begins in rows:
        g = [(s[i], begins[i]) for i in range(4) if is_good[i]]
        b = [(s[i], begins[i]) for i in range(4) if not is_good[i]]
        relative.append(half_or(sum(x for x, _ in g), sum(x for x, _ in b)))
        wins = [half_or(y, x) for x, i in g for y, j in b if i == j]
        assert len(wins) == 2
        pairwise.append(sum(wins) / 2)
        good += [x for x, _ in g]
        bad += [x for x, _ in b]
    assert relative_errors(scores, possible).tolist() == relative
    assert pairwise_accuracies(scores, possible, start).tolist() == pairwise
    auc = sum(half_or(y, x) for x in good for y in bad) / (len(good) * len(bad))
    assert absolute_error(scores, possible) == pytest.approx(1 - auc)


@given(seeds, st.floats(0.1, 10), st.floats(-5, 5))
def test_neither_scale_nor_zero_matters_nor_the_order_of_movies(seed, scale, shift):
    scores, possible, start = draw(seed)
    other = scores * scale + shift
    assert torch.equal(relative_errors(scores, possible), relative_errors(other, possible))
    assert absolute_error(scores, possible) == pytest.approx(absolute_error(other, possible))
    turned = [part.roll(1, 1) for part in (scores, possible, start)]
    assert torch.equal(relative_errors(scores, possible), relative_errors(*turned[:2]))
    assert torch.equal(pairwise_accuracies(scores, possible, start), pairwise_accuracies(*turned))


@given(seeds)
def test_turning_scores_round_turns_errors_round(seed):
    scores, possible, start = draw(seed)
    assert torch.equal(relative_errors(-scores, possible), 1 - relative_errors(scores, possible))
    assert absolute_error(-scores, possible) == pytest.approx(1 - absolute_error(scores, possible))
    assert torch.equal(
        pairwise_accuracies(-scores, possible, start),
        1 - pairwise_accuracies(scores, possible, start),
    )


@given(seeds)
def test_what_rounding_adds_is_a_tie(seed):
    generator = torch.Generator().manual_seed(seed)
    _, possible, start = draw(seed)
    noise = 1e-9 * torch.rand(possible.shape, generator=generator)
    scores = -500 * (1 + noise.double())
    assert (relative_errors(scores, possible) == 0.5).all()
    assert (pairwise_accuracies(scores, possible, start) == 0.5).all()
    assert absolute_error(scores, possible) == 0.5
    assert (relative_errors(scores, possible, tolerance=0) != 0.5).any()


def test_all_measures_agree_with_their_parts_and_intervals_hold_them():
    scores, possible, start = draw(3, size=200, levels=50)
    scores += 8 * possible
    got = measure(scores, possible, start)
    assert got.relative.value == pytest.approx(float(relative_errors(scores, possible).mean()))
    assert got.absolute.value == pytest.approx(absolute_error(scores, possible))
    pairs = pairwise_accuracies(scores, possible, start)
    assert got.pairwise.value == pytest.approx(float(pairs.mean()))
    for interval in (got.relative, got.absolute, got.pairwise):
        assert interval.low < interval.value < interval.high
        assert interval.quadruplets == 200
    assert measure(scores, possible).pairwise is None


def test_an_interval_is_as_wide_as_chance_makes_the_mean():
    draws = (torch.rand(400, generator=torch.Generator().manual_seed(1)) < 0.3).double()
    got = bootstrap(lambda drawn: draws[drawn].mean(1), 400)
    error = float(draws.std()) / 400**0.5
    assert got.high - got.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_groups_are_measured_apart():
    scores, possible, _ = draw(5, size=12)
    first = torch.arange(12) < 4
    groups = measure_groups(scores, possible, {"a": first, "b": ~first, "none": first & ~first})
    assert set(groups) == {"a", "b"}
    assert groups["a"].relative.quadruplets == 4
    assert groups["b"] == measure(scores[~first], possible[~first])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, p: (s[:, :3], p[:, :3]), "want \\(N, 4\\) both"),
        (lambda s, p: (s, p[:-1]), "want \\(N, 4\\) both"),
        (lambda s, p: (s, torch.ones_like(p)), "wants two of each four"),
        (lambda s, p: (s * float("nan"), p), "not finite"),
    ],
)
def test_what_is_no_score_is_refused(change, said):
    scores, possible, start = draw(0)
    for function in (relative_errors, absolute_error, measure):
        with pytest.raises(ValueError, match=said):
            function(*change(scores, possible))
    with pytest.raises(ValueError, match="starts alike"):
        pairwise_accuracies(scores, possible, 0 * start)
