"""Kernels that normalise maps against the reference: by Triton's interpreter, or on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoff.ops.map_norm import dispatch, map_norm_elu_reference

fused = pytest.importorskip("scoff.ops.map_norm.fused")
launch = pytest.importorskip("scoff.ops.scoff.launch")
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
old = launch.TRITON < launch.OLDEST_TRITON
recent = pytest.mark.skipif(old, reason="triton is older than what kernels need")
interpreted = pytest.mark.skipif(on_gpu, reason="float64 is for the interpreter")
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
EPS = 1e-5
NAMES = ("y", "x", "gain", "bias")  # the result, and what it has gradients of


def maps(n=2, height=3, width=5, channels=4, mean=1.0, scale=2.0, dtype=torch.float64):
    """Maps, gains and biases; of half precision only the maps, as autocast has them"""
    x = mean + scale * torch.randn(n, height, width, channels, dtype=torch.float64)
    weights = torch.randn(2, channels, dtype=torch.float64)
    exact = torch.promote_types(dtype, torch.float32)
    return x.to(device, dtype), *weights.to(device, exact)


def run(function, x: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The result, and gradients of all that is given"""
    inputs = [part.detach().requires_grad_() for part in (x, gain, bias)]
    y = function(*inputs, EPS)
    # a different weight for each number
    weight = torch.arange(y.numel(), device=device).double().cos().view_as(y)
    return y.detach(), *torch.autograd.grad((y * weight.to(y.dtype)).sum(), inputs)


def assert_same(*given: Tensor, atol=1e-10):
    ours, expected = (
        run(function, *given) for function in (fused.map_norm_elu_fused, map_norm_elu_reference)
    )
    for name, one, other in zip(NAMES, ours, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=atol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


@interpreted
@settings(max_examples=25)
@given(
    n=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    channels=st.integers(2, 9),
    mean=st.sampled_from([0.0, -3.0, 100.0]),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_kernels_equal_the_reference(n, height, width, channels, mean, scale, seed):
    torch.manual_seed(seed)
    assert_same(*maps(n, height, width, channels, mean, scale), atol=1e-8)


@interpreted
@pytest.mark.parametrize("tile", [1, 16, 32, 64])
def test_maps_of_several_tiles(tile, monkeypatch):
    """Of which the last need not be full"""
    monkeypatch.setattr(fused, "TILE", tile)
    assert_same(*maps(height=5, width=5, channels=3))


@interpreted
@pytest.mark.usefixtures("poisoned")
def test_no_uninitialised_memory_is_read():
    assert_same(*maps(height=7, channels=5))


@interpreted
def test_any_layout():
    x, gain, bias = maps(4, 5, 6, 4)
    for order in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)):
        assert_same(x.permute(order), gain, bias)
    assert_same(x, gain[:1].expand(4), bias.repeat_interleave(2)[::2])
    assert_same(x[::2, 1:, :, :3], gain[:3], bias[1:])


def test_a_constant_map_is_its_bias():
    """Also if numbers next to the map, which are not there, would be far from its mean"""
    _, gain, bias = maps(dtype=torch.float32)
    x = torch.full((2, 3, 5, 4), 0.5, device=device)
    y, d_x, d_gain, _ = run(fused.map_norm_elu_fused, x, gain, bias)
    torch.testing.assert_close(y, torch.nn.functional.elu(bias).expand_as(y))
    assert d_x.isfinite().all()
    assert (d_gain == 0).all()


