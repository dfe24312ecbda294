"""Whether torch is up to something that operators of this package take no part in."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_exporting() -> bool:
    """An exported program is to run without this package, hence without its operators.

    The flag itself, for up to torch 2.11 `torch.compiler.is_exporting()` is true inside
    torch.compile as well.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_forward_mode(*values: Any) -> bool:
    """Whether a tensor among these has a tangent, as within torch.func.jvp: operators that have no
    formula for forward-mode differentiation give derivatives of zero then, and no error."""
    if forward_ad._current_level < 0:  # that of all threads
        return False
    return torch.compiler.is_compiling() or any(map(has_tangent, values))  # a compiler cannot look


def has_tangent(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(has_tangent, value))
    if not isinstance(value, Tensor):
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = functorch.is_functorch_wrapped_tensor
    if wrapped(value) and (
        functorch.is_batchedtensor(value) or wrapped(functorch.get_unwrapped(value))
    ):
        return True  # within vmap, or a second transformation, it cannot be looked at
    return forward_ad.unpack_dual(value).tangent is not None
