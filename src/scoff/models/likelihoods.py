"""How probable a frame is under a predicted one: mean negative log-likelihoods in nats."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scoff.nn.noise import gumbel_

LEVELS = 256  # of a colour channel
FIRST_SCALE = 0.1


class Likelihood(nn.Module):
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
    """Pixels are lit or not; of grey ones, the cross-entropy."""

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(logits.sigmoid(), generator=generator)


class Categorical(Likelihood):
    """Each pixel is of one class, and channels tell of which: one is 1, the others 0."""

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        return -(logits.log_softmax(-3) * target).sum(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        # the largest of logits with Gumbel noise
        found = (logits + gumbel_(torch.empty_like(logits), generator)).argmax(-3)
        return F.one_hot(found, logits.shape[-3]).movedim(-1, -3).to(logits.dtype)


class DiscreteLogistic(Likelihood):
    """Each channel of a pixel is one of 256 levels: a logistic distribution around the predicted
    one, cut into as many pieces, the outer two without end. How wide it is, is learned."""

    def __init__(self, channels: int):
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((channels,), math.log(FIRST_SCALE)))

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        """Logits of predicted levels from 0 to 1, and targets there"""
        scale = self.log_scale.exp()[:, None, None]
        width = 1 / (LEVELS - 1)
        off = target - logits.sigmoid()
        above, below = (off + width / 2) / scale, (off - width / 2) / scale
        # the distribution function is a sigmoid s, and
        # s(above) - s(below) = s(above) s(-below) (1 - exp(below - above))
        log_above, log_not_below = F.logsigmoid(above), F.logsigmoid(-below)
        between = log_above + log_not_below + torch.log(-torch.expm1(-width / scale))
        is_first, is_last = target < width / 2, target > 1 - width / 2
        log_prob = torch.where(is_first, log_above, torch.where(is_last, log_not_below, between))
        return -log_prob.mean(-3)

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        least = torch.finfo(logits.dtype).eps
        noise = torch.empty_like(logits).uniform_(least, 1 - least, generator=generator).logit()
        level = logits.sigmoid() + self.log_scale.exp()[:, None, None] * noise
        return (level.clamp(0, 1) * (LEVELS - 1)).round() / (LEVELS - 1)
