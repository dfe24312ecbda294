"""The RIMs recurrence as a function of tensors: `reference` and `batched`."""

from scoff.ops.rims.batched import rims_batched
from scoff.ops.rims.dispatch import BACKENDS, Backend, backend_like, run_rims
from scoff.ops.rims.reference import rims_reference
from scoff.ops.rims.types import Inputs, Options, Run, Weights

__all__ = [
    "BACKENDS",
    "Backend",
    "Inputs",
    "Options",
    "Run",
    "Weights",
    "backend_like",
    "rims_batched",
    "rims_reference",
    "run_rims",
]
