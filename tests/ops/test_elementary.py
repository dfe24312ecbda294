"""Functions of single numbers: on a GPU as it does them, elsewhere as the interpreter does."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
elementary = pytest.importorskip("scoff.ops.scoff.kernels.elementary")

device = "cuda" if torch.cuda.is_available() else "cpu"
tanh, sigmoid, exp = elementary.tanh, elementary.sigmoid, elementary.exp
inverse, nearest = elementary.inverse, elementary.nearest
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at the limits
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])


@triton.jit
def tanh_kernel(x, y, PRECISION: tl.constexpr):  # noqa: N803
    here = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y + here, tanh(tl.load(x + here), PRECISION))


@triton.jit
def others_kernel(x, y, COUNT, PRECISION: tl.constexpr):  # noqa: N803
    here = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    given = tl.load(x + here, mask=here < COUNT, other=0.0)
    tl.store(y + here, sigmoid(given, PRECISION), mask=here < COUNT)
    tl.store(y + COUNT + here, exp(given, PRECISION), mask=here < COUNT)
    tl.store(y + 2 * COUNT + here, inverse(given, PRECISION), mask=here < COUNT)
    tl.store(y + 3 * COUNT + here, nearest(given, PRECISION), mask=here < COUNT)


def others(x, precision):
    """sigmoid, exp, inverse, nearest"""
    x = x.to(device)
    y = torch.full((4, len(x)), float("nan"), device=device)
    others_kernel[(triton.cdiv(len(x), 1024),)](x, y, len(x), precision)
    return y.cpu()


@pytest.mark.parametrize(("precision", "error"), [("ieee", 5e-7), ("tf32", 1e-3)])
def test_tanh_keeps_its_digits(precision, error):
    size = torch.logspace(-4, 1.2, 2048, dtype=torch.float64)
    x = torch.cat([size, -size]).float().to(device)
    y = torch.empty_like(x)
    tanh_kernel[(4,)](x, y, precision)
    torch.testing.assert_close(y.double(), x.double().tanh(), rtol=error, atol=0)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_others_keep_their_digits(precision):
    size = torch.logspace(-6, 1.9, 3000, dtype=torch.float64)
    x = torch.cat([size, -size]).float()
    sigmoid_of, exp_of, inverse_of, _ = others(x, precision).double()
    x = x.double()
    # what is left of a product with 1.44 has digits of x alone
    torch.testing.assert_close(exp_of, x.exp(), rtol=2e-5, atol=0)
    torch.testing.assert_close(sigmoid_of, x.sigmoid(), rtol=2e-5, atol=0)
    near = x.abs() < 1
    torch.testing.assert_close(exp_of[near], x[near].exp(), rtol=6e-7, atol=0)
    torch.testing.assert_close(sigmoid_of[near], x[near].sigmoid(), rtol=6e-7, atol=0)
    torch.testing.assert_close(inverse_of, 1 / x, rtol=6e-7, atol=0)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_limits(precision):
    sigmoid_of, exp_of, inverse_of, _ = others(SPECIAL, precision)
    torch.testing.assert_close(sigmoid_of, SPECIAL.sigmoid(), equal_nan=True)
    torch.testing.assert_close(exp_of, SPECIAL.exp(), equal_nan=True)
    torch.testing.assert_close(inverse_of, 1 / SPECIAL, equal_nan=True)


def test_nearest_has_ten_binary_digits_and_is_the_nearest():
    x = torch.randn(10000, generator=torch.Generator().manual_seed(0)) * 100
    found = others(x, "tf32")[3]
    bits = found.view(torch.int32)
    assert (bits & 0x1FFF == 0).all()
    half = x.double().abs().log2().floor().sub(11).exp2()  # of the last digit
    assert ((found - x.double()).abs() <= half).all()
    assert torch.equal(others(x, "ieee")[3], x)
    torch.testing.assert_close(others(SPECIAL, "tf32")[3], SPECIAL, equal_nan=True)
    of_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # CUDA's NaN
    assert others(of_ones, "tf32")[3].isnan().all()
