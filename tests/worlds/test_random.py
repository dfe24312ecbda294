import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.worlds.random import STREAMS, directions, philox, uniform, words

WORD = 0xFFFFFFFF
word = st.integers(0, WORD)


def seed_of(low: int, high: int) -> int:
    return low | high << 32


def deviation(observed: torch.Tensor) -> float:
    """Chi-square of counts that should all be alike, in standard deviations (Wilson–Hilferty)"""
    observed = observed.double()
    df = observed.numel() - 1
    chi_square = ((observed - observed.mean()) ** 2).sum().item() / observed.mean().item()
    variance = 2 / (9 * df)
    return ((chi_square / df) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)


# from kat_vectors of Random123
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, (WORD, WORD), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox(torch.tensor(counter), seed_of(*key)).tolist() == expected


def literal_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [key[0] + 0x9E3779B9 & WORD, key[1] + 0xBB67AE85 & WORD]
    return counter


@given(word, word, word, st.lists(st.integers(0, (1 << 63) - 1), max_size=4), st.integers(0, 9))
def test_words_are_those_of_the_counter_block_stream_index(low, high, stream, index, count):
    got = words(seed_of(low, high), stream, torch.tensor(index, dtype=torch.int64), count)
    assert got.shape == (len(index), count)
    for row, i in zip(got.tolist(), index, strict=True):
        blocks = [literal_philox([b, stream, i & WORD, i >> 32], [low, high]) for b in range(3)]
        assert row == [word for block in blocks for word in block][:count]


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(0, 30), st.integers(0, 3))
def test_a_row_depends_on_its_index_alone(chosen, count, stream):
    everything = uniform(7, stream, torch.arange(100), 30)
    rows = uniform(7, stream, torch.tensor(chosen), count)
    assert torch.equal(rows, everything[chosen, :count])


def test_uniform_keeps_the_upper_24_bits():
    index = torch.arange(1000)
    u = uniform(1, 2, index, 6)
    assert u.dtype == torch.float32
    assert torch.equal((u.double() * 2**24).long(), words(1, 2, index, 6) // 256)
    assert u.min() >= 0
    assert u.max() < 1


def test_moments():
    u = uniform(0, 0, torch.arange(20_000), 50).double()
    sigma = 1 / math.sqrt(u.numel())
    assert abs(u.mean() - 1 / 2) < 4 * sigma * math.sqrt(1 / 12)
    assert abs(u.var() - 1 / 12) < 4 * sigma * math.sqrt(1 / 180)
    assert abs(((u - 1 / 2) ** 3).mean()) < 4 * sigma * math.sqrt(1 / 448)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_a_word_is_uniform(shift):
    byte = words(5, 1, torch.arange(20_000), 8) >> shift & 255
    assert abs(deviation(byte.flatten().bincount(minlength=256))) < 4


def test_kolmogorov_smirnov():
    u = uniform(11, 0, torch.arange(10_000), 10).flatten().double().sort().values
    rank = torch.arange(len(u)) / len(u)
    distance = torch.maximum((u - rank).max(), (rank + 1 / len(u) - u).max())
    assert distance * math.sqrt(len(u)) < 1.95  # p = 0.001


INDEX = torch.arange(40_000)
NEIGHBOURS = {
    "index": (uniform(3, 0, INDEX, 4), uniform(3, 0, INDEX + 1, 4)),
    "upper half of the index": (uniform(3, 0, INDEX, 4), uniform(3, 0, INDEX + (1 << 32), 4)),
    "number": (uniform(3, 0, INDEX, 8)[:, :-1], uniform(3, 0, INDEX, 8)[:, 1:]),
    "block": (uniform(3, 0, INDEX, 8)[:, :4], uniform(3, 0, INDEX, 8)[:, 4:]),
    "seed": (uniform(3, 0, INDEX, 4), uniform(4, 0, INDEX, 4)),
    "upper half of the seed": (uniform(3, 0, INDEX, 4), uniform(3 + (1 << 32), 0, INDEX, 4)),
    "stream": (uniform(3, 0, INDEX, 4), uniform(3, 1, INDEX, 4)),
}


@pytest.mark.parametrize("step", NEIGHBOURS)
def test_neighbours_are_independent(step):
    a, b = NEIGHBOURS[step]
    pairs = (a * 16).long() * 16 + (b * 16).long()
    assert abs(deviation(pairs.flatten().bincount(minlength=256))) < 4
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(a.numel())


def test_directions_are_uniform_on_the_circle():
    chance = uniform(2, 0, torch.arange(10_000), 3)
    vector = directions(chance)
    assert vector.dtype == torch.float64
    assert vector.shape == (10_000, 3, 2)
    assert (vector.norm(dim=-1) - 1).abs().max() < 1e-15
    angle = torch.atan2(vector[..., 1], vector[..., 0]).remainder(2 * math.pi)
    assert (angle - chance.double() * 2 * math.pi).abs().max() < 1e-7


def test_splits_have_streams_of_their_own():
    assert len(set(STREAMS.values())) == len(STREAMS) == 3


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(ValueError, match=r"seed: got .*, wants"):
        uniform(seed, 0, torch.arange(2), 3)


@pytest.mark.parametrize(
    ("stream", "index", "count", "name"),
    [
        (-1, torch.arange(2), 1, "stream"),
        (1 << 32, torch.arange(2), 1, "stream"),
        (0, torch.arange(2), -1, "count"),
        (0, torch.zeros(2), 1, "index"),
        (0, torch.arange(2, dtype=torch.int32), 1, "index"),
        (0, torch.tensor(3), 1, "index"),
    ],
)
def test_errors_name_the_argument(stream, index, count, name):
    with pytest.raises(ValueError, match=f"{name}: got .*, wants"):
        uniform(0, stream, index, count)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_bits():
    index = torch.cat([torch.arange(5000), torch.arange(5000) + (1 << 40)])
    seed = (1 << 64) - 12345
    assert torch.equal(words(seed, WORD, index.cuda(), 53).cpu(), words(seed, WORD, index, 53))
    chance = uniform(seed, 0, index, 53)
    assert torch.equal(uniform(seed, 0, index.cuda(), 53).cpu(), chance)
    # one in 2**28 numbers may be rounded another way
    assert (directions(chance.cuda()).cpu() != directions(chance)).sum() < 10
