"""Whether Triton kernels can be launched, and launching them again and again."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

# on a CPU, for tests: set before triton is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
OLDEST_TRITON = (3, 6)  # with which the kernels were compiled and run


def why_no_kernels(x: Tensor) -> str | None:
    """Why no kernel can be launched for such an input; None: they can."""
    if TRITON < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"it needs triton {oldest}, and this is {triton.__version__}"
    if INTERPRETED:
        return None
    if not x.is_cuda:
        return f"it runs on a CUDA device, not on {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it needs a device of compute capability 8.0 or more"
    return "it has no float64" if x.dtype == torch.float64 else None


_compiled: dict[Any, Any] = {}


def launch(kernel: Any, programs: int, arguments: list[Any], shape: dict[str, Any]) -> None:
    """With as many stages as fit into shared memory, at most those of the layout. `shape` is one of
    those that are kept.

    Triton takes some 100 us to find out which of its compilations is meant; the second time it is
    told."""
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    key = (id(kernel), device, id(shape), *map(kind, arguments))
    if (found := _compiled.get(key)) is not None:
        compiled, constants = found
        compiled[(programs, 1, 1)](*arguments, *constants)
        return
    for stages in range(shape.get("STAGES", 1), 0, -1):
        chosen = {**shape, "STAGES": stages} if "STAGES" in shape else shape
        try:
            compiled = kernel[(programs,)](*arguments, **chosen)
        except triton.OutOfResources:
            if stages == 1:
                raise
        else:
            if compiled is not None:  # by the interpreter, it is
                names = kernel.arg_names[len(arguments) :]
                _compiled[key] = compiled, tuple(chosen[name] for name in names)
            return


def kind(x: Any) -> Any:
    """What Triton compiles anew for"""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    return (x == 1, x % 16 == 0) if isinstance(x, int) else type(x)


_shapes: dict[Any, dict[str, Any]] = {}


def prepared(kernel: Any, programs: int, **shape: Any) -> Callable[..., None]:
    """To be called with the arguments that are not known at compile time"""
    shape = _shapes.setdefault((id(kernel), *shape.values()), shape)
    return partial(_launch_with, kernel, programs, shape)


def _launch_with(kernel: Any, programs: int, shape: dict[str, Any], *arguments: Any) -> None:
    launch(kernel, programs, [*arguments], shape)
