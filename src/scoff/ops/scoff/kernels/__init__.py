"""The Triton kernels of the `fused` backend."""

from typing import Any

from scoff.ops.scoff.kernels import backward, forward, weights

# what is launched; to a type checker kernels are Python functions, called in the wrong way
forward_kernel: Any = forward.forward_kernel
backward_kernel: Any = backward.backward_kernel
pack_kernel: Any = weights.pack_kernel
share_kernel: Any = weights.share_kernel
measure_kernel: Any = weights.measure_kernel
weigh_kernel: Any = weights.weigh_kernel
