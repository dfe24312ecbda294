"""The backends of RIMs against each other; tests/nn/test_rims.py has the reference's equations."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import scoff
from scoff.models.video_layers import make_layer
from scoff.models.video_options import VideoOptions
from scoff.ops import rims
from scoff.ops.rims import batched, rims_batched, rims_reference
from scoff.ops.scoff import CommunicationWeights
from scoff.ops.scoff.types import GATES
from tests.ops.cases import Case, Choices, Sizes, choices, make_case, seeds, sizes


def make_rims_case(s: Sizes, c: Choices, seed: int, dtype=torch.float64, scale=0.7) -> Case:
    """That of SCOFF, with weights of each module's own"""
    like = make_case(s, c._replace(value_projection=True), seed, dtype, scale)
    g = torch.Generator().manual_seed(seed)
    f, d, value, gates = s.files, s.size, s.input_heads * s.value, GATES[c.cell] * s.size

    def leaf(*shape):
        return (torch.randn(shape, generator=g, dtype=dtype) * scale).requires_grad_()

    talk = like.weights.communication
    if talk is not None:
        talk = CommunicationWeights(*(x if x is None else leaf(f, *x.shape) for x in talk))
    weights = rims.Weights(
        leaf(f, s.input_heads, s.key, d),
        leaf(s.input_heads, s.key, s.features),
        leaf(value, s.features),
        leaf(f, gates, value),
        leaf(f, gates, d),
        leaf(f, gates) if c.bias else None,
        leaf(f, gates) if c.bias else None,
        talk,
    )
    given = like.inputs
    inputs = rims.Inputs(*given[:5], value_mask=given.value_mask, comm_mask=given.comm_mask)
    return Case(inputs, weights, rims.Options(c.cell, min(c.active, f)))


def readings(run: rims.Run) -> dict[str, Tensor]:
    """All that carries a gradient"""
    return {name: value for name, value in run._asdict().items() if name != "active"}


def gradients(run: rims.Run, case: Case, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for value in readings(run).values():
        # transposed, as the gradients of a batch-first layer are
        weight = torch.randn(value.shape[::-1], generator=g, dtype=torch.float64)
        weight = weight.permute(*reversed(range(value.ndim))).to(value)
        loss = loss.to(value) + (value * weight).sum()
    leaves = case.leaves()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        f"d_{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name].cpu(), value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=100)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_batched_equals_reference(sizes: Sizes, choices: Choices, seed: int):
    case = make_rims_case(sizes, choices, seed)
    expected, got = rims_reference(*case), rims_batched(*case)
    assert torch.equal(expected.active, got.active)
    assert_same(readings(expected), readings(got))
    assert_same(gradients(expected, case, seed), gradients(got, case, seed))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_batched_equals_reference_over_several_chunks(cell):
    # so many sequences that weight gradients are gathered in chunks, the last one shorter
    sizes = Sizes(steps=11, batch=100, positions=2, files=4, size=8)
    case = make_rims_case(sizes, Choices(cell=cell, active=2), 1, scale=0.3)
    expected, got = rims_reference(*case), rims_batched(*case)
    assert_same(readings(expected), readings(got))
    assert_same(gradients(expected, case), gradients(got, case))


@pytest.mark.parametrize("name", ["output", "state", "input_attention", "communication"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_loss_may_be_of_one_of_them_alone(cell, name):
    case = make_rims_case(Sizes(positions=2), Choices(cell=cell, active=2), 0)
    leaves = case.leaves()
    slopes = []
    for backend in (rims_reference, rims_batched):
        loss = getattr(backend(*case), name).square().sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        both = zip(leaves.items(), found, strict=True)
        slopes.append({k: torch.zeros_like(v) if x is None else x for (k, v), x in both})
    assert slopes[0]["x"].norm() > 0
    assert_same(*slopes)


@settings(max_examples=30)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_what_is_kept_does_not_change_the_result(sizes: Sizes, choices: Choices, seed: int):
    case = make_rims_case(sizes, choices, seed)
    with torch.no_grad():
        short, long = rims_batched(*case), rims_batched(*case, keep=True)
    assert len(short.active) == 1
    assert_same(readings(long), readings(rims_batched(*case)))
    for name in ("output", "state"):
        assert_same({name: readings(long)[name]}, {name: readings(short)[name]})


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("active", [2, 3])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_no_uninitialised_memory_is_read(cell, active, communication):
    choices = Choices(cell=cell, active=active, communication=communication)
    case = make_rims_case(Sizes(positions=4), choices, 0)
    run = rims_batched(*case)
    for name, value in (readings(run) | gradients(run, case)).items():
        assert value.isfinite().all(), name
    with torch.no_grad():
        assert rims_batched(*case).output.isfinite().all()


# by torch's checks themselves, of torch 2.15
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "choices",
    [Choices(reset=True, padding=True, comm_dropout=True, active=2), Choices("lstm", bias=False)],
)
def test_operators_pass_torchs_own_checks(choices):
    case = make_rims_case(Sizes(positions=2, input_heads=2), choices, 0)
    p = batched.prepare(*case)
    p = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in p]
    options = batched.Settings(choices.cell == "lstm", choices.active, 2, 2, True)
    torch.library.opcheck(torch.ops.scoff.rims_forward.default, (*p, *options))


def test_layers_compile_into_one_graph():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2)
    x = torch.randn(5, 2, 4, requires_grad=True)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    output, expected = compiled(x)[0], layer(x)[0]
    assert len(graphs) == 1
    assert len(graphs[0].graph.nodes) < 200  # time is not unrolled
    torch.testing.assert_close(output, expected)
    for run in (output, expected):
        run.sum().backward()
        x.grad, first = None, x.grad
        assert first.norm() > 0


