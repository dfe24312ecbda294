"""The backend for wide states, with products of 16-bit numbers, against the reference."""

import pytest
import torch
from torch import Tensor

from scoff.ops.scoff import scoff_reference
from scoff.ops.scoff.types import Run
from tests.ops.cases import Case, Choices, Sizes, make_case
from tests.ops.compare import errors, results

wide = pytest.importorskip("scoff.ops.scoff.wide")
wide_backward = pytest.importorskip("scoff.ops.scoff.wide_backward")
wide_forward = pytest.importorskip("scoff.ops.scoff.wide_forward")
wide_layout = pytest.importorskip("scoff.ops.scoff.wide_layout")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_wide does it on a GPU")

ALONE = Sizes(steps=4, batch=2, files=1, size=12, schemata=3)
DIGITS = 4e-3  # of a sum of a few numbers with eleven bits


def assert_as_exact_as_tf32(case: Case, scale: float = 1.0) -> None:
    """`scale`: that of the gradients"""
    reference = scoff_reference(*case)
    exact = results(scaled(reference, scale), case)
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    case = case.to("cpu", torch.float32)
    assert layout_of(case).half
    ours = errors(case, exact, scaled(wide.scoff_wide(*case), scale))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_layout, "in_half", lambda *_: False)
        for module in (wide_forward, wide_backward):
            patch.setattr(module, "multiply", multiply_in_tf32)
        theirs = errors(case, exact, scaled(wide.scoff_wide(*case), scale))
    assert len(ours) > 8
    assert sum(ours.values()) < 2 * sum(theirs.values()), (ours, theirs)


def multiply_in_tf32(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    a, b = (((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for x in (a, b))
    out.addmm_(a, b, beta=int(add))


def scaled(run: Run, scale: float) -> Run:
    """Its gradients are scaled with it."""
    return run._replace(output=run.output * scale, state=run.state * scale)


def layout_of(case: Case):
    files = case.inputs.state.shape[2]
    settings = wide_layout.Settings(case.options.cell == "lstm", files, False, 1e-8, "tf32", 1, 1)
    return wide_layout.layout_of(wide.prepare(*case), settings)


@pytest.mark.parametrize("communication", ["gated", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.usefixtures("poisoned")
def test_has_the_digits_of_its_numbers(cell, communication):
    choices = Choices(cell, communication=communication, reset=True, padding=True)
    choices = choices._replace(comm_dropout=communication is not None)
    for size in (12, 16):  # 16: the padding is in no block
        assert_as_exact_as_tf32(make_case(ALONE._replace(size=size), choices, 1))


def test_states_as_wide_as_may_be():
    sizes = ALONE._replace(steps=2, size=1030, schemata=1)
    assert_as_exact_as_tf32(make_case(sizes, Choices(), 1, scale=0.05))


@pytest.mark.parametrize("scale", [1e-18, 1e12])
def test_gradients_of_any_scale(scale):
    assert_as_exact_as_tf32(make_case(ALONE, Choices(), 2), scale)


@pytest.mark.parametrize("communication", ["gated", None])
def test_gradients_of_one_sequence_much_larger_than_those_of_another(communication):
    case = make_case(ALONE, Choices(communication=communication), 3, torch.float32)
    reference = scoff_reference(*case.to("cpu", torch.float64))
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    found = {}
    for share in (1.0, 1e-9, 0.0):
        output = wide.scoff_wide(*case).output
        loss = output[:, 0].sum() + share * output[:, 1].sum()
        (found[share],) = torch.autograd.grad(loss, [case.inputs.state])
        assert found[share].isfinite().all()
        torch.testing.assert_close(found[share][:, 0], found[1.0][:, 0], rtol=DIGITS, atol=DIGITS)
    assert not found[0.0][:, 1].any()
    ours, wanted = found[1e-9][:, 1] * 1e9, found[1.0][:, 1]
    torch.testing.assert_close(ours, wanted, rtol=DIGITS, atol=DIGITS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("largest", [1e-3, 300.0])
def test_states_and_inputs_of_any_size(largest):
    case = make_case(ALONE, Choices(), 4)
    inputs = case.inputs
    for name in ("x", "state"):
        large = (getattr(inputs, name).detach() * largest).requires_grad_()
        assert_as_exact_as_tf32(case._replace(inputs=inputs._replace(**{name: large})))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_large_inputs_do_not_wipe_out_what_is_told():
    case = make_case(ALONE, Choices(), 4)
    case = case._replace(inputs=case.inputs._replace(x=case.inputs.x.detach() * 1e12))
    expected = scoff_reference(*case)
    case = case._replace(inputs=case.inputs._replace(choice=expected.schema))
    found = wide.scoff_wide(*case.to("cpu", torch.float32)).output
    torch.testing.assert_close(found.double(), expected.output, rtol=DIGITS, atol=DIGITS)


def test_weights_beyond_what_16_bits_hold_are_the_largest():
    case = make_case(ALONE._replace(steps=1, batch=20, schema_key=4), Choices(), 4)
    scaled = {
        name: (getattr(case.weights, name).detach() * 30).requires_grad_()
        for name in ("schema_query", "schema_key")
    }
    case = case._replace(weights=case.weights._replace(**scaled))
    assert (scaled["schema_key"].T @ scaled["schema_query"]).abs().max() > 2048
    exact = scoff_reference(*case)
    case = case.to("cpu", torch.float32)
    assert layout_of(case).half
    run = wide.scoff_wide(*case)
    assert (run.schema != exact.schema).double().mean() < 0.1
    for name, x in results(run, case).items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize(("steps", "length"), [(3, 1), (5, 2)])
@pytest.mark.parametrize("reset", [False, True])
def test_chunks_of_steps(steps, length, reset, monkeypatch):
    for module in (wide_forward, wide_backward):
        monkeypatch.setattr(module, "longest_chunk", lambda *_: length)
    assert_as_exact_as_tf32(make_case(ALONE._replace(steps=steps), Choices(reset=reset), 5))


def test_backward_can_run_again():
    # the first time it overwrites what the forward pass kept for it
    case = make_case(ALONE, Choices(reset=True), 6, torch.float32)
    output, leaves = wide.scoff_wide(*case).output.sum(), list(case.leaves().values())
    first, second = (
        torch.autograd.grad(output, leaves, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=DIGITS, atol=DIGITS)


def test_what_is_not_known_to_fit_is_multiplied_with_more_bits():
    case = make_case(ALONE, Choices(), 0, torch.float32)
    assert layout_of(case).half
    for sizes, choices, dtype in [
        (ALONE, Choices(communication="residual"), torch.float32),  # states may grow
        (ALONE._replace(size=1030), Choices(), torch.float32),  # gates are in several blocks
        (ALONE._replace(files=2), Choices(), torch.float32),
        (ALONE, Choices(), torch.float64),
    ]:
        assert not layout_of(make_case(sizes, choices, 0, dtype)).half
