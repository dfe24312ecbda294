"""Whether a backend computes what the reference does; one that does not gets no speed.

Output (with and without autograd), last state and the gradients with respect to input, initial
state and every parameter are compared with those of the reference in float64, with the same
weights, inputs, initial state and noise, all rounded to the backend's dtype beforehand. No tensor
may be further from the reference's, relative to its norm, than its precision explains.

That is done for few sequences and steps, odd in number, and for as many as are timed: how the work
is cut depends on it, and with it the code that runs. Of several calls it is the last that counts,
for launches are recorded on the way, and then replayed.

Which schema is chosen is not continuous: where two are nearly as good, rounding may swap them, and
all that follows differs, with neither backend wrong. So each choice of the reference is made
clearer: MARGIN is added to the noise of the schema that it chose. That changes no choice, hence no
state, and leaves the runner-up of every choice at least this far behind.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import scoff
from scoff.bench.layers import make_rims, make_scoff
from scoff.bench.settings import Setting

FEW = (17, 7)  # sequences and steps: more than a kernel's block of sixteen, and no multiple of it
CALLS = 4
AT_ONCE = 64  # sequences of the reference, which keeps a lot
MARGIN = 0.5  # far above bfloat16's rounding of the noisy logits, few of which exceed 5
OF_SEQUENCES = (
    "the output",
    "the output without grad",
    "the last state",
    "the gradient of input",
    "the gradient of initial state",
)
NOTHING = 1e-12  # a gradient this small beside the others is zero but for the rounding


Layer = scoff.SCOFF | scoff.RIMs


class CheckError(Exception):
    """A backend differs from the reference."""


class Case(NamedTuple):
    """What a layer is run on, forwards and backwards. All of it is time-major, as the layer is."""

    x: Tensor
    state: Tensor
    noise: Tensor
    d_output: Tensor
    d_state: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(value.to(dtype) for value in self))

    def split(self, sequences: int) -> "list[Case]":
        """Into cases of at most so many"""
        parts = (x.split(sequences, at) for x, at in zip(self, BATCH, strict=True))
        return [Case(*piece) for piece in zip(*parts, strict=True)]


BATCH = (1, 1, 2, 1, 1)  # which axis of each is that of the sequences


def tolerance(backend: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error that the precision explains."""
    if dtype != torch.float32:
        return 1e-1
    # Triton's backends go by cuDNN's flag, as nn.GRU does
    by_cudnn = backend in ("fused", "wide")
    flags = torch.backends.cudnn if by_cudnn else torch.backends.cuda.matmul
    return 1e-2 if device.type == "cuda" and flags.allow_tf32 else 1e-4


def check_backend(
    layer: Layer, setting: Setting, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """The relative error of each tensor; raises CheckError if one is too large."""
    make = make_scoff if isinstance(layer, scoff.SCOFF) else make_rims
    reference = make(setting, "reference", device, torch.float64)
    reference.load_state_dict(layer.state_dict())
    found: dict[str, float] = {}
    for sequences, steps in (FEW, (setting.batch, setting.length)):
        case = draw_case(setting, sequences, steps, device, dtype)
        pieces = [clear_choices(reference, piece) for piece in case.split(AT_ONCE)]
        wanted = joined([outcome(reference, piece.to(torch.float64)) for piece in pieces])
        case = Case(
            *(
                torch.cat(parts, at)
                for at, parts in zip(BATCH, zip(*pieces, strict=True), strict=True)
            )
        )
        for _ in range(CALLS - 1):
            outcome(layer, case)
        errors = relative_errors(outcome(layer, case), wanted)
        allowed = tolerance(layer.backend, device, dtype)
        for name, error in errors.items():
            found[name] = max(error, found.get(name, 0.0))
            if not error <= allowed:  # NaN is not
                size = f"{sequences} sequences x {steps} steps"
                told = f"{name} differs by {error:.1e}, more than {allowed:.0e}"
                raise CheckError(f"{told}, with {size}")
    return found


def draw_case(
    setting: Setting, sequences: int, steps: int, device: torch.device, dtype: torch.dtype
) -> Case:
    positions = (setting.positions,) if setting.positions > 1 else ()
    new = functools.partial(torch.randn, device=device)
    noise = new(1, steps, sequences, setting.object_files, setting.schemata)
    return Case(
        new(steps, sequences, *positions, setting.input),
        0.5 * new(1, sequences, setting.hidden),
        -noise.exponential_().clamp(min=1e-6).log(),  # Gumbel, and finite
        new(steps, sequences, setting.hidden),
        new(1, sequences, setting.hidden),
    ).to(dtype)


def clear_choices(reference: Layer, case: Case) -> Case:
    """The same case with noise that favours what the reference chooses in any case."""
    if isinstance(reference, scoff.RIMs):  # which choose nothing
        return case
    exact = case.to(torch.float64)
    with torch.no_grad():
        trace = reference.trace(exact.x, exact.state, noise=exact.noise)
    chosen = trace.schema.transpose(0, 1)[None, ..., None]  # [N, L, F] -> [1, L, N, F, 1]
    boost = torch.zeros_like(exact.noise).scatter_(-1, chosen, MARGIN)
    return case._replace(noise=(exact.noise + boost).to(case.noise.dtype))


def outcome(layer: Layer, case: Case) -> dict[str, Tensor]:
    """All that is compared, by name, in float64."""
    noise: dict[str, Any] = {"noise": case.noise} if isinstance(layer, scoff.SCOFF) else {}
    x, state = (value.detach().requires_grad_() for value in (case.x, case.state))
    layer.zero_grad()
    output, last = layer(x, state, **noise)
    torch.autograd.backward([output, last], [case.d_output, case.d_state])
    with torch.no_grad():  # where a kernel keeps nothing for the way back, another path
        bare, _ = layer(x, state, **noise)
    leaves: dict[str, Any] = {"input": x, "initial state": state}
    leaves |= {name.rpartition(".")[2]: weight for name, weight in layer.named_parameters()}
    # an initial state is given, so that those that one is made of have no gradient
    gradients = {
        f"the gradient of {name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    layer.zero_grad()
    tensors = {"the output": output, "the last state": last, "the output without grad": bare}
    tensors |= gradients
    return {name: value.detach().double() for name, value in tensors.items()}


def joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What came of all sequences, from what came of some: parameters' gradients add up."""
    whole = {}
    for name in pieces[0]:
        parts = [piece[name] for piece in pieces]
        whole[name] = torch.cat(parts, 1) if name in OF_SEQUENCES else sum(parts[1:], parts[0])
    return whole


def relative_errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """|got - wanted| / |wanted|; where zero is wanted, beside the norm of all together."""
    norms = {name: value.norm().item() for name, value in wanted.items()}
    whole = math.hypot(*norms.values())
    return {
        name: (got[name] - value).norm().item()
        / (norms[name] if norms[name] > NOTHING * whole else whole)
        for name, value in wanted.items()
    }
