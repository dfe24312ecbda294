"""Normalisation over whole maps, then ELU: `reference` and Triton's kernels, `fused`."""

from scoff.ops.map_norm.dispatch import map_norm_elu
from scoff.ops.map_norm.reference import map_norm_elu_reference

__all__ = ["map_norm_elu", "map_norm_elu_reference"]
