"""torch.compile sees one operator, torch.export only torch's own."""

import time

import pytest
import torch

import scoff


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def run(rnn, x, noise, start):
    rnn.zero_grad()
    output, _ = rnn(x, start, noise=noise)
    output.square().sum().backward()
    return output.detach(), [p.grad.clone() for p in rnn.parameters() if p.grad is not None]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_fullgraph_gives_the_same_result(cell):
    rnn = scoff.SCOFF(4, 12, num_object_files=3, num_layers=2, bidirectional=True, cell=cell)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    x, noise = torch.randn(7, 3, 5, 4), torch.randn(4, 7, 3, 3, 4)
    start = rnn.initial_state(3)
    start = tuple(p.detach() for p in start) if cell == "lstm" else start.detach()
    expected, expected_grads = run(rnn, x, noise, start)
    output, grads = run(compiled, x, noise, start)
    torch.testing.assert_close(output, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_long_sequence_is_not_unrolled():
    nodes = []

    def count(graph, _inputs):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    for length in (10, 2000):
        torch._dynamo.reset()
        rnn = scoff.SCOFF(4, 12, num_object_files=3)
        compiled = torch.compile(rnn, fullgraph=True, backend=count)
        start = time.perf_counter()
        compiled(torch.randn(length, 1, 4))
        assert time.perf_counter() - start < 60
    assert nodes[0] == nodes[1]


@pytest.mark.slow
def test_inductor():
    rnn = scoff.SCOFF(4, 12, num_object_files=3)
    compiled = torch.compile(rnn, fullgraph=True)
    x, noise, start = torch.randn(7, 3, 4), torch.randn(1, 7, 3, 3, 4), torch.randn(1, 3, 12)
    expected, expected_grads = run(rnn, x, noise, start)
    output, grads = run(compiled, x, noise, start)
    torch.testing.assert_close(output, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_export_of_the_cell_needs_nothing_of_ours(cell, tmp_path):
    step = scoff.SCOFFCell(4, 12, num_object_files=3, active_object_files=2, cell=cell).eval()
    x = torch.randn(2, 4)
    state = step.initial_state(2)
    state = tuple(p.detach() for p in state) if cell == "lstm" else state.detach()
    batch = torch.export.Dim("batch", max=1024)
    shape = {0: batch}
    shapes = {"input": shape, "hx": (shape, shape) if cell == "lstm" else shape}
    program = torch.export.export(step, (x, state), dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if hasattr(torch.compiler, "is_exporting"):  # torch 2.6 does not tell
        assert not any(target.startswith("scoff") for target in targets)
    torch.export.save(program, tmp_path / "cell.pt2")
    loaded = torch.export.load(tmp_path / "cell.pt2").module()
    wide = torch.randn(5, 4)
    start = step.initial_state(5)
    for a, b in zip(as_pair(loaded(wide, start)), as_pair(step(wide, start)), strict=True):
        torch.testing.assert_close(a, b)


def as_pair(state):
    return state if isinstance(state, tuple | list) else (state,)


@pytest.mark.gpu
def test_cuda_graph():
    rnn = scoff.SCOFF(4, 12, num_object_files=3, active_object_files=2, device="cuda").eval()
    x = torch.randn(7, 3, 5, 4, device="cuda")

    def step():
        rnn.zero_grad(set_to_none=False)
        output, _ = rnn(x)
        output.square().sum().backward()
        return output.detach()  # a graph kept alive would tie the capture to its stream

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = output.clone(), [p.grad.clone() for p in rnn.parameters()]
    expected = step(), [p.grad.clone() for p in rnn.parameters()]
    torch.testing.assert_close(replayed[0], expected[0])
    for a, b in zip(replayed[1], expected[1], strict=True):
        torch.testing.assert_close(a, b)
