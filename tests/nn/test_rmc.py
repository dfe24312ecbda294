import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoff.nn.rmc import RMC, RMCCell

SMALL: dict[str, Any] = {"num_slots": 3, "num_heads": 2}


def make_cell(seed: int = 0, bias: bool = True, **options: Any) -> RMCCell:
    torch.manual_seed(seed)
    cell = RMCCell(5, 12, bias, dtype=torch.float64, **(SMALL | options))
    with torch.no_grad():
        for weight in cell.parameters():
            weight.normal_(0, 0.7)
    return cell


def make_layer(seed: int = 0, **options: Any) -> RMC:
    torch.manual_seed(seed)
    return RMC(5, 12, dtype=torch.float64, **(SMALL | options))


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Literal:
    """The equations of one step on one sequence, one slot and head at a time."""

    def __init__(self, cell: RMCCell):
        self.w = cell

    def normalise(self, row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        centred = row - row.mean()
        scaled = centred / torch.sqrt(centred.square().mean() + 1e-5) * weight
        return scaled if bias is None else scaled + bias

    def affine(self, weight: Tensor, bias: Tensor | None, row: Tensor) -> Tensor:
        return weight @ row if bias is None else weight @ row + bias

    def sigmoid(self, row: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-row))

    def qkv(self, row: Tensor, head: int) -> list[Tensor]:
        w = self.w
        whole = self.affine(w.qkv_weight, w.qkv_bias, row)
        whole = self.normalise(whole, w.qkv_norm_weight, w.qkv_norm_bias)
        size = len(row) // w.num_heads
        return [part[head * size : (head + 1) * size] for part in whole.split(len(row))]

    def attend(self, row: Tensor, rows: list[Tensor]) -> Tensor:
        attended = []
        for head in range(self.w.num_heads):
            q, _, _ = self.qkv(row, head)
            _, keys, values = zip(*(self.qkv(other, head) for other in rows), strict=True)
            scores = torch.stack([q.dot(k) / math.sqrt(len(k)) for k in keys])
            weights = scores.exp() / scores.exp().sum()
            attended.append(sum(a * v for a, v in zip(weights, values, strict=True)))
        return torch.cat(attended)

    def mlp(self, row: Tensor) -> Tensor:
        w = self.w
        for layer in range(w.num_mlp_layers):
            bias = None if w.mlp_bias is None else w.mlp_bias[layer]
            row = self.affine(w.mlp_weight[layer], bias, row)
            if layer < w.num_mlp_layers - 1:
                row = torch.clamp(row, min=0)
        return row

    def step(self, x: Tensor, memory: Tensor) -> Tensor:
        """x [P, C], memory [F, D] -> [F, D]"""
        w = self.w
        inputs = [self.affine(w.embed_weight, w.embed_bias, position) for position in x]
        gate_x = sum(inputs) / len(inputs)
        w_i, w_f = w.gate_input.chunk(2)
        u_i, u_f = w.gate_memory.chunk(2)
        after = []
        for slot in memory:
            first = slot + self.attend(slot, [*memory, *inputs])
            first = self.normalise(first, w.attended_norm_weight, w.attended_norm_bias)
            second = first + self.mlp(first)
            second = self.normalise(second, w.mlp_norm_weight, w.mlp_norm_bias)
            i = self.sigmoid(w_i @ gate_x + u_i @ torch.tanh(slot) + w.input_gate_bias)
            f = self.sigmoid(w_f @ gate_x + u_f @ torch.tanh(slot) + w.forget_gate_bias)
            after.append(f * slot + i * torch.tanh(second))
        return torch.stack(after)


def run_literally(cell: RMCCell, x: Tensor, state: Tensor) -> Tensor:
    """x [T, B, P, C], state [B, H] -> [T, B, H]"""
    literal = Literal(cell)
    outputs = []
    for b in range(x.shape[1]):
        memory = state[b].view(cell.num_slots, cell.slot_size)
        output = []
        for t in range(x.shape[0]):
            memory = literal.step(x[t, b], memory)
            output.append(memory.flatten())
        outputs.append(torch.stack(output))
    return torch.stack(outputs, 1)


@st.composite
def cells(draw: st.DrawFn) -> RMCCell:
    slots, heads = draw(st.sampled_from([(1, 4), (2, 1), (2, 3), (3, 2), (3, 4)]))
    return make_cell(
        seed=draw(st.integers(0, 2**31)),
        bias=draw(st.booleans()),
        num_slots=slots,
        num_heads=heads,
        num_mlp_layers=draw(st.integers(1, 3)),
    )


