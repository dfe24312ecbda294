"""Likelihoods of frames: they are distributions, and draws are from them."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from scoff.models.likelihoods import LEVELS, Bernoulli, Categorical, DiscreteNormal


def test_colour_likelihood_sums_to_one():
    likelihood = DiscreteNormal(3).double()
    levels = (torch.arange(LEVELS, dtype=torch.float64) / (LEVELS - 1))[:, None, None, None]
    with torch.no_grad():
        for std in (1e-3, 0.1, 2.0):
            likelihood.log_std.fill_(std).log_()
            for logit in (-9.0, 0.3, 2.0):
                logits = torch.full((LEVELS, 3, 1, 1), logit, dtype=torch.float64)
                # three channels alike, so that the mean over them is that of each
                error = likelihood(logits, levels.expand_as(logits))
                assert (-error).exp().sum().item() == pytest.approx(1)
                # the outer levels have all the rest; within, the predicted one is the likeliest
                told = likelihood.frames(logits)[0, 0].item() * (LEVELS - 1)
                assert 1 + error[1:-1].argmin().item() == min(max(1, round(told)), LEVELS - 2)


def test_black_and_white_can_be_told_for_certain():
    likelihood = DiscreteNormal(1)
    for logit, level in ((-9.0, 0.0), (9.0, 1.0)):
        told, true = torch.full((1, 1, 1), logit), torch.full((1, 1, 1), level)
        assert likelihood.frames(told).item() == level
        assert likelihood(told, true).item() < 0.01


@pytest.mark.parametrize("log_std", [-20.0, -5.0, -1.0, 1.0])
def test_colour_likelihood_has_gradients_far_away(log_std):
    found = []
    for dtype in (torch.float32, torch.float64):
        likelihood = DiscreteNormal(1).to(dtype)
        with torch.no_grad():
            likelihood.log_std.fill_(log_std)
        logits = torch.linspace(-6, 6, 25, dtype=dtype)[:, None, None, None].requires_grad_()
        levels = torch.tensor([0, 1, 100, 254, 255], dtype=dtype) / (LEVELS - 1)
        errors = [likelihood(logits, torch.full_like(logits, x)) for x in levels.tolist()]
        torch.stack(errors).sum().backward()
        found.append((torch.stack(errors), logits.grad, likelihood.log_std.grad))
    for single, double in zip(*found, strict=True):
        scale = double.abs().max().item()
        torch.testing.assert_close(single.double(), double, rtol=0.02, atol=1e-3 * scale)


def test_class_likelihood_is_the_cross_entropy():
    logits = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    kinds = torch.randint(3, (4, 5, 5))
    target = torch.nn.functional.one_hot(kinds, 3).movedim(-1, 1).double()
    where = cross_entropy(logits, kinds, reduction="none")
    torch.testing.assert_close(Categorical().pixels(logits, target), where)
    torch.testing.assert_close(Categorical()(logits, target), where.mean((1, 2)))


def test_who_doubts_pays_a_bounded_price():
    doubting, logits = Bernoulli(0.01), torch.tensor([-1e4, -3.0, 0.0, 3.0, 1e4])
    logits = logits.double()[:, None, None, None].requires_grad_()
    told = doubting.frames(logits).flatten()
    torch.testing.assert_close(told[[0, 2, 4]], torch.tensor([0.01, 0.5, 0.99]).double())
    assert (told.diff() > 0).all()
    wrong = doubting(logits, (logits < 0).double())
    assert wrong.max().item() == pytest.approx(-math.log(0.01))
    far = torch.tensor([-6.0, 6.0])[:, None, None, None].requires_grad_()  # beyond the limit
    doubting(far, (far < 0).float()).sum().backward()
    assert (far.grad.flatten() * torch.tensor([-1, 1]) > 0.05).all()
    # as far as it is not held back, it is as without
    small = torch.linspace(-0.1, 0.1, 9)[:, None, None, None]
    lit = torch.ones_like(small)
    torch.testing.assert_close(doubting(small, lit), Bernoulli()(small, lit), rtol=1e-3, atol=0)
    assert torch.equal(Bernoulli().frames(logits), logits.sigmoid())


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Bernoulli(0.2), Categorical(), DiscreteNormal(3)]
)
def test_draws_are_as_frequent_as_they_are_probable(likelihood):
    """What is drawn costs, on average over draws, what the likelihood says of all that may be."""
    if isinstance(likelihood, DiscreteNormal):
        levels = torch.arange(LEVELS)[:, None, None, None] / (LEVELS - 1)
        possible = levels.expand(-1, 3, 1, 1)
        logits = torch.full((3, 1, 1), 2.0)
        with torch.no_grad():
            likelihood.log_std.fill_(-8.0)  # so that few levels have all the draws
    elif isinstance(likelihood, Categorical):
        possible = torch.eye(3)[:, :, None, None]
        logits = torch.tensor([-1.0, 0.5, 2.0])[:, None, None]
    else:
        possible = torch.tensor([0.0, 1.0])[:, None, None, None]
        logits = torch.full((1, 1, 1), 0.8)
    with torch.no_grad():
        costs = likelihood(logits.expand_as(possible), possible)
        drawn = likelihood.draw(logits.expand(20_000, *logits.shape), torch.Generator())
    assert (-costs).exp().sum().item() == pytest.approx(1, rel=1e-5)
    # each channel by itself, but for classes
    drawn = (
        drawn if isinstance(likelihood, Categorical) else drawn[:, :1].expand(-1, len(logits), 1, 1)
    )
    found = (drawn[:, None] == possible[None]).all((2, 3, 4))
    assert (found.sum(1) == 1).all()
    expected = (-costs).exp()
    assert (found.float().mean(0) - expected).abs().max() < 0.015
