"""Forward-mode differentiation: right where it is taken, refused where it would be zero."""

import pytest
import torch
from torch.autograd import forward_ad

import scoff

BACKENDS = ("batched", "fused", "wide")


@pytest.fixture
def case():
    torch.manual_seed(0)
    layer = scoff.SCOFF(3, 16, num_object_files=2, num_schemata=2, active_object_files=1)
    layer = layer.double().eval()
    x, v = torch.randn(2, 4, 2, 3, dtype=torch.double)
    return layer, x, v


def test_it_is_that_of_the_backward_pass(case):
    layer, x, v = case

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0]

    jacobian = torch.autograd.functional.jacobian(run, x)
    expected = torch.einsum("abcdef,def->abc", jacobian, v)
    assert expected.norm() > 0.1
    torch.testing.assert_close(torch.func.jvp(run, (x,), (v,))[1], expected)
    torch.testing.assert_close(torch.func.jacfwd(run)(x), jacobian)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_without_it_say_so(case, backend):
    layer, x, v = case
    layer.backend = backend
    with pytest.raises(ValueError, match=f"got '{backend}', but it has no forward-mode"):
        torch.func.jvp(lambda x: layer(x)[0], (x,), (v,))
