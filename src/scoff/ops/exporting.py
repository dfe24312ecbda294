"""Whether torch is up to something that operators of this package take no part in."""

import torch
from torch.autograd import forward_ad


def is_exporting() -> bool:
    """An exported program is to run without this package, hence without its operators.

    The flag itself, for up to torch 2.11 `torch.compiler.is_exporting()` is true inside
    torch.compile as well.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def is_forward_mode() -> bool:
    """Within forward-mode differentiation, such as torch.func.jvp, operators that have no formula
    for it give derivatives of zero and no error."""
    return forward_ad._current_level >= 0