def wrap(cell: RMCCell) -> RMC:
    """The layer of one cell."""
    layer = RMC(5, 12, dtype=torch.float64, **SMALL)
    layer.cells[0] = cell
    return layer


@settings(max_examples=25, deadline=None)
@given(cell=cells(), positions=st.integers(1, 3))
def test_equals_the_equations_written_as_loops(cell: RMCCell, positions: int):
    x, hx = randn(2, 2, positions, 5, grad=True), randn(2, 12, grad=True)
    output, final = wrap(cell)(x, hx[None])
    expected = run_literally(cell, x, hx)
    assert_same(output, expected)
    assert torch.equal(final[0], output[-1])
    mix = torch.randn_like(output)
    wanted = [x, hx, *cell.parameters()]
    got, want = (torch.autograd.grad((out * mix).sum(), wanted) for out in (output, expected))
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(bias: bool):
    torch.manual_seed(0)
    rnn = RMC(2, 8, bias=bias, dtype=torch.float64, num_slots=2, num_heads=2)
    names = [name for name, _ in rnn.named_parameters()]

    def run(x: Tensor, hx: Tensor, *weights: Tensor) -> Any:
        by_name = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(rnn, by_name, (x, hx))

    inputs = [randn(3, 2, 2, 2), randn(1, 2, 8), *(p.detach() for p in rnn.parameters())]
    assert torch.autograd.gradcheck(run, [value.requires_grad_() for value in inputs])


@pytest.mark.parametrize(("slots", "size"), [(2, 6), (4, 4), (6, 2)])
def test_memory_starts_as_the_identity(slots: int, size: int):
    cell = RMCCell(5, slots * size, num_slots=slots, num_heads=2)
    expected = [[float(row == column) for column in range(size)] for row in range(slots)]
    state = cell.initial_state(3)
    assert state.view(3, slots, size).tolist() == [expected] * 3
    x = torch.randn(3, 5)
    assert torch.equal(cell(x), cell(x, state))


def test_slots_are_told_apart_by_what_they_hold_only():
    layer = make_layer()
    x, hx = randn(4, 2, 5), randn(1, 2, 12)
    order = torch.tensor([2, 0, 1])

    def permute(state: Tensor) -> Tensor:
        return state.unflatten(-1, (3, 4))[..., order, :].flatten(-2)

    assert_same(layer(x, permute(hx))[0], permute(layer(x, hx)[0]))


def test_the_order_of_positions_does_not_matter():
    layer = make_layer()
    x = randn(3, 2, 4, 5)
    order = torch.tensor([2, 0, 3, 1])
    assert_same(layer(x)[0], layer(x[:, :, order])[0])
    attention = layer.trace(x).input_attention
    assert_same(attention[..., order], layer.trace(x[:, :, order]).input_attention)


def test_the_gates_hold_and_take():
    x, hx = randn(5, 2, 5), randn(1, 2, 12)
    holds = make_layer(forget_bias=100.0, input_bias=-100.0)
    assert_same(holds(x, hx)[0], hx.expand(5, -1, -1))
    takes = make_layer(forget_bias=-100.0, input_bias=100.0)
    output, _ = takes(x, hx)
    assert output.abs().max() < 1
    assert (output[0] != hx[0]).all()


def test_each_layer_of_the_mlp_has_its_own_weights():
    layer = make_layer(num_mlp_layers=3)
    layer(randn(4, 2, 5))[0].sum().backward()
    weight = layer.cells[0].mlp_weight
    for a, b in itertools.combinations(range(3), 2):
        assert not torch.allclose(weight[a], weight[b])
        assert not torch.allclose(weight.grad[a], weight.grad[b])


def test_gate_biases_start_as_asked_and_learn():
    layer = make_layer(forget_bias=2, input_bias=-0.5)
    cell = layer.cells[0]
    assert (cell.forget_gate_bias.item(), cell.input_gate_bias.item()) == (2.0, -0.5)
    layer(randn(4, 2, 5))[0].sum().backward()
    assert cell.forget_gate_bias.grad != 0
    assert cell.input_gate_bias.grad != 0


def test_without_bias_only_the_gates_have_one():
    names = {name for name, _ in make_cell(bias=False).named_parameters() if "bias" in name}
    assert names == {"input_gate_bias", "forget_gate_bias"}


LAYERS = pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, False), (2, True)])


