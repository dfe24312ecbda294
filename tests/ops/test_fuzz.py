"""The Triton kernels against the reference, by Triton's interpreter, on cases drawn anew each time.

A failure tells the number that draws its case again: `SCOFF_FUZZ=<number> pytest <this file>`.
"""

import os
import random

import pytest
import torch

from tests.ops.cases import Case, Choices, Sizes, make_case
from tests.ops.compare import assert_same

fused = pytest.importorskip("scoff.ops.scoff.fused")
fused_gradients = pytest.importorskip("scoff.ops.scoff.fused_gradients")
fused_layout = pytest.importorskip("scoff.ops.scoff.fused_layout")
wide = pytest.importorskip("scoff.ops.scoff.wide")
wide_backward = pytest.importorskip("scoff.ops.scoff.wide_backward")
wide_forward = pytest.importorskip("scoff.ops.scoff.wide_forward")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float64 is for the interpreter")

CASES = 6


def seeds() -> list[int]:
    again = os.environ.get("SCOFF_FUZZ")
    if again is not None:
        return [int(again)]
    return [random.SystemRandom().getrandbits(32) for _ in range(CASES)]


def draw(r: random.Random) -> Case:
    steps, files = r.randint(1, 3), r.choice([1, 2, 3, 5, 9])
    sizes = Sizes(
        steps=steps,
        batch=r.randint(1, 4 - steps),
        positions=r.choice([1, 2, 5]),
        features=r.randint(1, 5),
        files=files,
        size=r.choice([1, 3, 7, 16, 65]),
        schemata=r.randint(1, 4),
        input_heads=r.randint(1, 2),
        key=r.randint(1, 3),
        value=r.randint(1, 3),
        schema_key=r.randint(1, 3),
        comm_heads=r.randint(1, 3),
        comm_key=r.randint(1, 3),
        comm_value=r.randint(1, 3),
    )

    def flip() -> bool:
        return r.random() < 0.5

    choices = Choices(
        cell=r.choice(["gru", "lstm"]),
        reduction=r.choice(["sum", "mean"]),
        communication=r.choice(["gated", "residual", None]),
        active=r.randint(1, files),
        temperature=r.choice([0.3, 1.0, 2.0]),
        bias=flip(),
        value_projection=flip(),
        reset=flip(),
        padding=flip(),
        noise=flip(),
        value_dropout=flip(),
        comm_dropout=flip(),
        detach=flip(),
    )
    case = make_case(sizes, choices, r.getrandbits(32), scale=0.3)
    if flip():
        return case
    choice = torch.zeros(steps, sizes.batch, files, dtype=torch.int64)
    choice.apply_(lambda _: r.randrange(sizes.schemata))
    return case._replace(inputs=case.inputs._replace(choice=choice))


def in_one_block(plan) -> bool:
    """Whether a gate's rows are read all at once, as gates that stay need it: of 16 bits always,
    of float64 if they are few"""
    return fused_layout.gate_rows(plan.sizes, plan.packed) >= plan.sizes.size


def fused_somehow(r: random.Random, patch: pytest.MonkeyPatch) -> str:
    """With processors to spare, where weights may stay in shared memory; or without, where programs
    have several sequences, the last steps are kept, and there may be many rows to multiply"""
    way = r.choice(["idle", "hold 1", "hold 2", "busy", "busy, many rows"])
    patch.setattr(fused_layout, "cut_for", fused_layout.cut_for.__wrapped__)
    if way.startswith("hold"):
        most = int(way[-1])
        patch.setattr(
            fused_layout, "held", lambda plan, _: min(most, 2 if in_one_block(plan) else 1)
        )
    if way.startswith("busy"):
        patch.setattr(fused_layout, "gpu_of", lambda _: fused_layout.GPU(1, 0))
    if way.endswith("many rows"):
        patch.setattr(fused_gradients, "MANY_ROWS", 0)
    return way


def wide_somehow(r: random.Random, patch: pytest.MonkeyPatch) -> str:
    length = r.randint(1, 3)
    for module in (wide_forward, wide_backward):
        patch.setattr(module, "longest_chunk", lambda *_: length)
    return f"chunks of {length} steps"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("run", "somehow"),
    [(fused.scoff_fused, fused_somehow), (wide.scoff_wide, wide_somehow)],
    ids=["fused", "wide"],
)
def test_cases_that_nobody_has_seen(run, somehow, monkeypatch):
    for seed in seeds():
        r = random.Random(seed)
        with monkeypatch.context() as patch:
            way, case = somehow(r, patch), draw(r)
            try:
                assert_same(run, case)
            except Exception as error:
                raise AssertionError(f"SCOFF_FUZZ={seed} draws it again: {way}") from error
