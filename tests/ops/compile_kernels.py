"""Compiles the kernels for a GPU that need not be there: `python -m tests.ops.compile_kernels`.

The interpreter takes what the compiler does not, and a machine without a GPU can still compile, for
another than Hopper with `--capability 80`. With `--count` it also tells of how many instructions
the code of each is: a step of the recurrence takes as long as its own.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.tools.tensor_descriptor import TensorDescriptor

from scoff.bench import weights
from scoff.ops.scoff import fused, fused_gradients, fused_launch, fused_layout, launch
from tests.ops.cases import Choices, Sizes, make_case

HOPPER = GPUTarget("cuda", 90, 32)
# of one program, in bytes, by compute capability
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
CASES = {
    "balls": (
        torch.float32,
        Sizes(6, 4, 64, 64, 4, 100, 4, 1, 64, 100, 16, 4, 32, 32),
        Choices(active=4),
    ),
    "adding": (
        torch.float32,
        Sizes(6, 4, 1, 64, 5, 60, 2, 1, 64, 60, 16),
        Choices(active=1, reduction="mean", communication=None),
    ),
    "many": (
        torch.float32,
        Sizes(6, 4, 9, 12, 12, 64, 3, 1, 8, 10, 4, 3, 16, 16),
        Choices(active=12),
    ),
    "all options": (
        torch.bfloat16,
        Sizes(6, 4, 9, 12, 3, 20, 3, 2, 8, 10, 4, 2, 8, 8),
        Choices("lstm", active=2, reset=True, padding=True, value_dropout=True, comm_dropout=True),
    ),
}


class Recorder:
    """Takes the place of a kernel and notes what it would have been launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple, dict]]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_kernel(kernel: Any, args: tuple, kwargs: dict) -> int:
    """The bytes of shared memory that it takes"""
    return compiled(kernel, args, kwargs).metadata.shared


def compiled(kernel: Any, args: tuple, kwargs: dict, target: GPUTarget = HOPPER) -> Any:
    kwargs = dict(kwargs)
    options = {"num_warps": kwargs.pop("num_warps", 4), **launch.FUSED_SUMS}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = args[index] if index < len(args) else kwargs[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif index < len(args) and isinstance(value, int | float):
            signature[name] = "i32" if isinstance(value, int) else "fp32"
        else:
            signature[name] = "constexpr"
            constants[(index,)] = value
    source = ASTSource(kernel, signature, constants, attributes)
    with launch.plain_products():
        return triton.compile(source, target=target, options=options)


def told(kernel: Any, args: tuple, kwargs: dict, target: GPUTarget, count: bool) -> str:
    """The bytes of shared memory that it takes, what it had to do without for that, and perhaps its
    instructions"""
    most = SHARED_MEMORY[target.arch]
    for chosen in launch.with_less_memory(kwargs):
        found = compiled(kernel, args, chosen, target)
        if found.metadata.shared <= most:
            break
    assert found.metadata.shared <= most, f"{found.metadata.shared} bytes are more than {most}"
    assert "m64n8k" not in found.asm["ptx"], "wgmma of 8 columns"
    told = f"{found.metadata.shared} bytes"
    if chosen != kwargs:
        fitting = (f"{name}={getattr(chosen['shape'], name)}" for name in ("STAGES", "HOLD", "PB"))
        told += f", with {' '.join(fitting)} to fit"
    if count:
        told += f", {instructions_of(found)} instructions"
    return told


def instructions_of(found: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cubin"
        path.write_bytes(found.asm["cubin"])
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(re.findall("^ +/[*][0-9a-f]{4,}[*]/", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=HOPPER.arch, choices=SHARED_MEMORY)
    parser.add_argument("--count", action="store_true")
    given = parser.parse_args()
    target = GPUTarget("cuda", given.capability, 32)

    def current_target() -> GPUTarget:
        return target

    current_target.__triton_builtin__ = True
    target_info.current_target = current_target
    launches: list[tuple[Any, tuple, dict]] = []
    for module, name in (
        (fused_launch, "forward_kernel"),
        (fused_launch, "backward_kernel"),
        (fused_launch, "pack_kernel"),
        (fused_launch, "share_kernel"),
        (fused_launch, "measure_kernel"),
        (fused_launch, "weigh_kernel"),
    ):
        setattr(module, name, Recorder(getattr(module, name), launches))
    held = set()
    for name, (dtype, sizes, choices) in CASES.items():
        launches.clear()
        for processors in (132, 1)[: 2 if name == "balls" else 1]:  # idle and busy
            found = fused_layout.GPU(processors, SHARED_MEMORY[given.capability])
            fused_layout.gpu_of = lambda _, found=found: found
            fused_gradients.MANY_ROWS = processors - 1  # of a busy one, all are many
            fused.scoff_fused(*make_case(sizes, choices, 0, dtype)).output.sum().backward()
        done = set()
        for kernel, args, kwargs in launches:
            held |= {kwargs["shape"].HOLD} if "shape" in kwargs else set()
            names = dict(zip(kernel.arg_names, args, strict=False))
            keeps = [name for name in ("kept", "halves") if names.get(name) is not None]
            key = kernel.__name__, *keeps, "shape" in kwargs and kwargs["shape"].SINGLE
            if key not in done:
                done.add(key)
                print(name, *key, told(kernel, args, kwargs, target, given.count), flush=True)
    assert target != HOPPER or held == {0, 1, 2}, held  # ways in which weights are read
    launches.clear()
    weights.launched = Recorder(weights.read_kernel, launches)
    weights.read(torch.zeros(2**16, dtype=torch.int32), programs=1, turns=1)
    print("bench", "read_kernel", told(*launches[0], target, given.count), flush=True)


if __name__ == "__main__":
    main()
