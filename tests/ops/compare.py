"""What two backends have in common: outputs and gradients of the same case."""

from collections.abc import Callable

import torch
from torch import Tensor

from scoff.ops.scoff import Run, scoff_batched, scoff_reference
from tests.ops.cases import Case


def results(run: Run, case: Case, seed: int = 0) -> dict[str, Tensor]:
    """The output, the last state and the gradients of everything."""
    g = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for value in (run.output, run.state):
        weight = torch.randn(value.shape[::-1], generator=g, dtype=torch.float64)
        weight = weight.permute(*reversed(range(value.ndim)))  # not contiguous
        loss = loss.to(value.device) + (value.double() * weight.to(value.device)).sum()
    leaves = case.leaves()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        f"d_{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return {"output": run.output, "state": run.state, **gradients}


def errors(case: Case, exact: dict[str, Tensor], run: Run) -> dict[str, float]:
    """Of results, each relative to what it should be"""

    def norm(x: Tensor) -> float:
        return x.double().norm().item()

    got = results(run, case)
    return {
        name: norm(got[name].double().cpu() - value) / norm(value)
        for name, value in exact.items()
        if norm(value) > 0
    }


def assert_same(backend: Callable[..., Run], case: Case, seed: int = 0) -> None:
    expected, got = scoff_reference(*case), backend(*case)
    assert torch.equal(expected.schema, got.schema)
    assert torch.equal(expected.active, got.active)
    expected, got = results(expected, case, seed), results(got, case, seed)
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_errors_at_most_twice_batched(
    backend: Callable[..., Run], cases: list[Case], device: str, dtype: torch.dtype, tf32: bool
) -> None:
    """Tensor by tensor, in the mean of the cases: one by one errors scatter, and some are chaotic
    all the same."""
    draws = []
    for case in cases:
        # the schemata are given, for near-ties are decided differently in another precision
        reference = scoff_reference(*case)
        exact = results(reference, case)
        case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
        case = case.to(device, dtype)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")  # of batched
        try:
            ours, theirs = (errors(case, exact, f(*case)) for f in (backend, scoff_batched))
        finally:
            torch.set_float32_matmul_precision(precision)
        draws.append({name: (error, theirs[name]) for name, error in ours.items()})
    found = {}
    for name in {name: None for draw in draws for name in draw}:  # not all matter in each draw
        both = torch.tensor([draw[name] for draw in draws if name in draw])
        found[name] = both.log().mean(0).exp().tolist()
    ours, typical = (sum(x) / len(x) for x in zip(*found.values(), strict=True))
    assert ours <= 2 * typical, found
    for name, (ours, theirs) in found.items():
        assert ours <= 2 * max(theirs, typical), (name, ours, theirs, typical)
