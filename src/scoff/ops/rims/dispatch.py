"""Which backend runs."""

from typing import Literal, cast

from scoff.ops.exporting import hides_requires_grad, is_exporting, is_transformed
from scoff.ops.rims.batched import rims_batched
from scoff.ops.rims.reference import rims_reference
from scoff.ops.rims.types import Inputs, Options, Run, Weights
from scoff.ops.scoff.dispatch import is_small_step

Backend = Literal["auto", "reference", "batched"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "batched")


def backend_like(of_scoff: str) -> Backend:
    """Of RIMs, where one option is for all layers: what it does not have is left to it."""
    return cast(Backend, of_scoff) if of_scoff in BACKENDS else "auto"


def run_rims(backend: Backend, inputs: Inputs, w: Weights, options: Options, keep: bool) -> Run:
    """`keep`: whether the details of `Run` are wanted."""
    transformed = is_transformed(inputs, w)
    # an operator has no rule for torch.func.vmap, which runs it in a loop
    plain = is_exporting() or transformed or hides_requires_grad()
    plain = plain or is_small_step(inputs.x, inputs.state)
    if backend == "reference" or (backend == "auto" and plain):
        return rims_reference(inputs, w, options)
    if transformed:
        raise ValueError(
            f"backend: got {backend!r}, but it has no derivatives by torch.func or in forward "
            "mode: 'auto' takes 'reference' for them"
        )
    return rims_batched(inputs, w, options, keep)
