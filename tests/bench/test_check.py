"""The check that a backend passes before it gets a speed."""

import pytest
import torch

from scoff.bench import check
from scoff.bench.check import (
    MARGIN,
    CheckError,
    check_backend,
    clear_choices,
    draw_case,
    tolerance,
)
from scoff.bench.layers import make_rims, make_scoff
from scoff.bench.settings import Setting
from scoff.ops.rims import dispatch as rims_dispatch
from scoff.ops.scoff import dispatch as scoff_dispatch

CPU = torch.device("cpu")
SMALL = Setting("small", 2, 3, object_files=3, size=8, schemata=4, positions=5, input=6)
ONE_FILE = Setting("one file", 2, 3, object_files=1, size=8, schemata=3, input=6)
ONE_SCHEMA = Setting("one schema", 2, 3, object_files=2, size=8, schemata=1, input=6)


@pytest.mark.parametrize("setting", [SMALL, ONE_FILE, ONE_SCHEMA], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["batched", "reference"])
@pytest.mark.parametrize("make", [make_scoff, make_rims])
def test_backends_pass(make, backend, dtype, setting):
    errors = check_backend(make(setting, backend, "cpu", dtype), setting, CPU, dtype)
    assert {"the output", "the output without grad", "the last state"} < errors.keys()
    assert {"the gradient of input", "the gradient of initial state"} < errors.keys()
    assert {"the gradient of weight_hh", "the gradient of comm_gate_bias"} < errors.keys()


def test_it_costs_the_layer_nothing():
    layer = make_scoff(SMALL, "batched", "cpu", torch.float32)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    check_backend(layer, SMALL, CPU, torch.float32)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert all(weight.grad is None for weight in layer.parameters())


class Scaled(torch.autograd.Function):
    """Exact going forward; the gradient is off."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return 1.01 * grad


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda y: 1.01 * y, "the output differs by 1.0e-02, more than 1e-04"),
        (lambda y: y * float("nan"), "the output differs by nan"),
        (lambda y: y if y.requires_grad else 1.01 * y, "the output without grad differs"),
        (Scaled.apply, "the gradient of input differs by"),
    ],
)
@pytest.mark.parametrize(
    ("module", "name", "make"),
    [(scoff_dispatch, "scoff_batched", make_scoff), (rims_dispatch, "rims_batched", make_rims)],
)
def test_what_is_wrong_is_named(module, name, make, spoil, told, monkeypatch):
    right = getattr(module, name)

    def wrong(*args):
        run = right(*args)
        return run._replace(output=spoil(run.output))

    monkeypatch.setattr(module, name, wrong)
    layer = make(SMALL, "batched", "cpu", torch.float32)
    with pytest.raises(CheckError, match=told):
        check_backend(layer, SMALL, CPU, torch.float32)


@pytest.mark.parametrize("first", [0, 3])
def test_what_is_timed_is_checked(first, monkeypatch):
    """Wrong with as many sequences as are timed alone, and there only once calls are replayed"""
    right, calls = scoff_dispatch.scoff_batched, []

    def wrong(inputs, *args):
        run = right(inputs, *args)
        if inputs.x.shape[1] != SMALL.batch or not torch.is_grad_enabled():
            return run
        calls.append(inputs)
        return run._replace(output=1.01 * run.output) if len(calls) > first else run

    monkeypatch.setattr(scoff_dispatch, "scoff_batched", wrong)
    layer = make_scoff(SMALL, "batched", "cpu", torch.float32)
    with pytest.raises(CheckError, match=r"differs by .*, with 2 sequences x 3 steps$"):
        check_backend(layer, SMALL, CPU, torch.float32)
    assert len(calls) > first


def test_the_reference_may_run_in_pieces(monkeypatch):
    layer = make_scoff(SMALL, "batched", "cpu", torch.float32)
    monkeypatch.setattr(check, "AT_ONCE", 3)
    assert max(check_backend(layer, SMALL, CPU, torch.float32).values()) < 1e-5


def test_choices_are_made_clear_and_stay_what_they_are():
    reference = make_scoff(SMALL, "reference", "cpu", torch.float64)
    drawn = draw_case(SMALL, 5, 4, CPU, torch.float64)
    clear = clear_choices(reference, drawn)
    before, after = (reference.trace(c.x, c.state, noise=c.noise) for c in (drawn, clear))
    assert torch.equal(before.schema, after.schema)
    torch.testing.assert_close(before.output, after.output)
    best, second = after.schema_probs.log().topk(2, -1).values.unbind(-1)
    assert (best - second).min() >= MARGIN - 1e-9


@pytest.mark.usefixtures("tf32_flags")
def test_tolerance_goes_by_precision():
    cuda = torch.device("cuda")

    def allowed(backend: str) -> list[float]:
        return [tolerance(backend, device, torch.float32) for device in (CPU, cuda)]

    assert tolerance("batched", cuda, torch.bfloat16) == 1e-1
    assert tolerance("fused", cuda, torch.float16) == 1e-1
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = True
    assert allowed("batched") == [1e-4, 1e-2]
    assert allowed("fused") == [1e-4, 1e-4]
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert allowed("batched") == [1e-4, 1e-4]
    assert allowed("fused") == allowed("wide") == [1e-4, 1e-2]