def errors(function, given: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> list[float]:
    """Of the result and the gradients, the mean"""
    found = run(function, *given)
    return [
        (one.double() - other).abs().mean().item() for one, other in zip(found, right, strict=True)
    ]


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_single_precision_is_as_good_as_the_references(mean):
    given = maps(4, 16, 16, 8, mean, dtype=torch.float32)
    right = run(map_norm_elu_reference, *(x.double() for x in given))
    ours = errors(fused.map_norm_elu_fused, given, right)
    theirs = errors(map_norm_elu_reference, given, right)
    # gains and biases have a sum of a thousand numbers, which the interpreter adds one by one
    for one, other, slack in zip(ours, theirs, (1e-8, 1e-8, 1e-5, 1e-5), strict=True):
        assert one <= 2 * other + slack


@halves
def test_half_precision_rounds_only_what_is_handed_back(dtype):
    given = maps(4, 8, 8, 8, dtype=dtype)
    ours = run(fused.map_norm_elu_fused, *given)
    assert [part.dtype for part in ours] == [dtype, dtype, torch.float32, torch.float32]
    x, gain, bias = given
    exact = run(
        # gradients of the result are rounded as well
        lambda x, *rest: fused.map_norm_elu_fused(x, *rest).to(dtype),
        x.float(),
        gain,
        bias,
    )
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype))


@halves
def test_autocast_changes_nothing(dtype):
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("autocast of a CPU is tested with bfloat16")
    given = maps(dtype=dtype)
    with torch.autocast(device, dtype):
        ours = run(fused.map_norm_elu_fused, *given)
        assert map_norm_elu_reference(*given, EPS).dtype == dtype
    for one, other in zip(ours, run(fused.map_norm_elu_fused, *given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_nan_stays_in_its_map():
    x, gain, bias = maps(dtype=torch.float32)
    x[0, 1, 2, 3] = torch.nan
    y, d_x, d_gain, _ = run(fused.map_norm_elu_fused, x, gain, bias)
    assert y[0].isnan().all()
    assert d_x[0].isnan().all()
    assert d_gain.isnan().all()
    assert y[1].isfinite().all()
    assert d_x[1].isfinite().all()


def test_large_numbers_of_half_precision():
    """Whose squares are none"""
    x, gain, bias = maps(mean=0.0, scale=1e4, dtype=torch.float16)
    expected = map_norm_elu_reference(x.float(), gain, bias, EPS)
    found = fused.map_norm_elu_fused(x, gain, bias, EPS)
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)


def test_compiles_into_one_graph():
    def both(*given: Tensor) -> Tensor:
        return fused.map_norm_elu_fused(*given, EPS).sin().sum()

    inputs = [x.requires_grad_() for x in maps(dtype=torch.float32)]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = [
        (y := function(*inputs), *torch.autograd.grad(y, inputs)) for function in (both, compiled)
    ]
    torch.testing.assert_close(*results)


def test_operators_pass_torchs_own_checks():
    given = maps(dtype=torch.float32)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused._forward, (*given, EPS), test_utils=utils)
    y, statistics = fused._forward(*given, EPS)
    torch.library.opcheck(fused._backward, (*given, statistics, y), test_utils=utils)


@recent
def test_what_kernels_do_not_take(monkeypatch):
    def why_not(x, gain, bias, dtype=torch.float32, weights=torch.float32):
        parts = (torch.empty(shape, device=device) for shape in (x, gain, bias))
        kinds = (dtype, weights, weights)
        return fused.why_not(*(part.to(to) for part, to in zip(parts, kinds, strict=True)))

    shape = (2, 3, 3, 4)
    assert why_not(shape, 4, 4) is None
    assert why_not(shape, 4, 4, torch.bfloat16) is None
    assert why_not(shape, 4, 4, torch.bfloat16, torch.bfloat16) is None
    assert why_not(shape, 4, 4, torch.float32, torch.float64).startswith("it has no torch.float64")
    assert why_not(shape, 4, 4, torch.int32).startswith("it has no torch.float32")
    assert why_not(shape, 4, 3) == "it has no (4,) and (3,) for (2, 3, 3, 4)"
    assert why_not((0, 3, 3, 4), 4, 4).startswith("it has no (4,)")
    assert why_not((2, 3, 4), 4, 4).startswith("it has no (4,)")
    assert why_not((1, 1, 1, 4097), 4097, 4097) == "4097 channels are more than 4096"
    x, gain, bias = maps(dtype=torch.float32)
    assert fused.why_not(x, gain, bias.to("meta")).startswith("it wants one device")
    monkeypatch.setattr(launch, "TRITON", (3, 5))
    assert why_not(shape, 4, 4).startswith("it needs triton 3.6")


