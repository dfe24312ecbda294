"""The precision of products of float32 on a GPU: nn.GRU's, which is not that of torch.matmul."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# torch's setting is that of all threads: one that sees another's would put that one back
_one_at_a_time = threading.RLock()

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def precision_of(dtype: torch.dtype) -> str:
    """As nn.GRU's: float32 may go through tensor cores. Numbers of half precision fit into tf32."""
    rnn = getattr(torch.backends.cudnn, "rnn", None)  # since torch 2.9, and then to be asked first
    allowed = torch.backends.cudnn.allow_tf32 if rnn is None else rnn.fp32_precision == "tf32"
    return "tf32" if allowed or dtype.itemsize == 2 else "ieee"


@contextmanager
def multiplied_in(precision: str, like: Tensor) -> Iterator[None]:
    """torch's products of float32 on a GPU have this precision: theirs is not that of nn.GRU."""
    if not like.is_cuda:
        yield
        return
    matmul: Any = torch.backends.cuda.matmul
    wanted: dict[str, Any] = {"allow_tf32": precision == "tf32"}
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9; to mix it with the older may raise
        wanted = {"fp32_precision": precision}
    if hasattr(matmul, "allow_fp16_accumulation"):  # sums in 32 bits would be refused
        wanted["allow_fp16_accumulation"] = False
    with _one_at_a_time:
        before = {name: getattr(matmul, name) for name in wanted}
        changed = [name for name in wanted if before[name] != wanted[name]]
        for name in changed:
            setattr(matmul, name, wanted[name])
        try:
            yield
        finally:
            for name in changed:
                setattr(matmul, name, before[name])


def multiplies_halves(like: Tensor) -> bool:
    """With sums of float32, also those that are added to: since torch 2.10, on a GPU"""
    return not like.is_cuda or TORCH >= (2, 10)


def multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """Of factors that may be of 16 bits, the product with all digits"""
    if a.dtype != out.dtype and not a.is_cuda:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dtype != out.dtype:
        aten = torch.ops.aten
        if add:
            aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
