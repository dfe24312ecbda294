"""Which backend runs."""

from typing import Literal

from scoff.ops.exporting import is_exporting, is_transformed
from scoff.ops.rims.batched import rims_batched
from scoff.ops.rims.reference import rims_reference
from scoff.ops.rims.types import Inputs, Options, Run, Weights

Backend = Literal["auto", "reference", "batched"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "batched")


def run_rims(backend: Backend, inputs: Inputs, w: Weights, options: Options, keep: bool) -> Run:
    """`keep`: whether the details of `Run` are wanted."""
    transformed = is_transformed(inputs, w)
    if backend == "reference" or (backend == "auto" and (is_exporting() or transformed)):
        return rims_reference(inputs, w, options)
    if transformed:
        raise ValueError(
            f"backend: got {backend!r}, but it has no derivatives by torch.func or in forward "
            "mode: 'auto' takes 'reference' for them"
        )
    return rims_batched(inputs, w, options, keep)
