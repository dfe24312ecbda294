"""Mixtures of pictures, as one would write them down."""

import torch.nn.functional as F
from torch import Tensor


def mix_reference(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    log_mask = mask_logits.log_softmax(-3)
    weight = log_mask[..., None, :, :]
    lit = (weight + F.logsigmoid(logits)).logsumexp(-4)
    dark = (weight + F.logsigmoid(-logits)).logsumexp(-4)
    return lit - dark, log_mask.exp()


def mix_classes_reference(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    log_mask = mask_logits.log_softmax(-3)
    mixed = (log_mask[..., None, :, :] + logits.log_softmax(-3)).logsumexp(-4)
    return mixed, log_mask.exp()
