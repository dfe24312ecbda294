"""Whether a backend computes what the reference does; one that does not gets no speed.

Output (with and without autograd), last state and the gradients with respect to input, initial
state and every parameter are compared with those of the reference in float64 on the CPU, with the
same weights, inputs, initial state and noise, all rounded to the backend's dtype beforehand. No
tensor may be further from the reference's, relative to its norm, than its precision explains.

Which schema is chosen is not continuous: where two are nearly as good, rounding may swap them, and
all that follows differs, with neither backend wrong. So each choice of the reference is made
clearer: MARGIN is added to the noise of the schema that it chose. That changes no choice, hence no
state, and leaves the runner-up of every choice at least this far behind.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import scoff
from scoff.bench.layers import make_scoff
from scoff.bench.settings import Setting

# more sequences than a kernel's block of sixteen, and not a multiple of it
SEQUENCES, STEPS = 17, 7
MARGIN = 0.5  # far above bfloat16's rounding of the noisy logits, few of which exceed 5
NOTHING = 1e-12  # a gradient this small beside the others is zero but for the rounding


class CheckError(Exception):
    """A backend differs from the reference."""


class Case(NamedTuple):
    """What a layer is run on, forwards and backwards. All of it is time-major, as the layer is."""

    x: Tensor
    state: Tensor
    noise: Tensor
    d_output: Tensor
    d_state: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Case":
        return Case(*(value.to(device, dtype) for value in self))


def tolerance(backend: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error that the precision explains."""
    if dtype != torch.float32:
        return 1e-1
    # Triton's backends go by cuDNN's flag, as nn.GRU does
    by_cudnn = backend in ("fused", "wide")
    flags = torch.backends.cudnn if by_cudnn else torch.backends.cuda.matmul
    return 1e-2 if device.type == "cuda" and flags.allow_tf32 else 1e-4


def check_backend(
    layer: scoff.SCOFF, setting: Setting, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """The relative error of each tensor; raises CheckError if one is too large."""
    reference = make_scoff(setting, "reference", "cpu", torch.float64)
    reference.load_state_dict(layer.state_dict())
    case = clear_choices(reference, draw_case(setting, dtype), dtype)
    wanted = outcome(reference, case.to("cpu", torch.float64))
    found = relative_errors(outcome(layer, case.to(device, dtype)), wanted)
    allowed = tolerance(layer.backend, device, dtype)
    for name, error in found.items():
        if not error <= allowed:  # NaN is not
            raise CheckError(f"{name} differs by {error:.1e}, more than {allowed:.0e}")
    return found


def draw_case(setting: Setting, dtype: torch.dtype) -> Case:
    positions = (setting.positions,) if setting.positions > 1 else ()
    output = (STEPS, SEQUENCES, setting.hidden)
    state = (1, SEQUENCES, setting.hidden)
    noise = torch.empty(1, STEPS, SEQUENCES, setting.object_files, setting.schemata)
    return Case(
        torch.randn(STEPS, SEQUENCES, *positions, setting.input),
        0.5 * torch.randn(state),
        -noise.exponential_().clamp(min=1e-6).log(),  # Gumbel, and finite
        torch.randn(output),
        torch.randn(state),
    ).to("cpu", dtype)


def clear_choices(reference: scoff.SCOFF, case: Case, dtype: torch.dtype) -> Case:
    """The same case with noise that favours what the reference chooses in any case."""
    exact = case.to("cpu", torch.float64)
    with torch.no_grad():
        trace = reference.trace(exact.x, exact.state, noise=exact.noise)
    chosen = trace.schema.transpose(0, 1)[None, ..., None]  # [N, L, F] -> [1, L, N, F, 1]
    boost = torch.zeros_like(exact.noise).scatter_(-1, chosen, MARGIN)
    return case._replace(noise=(exact.noise + boost).to(dtype))


def outcome(layer: scoff.SCOFF, case: Case) -> dict[str, Tensor]:
    """All that is compared, by name, in float64 on the CPU."""
    x, state = (value.detach().requires_grad_() for value in (case.x, case.state))
    layer.zero_grad()
    output, last = layer(x, state, noise=case.noise)
    torch.autograd.backward([output, last], [case.d_output, case.d_state])
    with torch.no_grad():  # where a kernel keeps nothing for the way back, another path
        bare, _ = layer(x, state, noise=case.noise)
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
    return {name: value.detach().to("cpu", torch.float64) for name, value in tensors.items()}


def relative_errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """|got - wanted| / |wanted|; where zero is wanted, beside the norm of all together."""
    norms = {name: value.norm().item() for name, value in wanted.items()}
    whole = math.hypot(*norms.values())
    return {
        name: (got[name] - value).norm().item()
        / (norms[name] if norms[name] > NOTHING * whole else whole)
        for name, value in wanted.items()
    }
