"""The precision of products, which is nn.GRU's, and left as it was."""

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


@pytest.mark.parametrize("before", ["highest", "high"])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_precision_of_products_is_restored(precision, before):
    def rounded() -> bool:
        matmul: Any = torch.backends.cuda.matmul
        if hasattr(matmul, "fp32_precision"):
            return matmul.fp32_precision == "tf32"
        return matmul.allow_tf32

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
