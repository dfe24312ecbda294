"""The `fused` backend on a GPU: what the interpreter cannot tell."""

import pytest
import torch
from torch import Tensor

import scoff
from scoff.bench.timing import peak_on_cuda
from scoff.ops.scoff import scoff_batched, scoff_reference
from scoff.ops.scoff.replay import forget
from tests.ops.cases import Case, Choices, Sizes, make_case
from tests.ops.compare import errors, results

fused = pytest.importorskip("scoff.ops.scoff.fused")
fused_gradients = pytest.importorskip("scoff.ops.scoff.fused_gradients")
pytestmark = pytest.mark.gpu


def realistic(dtype=torch.float32, **sizes) -> Case:
    all_sizes = Sizes(20, 16, 64, 64, 4, 100, 4, 1, 64, 100, 16, 4, 32, 32)._replace(**sizes)
    return make_case(all_sizes, Choices(active=4), 0, scale=0.1).to("cuda", dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"input_heads": 2},  # of which the second adds to the gradients of the first
        {"positions": 1, "files": 5, "size": 60, "schemata": 2},  # all weights stay
        {"batch": 300},  # the last steps are kept
    ],
)
@pytest.mark.parametrize("many", [fused_gradients.MANY_ROWS, 0])  # gradients of 16 bits
def test_gpu_repeats_itself_bit_for_bit(sizes, many, monkeypatch):
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", many)
    case = realistic(**sizes)
    first = results(fused.scoff_fused(*case), case, 0)
    for _ in range(50):
        again = results(fused.scoff_fused(*case), case, 0)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


def askew(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16"""
    memory = torch.cat([x.new_zeros(1), x.detach().flatten()])
    return memory[1:].view(x.shape).requires_grad_(x.requires_grad)


def test_gpu_inputs_need_not_be_aligned():
    case = realistic(steps=3)
    case = case._replace(inputs=case.inputs._replace(choice=scoff_reference(*case).schema))
    for _ in range(2):  # the second time without Triton
        expected = results(fused.scoff_fused(*case), case, 0)
    inputs = case.inputs._replace(x=askew(case.inputs.x), state=askew(case.inputs.state))
    weights = case.weights._replace(
        weight_hh=askew(case.weights.weight_hh), bias_ih=askew(case.weights.bias_ih)
    )
    other = Case(inputs, weights, case.options)
    for name, value in results(fused.scoff_fused(*other), other, 0).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("many", [fused_gradients.MANY_ROWS, 0])
def test_gpu_reads_no_uninitialised_memory(many, monkeypatch):
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", many)
    for case in (realistic(size=37, features=13, files=5), realistic(positions=1, size=60)):
        for name, value in results(fused.scoff_fused(*case), case, 0).items():
            assert value.isfinite().all(), name


def test_gpu_a_thousand_steps():
    sizes = Sizes(1000, 2, 1, 8, 3, 20, 2, 1, 8, 20, 4, 2, 8, 8)
    case = make_case(sizes, Choices(), 0, scale=0.1)
    reference = scoff_reference(*case)
    exact = results(reference, case, 0)
    there = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    there = there.to("cuda", torch.float32)
    torch.backends.cudnn.allow_tf32 = False
    try:
        found = errors(there, exact, fused.scoff_fused(*there))
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert max(found.values()) < 1e-4, found


def test_gpu_choices_differ_only_at_near_ties():
    # another precision may choose another schema where two are almost as good: from a state that
    # is the same for both, one step
    case = realistic(steps=1, batch=512)
    exact = scoff_reference(*case.to("cpu", torch.float64))
    got = fused.scoff_fused(*case)
    differ = got.schema.cpu() != exact.schema
    best = (exact.schema_probs.log()).topk(2, -1).values
    margin = best[..., 0] - best[..., 1]
    assert margin[differ].numel() < 0.01 * margin.numel()
    assert (margin[differ] < 0.02).all()


def test_gpu_from_a_cuda_graph():
    rnn = scoff.SCOFF(64, 400, backend="fused").cuda().eval()
    x = torch.randn(10, 8, 64, device="cuda", requires_grad=True)

    def step() -> Tensor:
        rnn.zero_grad(set_to_none=False)
        output = rnn(x)[0]
        output.sum().backward()
        return output

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step().detach().clone()
    torch.cuda.current_stream().wait_stream(side)
    wanted = rnn.cells[0].like.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(rnn.cells[0].like.grad, wanted)


def test_gpu_memory_is_at_most_a_quarter_of_that_of_batched():
    peaks = []
    for f in (fused.scoff_fused, scoff_batched):
        case = realistic(steps=50, batch=64)

        def both(f=f, case=case) -> None:
            leaves = list(case.leaves().values())
            torch.autograd.grad(f(*case).output.sum(), leaves, allow_unused=True)

        both()  # what is allocated once, such as cuBLAS's 32 MiB for each stream
        forget()
        peaks.append(peak_on_cuda(both))
    assert peaks[0] < peaks[1] / 4, peaks


# torch's own, of graphs that were captured on another stream
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_gpu_as_a_graphed_callable():
    rnn = scoff.SCOFF(64, 400).cuda().eval()
    x = torch.randn(10, 8, 64, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(rnn(x)[0].sum(), [x, *rnn.parameters()], allow_unused=True)
    graphed = torch.cuda.make_graphed_callables(rnn, (torch.randn_like(x, requires_grad=True),))
    for _ in range(2):
        found = torch.autograd.grad(graphed(x)[0].sum(), [x, *rnn.parameters()], allow_unused=True)
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
