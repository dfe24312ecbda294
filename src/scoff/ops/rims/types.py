"""What every backend of the RIMs recurrence takes and returns.

Axis letters, here and in the backends: T steps, B sequences, P input positions, C input features,
F modules, D size of one module, Z tensors that make up a state (1: h; 2: h and c).
"""

from typing import NamedTuple

from torch import Tensor

from scoff.ops.scoff.types import CellName, CommunicationWeights


class Weights(NamedTuple):
    """Parameters of a cell. All but the keys and values of the input belong to a module."""

    input_query: Tensor  # [F, heads, K, D]
    input_key: Tensor  # [heads, K, C]
    input_value: Tensor  # [V, C]
    weight_ih: Tensor  # [F, gates * D, V]
    weight_hh: Tensor  # [F, gates * D, D]
    bias_ih: Tensor | None  # [F, gates * D]
    bias_hh: Tensor | None  # [F, gates * D]
    communication: CommunicationWeights | None  # each of them with a leading axis F


class Options(NamedTuple):
    """What is not a tensor."""

    cell: CellName
    active: int  # modules that are updated at each step


class Inputs(NamedTuple):
    """Everything else a run depends on: given these and the weights, it is a pure function."""

    x: Tensor  # [T, B, P, C]
    state: Tensor  # [Z, B, F, D]
    reset: Tensor | None = None  # [T, B] bool: start anew, from `restart`, before this step
    restart: Tensor | None = None  # [Z, B, F, D]
    valid: Tensor | None = None  # [T, B] bool: False is padding, where the state stands still
    value_mask: Tensor | None = None  # [T, B, P, V] dropout on the input values, scaled
    comm_mask: Tensor | None = None  # [T, B, F, D] dropout on the messages, scaled


class Run(NamedTuple):
    """What happened. All but `active` carry gradients."""

    output: Tensor  # [T, B, F, D]
    state: Tensor  # [Z, B, F, D]
    input_attention: (
        Tensor  # [T, B, F, P], mean over heads; the null input has what is missing to 1
    )
    active: Tensor  # [T, B, F] bool
    communication: Tensor  # [T, B, heads, F, F], reader before read; no heads without communication
