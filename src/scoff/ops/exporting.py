"""Whether torch.export is looking on."""

import torch


def is_exporting() -> bool:
    """An exported program is to run without this package, hence without its operators.

    The flag itself, for up to torch 2.11 `torch.compiler.is_exporting()` is true inside
    torch.compile as well.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)
