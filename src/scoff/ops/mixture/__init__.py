"""Mixtures of pictures as functions of tensors: `reference` and Triton's kernels, `fused`."""

from scoff.ops.mixture.dispatch import mix, mix_classes
from scoff.ops.mixture.reference import mix_classes_reference, mix_reference

__all__ = ["mix", "mix_classes", "mix_classes_reference", "mix_reference"]
