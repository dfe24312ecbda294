"""Rollouts over draws: how probable the truth is on average."""

import math
from types import SimpleNamespace

import pytest
import torch

from scoff.experiments.rollouts import DRAWS, drawn_errors, roll_out
from scoff.models.likelihoods import Bernoulli
from scoff.models.video import Predictions, VideoModel, VideoOptions, VideoState

CONTEXT, HORIZONS = 2, 3


class Coin(torch.nn.Module):
    """All pixels are lit or none, for ever, and which is anyone's guess."""

    def __init__(self):
        super().__init__()
        self.options = SimpleNamespace(stack=1)
        self.thrown = []
        self.likelihood = Bernoulli()
        self.likelihood.draw = self.throw

    def throw(self, logits, generator):
        side = torch.rand(len(logits), generator=generator) < 0.5
        self.thrown.append(side)
        return side[:, None, None, None, None].expand_as(logits).to(logits.dtype)

    def forward(self, frames, state=None, free=0, generator=None):  # noqa: ARG002
        if state is None:
            return Predictions(torch.zeros_like(frames), None, VideoState())
        return Predictions(40 * (frames.repeat(1, 1 + free, 1, 1, 1) - 0.5), None, state)


def test_errors_are_those_of_how_probable_the_truth_is_on_average():
    side = torch.tensor([0.0, 1.0, 1.0, 0.0])
    frames = side[:, None, None, None, None].expand(-1, CONTEXT + HORIZONS, 1, 4, 4)
    model = Coin()
    errors = drawn_errors(model, frames, CONTEXT, torch.Generator())
    assert len(model.thrown) == DRAWS
    right = (torch.stack(model.thrown) == side.bool()).double().mean(0)
    assert 0 < right.min() < right.max() < 1
    # the first frame nobody can tell; what comes after it, those know who guessed right
    assert errors[:, 0].tolist() == pytest.approx([math.log(2)] * 4)
    expected = -right.log()[:, None].expand(-1, HORIZONS - 1)
    torch.testing.assert_close(errors[:, 1:].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("horizons", [1, HORIZONS])
def test_draws_that_are_all_the_same_make_no_difference(colour, horizons, monkeypatch):
    options = VideoOptions(
        hidden_size=8, object_files=2, frame_size=16, map_size=4, features=8, stack=2, colour=colour
    )
    model = VideoModel(options).eval()
    monkeypatch.setattr(model.likelihood, "draw", lambda logits, _: logits.sigmoid())
    frames = torch.rand(3, CONTEXT + horizons, options.channels, 16, 16)
    with torch.no_grad():
        errors = drawn_errors(model, frames, CONTEXT, torch.Generator())
        torch.testing.assert_close(errors, roll_out(model, frames, CONTEXT).errors)