@LAYERS
def test_trace_tells_what_forward_did(layers: int, bidirectional: bool):
    rnn = make_layer(num_layers=layers, bidirectional=bidirectional, batch_first=True).eval()
    x, hx = randn(2, 4, 7, 5), randn(len(rnn.cells), 2, 12)
    reset = torch.zeros(2, 4, dtype=torch.bool)
    reset[1, 2] = True
    for layer, reverse in itertools.product(range(layers), range(1 + bidirectional)):
        trace = rnn.trace(x, hx, reset=reset, layer=layer, reverse=bool(reverse))
        assert torch.equal(trace.output, rnn(x, hx, reset=reset)[0])
        assert trace.input_attention.shape == (2, 4, 3, 7 if layer == 0 else 1)
        assert trace.communication.shape == (2, 4, 2, 3, 3)
        mass = trace.input_attention.sum(-1) + trace.communication.mean(2).sum(-1)
        assert_same(mass, torch.ones_like(mass))
        assert torch.equal(trace.active, torch.ones(2, 4, 3, dtype=torch.bool))
        assert torch.equal(trace.schema, torch.zeros(2, 4, 3, dtype=torch.int64))
        assert torch.equal(trace.schema_probs, torch.ones(2, 4, 3, 1, dtype=torch.float64))


def test_trace_knows_the_input_from_the_slots():
    layer = make_layer(num_heads=1)
    cell = layer.cells[0]
    with torch.no_grad():
        # keys that point where all queries point, but for those of zero rows
        cell.embed_weight.zero_()
        cell.embed_bias.zero_()
        cell.qkv_weight.zero_()
        cell.qkv_bias.zero_()
        cell.qkv_norm_bias.zero_()
        cell.qkv_weight[:8] = 1
    trace = layer.trace(randn(1, 1, 2, 5), torch.ones(1, 1, 12, dtype=torch.float64))
    among_slots, to_input = trace.communication[0, 0, 0], trace.input_attention[0, 0]
    assert_same(among_slots, among_slots[0, 0].expand(3, 3))
    assert_same(to_input, to_input[0, 0].expand(3, 2))
    assert among_slots[0, 0] > 2 * to_input[0, 0]


def test_trace_reads_time_forwards_in_the_reverse_direction():
    rnn = make_layer(bidirectional=True)
    x = randn(4, 2, 5)
    last = rnn.trace(x, reverse=True).communication[:, -1]
    # the way back starts at the last step from the initial memory
    assert_same(last, rnn.trace(x[-1:], reverse=True).communication[:, 0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_slots": 0}, ValueError, "num_slots: got 0"),
        ({"num_slots": 5}, ValueError, "hidden_size: got 12, wants a multiple of num_slots = 5"),
        ({"num_slots": True}, TypeError, "num_slots: got True"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0"),
        ({"num_heads": 3}, ValueError, "num_slots: got 4, wants a multiple of num_heads = 3"),
        ({"num_mlp_layers": 0}, ValueError, "num_mlp_layers: got 0"),
        ({"num_mlp_layers": 1.0}, TypeError, r"num_mlp_layers: got 1\.0"),
        ({"forget_bias": "1"}, TypeError, "forget_bias: got '1'"),
        ({"forget_bias": math.inf}, ValueError, "forget_bias: got inf"),
        ({"input_bias": None}, TypeError, "input_bias: got None"),
        ({"input_bias": math.nan}, ValueError, "input_bias: got nan"),
        ({"num_layers": 0}, ValueError, "num_layers: got 0"),
        ({"dropout": -1}, ValueError, "dropout: got -1"),
        ({"mem_slots": 4}, TypeError, "RMC: got the unknown option 'mem_slots', knows num_slots"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_bad_arguments_of_a_call_are_named():
    rnn, x = make_layer(), randn(4, 2, 5)
    with pytest.raises(ValueError, match="input: got 6 features"):
        rnn(randn(4, 2, 6))
    with pytest.raises(ValueError, match=r"hx: got shape \(1, 3, 12\), wants \(1, 2, 12\)"):
        rnn(x, randn(1, 3, 12))
    with pytest.raises(TypeError, match="hx: got tuple, wants a tensor"):
        rnn(x, (randn(1, 2, 12), randn(1, 2, 12)))
    with pytest.raises(ValueError, match="layer: got 1"):
        rnn.trace(x, layer=1)
    with pytest.raises(ValueError, match="reverse: got True"):
        rnn.trace(x, reverse=True)


def test_defaults():
    rnn = RMC(5, 64)
    cell = rnn.cells[0]
    assert (rnn.num_slots, cell.num_heads, cell.num_mlp_layers) == (4, 4, 2)
    assert (cell.forget_gate_bias.item(), cell.input_gate_bias.item()) == (1.0, 0.0)
