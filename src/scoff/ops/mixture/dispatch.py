"""How pictures are mixed: by kernels on a GPU that can, else by torch's operators."""

from torch import Tensor

from scoff.ops.exporting import is_exporting, is_transformed
from scoff.ops.mixture.reference import mix_classes_reference, mix_reference

try:
    from scoff.ops.mixture import fused
except ImportError:  # triton comes with torch's builds for CUDA, not with others
    fused = None


def mix(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a mixture of pictures, and the masks that mix them.

    Probabilities are mixed, not logits: a pixel is lit with probability sum_k mask_k p_k, which is
    what a pixel drawn from object file k with probability mask_k has.

    Args:
        logits: [..., F, C, H, W]
        mask_logits: [..., F, H, W], of which a softmax over the object files makes the masks.

    Returns:
        [..., C, H, W] and [..., F, H, W]
    """
    if fused is not None and is_for_kernels(logits, mask_logits):
        return fused.mix_fused(logits, mask_logits)
    return mix_reference(logits, mask_logits)


def mix_classes(logits: Tensor, mask_logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `mix`, of pixels that are of one class each: a softmax over C tells of which."""
    if fused is not None and is_for_kernels(logits, mask_logits):
        return fused.mix_classes_fused(logits, mask_logits)
    return mix_classes_reference(logits, mask_logits)


def is_for_kernels(logits: Tensor, mask_logits: Tensor) -> bool:
    on_gpu = logits.is_cuda and not is_exporting() and not is_transformed(logits, mask_logits)
    return on_gpu and fused is not None and fused.why_not(logits, mask_logits) is None
