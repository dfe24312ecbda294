"""Whether Triton kernels can be launched, and launching them again and again."""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

# on a CPU, for tests: set before triton is imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ASSEMBLES = not INTERPRETED and torch.version.hip is None  # whether kernels may speak NVIDIA's PTX
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
OLDEST_TRITON = (3, 6)  # with which the kernels were compiled and run
# Products of 8 columns go to tensor cores as since Ampere, as before Triton 3.8. By Hopper's wgmma
# they read beyond their operands, or what is overwritten (triton-lang/triton#10629, #11781), and
# weights on their way take more shared memory than there is.
PLAIN_PRODUCTS = ("DISABLE_MMA_V3", "DISABLE_MMA_V5") if TRITON >= (3, 8) else ()
FEWEST_POSITIONS = 16  # that products take
FUSED_SUMS = {"enable_fp_fusion": True}  # no longer Triton's default from 3.10 on


capability_of = functools.cache(torch.cuda.get_device_capability)  # which takes its time


def why_no_kernels(x: Tensor) -> str | None:
    """Why no kernel can be launched for such an input; None: they can."""
    if TRITON < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"it needs triton {oldest}, and this is {triton.__version__}"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func's transformations cannot see through it"
    if INTERPRETED:
        return None
    if not x.is_cuda:
        return f"it runs on a CUDA device, not on {x.device}"
    if capability_of(x.device) < (8, 0):
        return "it needs a device of compute capability 8.0 or more"
    return "it has no float64" if x.dtype == torch.float64 else None


def is_plain(x: Tensor) -> bool:
    """Whether nobody looks on who has to see an operator, which takes time to call. Autograd does,
    inside of a function of its own, only if someone wants derivatives of the gradients."""
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return type(x) in (Tensor, torch.nn.Parameter) and not watched and not torch.is_grad_enabled()


_compiling = threading.RLock()


@contextmanager
def plain_products() -> Iterator[None]:
    """While a kernel is compiled; others would only be slower for it."""
    with _compiling:
        before = {name: os.environ.get(name) for name in PLAIN_PRODUCTS}
        os.environ.update(dict.fromkeys(PLAIN_PRODUCTS, "1"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class Compiled(NamedTuple):
    """A kernel as it is launched, but for the arguments that are not known at compile time"""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    device: torch.device
    shape: dict[str, Any]  # for which it was found: as long as this is here, its id is its own

    def launch(self, programs: int, addresses: list[Any]) -> None:
        """As torch's compiler does it, without hooks, which take as long as the launch"""
        active: Any = driver.active
        stream = active.get_current_stream(self.device.index)
        before = (stream, self.function, self.metadata, None, None, None)
        self.run(programs, 1, 1, *before, *addresses, *self.constants)


_compiled: dict[Any, Compiled] = {}


def addresses_of(arguments: Sequence[Any]) -> tuple[list[Any], bool]:
    """In the place of tensors, and whether all are aligned, which is compiled in"""
    low, found = 0, []
    for x in arguments:
        if isinstance(x, Tensor):
            x = x.data_ptr()
            low |= x
        found.append(x)
    return found, low % 16 == 0


def launch(
    kernel: Any, programs: int, arguments: Sequence[Any], shape: dict[str, Any]
) -> Compiled | None:
    """With as much at once as fits into shared memory, at most what the layout says.
    `shape` is known by its identity: the same one is to be given again. Integers among the
    arguments are not specialised.

    Triton takes some 100 us to find out which of its compilations is meant. The second time it is
    told, and given addresses."""
    addresses, aligned = addresses_of(arguments)
    kinds = [x.dtype if isinstance(x, Tensor) else type(x) for x in arguments]
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    key = (id(kernel), id(shape), device, *kinds)
    if aligned and (found := _compiled.get(key)) is not None:
        found.launch(programs, addresses)
        return found
    lacking = None
    for chosen in with_less_memory(shape):
        try:
            with plain_products():
                compiled = kernel[(programs,)](*arguments, **chosen, **FUSED_SUMS)
        except triton.OutOfResources as error:
            lacking = error
            continue
        if aligned and compiled is not None:  # by the interpreter, it is
            constants = tuple(chosen[name] for name in kernel.arg_names[len(arguments) :])
            parts = compiled.run, compiled.function, compiled.packed_metadata
            _compiled[key] = Compiled(*parts, constants, device, shape)
        return _compiled.get(key) if aligned else None
    assert lacking is not None
    raise lacking


class Bound:
    """A kernel whose arguments are known but for the last, which are numbers."""

    def __init__(self, kernel: Any, arguments: Sequence[Any], shape: dict[str, Any]):
        self.kernel, self.arguments, self.shape = kernel, arguments, shape
        self.compiled: Compiled | None = None
        self.addresses, _ = addresses_of(arguments)

    def __call__(self, programs: int, *last: int) -> None:
        if self.compiled is not None:
            self.compiled.launch(programs, [*self.addresses, *last])
        else:
            self.compiled = launch(self.kernel, programs, [*self.arguments, *last], self.shape)


def with_less_memory(shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As it is, and then, if it has them, with fewer weights that stay, with fewer stages, and with
    fewer positions at once"""
    yield shape
    if "shape" in shape:
        most = shape["shape"]
        choices = [(hold, most.STAGES, most.PB) for hold in reversed(range(most.HOLD))]
        choices += [(0, stages, most.PB) for stages in reversed(range(1, most.STAGES))]
        choices += [(0, 1, fewest) for fewest in [FEWEST_POSITIONS] if fewest < most.PB]
        for hold, stages, positions in choices:
            yield {**shape, "shape": most._replace(HOLD=hold, STAGES=stages, PB=positions)}


_shapes: dict[Any, dict[str, Any]] = {}


class Again:
    """Launches a kernel, again and again, with arguments of the same kinds."""

    def __init__(self, kernel: Any, programs: int, shape: dict[str, Any]):
        self.kernel, self.programs, self.shape = kernel, programs, shape
        self.compiled: Compiled | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is not None:
            addresses, aligned = addresses_of(arguments)
            if aligned:
                self.compiled.launch(self.programs, addresses)
                return
        self.compiled = launch(self.kernel, self.programs, arguments, self.shape)


def prepared(kernel: Any, programs: int, **shape: Any) -> Again:
    """To be called with the arguments that are not known at compile time"""
    return Again(kernel, programs, _shapes.setdefault((id(kernel), *shape.values()), shape))
