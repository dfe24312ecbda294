import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.training.data import _order, batch_indices, seed_for


def stream(seed: int, batch_size: int, size: int | None, total: int) -> torch.Tensor:
    """The first `total` samples of a run"""
    steps = range(-(-total // batch_size))
    return torch.cat([batch_indices(seed, step, batch_size, size) for step in steps])[:total]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 999))
def test_each_epoch_visits_every_sample_once(batch_size, size, seed):
    for epoch in stream(seed, batch_size, size, 3 * size).view(3, size):
        assert epoch.sort().values.tolist() == list(range(size))


@given(st.integers(1, 60), st.integers(1, 60))
def test_the_order_does_not_depend_on_the_batch_size(batch_size, size):
    assert torch.equal(stream(0, batch_size, size, 2 * size), stream(0, 1, size, 2 * size))


@given(st.integers(1, 8), st.integers(1, 5), st.none() | st.integers(1, 30), st.integers(0, 20))
def test_ranks_hold_the_slices_of_one_batch(share, world_size, size, step):
    batch_size = share * world_size
    whole = batch_indices(0, step, batch_size, size)
    for rank, part in enumerate(whole.split(share)):
        mine = batch_indices(0, step, batch_size, size, rank=rank, world_size=world_size)
        assert torch.equal(mine, part)


def test_a_restart_goes_on_alike():
    run = [batch_indices(4, step, 16, 50) for step in range(20)]
    for step in (13, 3, 19):  # not in order, with nothing kept
        _order.cache_clear()
        assert torch.equal(batch_indices(4, step, 16, 50), run[step])


def test_epochs_and_seeds_differ():
    first, second = stream(0, 10, 100, 200).view(2, 100)
    other = stream(1, 10, 100, 100)
    for a, b in ((first, second), (first, other), (first, torch.arange(100))):
        assert (a == b).sum() < 10  # one on average


def test_sizes_order_their_samples_anew_but_alike_each_time():
    assert torch.equal(stream(0, 7, 100, 100), stream(0, 7, 100, 100))
    assert stream(0, 7, 100, 100).tolist() != stream(0, 7, 101, 100).tolist()


def test_every_order_is_as_likely():
    orders = torch.stack([_order(seed, 0, 3) for seed in range(1200)])
    counts = (orders[:, 0] * 3 + orders[:, 1]).bincount(minlength=9)
    counts = counts[counts > 0].double()
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 20.5  # chi-square, p = 0.001


def test_a_stream_without_size_never_repeats():
    assert batch_indices(0, 0, 4, None).tolist() == [0, 1, 2, 3]
    assert batch_indices(0, 5, 4, None).tolist() == [20, 21, 22, 23]
    assert batch_indices(1, 1 << 40, 2, None).tolist() == [1 << 41, (1 << 41) + 1]


def test_writing_into_a_batch_changes_no_other():
    before = batch_indices(0, 0, 5, 10).clone()
    batch_indices(0, 0, 5, 10).zero_()
    assert torch.equal(batch_indices(0, 0, 5, 10), before)


@pytest.mark.parametrize("size", [None, 10])
def test_a_batch_is_int64_on_the_cpu(size):
    batch = batch_indices(0, 2, 6, size)
    assert (batch.dtype, batch.device.type, batch.shape) == (torch.int64, "cpu", (6,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step: got -1"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"size": 0}, "size: got 0"),
        ({"world_size": 0}, "world_size: got 0"),
        ({"world_size": 3}, "batch_size: got 8, wants a multiple of world_size = 3"),
        ({"rank": -1}, "rank: got -1"),
        ({"rank": 2, "world_size": 2}, "rank: got 2, wants less than world_size = 2"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_indices(**({"seed": 0, "step": 0, "batch_size": 8, "size": 20} | arguments))


def test_numbers_stay_what_they_are():
    # runs of an earlier version must stay comparable; `hash` would change with each process
    assert seed_for() == 2858069222894195974
    assert seed_for(0, "data") == 7233480179947299078
    assert stream(0, 4, 8, 16).tolist() == [0, 4, 5, 1, 2, 6, 3, 7, 6, 7, 3, 0, 5, 4, 2, 1]


def test_seeds_differ_with_every_part_and_its_place():
    parts = [
        (),
        (0,),
        ("0",),
        (0, 0),
        (1,),
        (-1,),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        ("a,b",),
        ("é",),
    ]
    seeds = {seed_for(*p) for p in parts} | {seed_for(i, "data") for i in range(1000)}
    assert len(seeds) == len(parts) + 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) >= 1 << 62
