"""The layers that are measured, all with the sizes of one setting."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import scoff
from scoff.bench.settings import Setting
from scoff.training.errors import UsageError

# what is measured unless asked otherwise; on a GPU the reference is too slow to wait for
BACKENDS = {"cuda": ("fused", "wide", "batched"), "cpu": ("batched", "reference")}
RIMS = {"rims": "batched", "rims-reference": "reference"}
KNOWN_BACKENDS = (*dict.fromkeys(name for names in BACKENDS.values() for name in names), *RIMS)


@dataclass(frozen=True)
class Candidate:
    """A layer that is yet to be made: making it may fail, which is then told in its row."""

    name: str
    make: Callable[[], nn.Module]
    is_ours: bool = False


def choose_backends(names: Sequence[str], device_type: str) -> tuple[str, ...]:
    for name in names:
        if name not in KNOWN_BACKENDS:
            raise UsageError(f"--backends: got {name!r}, wants one of {', '.join(KNOWN_BACKENDS)}")
    return tuple(dict.fromkeys(names)) or BACKENDS[device_type]


def make_scoff(
    setting: Setting, backend: str, device: torch.device | str, dtype: torch.dtype
) -> scoff.SCOFF:
    options: Any = {"backend": backend}  # names that this version may not know
    return scoff.SCOFF(
        setting.input,
        setting.hidden,
        num_object_files=setting.object_files,
        num_schemata=setting.schemata,
        device=device,
        dtype=dtype,
        **options,
    )


def make_rims(
    setting: Setting, backend: str, device: torch.device | str, dtype: torch.dtype
) -> scoff.RIMs:
    """With all modules active: who is would depend on the rounding"""
    options: Any = {"backend": backend}
    return scoff.RIMs(
        setting.input,
        setting.hidden,
        num_modules=setting.object_files,
        active_modules=None,
        device=device,
        dtype=dtype,
        **options,
    )


def make_candidates(
    setting: Setting, backends: Sequence[str], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """Ours and their rivals. The first is nn.GRU, which all others take turns with."""

    def of_torch(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
        return lambda: kind(setting.input, setting.hidden, device=device, dtype=dtype)

    def ours(name: str) -> Candidate:
        if name in RIMS:
            backend, make, layer = RIMS[name], make_rims, "RIMs"
        else:
            backend, make, layer = name, make_scoff, "SCOFF"
        return Candidate(f"{layer}, {backend}", lambda: make(setting, backend, device, dtype), True)

    rivals = [Candidate("nn.GRU", of_torch(nn.GRU)), Candidate("nn.LSTM", of_torch(nn.LSTM))]
    if flashrnn_is_there():
        rivals.append(Candidate("flashrnn, LSTM", of_torch(FlashLSTM)))
    return rivals + [ours(name) for name in backends]


def flashrnn_is_there() -> bool:
    try:
        importlib.import_module("flashrnn")
    except ImportError:
        return False
    return True


class FlashLSTM(nn.Module):
    """The package flashrnn, which does the recurrence only, with nn.LSTM's sizes and shapes."""

    def __init__(self, input_size: int, hidden_size: int, device: Any, dtype: torch.dtype):
        super().__init__()
        self.flashrnn: Any = importlib.import_module("flashrnn").flashrnn
        bound = hidden_size**-0.5

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)
            )

        # one head: as in nn.LSTM, all of the state depends on all of the state before
        self.weight_ih = parameter(4 * hidden_size, input_size)
        self.weight_hh = parameter(4, 1, hidden_size, hidden_size)  # [gates, heads, D, D]
        self.bias = parameter(4, 1, hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = nn.functional.linear(x, self.weight_ih).unflatten(-1, (4, 1, -1))
        states, last = self.flashrnn(
            gates.transpose(0, 1),  # [B, T, gates, heads, D]
            self.weight_hh,
            self.bias,
            function="lstm",
            backend="cuda_fused",
            dtype=str(x.dtype).removeprefix("torch."),
        )
        return states[0].flatten(2).transpose(0, 1), last  # h of [Z, B, T, heads, D] -> [T, B, H]
