import math

import pytest
import torch

from scoff.experiments.measures import entropy, joint_counts, mutual_information


def test_entropy():
    assert entropy(torch.tensor([1, 1, 1, 1])) == pytest.approx(2)
    assert entropy(torch.tensor([7, 0])) == 0
    assert entropy(torch.tensor([1, 3])) == pytest.approx(2 - 0.75 * math.log2(3))


def test_mutual_information():
    same = torch.tensor([[30, 0], [0, 10]])
    assert mutual_information(same) == pytest.approx(entropy(same.sum(1)))
    unrelated = torch.outer(torch.tensor([3, 9]), torch.tensor([5, 1, 2]))
    assert mutual_information(unrelated) == pytest.approx(0, abs=1e-12)
    single = torch.tensor([[7, 11, 0, 13], [0, 0, 0, 0]])
    assert mutual_information(single) == 0
    # a fair bit read wrongly in one case of ten
    noisy = torch.tensor([[9, 1], [1, 9]])
    assert mutual_information(noisy) == pytest.approx(1 - entropy(torch.tensor([9, 1])))


def test_joint_counts():
    a, b = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[2, 0], [0, 1]])
    torch.testing.assert_close(joint_counts(a, b, 2, 3), torch.tensor([[0, 0, 1], [2, 1, 0]]))
