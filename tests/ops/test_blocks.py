"""What kernels are made of."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
blocks = pytest.importorskip("scoff.ops.scoff.kernels.blocks")

device = "cuda" if torch.cuda.is_available() else "cpu"
power_below, within = blocks.power_below, blocks.within
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, at the limits


@triton.jit
def scale_kernel(x, scaled, powers):
    row, column = tl.arange(0, 16), tl.arange(0, 8)
    at = row[:, None] * 8 + column[None, :]
    given = tl.load(x + at)
    power = power_below(given, tl.float16)
    tl.store(scaled + at, within(given, power, tl.float16, "tf32"))
    tl.store(powers + column, power)


def test_columns_of_any_size_fit_into_16_bits():
    largest = torch.tensor([0, 2.0**-140, 2.0**-126, 1e-30, 1.5, 1e30, 2.0**127, 3.4e38])
    x = torch.linspace(-1, 1, 16)[:, None] * largest
    scaled = torch.empty(16, 8, dtype=torch.float16, device=device)
    powers = torch.empty(8, device=device)
    scale_kernel[(1,)](x.to(device), scaled, powers)
    scaled, powers = scaled.cpu().double(), powers.cpu().double()
    assert scaled.abs().max() <= 4
    assert torch.equal(powers.log2(), powers.log2().round())
    error = (scaled * powers - x.double()).abs().amax(0)
    known = largest >= 2.0**-126  # less is nothing beside a 1
    assert (error[known] <= 2.0**-11 * largest[known]).all()
    assert (scaled[:, ~known] == 0).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(value):
    x = torch.ones(16, 8)
    x[3, 5] = value
    scaled = torch.empty(16, 8, dtype=torch.float16, device=device)
    scale_kernel[(1,)](x.to(device), scaled, torch.empty(8, device=device))
    scaled = scaled.cpu()
    assert not scaled[3, 5].isfinite()
    others = torch.arange(8) != 5
    assert (scaled[:, others] == 1).all()
