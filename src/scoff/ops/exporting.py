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


def is_transformed(*values: Any) -> bool:
    """Whether such derivatives are wanted by these tensors (or tuples of them) as operators without
    a formula do not have: those of torch.func.grad, where they are errors, and forward-mode ones,
    as of torch.func.jvp, where they are zero without a word."""
    if torch.compiler.is_compiling():  # which cannot look
        return forward_ad._current_level >= 0
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return False
    return any(is_transformed(*v) if isinstance(v, tuple) else _is_transformed(v) for v in values)


def _is_transformed(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if not functorch.is_functorch_wrapped_tensor(value):
        return forward_ad.unpack_dual(value).tangent is not None
    stack = functorch.get_interpreter_stack()
    if all(each.key() == functorch.TransformType.Vmap for each in stack):
        return forward_ad._current_level >= 0  # the level is that of all threads
    if len(stack) > 1:  # what is inside of one transformation cannot be seen from within another
        return True
    return value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


def hides_requires_grad() -> bool:
    """Within a transformation of torch.func tensors do not tell that they require grad outside."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_second_derivatives(operator: Any) -> None:
    """Of a backward pass that is an operator: says what to do instead."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            "derivatives of derivatives: this backend has none; backend='reference' has them"
        )

    operator.register_autograd(refuse)
