import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from scoff.worlds.adding import Additions, additions

from .test_random import deviation

SPLITS = ("train", "valid", "test")


def same(a: Additions, b: Additions) -> bool:
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


@given(
    st.integers(0, 40),
    st.lists(st.integers(1, 10), min_size=1, max_size=4),
    st.integers(0, 999),
    st.integers(0, 1 << 40),
)
def test_operands_are_marked_one_in_each_segment_and_summed(extra, operands, seed, first):
    length = max(operands) + extra
    data = additions(seed, torch.arange(first, first + 20), length, tuple(operands))
    assert data.x.shape == (20, length, 2)
    values, marker = data.x.unbind(-1)
    assert ((marker == 0) | (marker == 1)).all()
    assert torch.equal(data.is_operand.sum(1), data.num_operands)
    assert data.target.dtype == torch.float32
    for i in range(20):
        n = operands[(first + i) % len(operands)]
        assert data.num_operands[i] == n
        places = data.is_operand[i].nonzero().flatten().tolist()
        for j, place in enumerate(places):
            assert j * length // n <= place < (j + 1) * length // n
        total = math.fsum(values[i, places].tolist())
        assert data.target[i] == torch.tensor(total, dtype=torch.float32)  # rounded once


@given(
    st.lists(st.integers(0, 99), min_size=1),
    st.sampled_from(SPLITS),
    st.sampled_from([(2,), (4, 3)]),
)
def test_a_sequence_depends_on_its_index_alone(chosen, split, operands):
    everything = additions(5, torch.arange(100), 30, operands, split)
    some = additions(5, torch.tensor(chosen), 30, operands, split)
    assert same(some, Additions(*(part[chosen] for part in everything)))


def test_batches_make_up_the_set():
    whole = additions(0, torch.arange(100), 50)
    parts = [additions(0, batch, 50) for batch in torch.arange(100).split(7)]
    assert same(whole, Additions(*map(torch.cat, zip(*parts, strict=True))))


def test_a_sequence_does_not_depend_on_the_counts_of_others():
    index = torch.arange(0, 100, 2)
    assert same(additions(0, index, 50, (2, 9)), additions(0, index, 50, (2, 3)))


def test_a_set_holds_as_many_of_each_count():
    count = additions(0, torch.arange(1000), 20, (2, 4)).num_operands
    assert count.bincount().tolist() == [0, 0, 500, 0, 500]


def test_numbers_are_uniform():
    values = additions(0, torch.arange(20_000), 50).x[..., 0]
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(deviation((values * 1000).long().flatten().bincount(minlength=1000))) < 4
    # at each place alike, and marked ones are no different
    assert (values.mean(0) - 1 / 2).abs().max() < 4 * math.sqrt(1 / 12 / 20_000)
    data = additions(1, torch.arange(20_000), 50)
    marked = data.x[..., 0][data.is_operand]
    assert abs(deviation((marked * 100).long().bincount(minlength=100))) < 4


@pytest.mark.parametrize("length", [50, 200])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 10])
def test_places_are_uniform_in_each_segment(n, length):
    counts = additions(2, torch.arange(20_000), length, (n,)).is_operand.sum(0)
    for i in range(n):
        segment = counts[i * length // n : (i + 1) * length // n]
        assert segment.sum() == 20_000
        assert abs(deviation(segment)) < 4


def test_the_largest_number_marks_the_last_place_of_a_segment():
    width = torch.arange(1, 100_000)
    assert torch.equal((torch.tensor(1 - 2**-24) * width).long(), width - 1)


def test_places_of_two_operands_are_independent():
    marker = additions(3, torch.arange(40_000), 20, (2,)).is_operand
    first, second = marker[:, :10].int().argmax(1), marker[:, 10:].int().argmax(1)
    assert abs(deviation((first * 10 + second).bincount(minlength=100))) < 4


def test_splits_and_seeds_share_no_sequence():
    sets = [additions(0, torch.arange(20_000), 10, split=split) for split in SPLITS]
    sets.append(additions(1, torch.arange(20_000), 10))
    values = torch.cat([data.x[..., 0] for data in sets])
    # not even one that starts with the same two numbers, 48 bits
    first, second = (values[:, :2].double() * 2**24).long().unbind(1)
    assert (first << 24 | second).unique().numel() == 80_000


def test_numbers_stay_what_they_are():
    # runs of an earlier version must stay comparable
    data = additions(1, torch.tensor([0, 1, 1 << 33]), 5, (1, 2), "test")
    assert data.num_operands.tolist() == [1, 2, 1]
    assert (data.x[..., 0].double() * 2**24).long().tolist() == [
        [15087067, 1446456, 18281, 5884944, 16108568],
        [3059672, 8992763, 13546908, 3160784, 11082138],
        [4675340, 13122725, 14364247, 4439957, 11967851],
    ]
    assert data.is_operand.int().tolist() == [[0, 0, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


class OnDevice(TorchDispatchMode):
    """Refuses to read a tensor on the host or to make one of host data: a CUDA graph cannot."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert func not in (
            aten._local_scalar_dense.default,
            aten.nonzero.default,
            aten.lift_fresh.default,
        )
        return func(*args, **(kwargs or {}))


def test_nothing_goes_through_the_host():
    index = torch.arange(10)
    with OnDevice():
        additions(0, index, 50, (2, 3, 4))
    with pytest.raises(AssertionError), OnDevice():
        index[0].item()
    with pytest.raises(AssertionError), OnDevice():
        torch.tensor([1, 2])


@pytest.mark.parametrize("operands", [(), (0,), (2, 21), (-1, 3)])
def test_impossible_operands(operands):
    with pytest.raises(ValueError, match=r"operands: got .*, wants numbers from 1 to length = 20"):
        additions(0, torch.arange(5), 20, operands)


def test_impossible_length():
    with pytest.raises(ValueError, match="length: got 0, wants an integer of at least 1"):
        additions(0, torch.arange(5), 0)


def test_impossible_split():
    with pytest.raises(ValueError, match="split: got 'dev', wants one of 'train', 'valid', 'test'"):
        additions(0, torch.arange(5), 20, split="dev")  # pyright: ignore


@pytest.mark.gpu
@pytest.mark.parametrize("operands", [(2, 4), (3,), (8, 9, 10)])
def test_the_gpu_makes_the_same_bits(operands):
    index = torch.arange(10_000)
    expected = additions(9, index, 200, operands, "valid")
    got = additions(9, index.cuda(), 200, operands, "valid")
    assert got.x.is_cuda
    assert same(Additions(*(part.cpu() for part in got)), expected)


@pytest.mark.gpu
def test_a_cuda_graph_makes_the_same_bits():
    index = torch.arange(64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        additions(9, index, 50)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data = additions(9, index, 50)
    for first in (0, 1000, 1 << 35):
        index.copy_(torch.arange(first, first + 64))
        graph.replay()
        expected = additions(9, torch.arange(first, first + 64), 50)
        assert same(Additions(*(part.cpu() for part in data)), expected)
