"""Kernels that mix pictures against the reference: by Triton's interpreter, or on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoff.ops.mixture import dispatch, mix_classes_reference, mix_reference

fused = pytest.importorskip("scoff.ops.mixture.fused")
launch = pytest.importorskip("scoff.ops.scoff.launch")
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
old = launch.TRITON < launch.OLDEST_TRITON
recent = pytest.mark.skipif(old, reason="triton is older than what kernels need")
interpreted = pytest.mark.skipif(on_gpu, reason="float64 is for the interpreter")
KINDS = {
    "brightness": (fused.mix_fused, mix_reference),
    "classes": (fused.mix_classes_fused, mix_classes_reference),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def painted(
    frames=(2,), files=3, channels=2, height=3, width=5, scale=3.0, dtype=torch.float64
) -> Tensor:
    """Pictures and masks of object files in one tensor, as a painter leaves them"""
    x = scale * torch.randn(*frames, files, channels + 1, height, width, dtype=torch.float64)
    return x.to(device, dtype)


def run(function, x: Tensor, use=("mixed", "masks")):
    """Results, and gradients of all that is in x"""
    x = x.detach().requires_grad_()
    pictures, masks = x.split([x.shape[-3] - 1, 1], -3)
    found = dict(zip(("mixed", "masks"), function(pictures, masks.squeeze(-3)), strict=True))
    # a different weight for each number
    loss = sum(
        found[name].flatten() @ torch.arange(found[name].numel(), device=x.device).to(x).cos()
        for name in use
    )
    (gradient,) = torch.autograd.grad(loss, x)
    return *(part.detach() for part in found.values()), gradient


def assert_same(kind: str, x: Tensor, use=("mixed", "masks")):
    ours, expected = (run(function, x, use) for function in KINDS[kind])
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@interpreted
@kinds
@settings(max_examples=15)
@given(
    frames=st.lists(st.integers(1, 3), max_size=2),
    files=st.integers(1, 9),
    channels=st.integers(1, 4),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    scale=st.sampled_from([0.1, 3.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_kernels_equal_the_reference(kind, frames, files, channels, height, width, scale, seed):
    torch.manual_seed(seed)
    assert_same(kind, painted(frames, files, channels, height, width, scale))


@interpreted
@kinds
@pytest.mark.parametrize(
    "sizes",
    [
        {"files": 64, "height": 10, "width": 7},  # several blocks, the last not full
        {"height": 23, "width": 23},
        {"files": 1, "channels": 1, "height": 1, "width": 1},
    ],
)
def test_sizes_at_the_edges_of_blocks(kind, sizes):
    assert_same(kind, painted((1,), **sizes))


@interpreted
@kinds
@pytest.mark.parametrize("use", ["mixed", "masks"])
def test_gradients_of_one_result_alone(kind, use):
    assert_same(kind, painted(), (use,))


@interpreted
@kinds
@pytest.mark.usefixtures("poisoned")
def test_no_uninitialised_memory_is_read(kind):
    assert_same(kind, painted(files=5, height=7))


@interpreted
@kinds
def test_any_layout(kind):
    ours, reference = KINDS[kind]
    pictures = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64).transpose(1, 2).mT  # 5 object files
    masks = torch.randn(5, 1, 4, 2, dtype=torch.float64).permute(3, 0, 2, 1).expand(2, 5, 4, 4)
    for one, other in zip(ours(pictures, masks), reference(pictures, masks), strict=True):
        torch.testing.assert_close(one, other)


def test_parts_of_one_tensor_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr(fused, "prepared", lambda *_, **__: lambda *given: seen.append(given))
    x = painted(files=4)
    fused.mix_fused(x[..., :-1, :, :], x[..., -1, :, :])
    pictures, masks, *_ = seen[0]
    assert pictures.data_ptr() == x.data_ptr()
    assert masks.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@kinds
def test_single_precision_is_as_good_as_the_references(kind):
    exact = painted((4,), 4, 2, 16, 16, dtype=torch.float64)
    expected = run(KINDS[kind][1], exact)
    ours, theirs = (run(function, exact.float()) for function in KINDS[kind])
    for one, other, right in zip(ours, theirs, expected, strict=True):
        assert (one - right).abs().mean() <= 2 * (other - right).abs().mean() + 1e-8


@kinds
@pytest.mark.parametrize("size", [80.0, 1e4, 1e37])
def test_large_logits(kind, size):
    """Of pictures and of masks, all ways around"""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 4).T  # [4, 81]
    x = (size * signs).reshape(2, 2, 9, 9).to(device)  # two object files, one channel and masks
    if kind == "classes":
        x = torch.cat([x[:, :1], -x[:, :1], x[:, 1:]], 1)
    ours, reference = KINDS[kind]
    mixed, masks, gradient = run(ours, x)
    assert gradient.isfinite().all()
    for one, other in zip((mixed, masks), run(reference, x), strict=False):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    if size < 1e5:  # beyond, the reference's gradients are wrong even in float64
        right = run(reference, x.double())[-1].float()
        torch.testing.assert_close(gradient, right, rtol=0, atol=size * 1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@kinds
@pytest.mark.parametrize("channel", [0, 2])
def test_nan_stays_nan(kind, channel):
    x = painted((2,), dtype=torch.float32)
    x[0, 1, channel, 0, 0] = torch.nan
    mixed, _, gradient = run(KINDS[kind][0], x)
    assert mixed[0, 0, 0, 0].isnan()
    assert gradient[0, :, 0, 0, 0].isnan().all()
    assert mixed[1].isfinite().all()
    assert mixed[0, :, 1].isfinite().all()
    assert gradient[1].isfinite().all()


@kinds
def test_compiles_into_one_graph(kind):
    ours = KINDS[kind][0]

    def both(x: Tensor) -> Tensor:
        pictures, masks = x.split([x.shape[-3] - 1, 1], -3)
        mixed, seen = ours(pictures, masks.squeeze(-3))
        return mixed.sin().sum() + seen.cos().sum()

    x = painted(dtype=torch.float32).requires_grad_()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = [(y := function(x), *torch.autograd.grad(y, x)) for function in (both, compiled)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("classes", [False, True])
def test_operators_pass_torchs_own_checks(classes):
    x = painted(dtype=torch.float32).flatten(-2)
    pictures, masks = x[:, :, :-1], x[:, :, -1]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused._forward, (pictures, masks, classes), test_utils=utils)
    mixed, seen = fused._forward(pictures, masks, classes)
    for d_masks in (None, seen):
        given = (pictures, masks, classes, mixed, d_masks)
        torch.library.opcheck(fused._backward, given, test_utils=utils)


@recent
def test_what_kernels_do_not_take(monkeypatch):
    def why_not(pictures, masks):
        return fused.why_not(
            torch.empty(pictures, device=device), torch.empty(masks, device=device)
        )

    assert why_not((2, 3, 1, 4, 4), (2, 3, 4, 4)) is None
    assert why_not((65, 1, 4, 4), (65, 4, 4)) == "65 object files are more than 64"
    assert why_not((2, 3, 1, 4, 4), (3, 4, 4)).startswith("it has no (3, 4, 4) masks of")
    assert why_not((0, 3, 1, 4, 4), (0, 3, 4, 4)).startswith("it has no")
    elsewhere = torch.zeros(3, 4, 4, device="meta")
    pictures = torch.zeros(3, 1, 4, 4, device=device)
    assert fused.why_not(pictures, elsewhere).startswith("pictures are on")
    single, half = (torch.empty(3, 1, 4, 4, device=device).to(x) for x in (torch.float, torch.half))
    for pictures, masks in ((single, half), (half, single), (half, half)):
        assert fused.why_not(pictures, masks[:, 0]).startswith("it wants float32")
    monkeypatch.setattr(launch, "TRITON", (3, 5))
    assert why_not((2, 3, 1, 4, 4), (2, 3, 4, 4)).startswith("it needs triton 3.6")


@interpreted
@pytest.mark.parametrize("frames", [(2,), (0,)])
def test_a_cpu_takes_the_reference(frames, monkeypatch):
    monkeypatch.setattr(fused, "launch", None)  # which cannot be called
    x = painted(frames)
    for function in (dispatch.mix, dispatch.mix_classes):
        assert function(x[..., :-1, :, :], x[..., -1, :, :])[0].shape == (*frames, 2, 3, 5)


COMPILE = """
import torch
from scoff.ops.mixture import fused
from tests.ops.compile_kernels import Recorder, compile_kernel

