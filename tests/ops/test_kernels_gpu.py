"""Compiled kernels against the reference: all options, sizes at the edges, long sequences."""

import pytest
import torch

from scoff.ops.scoff import scoff_reference
from tests.ops.cases import EVERYTHING, Case, Choices, Sizes, make_case
from tests.ops.compare import errors, results

fused = pytest.importorskip("scoff.ops.scoff.fused", exc_type=ImportError)
wide = pytest.importorskip("scoff.ops.scoff.wide", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tf32_flags")]
backends = pytest.mark.parametrize(
    "backend", [fused.scoff_fused, wide.scoff_wide], ids=["fused", "wide"]
)


def check(backend, case: Case) -> None:
    """In float32 without TF32, the schemata being given"""
    torch.backends.cudnn.allow_tf32 = False
    reference = scoff_reference(*case)
    exact = results(reference, case)
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    case = case.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    for _ in range(4):  # launched one by one, recorded, replayed
        run = backend(*case)
        assert torch.equal(run.active.cpu(), reference.active)
        found = errors(case, exact, run)
        assert max(found.values()) < 1e-4, found


@backends
@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("files", [1, 3])
def test_gpu_every_option_at_once(backend, files, cell, communication):
    sizes = Sizes(steps=4, batch=5, positions=3, files=files, input_heads=2)
    choices = EVERYTHING._replace(cell=cell, communication=communication, active=min(2, files))
    check(backend, make_case(sizes, choices, 1))


@backends
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(steps=1, batch=1),
        Sizes(positions=1024, features=8, steps=2),
        Sizes(schemata=5, comm_heads=3, comm_key=11, comm_value=23, steps=2),
        Sizes(features=67, value=33, input_heads=2, size=65, steps=2),
        Sizes(files=17, steps=2),
        Sizes(batch=301, steps=5),  # more sequences than processors
        Sizes(1000, 2, 1, 8, 3, 20, 2, 1, 8, 20, 4, 2, 8, 8),
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s._asdict().items() if v != getattr(Sizes(), k)),
)
def test_gpu_sizes(backend, sizes):
    check(backend, make_case(sizes, Choices(), 2, scale=0.1 if sizes.steps > 100 else 0.3))
