"""What kernels are made of."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
blocks = pytest.importorskip("scoff.ops.scoff.kernels.blocks")

device = "cuda" if torch.cuda.is_available() else "cpu"
tanh = blocks.tanh


@triton.jit
def tanh_kernel(x, y, PRECISION: tl.constexpr):  # noqa: N803
    here = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + here, tanh(tl.load(x + here), PRECISION))


@pytest.mark.parametrize(("precision", "error"), [("ieee", 5e-7), ("tf32", 1e-3)])
def test_tanh_keeps_its_digits(precision, error):
    size = torch.logspace(-4, 1.2, 2048, dtype=torch.float64)
    x = torch.cat([size, -size]).float().to(device)
    y = torch.empty_like(x)
    tanh_kernel[(4,)](x, y, precision)
    torch.testing.assert_close(y.double(), x.double().tanh(), rtol=error, atol=0)
