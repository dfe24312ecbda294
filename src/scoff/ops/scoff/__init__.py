"""The SCOFF recurrence as a function of tensors: `reference` and `batched`."""

from scoff.ops.scoff.batched import scoff_batched
from scoff.ops.scoff.reference import scoff_reference
from scoff.ops.scoff.types import CommunicationWeights, Inputs, Options, Run, Weights

__all__ = [
    "CommunicationWeights",
    "Inputs",
    "Options",
    "Run",
    "Weights",
    "scoff_batched",
    "scoff_reference",
]