@interpreted
@pytest.mark.parametrize("n", [2, 0])
def test_a_cpu_takes_the_reference(n, monkeypatch):
    monkeypatch.setattr(fused, "launch", None)  # which cannot be called
    x, gain, bias = maps(n)
    assert torch.equal(
        dispatch.map_norm_elu(x, gain, bias), map_norm_elu_reference(x, gain, bias, EPS)
    )


COMPILE = """
import torch
import triton
from scoff.ops.map_norm import fused
from tests.ops.compile_kernels import Recorder, compile_kernel

launches = []
for name in dir(fused):
    if name.endswith("_kernel"):
        setattr(fused, name, Recorder(getattr(fused, name), launches))
single, half, brain = torch.float32, torch.float16, torch.bfloat16
for dtype, size, channels in ((single, 32, 16), (brain, 16, 32), (half, 9, 7), (single, 64, 16)):
    x = torch.randn(2, size, size, channels, dtype=dtype, requires_grad=True)
    gain, bias = torch.zeros(2, channels, requires_grad=True)
    fused.map_norm_elu_fused(x, gain, bias, 1e-5).sum().backward()
compile = triton.compile
for kernel, args, kwargs in launches:
    def noted(*args, **kwargs):
        done = compile(*args, **kwargs)
        print(kernel.__name__, done.asm["ttgir"].count("tt.load"))
        return done
    triton.compile = noted
    compile_kernel(kernel, args, kwargs)
"""


@interpreted
@recent
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    # without the interpreter, hence in another process
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # a map that fits is read once: x, gain and bias, and on the way back two statistics and d_y
    once = ["map_norm_elu_kernel 3", "map_norm_elu_back_kernel 6"]
    again = ["map_norm_elu_kernel 5", "map_norm_elu_back_kernel 8"]
    assert done.stdout.splitlines() == [*once * 3, *again]


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "channels"), [(32, 16), (16, 32), (8, 64), (64, 16), (64, 64), (9, 7), (1, 2)]
)
def test_gpu_equals_the_reference(size, channels):
    assert_same(*maps(5, size, size, channels, dtype=torch.float32), atol=1e-3)


@pytest.mark.gpu
@halves
@pytest.mark.parametrize(("size", "channels"), [(32, 16), (16, 32), (8, 64), (64, 16)])
def test_gpu_in_half_precision(dtype, size, channels):
    x, gain, bias = maps(5, size, size, channels, dtype=dtype)
    ours = run(fused.map_norm_elu_fused, x, gain, bias)
    exact = run(map_norm_elu_reference, x.double(), gain.double(), bias.double())
    for one, other in zip(ours, exact, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.01 * scale)


@pytest.mark.gpu
def test_a_gpu_takes_kernels_if_it_can(monkeypatch):
    taken = []
    monkeypatch.setattr(fused, "launch", lambda *given, **_: taken.append(given[1].dtype))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        dispatch.map_norm_elu(*maps(dtype=dtype))
    assert taken == [torch.float32, torch.bfloat16]


@pytest.mark.gpu
def test_gradients_have_the_same_bits_each_time():
    given = maps(500, 16, 16, 32, dtype=torch.float32)
    for one, other in zip(*(run(fused.map_norm_elu_fused, *given) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_inside_a_cuda_graph():
    given = maps(3, 32, 32, 16, dtype=torch.float32)
    expected = run(fused.map_norm_elu_fused, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(fused.map_norm_elu_fused, *given)
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
