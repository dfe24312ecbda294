"""The two backends against each other, and the reference against Algorithm 1 and its derivative."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from scoff.ops.scoff import Run, reference, scoff_batched, scoff_reference
from scoff.ops.scoff import batched as batched_module
from tests.ops.cases import Case, Choices, Sizes, choices, make_case, seeds, sizes
from tests.ops.compare import results


def readings(run: Run) -> dict[str, Tensor]:
    """All that carries a gradient; heads of the input attention are averaged, as in a trace."""
    return {
        "output": run.output,
        "state": run.state,
        "input_attention": run.input_attention.mean(3),
        "schema_probs": run.schema_probs,
        "communication": run.communication,
    }


def loss_of(run: Run, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    parts = []
    for value in readings(run).values():
        # transposed, as the gradients of a batch-first layer are
        weight = torch.randn(value.shape[::-1], generator=g, dtype=torch.float64)
        weight = weight.permute(*reversed(range(value.ndim)))
        parts.append((value * weight.to(value)).sum())
    return torch.stack(parts).sum()


def gradients(run: Run, case: Case, seed: int) -> dict[str, Tensor]:
    leaves = case.leaves()
    found = torch.autograd.grad(loss_of(run, seed), list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float) -> None:
    assert expected.keys() == got.keys()
    for name in expected:
        torch.testing.assert_close(
            got[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@settings(max_examples=80)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_batched_equals_reference(sizes: Sizes, choices: Choices, seed: int):
    case = make_case(sizes, choices, seed)
    expected, got = scoff_reference(*case), scoff_batched(*case)
    assert_same(readings(expected), readings(got), 1e-10)
    assert torch.equal(expected.schema, got.schema)
    assert torch.equal(expected.active, got.active)
    assert_same(gradients(expected, case, seed), gradients(got, case, seed), 1e-10)


@pytest.mark.parametrize("name", ["output", "state", "schema_probs"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_loss_may_be_of_one_of_them_alone(cell, name):
    case = make_case(Sizes(positions=2), Choices(cell=cell, active=2), 0)
    leaves = case.leaves()
    slopes = []
    for backend in (scoff_reference, scoff_batched):
        loss = getattr(backend(*case), name).square().sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        both = zip(leaves.items(), found, strict=True)
        slopes.append({k: torch.zeros_like(v) if x is None else x for (k, v), x in both})
    assert slopes[0]["x"].norm() > 0
    assert_same(*slopes, 1e-10)


@given(sizes=sizes, choices=choices, seed=seeds)
def test_what_is_asked_can_be_detached_from_who_asks(sizes, choices, seed):
    """In one step that changes the gradient of the state alone."""
    sizes = sizes._replace(steps=1, files=max(2, sizes.files), positions=2)
    cases = [make_case(sizes, choices._replace(detach=x, reset=False), seed) for x in (False, True)]
    runs = [scoff_reference(*case) for case in cases]
    plain, detached = (results(run, case) for run, case in zip(runs, cases, strict=True))
    for name in plain.keys() - {"d_state"}:
        assert torch.equal(plain[name], detached[name]), name
    if choices.active >= sizes.files and not choices.padding and not choices.value_dropout:
        assert not torch.equal(plain["d_state"], detached["d_state"])


@pytest.mark.parametrize("positions", [1, 64])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_batched_equals_reference_over_several_chunks(cell, positions):
    # enough rows that weight gradients are gathered in several chunks, the last one shorter
    sizes = Sizes(steps=11, batch=64, positions=positions, files=8, size=16, schemata=3)
    case = make_case(sizes, Choices(cell=cell, active=5), seed=1, scale=0.3)
    expected, got = scoff_reference(*case), scoff_batched(*case)
    assert_same(readings(expected), readings(got), 1e-10)
    assert_same(gradients(expected, case, 1), gradients(got, case, 1), 1e-10)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_no_uninitialised_memory_is_read(cell, positions, files, communication):
    sizes = Sizes(positions=positions, files=files)
    case = make_case(sizes, Choices(cell=cell, communication=communication), seed=0)
    run = scoff_batched(*case)
    for name, value in (readings(run) | gradients(run, case, 0)).items():
        assert value.isfinite().all(), name
    with torch.no_grad():
        assert scoff_batched(*case).output.isfinite().all()


def test_without_gradients_only_one_step_is_kept():
    case = make_case(Sizes(steps=7), Choices(), seed=0)
    with torch.no_grad():
        assert scoff_batched(*case).schema_probs.shape[0] == 1
        assert scoff_batched(*case, keep=True).schema_probs.shape[0] == 7
    assert scoff_batched(*case).schema_probs.shape[0] == 7


@settings(max_examples=40)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_what_is_kept_does_not_change_the_result(sizes: Sizes, choices: Choices, seed: int):
    case = make_case(sizes, choices, seed)
    with torch.no_grad():
        short, long = scoff_batched(*case), scoff_batched(*case, keep=True)
    # not bit for bit: a BLAS may round differently at another alignment
    torch.testing.assert_close(short.output, long.output, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(short.state, long.state, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("backend", [scoff_reference, scoff_batched])
def test_gradcheck_with_one_schema(backend, cell, communication):
    # with one schema nothing is straight-through: the gradient is the derivative
    sizes = Sizes(schemata=1, size=3, positions=2)
    choices = Choices(cell=cell, communication=communication, active=2, reset=True, padding=True)
    case = make_case(sizes, choices, seed=3)
    assert_derivative(backend, case)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_straight_through_gradient_is_the_derivative_of_its_surrogate(cell, monkeypatch):
    # forward, straight_through(p) is one-hot; with the constants hard - p of an undisturbed run it
    # becomes a differentiable function of p with the gradient that the estimator claims
    case = make_case(Sizes(schemata=3, size=3, positions=2), Choices(cell=cell), seed=5)
    original = reference.straight_through
    constants = []

    def record(probs, choice):
        hard = original(probs, choice)
        constants.append((hard - probs).detach())
        return hard

    monkeypatch.setattr(reference, "straight_through", record)
    scoff_reference(*case)
    estimate = gradients(scoff_batched(*case), case, 5)

    def surrogate(*case):
        remaining = iter(constants)
        monkeypatch.setattr(reference, "straight_through", lambda probs, _: next(remaining) + probs)
        return scoff_reference(*case)

    assert_derivative(surrogate, case)
    assert_same(gradients(surrogate(*case), case, 5), estimate, 1e-10)


def assert_derivative(backend, case: Case) -> None:
    leaves = case.leaves()

    def run(*values):
        by_name = dict(zip(leaves, values, strict=True))

        def swap(x):
            named = {k: by_name.get(k, v) for k, v in x._asdict().items()}
            if named.get("communication") is not None:
                named["communication"] = swap(named["communication"])
            return type(x)(**named)

        result = backend(swap(case.inputs), swap(case.weights), case.options)
        return result.output, result.state, result.input_attention, result.schema_probs

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)


def test_reference_is_algorithm_1_in_plain_loops():
    """Single heads, literal communication: the paper's lines with scalars k, p, j spelt out."""
    sizes = Sizes(steps=2, batch=1, positions=3, comm_heads=1, comm_value=5)
    case = make_case(sizes, Choices(communication="residual"), seed=2)
    w, inputs = case.weights, case.inputs
    with torch.no_grad():
        assert w.communication is not None
        w.communication.out.copy_(torch.eye(5))  # one head: the values are added as they are
        h = [inputs.state[0, 0, k] for k in range(3)]
        for t in range(2):
            a = inputs.x[t, 0]  # [P, C]
            q = [w.input_query[0] @ h[k] for k in range(3)]
            kappa = [w.input_key[0] @ a[p] for p in range(3)]
            z = [torch.zeros(3, dtype=torch.float64) for _ in range(3)]
            for p in range(3):
                scores = [math.exp(float(q[k] @ kappa[p]) / math.sqrt(3)) for k in range(3)]
                for k in range(3):
                    z[k] = z[k] + scores[k] / sum(scores) * (w.input_value @ a[p])
            new = []
            for k in range(3):
                tried = [gru(w, j, z[k], h[k]) for j in range(2)]
                merit = [
                    float((w.schema_query @ h[k]) @ (w.schema_key @ tried[j]))
                    + float(inputs.noise[t, 0, k, j])
                    for j in range(2)
                ]
                new.append(tried[merit.index(max(merit))])
            comm = w.communication
            heard = []
            for k in range(3):
                query = comm.query[0] @ h[k]
                scores = [
                    math.exp(float(query @ (comm.key[0] @ new[o])) / math.sqrt(3)) for o in range(3)
                ]
                heard.append(
                    sum(scores[o] / sum(scores) * (comm.value[0] @ new[o]) for o in range(3))
                )
            h = [new[k] + heard[k] for k in range(3)]
            got = scoff_reference(*case).output[t, 0]
            torch.testing.assert_close(got, torch.stack(h), rtol=1e-12, atol=1e-12)


