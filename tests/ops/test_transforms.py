"""What the Triton backends leave to others: they say so."""

import pytest
import torch

from scoff.ops.scoff import run_scoff
from tests.ops.cases import Choices, Sizes, make_case

pytest.importorskip("scoff.ops.scoff.fused", exc_type=ImportError)
device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["fused", "wide"])
def test_derivatives_of_gradients_are_refused_not_wrong(backend):
    case = make_case(Sizes(steps=1, batch=1), Choices(), 0, torch.float32).to(device)
    leaves = list(case.leaves().values())
    output = run_scoff(backend, *case, keep=False).output
    loss = output.square().sum()
    found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    wanted = [gradient for gradient in found if gradient is not None and gradient.requires_grad]
    assert wanted
    for gradient in wanted:
        with pytest.raises(
            RuntimeError, match=r"derivatives of derivatives|no autograd formula was registered"
        ):
            torch.autograd.grad(gradient.sum(), leaves, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("backend", ["fused", "wide"])
def test_transformations_of_functions_are_refused(backend):
    case = make_case(Sizes(steps=1, batch=1), Choices(), 0, torch.float32).to(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        inputs = case.inputs._replace(x=x)
        return run_scoff(backend, inputs, *case[1:], keep=False).output

    with pytest.raises(ValueError, match=f"backend: got '{backend}', but torch.func's"):
        torch.func.vmap(run)(torch.stack([case.inputs.x] * 2))