def test_auto_leaves_transformations_and_export_to_the_reference():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2).double()
    x, v = torch.randn(2, 5, 2, 4, dtype=torch.double)

    def run(x: Tensor) -> Tensor:
        return layer(x)[0].sin()

    jacobian = torch.autograd.functional.jacobian(run, x)
    expected = torch.einsum("abcdef,def->abc", jacobian, v)
    torch.testing.assert_close(torch.func.jvp(run, (x,), (v,))[1], expected)
    torch.testing.assert_close(torch.func.jacrev(run)(x), jacobian)
    program = torch.export.export(layer, (x,))
    if hasattr(torch.compiler, "is_exporting"):  # torch 2.6 does not tell
        assert "scoff" not in str(program.graph)
    torch.testing.assert_close(program.module()(x)[0], layer(x)[0])
    layer.backend = "batched"
    with pytest.raises(ValueError, match="backend: got 'batched', but it has no derivatives"):
        torch.func.jvp(run, (x,), (v,))


def test_the_way_back_may_be_under_autocast():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2)
    x = torch.randn(3, 2, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(x)[0].sum(), x)[0]
    output = layer(x)[0].sum()
    with torch.autocast("cpu", torch.bfloat16):  # which what is outside of the operator heeds
        found = torch.autograd.grad(output, x)[0]
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.01)


@pytest.mark.filterwarnings("error")
def test_auto_maps_without_a_loop():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2)
    x = torch.randn(5, 3, 2, 4)
    found = torch.func.vmap(lambda x: layer(x)[0])(x)
    torch.testing.assert_close(found, torch.stack([layer(each)[0] for each in x]))


def test_cells_that_were_pickled_before_there_were_backends():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2)
    x = torch.randn(3, 2, 4)
    expected = layer(x)[0]
    del layer.cells[0]._backend
    assert layer.backend == "auto"
    assert torch.equal(layer(x)[0], expected)


@pytest.mark.parametrize(
    ("asked", "taken"), [("reference", "reference"), ("batched", "batched"), ("fused", "auto")]
)
def test_an_option_for_all_layers_is_heeded_as_far_as_it_goes(asked, taken):
    options = VideoOptions(model="rims", backend=asked)
    layer = make_layer(options, 8)
    assert isinstance(layer, scoff.RIMs)
    assert layer.backend == taken


def test_second_derivatives_are_those_of_the_reference_or_refused():
    layer = scoff.RIMs(4, 12, num_modules=3, active_modules=2)
    x = torch.randn(3, 2, 4, requires_grad=True)

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return slope.square().sum()

    with pytest.raises(RuntimeError, match="backend='reference' has them"):
        penalty().backward()
    layer.backend = "reference"
    penalty().backward()
    assert layer.cells[0].weight_hh.grad.norm() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_gpu_equals_cpu(cell, positions):
    choices = Choices(cell=cell, active=2, reset=True, padding=True)
    case = make_rims_case(Sizes(positions=positions, size=16, input_heads=2), choices, 0)
    there = case.to("cuda")
    expected, got = rims_batched(*case), rims_batched(*there)
    assert_same(readings(expected), readings(got))
    assert_same(gradients(expected, case), gradients(got, there))


@pytest.mark.gpu
def test_gpu_from_a_cuda_graph():
    layer = scoff.RIMs(8, 48, num_modules=4, active_modules=2).cuda()
    x = torch.randn(6, 3, 8, device="cuda")
    expected = layer(x)[0].detach()
    graphed = torch.cuda.make_graphed_callables(layer, (x,))
    torch.testing.assert_close(graphed(x)[0], expected)
