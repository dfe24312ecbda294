import pytest
import torch
from torch import nn

import scoff


@pytest.mark.parametrize("pool", ["attention", "sum"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_order_of_object_files_does_not_matter(num_heads, pool):
    read = scoff.Readout(12, 5, 3, features=8, num_heads=num_heads, pool=pool)
    output = torch.randn(2, 7, 12)
    moved = output.unflatten(-1, (3, 4))[..., [2, 0, 1], :].flatten(-2)
    assert read(output).shape == (2, 7, 5)
    torch.testing.assert_close(read(moved), read(output))
    assert not torch.allclose(read(torch.randn_like(output)), read(output))


def test_attention_weighs_the_object_files_head_by_head():
    read = scoff.Readout(12, 5, 3, features=8, num_heads=2)
    output = torch.randn(12)
    first, _, second = read.siamese
    files = torch.stack([second(first(output[4 * k : 4 * k + 4]).clamp(min=0)) for k in range(3)])
    scores = torch.stack([read.score(file) for file in files]).exp()  # [F, heads]
    weights = scores / scores.sum(0)
    pooled = [sum(weights[k, h] * files[k, 4 * h : 4 * h + 4] for k in range(3)) for h in range(2)]
    torch.testing.assert_close(read(output), read.out(torch.cat(pooled)))


def test_attention_is_a_weighted_mean_and_a_sum_is_a_sum():
    one = torch.randn(4, 6)
    for pool, factor in (("attention", 1), ("sum", 3)):
        single = scoff.Readout(6, 5, 1, pool=pool)
        triple = scoff.Readout(18, 5, 3, pool=pool)
        triple.load_state_dict(single.state_dict())
        torch.testing.assert_close(triple(one.repeat(1, 3)), factor * single(one))


@pytest.mark.parametrize("layer", ["SCOFF", "RIMs", "RMC", "GRU"])
def test_after_any_layer(layer):
    slots = {"SCOFF": 4, "RIMs": 6, "RMC": 4, "GRU": 1}[layer]
    rnn = getattr(scoff, layer, None) or getattr(nn, layer)
    output, _ = rnn(3, 48)(torch.randn(5, 2, 3))
    assert scoff.Readout(48, 7, slots)(output).shape == (5, 2, 7)


def test_errors():
    with pytest.raises(
        ValueError, match="hidden_size: got 13, wants a multiple of num_object_files"
    ):
        scoff.Readout(13, 5, 3)
    with pytest.raises(ValueError, match="features: got 4, wants a multiple of num_heads = 3"):
        scoff.Readout(12, 5, 3, num_heads=3)
    with pytest.raises(ValueError, match="pool: got 'max'"):
        scoff.Readout(12, 5, 3, pool="max")
    with pytest.raises(ValueError, match=r"output: got shape \(2, 11\), wants"):
        scoff.Readout(12, 5, 3)(torch.zeros(2, 11))
