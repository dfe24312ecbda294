"""What RIMs and RMC promise alike: the interface of nn.GRU and nn.LSTM."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import scoff

RIMS = {
    "num_modules": 3,
    "active_modules": 2,
    "input_key_size": 4,
    "comm_heads": 2,
    "comm_key_size": 3,
    "comm_value_size": 2,
}
KINDS: dict[str, Any] = {
    "RIMs": (scoff.RIMs, RIMS),
    "RIMs, LSTM": (scoff.RIMs, RIMS | {"cell": "lstm"}),
    "RMC": (scoff.RMC, {"num_slots": 3, "num_heads": 2}),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))
stacks = pytest.mark.parametrize(
    ("kind", "layers", "bidirectional"),
    [(kind, *stack) for kind in KINDS for stack in ((1, False), (2, True))],
)


def make_layer(kind: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    layer, small = KINDS[kind]
    return layer(5, 12, dtype=torch.float64, **(small | options))


def all_active(kind: str) -> dict[str, Any]:
    """Who is active must not hang on the precision."""
    return {} if kind == "RMC" else {"active_modules": None}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_state(kind: str, *shape: int) -> Any:
    return (randn(*shape), randn(*shape)) if "LSTM" in kind else randn(*shape)


def parts(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def map_state(function: Any, *states: Any) -> Any:
    mapped = tuple(function(*values) for values in zip(*map(parts, states), strict=True))
    return mapped if isinstance(states[0], tuple) else mapped[0]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(parts(a), parts(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def as_input(form: str, batch_first: bool) -> Tensor | PackedSequence:
    if form == "unbatched":
        return randn(4, 5)
    if form == "packed":
        return pack_sequence([randn(length, 5) for length in (2, 4, 1)], enforce_sorted=False)
    return randn(3, 4, 5) if batch_first else randn(4, 3, 5)


def shapes(result: Any) -> list[Any]:
    output, state = result
    data = output.data if isinstance(output, PackedSequence) else output
    return [type(output), data.shape, [s.shape for s in parts(state)]]


@every_kind
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed"])
@pytest.mark.parametrize(
    ("layers", "bidirectional", "batch_first"),
    list(itertools.product([1, 2], [False, True], [False, True])),
)
def test_shapes_are_those_of_torch(
    layers: int, bidirectional: bool, batch_first: bool, form: str, kind: str
):
    args = {"num_layers": layers, "bidirectional": bidirectional, "batch_first": batch_first}
    theirs = (nn.LSTM if "LSTM" in kind else nn.GRU)(5, 12, dtype=torch.float64, **args)
    ours = make_layer(kind, **args)
    x = as_input(form, batch_first)
    output, state = theirs(x)
    assert shapes(ours(x)) == shapes((output, state))
    assert shapes(ours(x, state)) == shapes((output, state))


@every_kind
def test_positions_are_optional_and_one_is_as_good_as_none(kind: str):
    layer = make_layer(kind, batch_first=True)
    x = randn(2, 4, 5)
    assert torch.equal(layer(x)[0], layer(x[:, :, None])[0])
    assert layer(randn(2, 4, 7, 5))[0].shape == (2, 4, 12)


@stacks
def test_packed_equals_each_alone(kind: str, layers: int, bidirectional: bool):
    rnn = make_layer(kind, num_layers=layers, bidirectional=bidirectional)
    sequences = [randn(length, 5) for length in (3, 5, 1)]
    hx = random_state(kind, len(rnn.cells), 3, 12)
    packed = pack_sequence(sequences, enforce_sorted=False)
    output, final = rnn(packed, hx)
    for i, (sequence, got) in enumerate(zip(sequences, unpack_sequence(output), strict=True)):
        alone, alone_final = rnn(sequence, map_state(lambda s, i=i: s[:, i], hx))
        assert_same(got, alone)
        assert_same(map_state(lambda s, i=i: s[:, i], final), alone_final)


@stacks
def test_reset_equals_starting_anew(kind: str, layers: int, bidirectional: bool):
    rnn = make_layer(kind, num_layers=layers, bidirectional=bidirectional)
    x = randn(6, 2, 5)
    hx, restart = (random_state(kind, len(rnn.cells), 2, 12) for _ in range(2))
    reset = torch.zeros(6, 2, dtype=torch.bool)
    reset[4, 1] = True
    forth = (torch.arange(len(rnn.cells)) % (1 + bidirectional) == 0)[:, None, None]
    for start in (None, restart):
        output, final = rnn(x, hx, reset=reset, restart=start)
        whole, whole_final = rnn(x[:, :1], map_state(lambda s: s[:, :1], hx))
        assert_same(output[:, :1], whole)
        assert_same(map_state(lambda s: s[:, :1], final), whole_final)
        anew = rnn.initial_state(2) if start is None else start
        # the way back enters at the end, and starts anew on leaving the second part
        first = map_state(lambda h, a: torch.where(forth, h, a)[:, 1:], hx, anew)
        second = map_state(lambda h, a: torch.where(forth, a, h)[:, 1:], hx, anew)
        assert_same(output[:4, 1:], rnn(x[:4, 1:], first)[0])
        assert_same(output[4:, 1:], rnn(x[4:, 1:], second)[0])


@pytest.mark.parametrize("layers", [1, 2])
@every_kind
def test_split_and_resumed_equals_one_call(kind: str, layers: int):
    rnn = make_layer(kind, num_layers=layers)
    x, hx = randn(6, 2, 5), random_state(kind, layers, 2, 12)
    output, final = rnn(x, hx)
    first, between = rnn(x[:2], hx)
    second, last = rnn(x[2:], between)
    assert_same(output, torch.cat([first, second]))
    assert_same(final, last)


@pytest.mark.parametrize("positions", [None, 3])
@every_kind
def test_steps_of_the_cell_equal_the_layer(kind: str, positions: int | None):
    rnn = make_layer(kind)
    lead = (4, 2) if positions is None else (4, 2, positions)
    x = randn(*lead, 5)
    output, final = rnn(x)
    step, state = rnn.cells[0], None
    for t in range(4):
        state = step(x[t], state)
        assert_same(parts(state)[0], output[t])
    assert_same(state, map_state(lambda s: s[0], final))


@every_kind
def test_the_cell_takes_one_sequence_without_a_batch(kind: str):
    step = make_layer(kind).cells[0]
    x, hx = randn(2, 5), random_state(kind, 2, 12)
    alone = step(x[1], map_state(lambda s: s[1], hx))
    assert parts(alone)[0].shape == (12,)
    assert_same(alone, map_state(lambda s: s[1], step(x, hx)))


@every_kind
def test_state_dict_pickle_and_deepcopy_keep_the_function(kind: str):
    x, rnn = randn(4, 2, 5), make_layer(kind, num_layers=2)
    other = make_layer(kind, seed=1, num_layers=2)
    assert not torch.allclose(rnn(x)[0], other(x)[0])
    other.load_state_dict(rnn.state_dict())
    for same in (other, copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(rnn(x)[0], same(x)[0])


@every_kind
def test_half_precision(kind: str):
    rnn = make_layer(kind, **all_active(kind)).float()
    x = randn(4, 2, 3, 5).float()
    expected, _ = rnn(x)
    output, state = copy.deepcopy(rnn).half()(x.half())
    assert {output.dtype, *(s.dtype for s in parts(state))} == {torch.float16}
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-2)


@every_kind
def test_autocast(kind: str):
    rnn = make_layer(kind, num_layers=2, bidirectional=True, **all_active(kind)).float()
    x = randn(4, 2, 3, 5).float()
    reset = torch.zeros(4, 2, dtype=torch.bool)
    reset[2] = True
    expected, _ = rnn(x, reset=reset)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = rnn(x, reset=reset)
        stepped = rnn.cells[0](x[0])
    assert {output.dtype, *(s.dtype for s in (*parts(state), *parts(stepped)))} == {torch.bfloat16}
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.1)
    output.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in rnn.parameters())