launches = []
for name in dir(fused):
    if name.endswith("_kernel"):
        setattr(fused, name, Recorder(getattr(fused, name), launches))
for files in (4, 7):
    x = torch.randn(2, files, 4, 64, 64, requires_grad=True)
    for function in (fused.mix_fused, fused.mix_classes_fused):
        mixed, masks = function(x[:, :, :-1], x[:, :, -1])
        (mixed.sum() + (masks.sum() if files == 4 else 0)).backward()
for kernel, args, kwargs in launches:
    print(kernel.__name__, compile_kernel(kernel, args, kwargs))
"""


@interpreted
@recent
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    # without the interpreter, hence in another process
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # up to eight object files of a pixel are in one thread: nothing goes through shared memory
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0"] * 8


# --- on a GPU


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize(("files", "size"), [(1, 64), (4, 64), (6, 32), (8, 64), (20, 24)])
def test_gpu_equals_the_reference(kind, files, size):
    x = painted((3, 2), files, 3, size, size, dtype=torch.float32)
    ours, reference = (run(function, x) for function in KINDS[kind])
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [False, True])
def test_a_gpu_takes_kernels_if_it_can(classes, monkeypatch):
    taken = []
    monkeypatch.setattr(fused, "launch", lambda kernel, *_: taken.append(kernel))
    function = dispatch.mix_classes if classes else dispatch.mix
    for dtype in (torch.float32, torch.float64):
        x = painted((2,), dtype=dtype)
        function(x[..., :-1, :, :], x[..., -1, :, :])
    assert taken == [fused.mix_classes_kernel if classes else fused.mix_kernel]


@pytest.mark.gpu
@kinds
def test_inside_a_cuda_graph(kind):
    x = painted((3,), 4, 1, 64, 64, dtype=torch.float32)
    expected = run(KINDS[kind][0], x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(KINDS[kind][0], x)
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
