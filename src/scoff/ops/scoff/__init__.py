"""The SCOFF recurrence as a function of tensors: `reference`, `batched` and `fused`."""

from scoff.ops.scoff.batched import scoff_batched
from scoff.ops.scoff.dispatch import BACKENDS, Backend, run_scoff
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import CommunicationWeights, Inputs, Options, Run, Weights

__all__ = [
    "BACKENDS",
    "Backend",
    "CommunicationWeights",
    "Inputs",
    "Options",
    "Run",
    "Weights",
    "run_scoff",
    "scoff_batched",
    "scoff_reference",
]
