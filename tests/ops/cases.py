"""Random cases of the recurrence, all options crossed."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from scoff.ops.scoff import CommunicationWeights, Inputs, Options, Weights
from scoff.ops.scoff.types import GATES


class Sizes(NamedTuple):
    steps: int = 3
    batch: int = 2
    positions: int = 1
    features: int = 4
    files: int = 3
    size: int = 5
    schemata: int = 2
    input_heads: int = 1
    key: int = 3
    value: int = 3  # per head
    schema_key: int = 2
    comm_heads: int = 2
    comm_key: int = 3
    comm_value: int = 2


class Choices(NamedTuple):
    cell: str = "gru"
    reduction: str = "sum"
    communication: str | None = "gated"
    active: int = 3
    temperature: float = 1.0
    bias: bool = True
    value_projection: bool = True
    reset: bool = False
    padding: bool = False
    noise: bool = True
    value_dropout: bool = False
    comm_dropout: bool = False
    detach: bool = False


EVERYTHING = Choices(
    active=2, reset=True, padding=True, value_dropout=True, comm_dropout=True, reduction="mean"
)


class Case(NamedTuple):
    inputs: Inputs
    weights: Weights
    options: Options

    def leaves(self) -> dict[str, Tensor]:
        """Everything that takes a gradient."""
        named = {**self.weights._asdict(), **(self.weights.communication or Nothing())._asdict()}
        named |= {name: getattr(self.inputs, name) for name in ("x", "state", "restart")}
        return {k: v for k, v in named.items() if isinstance(v, Tensor) and v.requires_grad}

    def to(self, *args) -> "Case":
        """Leaves of another dtype or device, with the same values."""

        def move(x):
            if isinstance(x, tuple):
                return type(x)(*(move(y) for y in x))
            if not isinstance(x, Tensor):
                return x
            if not x.is_floating_point():
                return x.to(*[a for a in args if not isinstance(a, torch.dtype)])
            return x.detach().to(*args).requires_grad_(x.requires_grad)

        return Case(move(self.inputs), move(self.weights), self.options)


class Nothing(NamedTuple):
    pass


def make_case(sizes: Sizes, choices: Choices, seed: int, dtype=torch.float64, scale=0.7) -> Case:
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return (torch.randn(shape, generator=g, dtype=dtype) * scale).requires_grad_()

    def flags(probability, *shape):
        return torch.rand(shape, generator=g) < probability

    def mask(*shape):
        return flags(0.7, *shape).to(dtype) / 0.7

    s, c = sizes, choices
    t, b, p, f, d = s.steps, s.batch, s.positions, s.files, s.size
    z, gates = (2 if c.cell == "lstm" else 1), GATES[c.cell] * d
    # without a projection the values are the features, which the heads must divide
    features = s.features if c.value_projection else s.input_heads * s.value
    value = s.input_heads * s.value if c.value_projection else features
    communication = None
    if c.communication is not None:
        heard = s.comm_heads * s.comm_value
        gated = c.communication == "gated"
        communication = CommunicationWeights(
            leaf(s.comm_heads, s.comm_key, d),
            leaf(s.comm_heads, s.comm_key, d),
            leaf(s.comm_heads, s.comm_value, d),
            leaf(d, heard),
            leaf(d, heard) if gated else None,
            leaf(d) if gated else None,
        )
    weights = Weights(
        leaf(s.input_heads, s.key, d),
        leaf(s.input_heads, s.key, features),
        leaf(value, features) if c.value_projection else None,
        leaf(s.schemata, gates, value),
        leaf(s.schemata, gates, d),
        leaf(s.schemata, gates) if c.bias else None,
        leaf(s.schemata, gates) if c.bias else None,
        leaf(s.schema_key, d),
        leaf(s.schema_key, d),
        communication,
    )
    inputs = Inputs(
        leaf(t, b, p, features),
        leaf(z, b, f, d),
        flags(0.4, t, b) if c.reset else None,
        leaf(z, b, f, d) if c.reset else None,
        flags(0.7, t, b) if c.padding else None,
        torch.randn(t, b, f, s.schemata, generator=g, dtype=dtype) if c.noise else None,
        mask(t, b, p, value) if c.value_dropout else None,
        mask(t, b, f, d) if c.comm_dropout else None,
    )
    options = Options(c.cell, min(c.active, f), c.reduction, c.temperature, c.detach)
    return Case(inputs, weights, options)


small = st.integers(1, 3)
sizes = st.builds(
    Sizes,
    steps=st.sampled_from([1, 2, 5]),
    batch=small,
    positions=st.sampled_from([1, 1, 2, 7]),
    features=st.integers(1, 5),
    files=st.integers(1, 5),
    size=st.integers(1, 7),
    schemata=st.integers(1, 4),
    input_heads=small,
    key=small,
    value=small,
    schema_key=small,
    comm_heads=small,
    comm_key=small,
    comm_value=small,
)
flag = st.booleans()
choices = st.builds(
    Choices,
    cell=st.sampled_from(["gru", "lstm"]),
    reduction=st.sampled_from(["sum", "mean"]),
    communication=st.sampled_from(["gated", "residual", None]),
    active=st.integers(1, 5),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    bias=flag,
    value_projection=flag,
    reset=flag,
    padding=flag,
    noise=flag,
    value_dropout=flag,
    comm_dropout=flag,
    detach=flag,
)
seeds = st.integers(0, 2**31)
