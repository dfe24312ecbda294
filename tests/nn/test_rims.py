import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scoff.nn.rims import RIMs, RIMsCell
from scoff.nn.scoff_cell import SCOFFCell

CELLS = ["gru", "lstm"]
SMALL: dict[str, Any] = {
    "num_modules": 3,
    "active_modules": 2,
    "input_key_size": 4,
    "comm_heads": 2,
    "comm_key_size": 3,
    "comm_value_size": 2,
}


def make_cell(seed: int = 0, bias: bool = True, **options: Any) -> RIMsCell:
    torch.manual_seed(seed)
    cell = RIMsCell(5, 12, bias, dtype=torch.float64, **(SMALL | options))
    with torch.no_grad():
        for weight in cell.parameters():
            weight.normal_(0, 0.7)
    return cell


def make_layer(seed: int = 0, **options: Any) -> RIMs:
    torch.manual_seed(seed)
    return RIMs(5, 12, dtype=torch.float64, **(SMALL | options))


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def random_state(cell: str, *shape: int) -> Any:
    return (randn(*shape), randn(*shape)) if cell == "lstm" else randn(*shape)


def parts(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def map_state(function: Any, *states: Any) -> Any:
    mapped = tuple(function(*values) for values in zip(*map(parts, states), strict=True))
    return mapped if isinstance(states[0], tuple) else mapped[0]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(parts(a), parts(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


class Literal:
    """The equations of one step on one sequence, one module, head and position at a time."""

    def __init__(self, cell: RIMsCell):
        self.w = cell
        self.modules = range(cell.num_modules)
        self.size = cell.slot_size

    def null_and_read(self, k: int, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.w
        heads, key_size, _ = w.input_key.shape
        value_size = w.input_value.shape[0] // heads
        rows = [torch.zeros_like(x[0]), *x]  # the null input first
        nulls, read = [], []
        for head in range(heads):
            q = w.input_query[k, head] @ h
            scores = [q.dot(w.input_key[head] @ row) / math.sqrt(key_size) for row in rows]
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            value = w.input_value[head * value_size : (head + 1) * value_size]
            read.append(sum(weights[j] * (value @ row) for j, row in enumerate(rows)))
            nulls.append(weights[0])
        return torch.stack(nulls).mean(), torch.cat(read)

    def update(self, k: int, read: Tensor, h: Tensor, c: Tensor | None) -> list[Tensor]:
        w = self.w
        weights = [w.weight_ih[k], w.weight_hh[k]]
        if w.bias_ih is not None and w.bias_hh is not None:
            weights += [w.bias_ih[k], w.bias_hh[k]]
        if c is None:
            return [torch.gru_cell(read[None], h[None], *weights)[0]]
        return [s[0] for s in torch.lstm_cell(read[None], (h[None], c[None]), *weights)]

    def hear(self, k: int, hs: list[Tensor]) -> Tensor:
        w = self.w
        heads, key_size = w.comm_query.shape[1:3]
        heard = []
        for head in range(heads):
            q = w.comm_query[k, head] @ hs[k]
            scores = [
                q.dot(w.comm_key[j, head] @ hs[j]) / math.sqrt(key_size) for j in self.modules
            ]
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            heard.append(sum(weights[j] * (w.comm_value[j, head] @ hs[j]) for j in self.modules))
        heard = torch.cat(heard)
        message = w.comm_out[k] @ heard
        if w.communication == "residual":
            return hs[k] + message
        gate = 1 / (1 + torch.exp(-(w.comm_gate[k] @ heard + w.comm_gate_bias[k])))
        return (1 - gate) * hs[k] + gate * torch.tanh(message)

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[int]]:
        """x [P, C], state of [H] each -> the state after it, and who was active"""
        hs = list(state[0].split(self.size))
        cs = list(state[1].split(self.size)) if len(state) == 2 else None
        attended = [self.null_and_read(k, hs[k], x) for k in self.modules]
        by_null = sorted(self.modules, key=lambda k: (attended[k][0].item(), k))
        active = by_null[: self.w.active_modules]
        updated = list(hs)
        for k in active:
            new = self.update(k, attended[k][1], hs[k], None if cs is None else cs[k])
            updated[k] = new[0]
            if cs is not None:
                cs[k] = new[1]
        after = list(updated)
        if self.w.communication is not None:
            for k in active:
                after[k] = self.hear(k, updated)
        joined = (torch.cat(after),) if cs is None else (torch.cat(after), torch.cat(cs))
        return joined, sorted(active)


def run_literally(cell: RIMsCell, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """x [T, B, P, C] -> output [T, B, H], the states, active [T, B, F]"""
    literal = Literal(cell)
    outputs, finals, actives = [], [], []
    for b in range(x.shape[1]):
        one = tuple(s[b] for s in state)
        output = []
        for t in range(x.shape[0]):
            one, active = literal.step(x[t, b], one)
            output.append(one[0])
            actives.append([k in active for k in range(cell.num_modules)])
        outputs.append(torch.stack(output))
        finals.append(one)
    final = tuple(torch.stack(column) for column in zip(*finals, strict=True))
    active = torch.tensor(actives).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)
    return torch.stack(outputs, 1), final, active


@st.composite
def cells(draw: st.DrawFn) -> RIMsCell:
    heads = draw(st.integers(1, 2))
    return make_cell(
        seed=draw(st.integers(0, 2**31)),
        bias=draw(st.booleans()),
        cell=draw(st.sampled_from(CELLS)),
        active_modules=draw(st.sampled_from([1, 2, None])),
        input_heads=heads,
        input_value_size=draw(st.sampled_from([None, 3 * heads])),
        communication=draw(st.sampled_from(["gated", "residual", None])),
    )


@settings(max_examples=25, deadline=None)
@given(cell=cells(), positions=st.integers(1, 3), from_zero=st.booleans())
def test_equals_the_equations_written_as_loops(cell: RIMsCell, positions: int, from_zero: bool):
    layer = wrap(cell)
    x = randn(3, 2, positions, 5, grad=True)
    state = tuple(randn(2, 12) * (not from_zero) for _ in range(cell.num_states))
    state = tuple(s.requires_grad_() for s in state)
    hx = state[0][None] if len(state) == 1 else tuple(s[None] for s in state)
    output, final = layer(x, hx)
    trace = layer.trace(x, hx)
    expected, expected_final, active = run_literally(cell, x, state)
    assert_same(output, expected)
    assert_same(map_state(lambda s: s[0], final), expected_final)
    assert torch.equal(trace.active.transpose(0, 1), active)

    wanted = [x, *state, *cell.parameters()]
    mix = torch.randn_like(output)

    def gradients(out: Tensor, last: Any) -> tuple[Any, ...]:
        loss = (out * mix).sum() + sum(s.square().sum() for s in parts(last))
        return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    for got, want in zip(
        gradients(output, final), gradients(expected, expected_final), strict=True
    ):
        assert_same(got, want)


def wrap(cell: RIMsCell) -> RIMs:
    """The layer of one cell."""
    options = SMALL | {"cell": cell.cell, "communication": cell.communication}
    layer = RIMs(5, 12, dtype=torch.float64, **options)
    layer.cells[0] = cell
    return layer


@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("cell", CELLS)
def test_gradcheck(cell: str, communication: str | None):
    torch.manual_seed(0)
    options = {"input_key_size": 2, "comm_key_size": 1, "comm_value_size": 1, "comm_heads": 2}
    rnn = RIMs(
        2,
        6,
        dtype=torch.float64,
        **(SMALL | options | {"cell": cell, "communication": communication, "input_heads": 2}),
    )
    names = [name for name, _ in rnn.named_parameters()]
    hx = parts(random_state(cell, 1, 2, 6))

    def run(x: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        state = args[: len(hx)] if cell == "lstm" else args[0]
        weights = dict(zip(names, args[len(hx) :], strict=True))
        output, final = torch.func.functional_call(rnn, weights, (x, state))
        return output, *parts(final)

    inputs = [randn(3, 2, 2, 2), *hx, *(p.detach() for p in rnn.parameters())]
    assert torch.autograd.gradcheck(run, [value.requires_grad_() for value in inputs])


def null_weights(cell: RIMsCell, h: Tensor, x: Tensor) -> Tensor:
    """[B, H], [B, P, C] -> [B, F]: 1 / (1 + sum of exp(scores)), the null score being 0"""
    h = h.unflatten(-1, (cell.num_modules, -1))
    query = torch.einsum("bkd,khed->bkhe", h, cell.input_query)
    key = torch.einsum("bpc,hec->bphe", x, cell.input_key)
    score = torch.einsum("bkhe,bphe->bkhp", query, key) / math.sqrt(key.shape[-1])
    return (1 / (1 + score.exp().sum(-1))).mean(-1)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(CELLS),
    active=st.integers(1, 4),
    heads=st.integers(1, 2),
    communication=st.sampled_from(["gated", "residual", None]),
)
def test_the_modules_with_least_null_weight_change_and_the_others_are_frozen(
    seed: int, kind: str, active: int, heads: int, communication: str | None
):
    cell = make_cell(
        seed,
        cell=kind,
        num_modules=4,
        active_modules=active,
        input_heads=heads,
        input_value_size=2 * heads,
        communication=communication,
    )
    layer = wrap(cell)
    state = random_state(kind, 3, 12)
    for _ in range(3):
        x = randn(3, 2, 5)
        null = null_weights(cell, parts(state)[0], x)
        trace = layer.trace(x[None], map_state(lambda s: s[None], state))
        is_active = trace.active[:, 0]
        assert is_active.sum(-1).tolist() == [active] * 3
        largest = null.masked_fill(~is_active, -1).amax(-1)
        smallest = null.masked_fill(is_active, 2).amin(-1)
        assert (largest < smallest).all()
        torch.testing.assert_close(1 - trace.input_attention[:, 0].sum(-1), null)

        after = cell(x, state)
        for new, old in zip(parts(after), parts(state), strict=True):
            changed = (new != old).unflatten(-1, (4, 3))
            assert not changed[~is_active].any()
            assert changed[is_active].any(-1).all()
        state = after


@pytest.mark.parametrize("listener", [0, 2])
def test_the_one_module_that_attends_is_the_one_that_acts(listener: int):
    cell = make_cell(active_modules=1, communication=None)
    with torch.no_grad():
        cell.input_query.fill_(-1)
        cell.input_query[listener].fill_(1)
        cell.input_key.fill_(1)
    hx = torch.ones(1, 12, dtype=torch.float64)
    after = cell(torch.ones(1, 5, dtype=torch.float64), hx).unflatten(-1, (3, 4))
    assert [(after[0, k] != 1).any().item() for k in range(3)] == [k == listener for k in range(3)]


def test_of_modules_that_attend_alike_the_first_act():
    layer = make_layer()
    assert layer.trace(randn(1, 4, 5)).active.tolist() == [[[True, True, False]]] * 4


def test_true_gradients_pass_by_inactive_modules():
    cell = make_cell()
    layer = wrap(cell)
    x, hx = randn(1, 5), randn(1, 12, grad=True)
    active = layer.trace(x[None], hx[None]).active[0, 0]
    frozen = int((~active).nonzero()[0])
    jacobian = torch.autograd.functional.jacobian(lambda h: cell(x, h)[0], hx)[:, 0]
    by_module = jacobian.unflatten(0, (3, 4)).unflatten(-1, (3, 4))  # [new, 4, old, 4]
    for k in range(3):
        expected = torch.eye(4, dtype=torch.float64) * (k == frozen)
        assert torch.equal(by_module[frozen, :, k], expected)
    # the others read it, so that they pass on to it what they want of it
    others = [k for k in range(3) if k != frozen]
    assert all(by_module[k, :, frozen].abs().max() > 1e-6 for k in others)


def test_the_order_of_positions_does_not_matter():
    layer = make_layer()
    x, hx = randn(3, 2, 4, 5), randn(1, 2, 12)
    order = torch.tensor([2, 0, 3, 1])
    assert_same(layer(x, hx)[0], layer(x[:, :, order], hx)[0])
    attention = layer.trace(x, hx).input_attention
    assert_same(attention[..., order], layer.trace(x[:, :, order], hx).input_attention)


def test_starts_from_zero():
    assert not make_layer(num_layers=2).initial_state(3).any()
    h, c = make_cell(cell="lstm").initial_state(3)
    assert h.shape == c.shape == (3, 12)
    assert not h.any()
    assert not c.any()


def test_the_gate_starts_as_far_open_as_that_of_scoff():
    assert RIMsCell(5, 12).comm_gate_bias.unique() == SCOFFCell(5, 12).comm_gate_bias.unique()


def test_dropout_acts_on_what_is_read_in_training_only():
    layer = make_layer(input_dropout=1.0, active_modules=None)
    x, y = randn(3, 2, 5), randn(3, 2, 5)
    assert torch.equal(layer(x)[0], layer(y)[0])
    layer.eval()
    assert not torch.allclose(layer(x)[0], layer(y)[0])


def test_dropout_acts_on_messages_in_training_only():
    talks = make_layer(comm_dropout=1.0, communication="residual")
    silent = make_layer(communication=None)
    silent.load_state_dict(talks.state_dict(), strict=False)
    x = randn(3, 2, 5)
    assert torch.equal(talks(x)[0], silent(x)[0])
    talks.eval()
    assert not torch.allclose(talks(x)[0], silent(x)[0])


LAYERS = pytest.mark.parametrize(
    ("cell", "layers", "bidirectional"),
    [("gru", 1, False), ("lstm", 1, False), ("gru", 2, True), ("lstm", 2, True)],
)


@LAYERS
def test_trace_tells_what_forward_did(cell: str, layers: int, bidirectional: bool):
    rnn = make_layer(cell=cell, num_layers=layers, bidirectional=bidirectional, batch_first=True)
    rnn.eval()
    x, hx = randn(2, 4, 7, 5), random_state(cell, len(rnn.cells), 2, 12)
    reset = torch.zeros(2, 4, dtype=torch.bool)
    reset[1, 2] = True
    for layer, reverse in itertools.product(range(layers), range(1 + bidirectional)):
        trace = rnn.trace(x, hx, reset=reset, layer=layer, reverse=bool(reverse))
        assert torch.equal(trace.output, rnn(x, hx, reset=reset)[0])
        assert trace.input_attention.shape == (2, 4, 3, 7 if layer == 0 else 1)
        assert (trace.input_attention.sum(-1) < 1).all()
        assert trace.active.dtype == torch.bool
        assert trace.active.sum(-1).eq(2).all()
        assert trace.communication.shape == (2, 4, 2, 3, 3)
        assert_same(trace.communication.sum(-1), torch.ones(2, 4, 2, 3, dtype=torch.float64))
        assert torch.equal(trace.schema, torch.arange(3).expand(2, 4, 3))
        assert torch.equal(trace.schema_probs, torch.eye(3, dtype=torch.float64).expand(2, 4, 3, 3))


def test_trace_reads_time_forwards_in_the_reverse_direction():
    rnn = make_layer(bidirectional=True)
    x = randn(4, 2, 5)
    trace = rnn.trace(x, reverse=True)
    # the way back starts from zero at the last step, where all modules attend alike
    assert trace.active[:, -1].tolist() == [[True, True, False]] * 2
    assert_same(trace.input_attention[:, -1], torch.full((2, 3, 1), 0.5, dtype=torch.float64))
    assert not torch.allclose(trace.input_attention[:, 0], trace.input_attention[:, -1])


def test_trace_without_communication_has_no_heads():
    assert make_layer(communication=None).trace(randn(4, 2, 5)).communication.shape == (
        2,
        4,
        0,
        3,
        3,
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_modules": 0}, ValueError, "num_modules: got 0"),
        ({"num_modules": 2.0}, TypeError, r"num_modules: got 2\.0"),
        ({"num_modules": 5}, ValueError, "hidden_size: got 12, wants a multiple of num_modules"),
        ({"active_modules": 4}, ValueError, "active_modules: got 4, wants at most num_modules = 3"),
        ({"active_modules": 0}, ValueError, "active_modules: got 0"),
        ({"active_modules": 1.5}, TypeError, r"active_modules: got 1\.5"),
        ({"cell": "rnn"}, ValueError, "cell: got 'rnn', wants one of 'gru', 'lstm'"),
        ({"input_heads": 0}, ValueError, "input_heads: got 0"),
        (
            {"input_heads": 3},
            ValueError,
            "input_value_size: got 4, wants a multiple of input_heads",
        ),
        ({"input_key_size": -1}, ValueError, "input_key_size: got -1"),
        ({"input_value_size": 0}, ValueError, "input_value_size: got 0"),
        ({"input_dropout": 1.1}, ValueError, r"input_dropout: got 1\.1"),
        ({"communication": "loud"}, ValueError, "communication: got 'loud'"),
        ({"comm_heads": "4"}, TypeError, "comm_heads: got '4'"),
        ({"comm_key_size": 0}, ValueError, "comm_key_size: got 0"),
        ({"comm_value_size": 0}, ValueError, "comm_value_size: got 0"),
        ({"comm_dropout": None}, TypeError, "comm_dropout: got None"),
        ({"num_layers": 0}, ValueError, "num_layers: got 0"),
        ({"dropout": 2}, ValueError, "dropout: got 2"),
        ({"num_rims": 6}, TypeError, "RIMs: got the unknown option 'num_rims', knows num_modules"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_bad_arguments_of_a_call_are_named():
    rnn, pair = make_layer(), make_layer(cell="lstm")
    x = randn(4, 2, 5)
    with pytest.raises(ValueError, match="input: got 6 features"):
        rnn(randn(4, 2, 6))
    with pytest.raises(ValueError, match=r"hx: got shape \(1, 3, 12\), wants \(1, 2, 12\)"):
        rnn(x, randn(1, 3, 12))
    with pytest.raises(TypeError, match="hx: got Tensor, wants the pair"):
        pair(x, randn(1, 2, 12))
    with pytest.raises(ValueError, match="layer: got 1"):
        rnn.trace(x, layer=1)
    with pytest.raises(ValueError, match="reverse: got True"):
        rnn.trace(x, reverse=True)


def test_defaults():
    rnn = RIMs(5, 24)
    cell = rnn.cells[0]
    assert (rnn.num_modules, rnn.active_modules) == (6, 4)
    assert cell.input_query.shape == (6, 1, 64, 4)
    assert cell.input_value.shape == (4, 5)
    assert cell.comm_key.shape == cell.comm_value.shape == (6, 4, 32, 4)
    assert RIMs(5, 24, active_modules=None).active_modules == 6
