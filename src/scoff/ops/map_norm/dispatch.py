"""How maps are normalised: by kernels on a GPU that can, else by torch's operators."""

from torch import Tensor

from scoff.ops.exporting import is_exporting, is_transformed
from scoff.ops.map_norm.reference import map_norm_elu_reference

try:
    from scoff.ops.map_norm import fused
except ImportError:  # triton comes with torch's builds for CUDA, not with others
    fused = None


def map_norm_elu(x: Tensor, gain: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Each map less its mean and over its standard deviation, times gain, plus bias, through ELU.

    Args:
        x: [M, H, W, C]; mean and standard deviation are those of a whole map.
        gain: [C]
        bias: [C]
        eps: added to the variance.

    Returns:
        [M, H, W, C] of the type of x, whatever autocast says.
    """
    if fused is not None and is_for_kernels(x, gain, bias):
        return fused.map_norm_elu_fused(x, gain, bias, eps)
    return map_norm_elu_reference(x, gain, bias, eps)


def is_for_kernels(x: Tensor, gain: Tensor, bias: Tensor) -> bool:
    on_gpu = x.is_cuda and not is_exporting() and not is_transformed(x, gain, bias)
    return on_gpu and fused is not None and fused.why_not(x, gain, bias) is None
