"""Hedged rollouts: as much of a prediction is taken as it is worth."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.experiments import hedging
from scoff.experiments.hedging import TRUSTS, Hedge, fit_hedge
from scoff.experiments.rollouts import Rollout

CONTEXT, HORIZONS, SIZE = 2, 3, 8


def make_frames(clips: int) -> torch.Tensor:
    """Pixels that are lit by chance, in the left half more often"""
    often = torch.full((SIZE, SIZE), 0.1)
    often[:, : SIZE // 2] = 0.4
    return torch.bernoulli(often.expand(clips, CONTEXT + HORIZONS, 1, SIZE, SIZE))


@pytest.fixture
def fit(monkeypatch):
    """Of frames that are told so"""

    def fit(tell, parts) -> Hedge:
        def rolled(_model, frames, context):
            return Rollout(torch.empty(0), tell(frames[:, context:]))

        monkeypatch.setattr(hedging, "roll_out", rolled)
        return fit_hedge(None, parts, CONTEXT)

    return fit


def spoilt(true: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Certain, and at each horizon in so many pixels by chance"""
    by_chance = make_frames(len(true))[:, CONTEXT:]
    return torch.where(torch.rand_like(true) < wrong[:, None, None, None], by_chance, true)


def test_trust_is_the_share_of_what_is_right(fit):
    """A pixel is told truly, or by chance with the frequencies of the mean picture, so that what
    is told, with so much trust, is just how probable the pixel is."""
    wrong = torch.tensor([0.02, 0.5, 1.0])
    parts = list(make_frames(600).split(250))
    hedge = fit(lambda true: spoilt(true, wrong), parts)
    assert (hedge.mean[..., : SIZE // 2] - 0.4).abs().max() < 0.06
    assert (hedge.mean[..., SIZE // 2 :] - 0.1).abs().max() < 0.06
    # to within a step of those that were tried
    logits = hedge.trust.logit()
    assert logits[:2].tolist() == pytest.approx((1 - wrong[:2]).logit().tolist(), abs=0.51)
    assert hedge.trust[2] < 0.05
    true = make_frames(600)[:, CONTEXT:]
    errors = hedge.errors(spoilt(true, wrong), true).mean(0)
    entropy = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (0.4, 0.1)) / 2
    assert errors[2].item() == pytest.approx(entropy, rel=0.02)
    assert errors[0] < errors[1] < errors[2]


def test_what_is_right_is_taken_as_it_is(fit):
    hedge = fit(lambda true: true, [make_frames(20)])
    assert hedge.trust.tolist() == pytest.approx([TRUSTS[-1]] * HORIZONS)
    true = make_frames(5)[:, CONTEXT:]
    assert hedge.errors(true, true).max() < 1e-3


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(0, 1))
def test_errors_are_those_of_a_mixture(mean, told, trust):
    hedge = Hedge(torch.full((1, 2, 2), mean), torch.tensor([trust]))
    mixed = trust * told + (1 - trust) * mean
    for true, probability in ((1.0, mixed), (0.0, 1 - mixed)):
        frames = torch.full((1, 1, 1, 2, 2), true)
        found = hedge.errors(torch.full_like(frames, told), frames)
        assert found.item() == pytest.approx(-math.log(probability), abs=1e-5)


def test_certainty_and_pixels_that_are_never_lit_cost_no_infinity(fit):
    frames = make_frames(4)
    frames[..., 0] = 0
    frames[..., 1] = 1
    hedge = fit(lambda true: 1 - true, [frames])
    assert hedge.errors(1 - frames[:, CONTEXT:], frames[:, CONTEXT:]).isfinite().all()
