"""What `auto` takes for a single step on a CPU, as in a control loop."""

import pytest
import torch

import scoff
from scoff.ops.rims import dispatch as rims_dispatch
from scoff.ops.scoff import dispatch as scoff_dispatch

LAYERS = {
    "SCOFF": (scoff.SCOFF, {"num_object_files": 3}, scoff_dispatch, "scoff_batched"),
    "RIMs": (
        scoff.RIMs,
        {"num_modules": 3, "active_modules": 2},
        rims_dispatch,
        "rims_batched",
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("steps", "batch", "with_grad", "is_plain"),
    [(1, 2, False, True), (1, 2, True, False), (2, 2, False, False), (1, 86, False, False)],
)
def test_the_reference_if_there_are_few_rows_and_no_way_back(
    kind, steps, batch, with_grad, is_plain, monkeypatch
):
    make, options, module, name = LAYERS[kind]
    layer = make(4, 12, **options).eval()
    x, hx = torch.randn(steps, batch, 4), torch.randn(1, batch, 12)
    expected = layer(x, hx)[0]
    calls = []
    batched = getattr(module, name)

    def noted(*args):
        calls.append(args)
        return batched(*args)

    monkeypatch.setattr(module, name, noted)
    with torch.set_grad_enabled(with_grad):
        output, state = layer(x, hx)
    assert (len(calls) == 0) == is_plain
    torch.testing.assert_close(output, expected)
    assert torch.equal(state[0], output[-1])
    layer.backend = "batched"
    with torch.no_grad():
        torch.testing.assert_close(layer(x, hx)[0], expected)
    assert len(calls) == 2 - is_plain
