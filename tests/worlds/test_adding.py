import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.worlds.adding import draw_additions


@given(st.integers(1, 40), st.sets(st.integers(1, 10), min_size=1, max_size=4), st.integers(0, 999))
def test_operands_are_marked_one_in_each_segment_and_summed(extra, operands, seed):
    length = max(operands) + extra
    g = torch.Generator().manual_seed(seed)
    data = draw_additions(20, length, tuple(operands), g)
    assert data.x.shape == (20, length, 2)
    values, marker = data.x.unbind(-1)
    assert ((marker == 0) | (marker == 1)).all()
    assert torch.equal(data.is_operand.sum(1), data.num_operands)
    assert set(data.num_operands.tolist()) <= operands
    torch.testing.assert_close(data.target, (values * marker).sum(1))
    for sequence, n in zip(data.is_operand, data.num_operands.tolist(), strict=True):
        places = sequence.nonzero().flatten().tolist()
        for i, place in enumerate(places):
            assert i * length // n <= place < (i + 1) * length // n


def test_distribution():
    data = draw_additions(40_000, 50, (2, 4), torch.Generator().manual_seed(0))
    assert abs((data.num_operands == 2).float().mean() - 0.5) < 0.01
    values = data.x[..., 0]
    assert abs(values.mean() - 0.5) < 1e-3
    assert values.min() >= 0
    assert values.max() < 1
    twos = data.is_operand[data.num_operands == 2].float().mean(0)
    assert (twos - 1 / 25).abs().max() < 0.01  # uniform in either half


def test_the_seed_decides():
    a, b = (draw_additions(5, 20, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a.x, b.x)


@pytest.mark.parametrize("operands", [(), (0,), (21,)])
def test_impossible_operands(operands):
    with pytest.raises(ValueError, match="operands: got"):
        draw_additions(5, 20, operands)
