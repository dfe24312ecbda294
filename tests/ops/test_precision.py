"""The precision of products, which is nn.GRU's, and left as it was."""

import threading
from typing import Any

import pytest
import torch

from scoff.ops.scoff.precision import multiplied_in, precision_of


@pytest.mark.parametrize("tf32", [True, False])
def test_precision_is_that_of_torchs_recurrent_layers(tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    assert precision_of(torch.float32) == ("tf32" if tf32 else "ieee")
    assert precision_of(torch.float16) == "tf32"


class OnGPU:
    is_cuda = True


on_gpu: Any = OnGPU()


def rounded() -> bool:
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_precision_of_products_is_restored(precision, before):
    def fail() -> None:
        with multiplied_in(precision, on_gpu):
            assert rounded() == (precision == "tf32")
            raise KeyError

    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        with pytest.raises(KeyError):
            fail()
        assert rounded() == (before == "high")
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(usual)


def test_threads_do_not_see_or_restore_each_others_precision():
    assert not rounded()
    first_is_in, first_may_leave = threading.Event(), threading.Event()
    seen = []

    def first() -> None:
        with multiplied_in("tf32", on_gpu):
            first_is_in.set()
            first_may_leave.wait()
            seen.append(rounded())

    def second() -> None:
        first_is_in.wait()
        with multiplied_in("ieee", on_gpu):
            seen.append(rounded())
            threads[0].join(0.2)  # without a lock it leaves before this one does

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    threads[1].join(0.1)
    first_may_leave.set()
    for thread in threads:
        thread.join()
    assert seen == [True, False]
    assert not rounded()
