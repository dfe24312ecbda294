"""SCOFF as a layer: what nn.GRU and nn.LSTM promise, and what SCOFF adds."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import scoff
from scoff.nn.noise import gumbel_

N, L, C, H, F, S = 3, 6, 4, 12, 3, 2
D = H // F


def make(**options) -> scoff.SCOFF:
    settings = {"num_object_files": F, "num_schemata": S, "dtype": torch.float64}
    return scoff.SCOFF(C, H, **(settings | options))


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def as_pair(state):
    return state if isinstance(state, tuple) else (state,)


every_layout = pytest.mark.parametrize(
    ("num_layers", "bidirectional", "batch_first"),
    list(itertools.product([1, 2], [False, True], [False, True])),
)
every_cell = pytest.mark.parametrize("cell", ["gru", "lstm"])


@every_layout
@every_cell
@pytest.mark.parametrize("kind", ["batched", "unbatched", "sorted", "unsorted"])
def test_shapes_and_types_are_those_of_torch(kind, cell, num_layers, bidirectional, batch_first):
    layout = {
        "num_layers": num_layers,
        "bidirectional": bidirectional,
        "batch_first": batch_first,
        "dtype": torch.float64,
    }
    theirs = (nn.GRU if cell == "gru" else nn.LSTM)(C, H, **layout)
    ours = make(cell=cell, **layout)
    x = torch.randn(N, L, C, dtype=torch.float64)
    if kind == "batched":
        x = x if batch_first else x.transpose(0, 1)
    elif kind == "unbatched":
        x = x[0]
    else:
        lengths = [6, 4, 1] if kind == "sorted" else [4, 6, 1]
        x = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=kind == "sorted")
    for hx in (None, theirs(x)[1]):
        expected, expected_state = theirs(x, hx)
        got, got_state = ours(x, hx)
        if isinstance(expected, PackedSequence):
            assert isinstance(got, PackedSequence)
            for a, b in zip(expected[1:], got[1:], strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
            expected, got = expected.data, got.data
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert isinstance(got_state, tuple) == isinstance(expected_state, tuple)
        for a, b in zip(as_pair(expected_state), as_pair(got_state), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@every_layout
@every_cell
def test_the_state_is_the_last_output(cell, num_layers, bidirectional, batch_first):
    rnn = make(
        cell=cell, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first
    )
    x = torch.randn(L, N, C, dtype=torch.float64)
    output, state = rnn(x.transpose(0, 1) if batch_first else x)
    output = output.transpose(0, 1) if batch_first else output
    h_n = as_pair(state)[0]
    if bidirectional:
        close(h_n[-2], output[-1, :, :H])
        close(h_n[-1], output[0, :, H:])
    else:
        close(h_n[-1], output[-1])


@every_layout
@every_cell
@pytest.mark.parametrize("positions", [None, 5])
@pytest.mark.parametrize("lengths", [[6, 4, 1], [1, 6, 4]])
def test_a_packed_batch_equals_each_sequence_alone(
    lengths, positions, cell, num_layers, bidirectional, batch_first
):
    rnn = make(
        cell=cell, num_layers=num_layers, bidirectional=bidirectional, batch_first=batch_first
    ).eval()
    shape = (N, L, C) if positions is None else (N, L, positions, C)
    x = torch.randn(shape, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
    output, state = rnn(packed)
    output, _ = pad_packed_sequence(output, batch_first=True)
    for i, length in enumerate(lengths):
        alone = x[i : i + 1, :length]
        expected, expected_state = rnn(alone if batch_first else alone.transpose(0, 1))
        close(output[i, :length], expected.reshape(length, -1))
        for a, b in zip(as_pair(state), as_pair(expected_state), strict=True):
            close(a[:, i], b[:, 0])


@every_cell
def test_unbatched_equals_a_batch_of_one(cell):
    rnn = make(cell=cell, num_layers=2, bidirectional=True).eval()
    x = torch.randn(L, C, dtype=torch.float64)
    output, state = rnn(x)
    expected, expected_state = rnn(x[:, None])
    close(output, expected[:, 0])
    for a, b in zip(as_pair(state), as_pair(expected_state), strict=True):
        close(a, b[:, 0])


@every_cell
@pytest.mark.parametrize("num_layers", [1, 2])
def test_stopping_and_going_on_equals_one_long_call(cell, num_layers):
    rnn = make(cell=cell, num_layers=num_layers, active_object_files=2)
    x = torch.randn(L, N, C, dtype=torch.float64)
    noise = torch.randn(num_layers, L, N, F, S, dtype=torch.float64)
    start = rnn.initial_state(N)
    expected, expected_state = rnn(x, start, noise=noise)
    first, state = rnn(x[:2], start, noise=noise[:, :2])
    second, state = rnn(x[2:], state, noise=noise[:, 2:])
    close(torch.cat([first, second]), expected)
    for a, b in zip(as_pair(state), as_pair(expected_state), strict=True):
        close(a, b)


@every_cell
@pytest.mark.parametrize("positions", [None, 5])
def test_steps_of_the_cell_equal_one_call(cell, positions):
    rnn = make(cell=cell, active_object_files=2)
    shape = (L, N, C) if positions is None else (L, N, positions, C)
    x = torch.randn(shape, dtype=torch.float64)
    noise = torch.randn(1, L, N, F, S, dtype=torch.float64)
    start = rnn.cells[0].initial_state(N)
    hx = tuple(part[None] for part in start) if cell == "lstm" else start[None]
    expected, _ = rnn(x, hx, noise=noise)
    state = start
    for t in range(L):
        state = rnn.cells[0](x[t], state, noise=noise[0, t])
        close(as_pair(state)[0], expected[t])


def test_the_cell_has_the_shapes_of_grucell():
    cell = scoff.SCOFFCell(C, H, num_object_files=F)
    theirs = nn.GRUCell(C, H)
    for x in (torch.randn(N, C), torch.randn(C)):
        assert cell(x).shape == theirs(x).shape
        assert cell(x, theirs(x)).shape == theirs(x).shape
    lstm = scoff.SCOFFCell(C, H, num_object_files=F, cell="lstm")
    assert [part.shape for part in lstm(torch.randn(N, C))] == [(N, H), (N, H)]


@every_cell
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_reset_equals_starting_anew(bidirectional, batch_first, cell):
    rnn = make(cell=cell, bidirectional=bidirectional, batch_first=batch_first)
    directions = 2 if bidirectional else 1
    x = torch.randn(L, N, C, dtype=torch.float64)
    noise = torch.randn(directions, L, N, F, S, dtype=torch.float64)
    reset = torch.zeros(L, N, dtype=torch.bool)
    reset[2, 0] = reset[4, 0] = reset[3, 1] = True  # the third sequence goes through
    start, restart = rnn.initial_state(N), rnn.initial_state(N)

    def arrange(y, axis=0):
        return y.transpose(axis, axis + 1) if batch_first else y

    output, _ = rnn(
        arrange(x), start, reset=arrange(reset), restart=restart, noise=arrange(noise, 1)
    )
    output = arrange(output)
    for n, starts in enumerate([[0, 2, 4], [0, 3], [0]]):
        for i, (a, b) in enumerate(itertools.pairwise([*starts, L])):
            # forwards the first piece goes on from hx, backwards the last one
            parts = [
                torch.stack(
                    [(p if use else q)[k] for k, use in enumerate((i == 0, b == L)[:directions])]
                )[:, n : n + 1]
                for p, q in zip(as_pair(start), as_pair(restart), strict=True)
            ]
            hx = tuple(parts) if cell == "lstm" else parts[0]
            alone, _ = rnn(
                arrange(x[a:b, n : n + 1]), hx, noise=arrange(noise[:, a:b, n : n + 1], 1)
            )
            close(output[a:b, n], arrange(alone)[:, 0])


def test_reset_starts_from_the_initial_state_by_default():
    rnn = make().eval()
    x = torch.randn(L, N, C, dtype=torch.float64)
    reset = torch.zeros(L, N, dtype=torch.bool)
    reset[3] = True
    for hx in (None, torch.randn(1, N, H, dtype=torch.float64)):
        output, _ = rnn(x, hx, reset=reset)
        close(output[3:], rnn(x[3:])[0])


def test_reset_reaches_packed_sequences():
    rnn = make(bidirectional=True).eval()
    x = torch.randn(L, N, C, dtype=torch.float64)
    lengths = [2, 6, 4]
    reset = torch.zeros(L, N, dtype=torch.bool)
    reset[3] = True  # beyond the end of the first sequence, where it must not matter
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    output, state = rnn(packed, reset=reset)
    output, _ = pad_packed_sequence(output)
    for n, length in enumerate(lengths):
        alone, alone_state = rnn(x[:length, n : n + 1], reset=reset[:length, n : n + 1])
        close(output[:length, n], alone[:, 0])
        close(state[:, n], alone_state[:, 0])


def test_packed_input_takes_reset_and_noise_in_the_order_of_the_batch():
    by_time, by_batch = make(), make(batch_first=True)
    by_batch.load_state_dict(by_time.state_dict())
    x = torch.randn(L, N, C, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([2, 6, 4]), enforce_sorted=False)
    reset = torch.rand(L, N) < 0.4
    noise = torch.randn(1, L, N, F, S, dtype=torch.float64)
    start = by_time.initial_state(N)
    expected, _ = by_time(packed, start, reset=reset, restart=start, noise=noise)
    given = {"reset": reset.T, "restart": start, "noise": noise.transpose(1, 2)}
    close(by_batch(packed, start, **given)[0].data, expected.data)


def permute_files(state, order):
    return state.unflatten(-1, (F, D))[..., order, :].flatten(-2)


@every_cell
@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_permuting_object_files_permutes_the_output_and_nothing_else(num_layers, backend, cell):
    rnn = make(cell=cell, num_layers=num_layers, active_object_files=2, backend=backend)
    x = torch.randn(L, N, 5, C, dtype=torch.float64)
    noise = torch.randn(num_layers, L, N, F, S, dtype=torch.float64)
    start = rnn.initial_state(N)
    order = torch.tensor([2, 0, 1])
    expected, expected_state = rnn(x, start, noise=noise)
    moved = tuple(permute_files(part, order) for part in as_pair(start))
    output, state = rnn(x, moved if cell == "lstm" else moved[0], noise=noise[..., order, :])
    close(output, permute_files(expected, order), 1e-10)
    for a, b in zip(as_pair(state), as_pair(expected_state), strict=True):
        close(a, permute_files(b, order), 1e-10)


@every_cell
def test_permuting_schemata_changes_nothing(cell):
    rnn = make(cell=cell, num_schemata=3)
    x = torch.randn(L, N, C, dtype=torch.float64)
    noise = torch.randn(1, L, N, F, 3, dtype=torch.float64)
    start = rnn.initial_state(N)
    expected, _ = rnn(x, start, noise=noise)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            weight = getattr(rnn.cells[0], name)
            weight.copy_(weight[order].clone())
    close(rnn(x, start, noise=noise[..., order])[0], expected, 1e-10)


def test_no_parameter_belongs_to_a_slot():
    few, many = make(num_object_files=2), scoff.SCOFF(C, 6 * 6, num_object_files=6, num_schemata=S)
    shapes = [{k: v.shape for k, v in rnn.named_parameters()} for rnn in (few, many)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_object_files_that_start_alike_stay_alike(backend):
    rnn = make(backend=backend).eval()
    x = torch.randn(20, N, C, dtype=torch.float64)
    same = torch.randn(1, N, 1, D, dtype=torch.float64).expand(-1, -1, F, -1).flatten(-2)
    files = rnn(x, same)[0].unflatten(-1, (F, D))
    close(files, files[:, :, :1].expand_as(files))
    files = rnn(x)[0].unflatten(-1, (F, D))  # its own initial states differ, and so do the files
    assert (files[..., 0, :] - files[..., 1, :]).abs().max() > 1e-3


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_sparse_activation_freezes_exactly_the_least_attended(backend, cell):
    rnn = make(cell=cell, active_object_files=2, backend=backend)
    x = torch.randn(L, N, 5, C, dtype=torch.float64)
    start = rnn.initial_state(N)
    noise = torch.randn(1, L, N, F, S, dtype=torch.float64)
    trace = rnn.trace(x, start, noise=noise)
    mass = trace.input_attention.sum(-1)  # [N, L, F]
    assert (trace.active.sum(-1) == 2).all()
    rank = mass.argsort(-1, descending=True)
    assert trace.active.gather(-1, rank[..., :2]).all()
    assert not trace.active.gather(-1, rank[..., 2:]).any()
    state = start
    for t in range(L):
        before = [part.unflatten(-1, (F, D))[0] for part in as_pair(state)]
        _, state = rnn(x[t : t + 1], state, noise=noise[:, t : t + 1])
        for old, new in zip(before, as_pair(state), strict=True):
            same = (new.unflatten(-1, (F, D))[0] == old).all(-1)  # bit for bit
            assert torch.equal(same, ~trace.active[:, t])


def test_trace_has_the_shapes_it_names_and_the_output_of_forward():
    for options in ({}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}):
        rnn = make(input_heads=2, active_object_files=2, **options).eval()
        x = torch.randn(N, L, 5, C, dtype=torch.float64)
        x = x if rnn.batch_first else x.transpose(0, 1)
        last = rnn.num_layers - 1
        trace = rnn.trace(x, layer=last, reverse=rnn.bidirectional)
        assert torch.equal(trace.output, rnn(x)[0])
        positions = 5 if last == 0 else 2 * F
        assert trace.input_attention.shape == (N, L, F, positions)
        close(trace.input_attention.sum(2), torch.ones(N, L, positions, dtype=torch.float64))
        assert trace.schema_probs.shape == (N, L, F, S)
        close(trace.schema_probs.sum(-1), torch.ones(N, L, F, dtype=torch.float64))
        assert torch.equal(trace.schema, trace.schema_probs.argmax(-1))
        assert trace.active.shape == (N, L, F)
        assert trace.communication.shape == (N, L, 4, F, F)
        close(trace.communication.sum(-1), torch.ones(N, L, 4, F, dtype=torch.float64))
    assert make(communication=None).trace(torch.randn(L, C).double()).communication.shape == (
        L,
        0,
        F,
        F,
    )


def test_trace_without_gradients_keeps_every_step():
    rnn = make().eval()
    x = torch.randn(L, N, C, dtype=torch.float64)
    expected = rnn.trace(x)
    with torch.no_grad():
        for a, b in zip(rnn.trace(x), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_the_reverse_trace_is_in_the_order_of_the_input():
    rnn = make(bidirectional=True).eval()
    x = torch.randn(L, N, C, dtype=torch.float64)
    there = make().eval()
    there.cells[0].load_state_dict(rnn.cells[1].state_dict())
    got, expected = rnn.trace(x, reverse=True), there.trace(x.flip(0))
    close(got.schema_probs, expected.schema_probs.flip(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_from_gru_is_the_gru(bidirectional, bias):
    gru = nn.GRU(C, 7, bias=bias, bidirectional=bidirectional, batch_first=True)
    rnn = scoff.SCOFF.from_gru(gru)
    x = torch.randn(N, L, C)
    x_ours, x_theirs = (x.clone().requires_grad_() for _ in range(2))
    h = torch.randn(2 if bidirectional else 1, N, 7)
    h_ours, h_theirs = (h.clone().requires_grad_() for _ in range(2))
    for ours, theirs in (
        (rnn(x_ours), gru(x_theirs)),
        (rnn(x_ours, h_ours), gru(x_theirs, h_theirs)),
    ):
        for a, b in zip(ours, theirs, strict=True):
            close(a, b, 1e-6)
        (ours[0].square().mean() + ours[1].mean()).backward()
        (theirs[0].square().mean() + theirs[1].mean()).backward()
    close(x_ours.grad, x_theirs.grad, 1e-6)
    close(h_ours.grad, h_theirs.grad, 1e-6)
    for index, suffix in enumerate(["_l0", "_l0_reverse"][: len(rnn.cells)]):
        for name in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if bias else ())):
            ours = getattr(rnn.cells[index], name).grad[0]
            close(ours, getattr(gru, name + suffix).grad, 1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_from_gru_starts_more_object_files_and_schemata_from_copies(reduction):
    gru = nn.GRU(C, 7)
    rnn = scoff.SCOFF.from_gru(
        gru, num_object_files=3, num_schemata=4, input_reduction=reduction, input_heads=2
    )
    x = torch.randn(L, N, C)
    output, _ = rnn(x, torch.zeros(1, N, 21))
    for k in range(3):
        close(output[..., 7 * k : 7 * (k + 1)], gru(x)[0], 1e-6)
    files = rnn(x)[0].unflatten(-1, (3, 7))
    assert (files[..., 0, :] - files[..., 1, :]).abs().max() > 1e-3
    assert not scoff.SCOFF.from_gru(gru.eval()).training


def test_positions_are_a_set():
    rnn = make().eval()
    x = torch.randn(L, N, 5, C, dtype=torch.float64)
    close(rnn(x)[0], rnn(x[:, :, [3, 1, 4, 0, 2]])[0], 1e-10)
    close(rnn(x[:, :, :1])[0], rnn(x[:, :, 0])[0])


def test_evaluation_is_deterministic_and_training_is_not():
    rnn = make()
    x = torch.randn(L, N, C, dtype=torch.float64)
    assert not torch.equal(rnn(x)[0], rnn(x)[0])
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])


def test_the_choice_is_a_gumbel_sample_in_training():
    rnn = make(num_schemata=3, num_object_files=1, communication=None)
    x = torch.randn(1, 1, C, dtype=torch.float64).expand(1, 20_000, C)
    start = rnn.initial_state(1).detach().expand(1, 20_000, H).contiguous()
    with torch.no_grad():
        chosen = rnn.trace(x, start).schema.flatten().bincount(minlength=3) / 20_000
        clean = rnn.eval().trace(x[:, :1], start[:, :1]).schema_probs.flatten()
    close(chosen.double(), clean, 0.015)


def test_noise_differs_between_steps_sequences_and_object_files():
    rnn = make(num_schemata=3)
    with torch.no_grad():
        rnn.cells[0].schema_query.zero_()  # all that is left of the probabilities is the noise
        probs = rnn.trace(torch.randn(L, N, C, dtype=torch.float64)).schema_probs
    rows = probs.flatten(0, 2)
    assert len(rows.unique(dim=0)) == L * N * F


def test_dropout_differs_between_steps():
    cell = make(comm_dropout=0.5, input_dropout=0.5).cells[0]
    mask = cell._dropout_mask(0.5, torch.zeros(()), 50, N, F, D)
    assert not torch.equal(mask[0], mask[1])
    assert set(mask.unique().tolist()) == {0.0, 2.0}


@every_cell
@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_field_of_a_trace_can_be_trained_on(batch_first, backend, cell):
    rnn = make(cell=cell, backend=backend, batch_first=batch_first)
    x = torch.randn(N, L, 5, C, dtype=torch.float64)
    noise, start = torch.randn(1, N, L, F, S, dtype=torch.float64), rnn.initial_state(N)
    for name in ("output", "input_attention", "schema_probs", "communication"):
        rnn.zero_grad()
        given = (x, noise) if batch_first else (x.transpose(0, 1), noise.transpose(1, 2))
        getattr(rnn.trace(given[0], start, noise=given[1]), name).square().sum().backward(
            retain_graph=True
        )
        assert rnn.cells[0].weight_hh.grad.abs().max() > 0, name


@every_cell
def test_strided_tensors(cell):
    rnn = make(cell=cell)
    x = torch.randn(C, N, L, dtype=torch.float64).permute(2, 1, 0)
    noise = torch.randn(1, 1, 1, F, S, dtype=torch.float64).expand(1, L, N, F, S)
    start = tuple(
        torch.randn(1, H, N, dtype=torch.float64).mT for _ in as_pair(rnn.initial_state(1))
    )
    start = start if cell == "lstm" else start[0]
    rnn(x, start, noise=noise)[0].sum().backward()
    rnn.cells[0](x[0], noise=noise[0, 0])


@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_an_empty_batch(backend):
    rnn = make(backend=backend)
    output, state = rnn(torch.zeros(L, 0, C, dtype=torch.float64))
    assert output.shape == (L, 0, H)
    assert state.shape == (1, 0, H)
    output.sum().backward()
    assert rnn.cells[0](torch.zeros(0, C, dtype=torch.float64)).shape == (0, H)


@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_one_object_file_has_a_gradient_for_every_parameter(backend):
    rnn = make(num_object_files=1, backend=backend)
    rnn(torch.randn(L, N, C, dtype=torch.float64))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in rnn.parameters())


def test_weights_load_into_another_number_of_object_files():
    few, many = (
        make(num_object_files=3),
        scoff.SCOFF(C, 5 * D, num_object_files=5, num_schemata=S, dtype=torch.float64),
    )
    many.load_state_dict(few.state_dict())
    for (name, a), b in zip(few.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b), name
    few.load_state_dict(many.state_dict())
    assert torch.equal(many.cells[0].initial_noise[:, :3], few.cells[0].initial_noise)


@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_half_precision_survives_an_object_file_that_sees_nothing(backend):
    rnn = make(dtype=torch.float16, input_reduction="mean", backend=backend).eval()
    assert rnn(30 * torch.randn(L, 64, 2, C, dtype=torch.float16))[0].isfinite().all()


def test_replicas_and_meta_tensors():
    rnn = make(device="meta", dtype=torch.float32)
    assert rnn(torch.zeros(L, N, C, device="meta"))[0].shape == (L, N, H)
    rnn.to_empty(device="cpu").reset_parameters()
    assert rnn(torch.zeros(L, N, C))[0].isfinite().all()
    replica = rnn.cells[0]._replicate_for_data_parallel()  # has no parameters of its own
    for name, parameter in rnn.cells[0].named_parameters():
        setattr(replica, name, parameter.detach().clone())
    assert replica(torch.zeros(N, C)).shape == (N, H)


def test_dropout_without_a_layer_to_act_on_warns():
    with pytest.warns(UserWarning, match="dropout: got 0.5"):
        make(dropout=0.5)


def test_initial_states_follow_the_learned_distribution():
    rnn = make(cell="lstm")
    with torch.no_grad():
        rnn.cells[0].initial_mean.fill_(2.0)
        rnn.cells[0].initial_std.fill_(0.1)
        h, c = rnn.initial_state(5_000)
    for part in (h, c):
        close(part.mean(), torch.tensor(2.0).double(), 5e-3)
        close(part.std(), torch.tensor(0.1).double(), 5e-3)
    rnn.eval()
    a, b = rnn.initial_state(2), rnn.initial_state(2)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[0][:, 0], a[0][:, 1])


def test_every_parameter_learns():
    rnn = make(num_layers=2, input_heads=2, input_value_size=4)
    output, h_n = rnn(torch.randn(L, N, C, dtype=torch.float64))
    (output.square().sum() + h_n.sum()).backward()
    for name, parameter in rnn.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("option", ["input_dropout", "comm_dropout"])
def test_dropout_acts_in_training_alone(option):
    rnn = make(num_schemata=1, **{option: 0.5})
    x = torch.randn(L, N, C, dtype=torch.float64)
    start = rnn.initial_state(N)
    assert not torch.equal(rnn(x, start)[0], rnn(x, start)[0])
    rnn.eval()
    plain = make(num_schemata=1).eval()
    plain.load_state_dict(rnn.state_dict())
    close(rnn(x, start)[0], plain(x, start)[0])


def test_dropout_between_layers_spares_the_last():
    rnn = make(num_layers=2, dropout=0.9, num_schemata=1)
    x = torch.randn(L, N, C, dtype=torch.float64)
    start = rnn.initial_state(N)
    (first, h), (second, g) = rnn(x, start), rnn(x, start)
    close(h[0], g[0])  # the first layer is not touched
    assert not torch.equal(first, second)
    assert (first != 0).all()


def test_temperature_can_be_annealed():
    rnn = make(num_layers=2, temperature=2.0)
    x = torch.randn(L, N, C, dtype=torch.float64)
    rnn.eval()
    soft = rnn.trace(x, layer=1).schema_probs.amax(-1).mean()
    rnn.temperature = 0.1
    assert rnn.trace(x, layer=1).schema_probs.amax(-1).mean() > soft


def test_copies_and_files(tmp_path):
    rnn = make(num_layers=2).eval()
    x = torch.randn(L, N, C, dtype=torch.float64)
    expected = rnn(x)[0]
    other = make(num_layers=2).eval()
    assert not torch.equal(other(x)[0], expected)
    other.load_state_dict(rnn.state_dict())  # the noise of evaluation comes along
    torch.save(rnn, tmp_path / "rnn.pt")
    loaded = torch.load(tmp_path / "rnn.pt", weights_only=False)
    for copied in (other, copy.deepcopy(rnn), loaded):
        assert torch.equal(copied(x)[0], expected)


@every_cell
@pytest.mark.parametrize("backend", ["reference", "batched"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_precisions(dtype, backend, cell):
    rnn = make(dtype=torch.float32, cell=cell, backend=backend).eval()
    x = torch.randn(L, N, C)
    expected = rnn(x)[0]
    output, state = rnn.to(dtype)(x.to(dtype))
    assert output.dtype == as_pair(state)[0].dtype == dtype
    tolerance = {torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    close(output.float(), expected, tolerance)
    output.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in rnn.parameters())


def test_autocast():
    rnn = make(dtype=torch.float32).eval()
    x = torch.randn(L, N, C)
    expected = rnn(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = rnn(nn.functional.linear(x, torch.eye(C)))
        assert output.dtype == torch.bfloat16
        assert rnn.cells[0](x[0]).dtype == torch.bfloat16
    close(output.float(), expected, 0.1)
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in rnn.parameters())


def test_autocast_takes_a_state_of_either_precision_and_leaves_float64_alone():
    rnn = make(dtype=torch.float32, cell="lstm").eval()
    h, c = rnn.initial_state(N)
    x = torch.randn(L, N, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rnn(x, (h.bfloat16(), c))[0].dtype == torch.bfloat16
        assert rnn.double()(x.double())[0].dtype == torch.float64


def test_second_derivatives_need_the_reference():
    rnn = make(backend="reference").eval()
    x = torch.randn(2, 1, C, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(rnn(x)[0].sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    assert curvature.abs().max() > 0


def test_code_written_for_a_gru_finds_what_it_looks_for():
    rnn, gru = make(num_layers=2), nn.GRU(C, H, num_layers=2)
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
    for name in (*names, "bidirectional"):
        assert getattr(rnn, name) == getattr(gru, name)
    rnn.flatten_parameters()


@pytest.mark.gpu
@every_cell
def test_gpu_runs_all_of_it(cell, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    rnn = scoff.SCOFF(C, H, num_object_files=F, cell=cell, num_layers=2, device="cuda")
    x = torch.randn(L, N, C, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        output, _ = rnn(x)
    assert output.dtype == torch.float16
    output, _ = rnn(pack_padded_sequence(x, torch.tensor([6, 4, 1])))
    output.data.sum().backward()
    rnn.eval()
    close(rnn(x)[0].cpu(), copy.deepcopy(rnn).cpu()(x.cpu())[0], 1e-5)
    with pytest.raises(ValueError, match="input: got a tensor on cpu, wants it on cuda:0"):
        rnn(x.cpu())


def test_gradients_of_each_sample_need_the_reference():
    rnn = make(backend="reference").eval()
    parameters, buffers = dict(rnn.named_parameters()), dict(rnn.named_buffers())
    x = torch.randn(N, L, C, dtype=torch.float64)

    def loss(parameters, one):
        output, _ = torch.func.functional_call(rnn, (parameters, buffers), (one,))
        return output.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    alone = torch.autograd.grad(loss(parameters, x[1]), list(parameters.values()))
    for name, expected in zip(parameters, alone, strict=True):
        close(each[name][1], expected, 1e-10)


# --- choices


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_step_can_be_repeated_by_its_choices(batch_first, cell):
    rnn = scoff.SCOFF(3, 8, 2, num_object_files=2, cell=cell, batch_first=batch_first)
    x = torch.randn((5, 1, 3) if batch_first else (1, 5, 3))
    hx = rnn.initial_state(5)
    output, state, choice = rnn.choose(x, hx)
    assert choice.shape == ((2, 5, 1, 2) if batch_first else (2, 1, 5, 2))
    assert choice.unique().tolist() == [0, 1, 2, 3]
    again, after = rnn(x, hx, choice=choice)  # with noise of its own
    torch.testing.assert_close(again, output)
    torch.testing.assert_close(after, state)
    other, _ = rnn(x, hx, choice=(choice + 1) % 4)
    assert not torch.allclose(other, output)


def test_choices_of_many_steps_are_taken():
    rnn = scoff.SCOFF(3, 8, num_object_files=2, backend="batched")
    x, hx = torch.randn(6, 5, 3), torch.zeros(1, 5, 8)
    choice = torch.randint(0, 4, (1, 6, 5, 2))
    whole, _ = rnn(x, hx, choice=choice)
    for t in range(6):
        step, hx = rnn(x[t : t + 1], hx, choice=choice[:, t : t + 1])
        torch.testing.assert_close(step, whole[t : t + 1])
    trace = rnn.trace(x, choice=choice)
    assert torch.equal(trace.schema, choice[0].transpose(0, 1))


def test_bad_choices_are_refused():
    rnn = scoff.SCOFF(3, 8, num_object_files=2)
    x = torch.randn(6, 5, 3)
    with pytest.raises(TypeError, match=r"choice: got torch.float32, wants .* torch.int64"):
        rnn(x, choice=torch.zeros(1, 6, 5, 2))
    with pytest.raises(TypeError, match="choice: got list, wants a tensor"):
        rnn(x, choice=[[0]])  # pyright: ignore[reportArgumentType]
    good = torch.zeros(1, 6, 5, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"choice: got shape \(6, 5, 2\), wants \(1, 6, 5, 2\)"):
        rnn(x, choice=good[0])
    # a kernel would read whatever is at that address on its own device
    with pytest.raises(ValueError, match="choice: got a tensor on meta, wants it on cpu"):
        rnn(x, choice=good.to("meta"))
    for wrong, got in ((-1, "-1 to 0"), (4, "0 to 4")):
        bad = good.clone()
        bad[0, 2, 3, 1] = wrong
        with pytest.raises(ValueError, match=f"choice: got {got}, wants 0 to 3"):
            rnn(x, choice=bad)
    with pytest.raises(ValueError, match="wants a batch of one step"):
        rnn.choose(x)


def test_choices_may_be_compiled_and_mapped_over():
    rnn = scoff.SCOFF(3, 8, num_object_files=2, backend="reference").eval()
    x, choice = torch.randn(2, 5, 3), torch.randint(0, 4, (3, 1, 2, 5, 2))

    def run(choice):
        return rnn(x, choice=choice)[0]

    expected = torch.stack([run(one) for one in choice])
    torch.testing.assert_close(torch.func.vmap(run)(choice), expected)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(choice[1]), expected[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_choices_that_are_not_looked_at_the_nearest_are_taken(device):
    rnn = scoff.SCOFF(3, 8, num_object_files=2, device=device).eval()
    x = torch.randn(2, 5, 3, device=device)
    choice = torch.randint(0, 4, (1, 2, 5, 2), device=device)
    beyond = torch.where(choice == 3, 9, torch.where(choice == 0, -9, choice))

    def run(choice):
        return rnn(x, choice=choice)[0]

    unseeing = torch.compile(run, fullgraph=True, backend="eager") if device == "cpu" else run
    torch.testing.assert_close(unseeing(beyond), run(choice))


def test_noise_is_finite_whatever_is_drawn(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.zero_())  # noqa: ARG005
    for dtype in (torch.float32, torch.float64):
        assert gumbel_(torch.empty(3, dtype=dtype)).isfinite().all()
