"""How probable a frame is under a predicted one: mean negative log-likelihoods in nats."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoff.nn.noise import gumbel_

LEVELS = 256  # of a colour channel
FIRST_STD = 0.1
BEYOND = 0.25  # the outer levels


class Likelihood(nn.Module):
    def frames(self, logits: Tensor) -> Tensor:
        """What is predicted, from 0 to 1  [..., C, H, W] both"""
        return logits.sigmoid()

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        """Where the error is  [..., C, H, W] both -> [..., H, W]"""
        raise NotImplementedError

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over pixels  [..., C, H, W] both -> [...]"""
        return self.pixels(logits, target).mean((-2, -1))

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """A frame that is as probable as is told  [..., C, H, W] both"""
        raise NotImplementedError


class Bernoulli(Likelihood):
    """Pixels are lit or not; of grey ones, the cross-entropy.

    Args:
        doubt: how far from 0 and 1 predictions stay at least. What is wrong and as sure as can be
            has hardly a gradient, then.
    """

    def __init__(self, doubt: float = 0.0):
        super().__init__()
        self.limit = math.log((1 - doubt) / doubt) if doubt else math.inf

    def bounded(self, logits: Tensor) -> Tensor:
        if self.limit == math.inf:
            return logits
        return self.limit * (logits / self.limit).tanh()

    def frames(self, logits: Tensor) -> Tensor:
        return self.bounded(logits).sigmoid()

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = self.bounded(logits)
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(self.frames(logits), generator=generator)


class Categorical(Likelihood):
    """Each pixel is of one class, and channels tell of which: one is 1, the others 0."""

    def frames(self, logits: Tensor) -> Tensor:
        return logits.softmax(-3)

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        return -(logits.log_softmax(-3) * target).sum(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        # the largest of logits with Gumbel noise
        found = (logits + gumbel_(torch.empty_like(logits), generator)).argmax(-3)
        return F.one_hot(found, logits.shape[-3]).movedim(-1, -3).to(logits.dtype)


class DiscreteNormal(Likelihood):
    """Each channel of a pixel is one of 256 levels: a normal distribution around a mean, cut into
    as many pieces, the outer two without end. How wide it is, is learned.

    Means may lie beyond the outer levels, so that black can be told for certain."""

    def __init__(self, channels: int):
        super().__init__()
        self.log_std = nn.Parameter(torch.full((channels,), math.log(FIRST_STD)))

    def means(self, logits: Tensor) -> Tensor:
        return (1 + 2 * BEYOND) * logits.sigmoid() - BEYOND

    def stds(self) -> Tensor:
        """[C, 1, 1], not less than a level: hundreds of them away float32 has no gradients"""
        return self.log_std.exp()[:, None, None] + 1 / (LEVELS - 1)

    def frames(self, logits: Tensor) -> Tensor:
        return self.means(logits).clamp(0, 1)

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        std = self.stds()
        off, half = target - self.means(logits), 0.5 / (LEVELS - 1)
        above, below = (off + half) / std, (off - half) / std
        is_first, is_last = target < half, target > 1 - half
        # of the outer levels one side; of others the difference, where both are below the middle
        turned = off > 0
        most = torch.where(is_last | turned & ~is_first, -below, above)
        log_prob = torch.special.log_ndtr(most)
        least = torch.where(turned, -above, below)
        less = torch.special.log_ndtr(least) - log_prob
        inner = torch.where(is_first | is_last, -math.inf, less)
        return -(log_prob + torch.log(-torch.expm1(inner))).mean(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.empty_like(logits).normal_(generator=generator)
        level = self.means(logits) + self.stds() * noise
        return (level.clamp(0, 1) * (LEVELS - 1)).round() / (LEVELS - 1)