def gru(w, j: int, z: Tensor, h: Tensor) -> Tensor:
    cell = torch.nn.GRUCell(len(z), len(h), dtype=torch.float64)
    cell.weight_ih.copy_(w.weight_ih[j])
    cell.weight_hh.copy_(w.weight_hh[j])
    cell.bias_ih.copy_(w.bias_ih[j])
    cell.bias_hh.copy_(w.bias_hh[j])
    return cell(z, h)


@pytest.mark.parametrize("backend", [scoff_reference, scoff_batched])
def test_gated_communication_keeps_the_state_bounded(backend):
    case = make_case(Sizes(steps=60), Choices(), seed=0, scale=3.0)
    with torch.no_grad():
        bound = max(1.0, case.inputs.state.abs().max().item())
        assert backend(*case).output.abs().max() <= bound


def test_literal_communication_grows_without_bound():
    # why it is not the default
    case = make_case(Sizes(steps=60), Choices(communication="residual"), seed=0, scale=1.5)
    with torch.no_grad():
        output = scoff_reference(*case).output
    assert output[-1].abs().max() > 1e6


def test_the_way_back_may_be_under_autocast():
    case = make_case(Sizes(positions=2), Choices(), 0, torch.float32)
    leaves = list(case.leaves().values())
    expected = torch.autograd.grad(scoff_batched(*case).output.sum(), leaves, allow_unused=True)
    output = scoff_batched(*case).output.sum()
    with torch.autocast("cpu", torch.bfloat16):  # which what is outside of the operator heeds
        found = torch.autograd.grad(output, leaves, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


def test_operators_pass_torchs_own_checks():
    case = make_case(Sizes(positions=2), Choices(reset=True, padding=True), seed=0)
    p = batched_module.prepare(*case)
    p = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in p]
    settings = (False, 2, False, 1.0, False, True)
    torch.library.opcheck(
        torch.ops.scoff.batched_forward.default,
        (*p, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_gpu_equals_cpu(cell, positions):
    case = make_case(Sizes(positions=positions, size=16), Choices(cell=cell, active=2), seed=0)
    there = case.to("cuda")
    expected, got = scoff_batched(*case), scoff_batched(*there)
    assert_same(readings(expected), {k: v.cpu() for k, v in readings(got).items()}, 1e-10)
    found = {k: v.cpu() for k, v in gradients(got, there, 0).items()}
    assert_same(gradients(expected, case, 0), found, 1e-10)


@pytest.mark.gpu
def test_gpu_repeats_itself_bit_for_bit():
    case = make_case(Sizes(batch=8, positions=5, size=16), Choices(), 0, torch.float32).to("cuda")
    first = scoff_batched(*case)
    again = scoff_batched(*case)
    assert torch.equal(first.output, again.output)
    for a, b in zip(
        gradients(first, case, 0).values(), gradients(again, case, 0).values(), strict=True
    ):
        assert torch.equal(a, b)


def test_memory_for_the_backward_pass_grows_linearly_with_the_steps():
    saved = []
    for steps in (10, 20, 40):
        case = make_case(Sizes(steps=steps, batch=8, positions=4, size=16), Choices(), seed=0)
        kept: dict[int, int] = {}

        def note(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            run = scoff_batched(*case)
        saved.append(sum(kept.values()))
        del run
    assert saved[2] - saved[1] == 2 * (saved[1] - saved[0])
