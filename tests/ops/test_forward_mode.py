"""Forward-mode differentiation: right where it is taken, refused where it would be zero."""

from concurrent.futures import ThreadPoolExecutor

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


def test_what_has_no_tangent_is_as_ever(case):
    """Though elsewhere in the process, or around it, something is differentiated."""
    layer, x, v = case
    layer.backend = "batched"
    expected = layer(x)[0]
    weight = torch.randn(16, 2, dtype=torch.double)

    def run(weight: torch.Tensor) -> torch.Tensor:
        found = layer(x)[0]
        assert torch.equal(found, expected)
        return found @ weight

    assert torch.equal(torch.func.jvp(run, (weight,), (weight,))[1], expected @ weight)

    def beside(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as other:
            other.submit(lambda: layer(v)[0].sum().backward()).result()
        return x

    torch.func.jvp(beside, (x,), (v,))
    assert layer.cells[0].weight_ih.grad.norm() > 0


@pytest.mark.parametrize("name", ["weight_hh", "comm_out"])
def test_weights_may_have_tangents(case, name):
    layer, x, _ = case
    weights = dict(layer.named_parameters())
    name = f"cells.0.{name}"

    def run(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {**weights, name: weight}, (x,))[0]

    step, back = torch.randn_like(weights[name]), torch.randn(4, 2, 16).double()
    found = torch.func.jvp(run, (weights[name].detach(),), (step,))[1]
    (gradient,) = torch.autograd.grad(run(weights[name]), weights[name], back)
    torch.testing.assert_close((found * back).sum(), (gradient * step).sum())


def test_it_may_be_of_a_gradient(case):
    layer, x, v = case

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: layer(x)[0].square().sum())(x)

    found = torch.func.jvp(slope, (x,), (v,))[1]
    layer.backend = "reference"
    torch.testing.assert_close(found, torch.func.jvp(slope, (x,), (v,))[1])
    assert found.norm() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_without_it_say_so(case, backend):
    layer, x, v = case
    layer.backend = backend

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x)[0].sum()

    for differentiate in (
        lambda: torch.func.jvp(run, (x,), (v,)),
        lambda: torch.func.grad(run)(x),
        lambda: torch.vmap(torch.func.grad(run))(x[None]),
    ):
        with pytest.raises(ValueError, match=f"got '{backend}', but it has no derivatives by"):
            differentiate()


def test_gradients_of_each_sample(case):
    layer, x, _ = case
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (x[:, None],))[0].square().sum()

    samples = x.transpose(0, 1)
    found = torch.vmap(torch.func.grad(loss), (None, 0))(weights, samples)
    for i, sample in enumerate(samples):
        layer.zero_grad()
        layer(sample[:, None])[0].square().sum().backward()
        for name, weight in layer.named_parameters():
            torch.testing.assert_close(found[name][i], weight.grad)


@pytest.mark.parametrize("backend", ["auto", "batched"])
def test_what_is_beside_the_layer_may_be_differentiated_inside(case, backend):
    """Its own gradients are then wanted outside, as in MAML of a readout alone."""
    layer, x, _ = case
    layer.backend = backend
    weight = torch.randn(16, 2, dtype=torch.double)

    def slope(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda weight: (layer(x)[0] @ weight).sum())(weight).sum()

    slope(weight).backward()
    found = layer.cells[0].weight_hh.grad.clone()
    layer.zero_grad()
    (2 * layer(x)[0].sum()).backward()
    torch.testing.assert_close(found, layer.cells[0].weight_hh.grad)


def test_derivatives_of_derivatives_are_refused_with_what_to_do(case):
    layer, x, _ = case
    x.requires_grad_()

    def penalty() -> torch.Tensor:
        (slope,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
        return slope.square().sum()

    with pytest.raises(RuntimeError, match="backend='reference' has them"):
        penalty().backward()
    layer.backend = "reference"
    penalty().backward()
    assert x.grad.norm() > 0


@pytest.mark.gpu
def test_gpu_auto_takes_what_can():
    layer = scoff.SCOFF(3, 16, num_object_files=2, num_schemata=2).cuda().eval()
    x, v, state = (torch.randn(n, 2, d, device="cuda") for n, d in ((4, 3), (4, 3), (1, 16)))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x, state)[0].square().sum()

    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)  # by kernels, whose products may be in TF32
    close = {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(torch.func.grad(loss)(x), slope, **close)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (v,))[1], (slope * v).sum(), **close)
    each = torch.vmap(lambda x: layer(x, state)[0])(torch.stack([x, v]))
    torch.testing.assert_close(each[0], layer(x, state)[0], **close)
