"""Speed and memory of SCOFF's backends against torch's own layers, as ratios in one run.

`scoff bench`: each layer takes turns with nn.GRU (`timing`), at several sizes (`settings`), and is
compared with the least time that the device allows (`floor`). A backend whose output or gradients
are not the reference's (`check`) gets no times. Where they go on a GPU, `stages` tells.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import scoff
from scoff.bench.check import CheckError, check_backend
from scoff.bench.floor import (
    Floor,
    Machine,
    WeightReading,
    floor_of,
    measure_machine,
    work_of,
)
from scoff.bench.layers import Candidate, choose_backends, make_candidates, make_scoff
from scoff.bench.settings import SETTINGS, Setting, choose_settings
from scoff.bench.stages import measure_stages
from scoff.bench.table import NOTES, Report, Row, Section, header, section_text
from scoff.bench.timing import Job, Timing, capture, in_turns, peak_memory
from scoff.ops.scoff import dispatch
from scoff.training.errors import ScoffError

__all__ = ["SETTINGS", "Place", "Report", "bench", "choose_backends", "choose_settings"]

# how a backend says that it is not made for this device, dtype or size
REFUSALS = (ValueError, RuntimeError, ImportError)


@dataclass(frozen=True)
class Place:
    """Where and how layers are measured."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    stages: bool = False  # whether to tell where the time goes

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def bench(settings: Sequence[Setting], backends: Sequence[str], place: Place) -> Report:
    """Prints a table for each setting as soon as it is measured."""
    torch.set_num_threads(1)  # small recurrent steps are far slower with more
    device_type = place.device.type
    if device_type == "cuda":
        torch.cuda.set_device(place.device.index or 0)
    tell("measuring the device")
    machine = measure_machine(place.device, place.dtype)
    print(header(machine, device_type, place.dtype), flush=True)
    sections = []
    with warnings.catch_warnings():
        # torch says so at every call of an RNN of bfloat16, whose weights it does not compact
        warnings.filterwarnings("ignore", "RNN module weights are not part", UserWarning)
        for setting in settings:
            sections.append(measure_setting(setting, backends, place, machine))
            print(f"\n{section_text(sections[-1], device_type)}", flush=True)
    if place.stages and device_type != "cuda":
        print("\n--stages: where the time goes is told of a GPU only", flush=True)
    print(f"\n{NOTES}", flush=True)
    return Report(machine, device_type, place.dtype, sections)


def measure_setting(
    setting: Setting, backends: Sequence[str], place: Place, machine: Machine
) -> Section:
    torch.manual_seed(0)
    (cell,) = make_scoff(setting, "auto", "cpu", place.dtype).cells
    assert isinstance(cell, scoff.SCOFFCell)
    work = work_of(setting, cell, place.dtype)
    floor = floor_of(work, machine)
    try:
        gru = Pacemaker(setting, place)
    except RuntimeError as error:  # most likely out of memory
        raise ScoffError(f"{setting.name}: nn.GRU does not run: {brief(error)}") from error
    candidates = make_candidates(setting, backends, place.device, place.dtype)
    rows = []
    for index, candidate in enumerate(candidates):
        tell(f"{setting.name}: {candidate.name} ({index + 1} of {len(candidates)})")
        rows.append(row_of(candidate, setting, gru, floor, place))
    return Section(setting, work, floor, rows, weight_reading(setting, place))


def weight_reading(setting: Setting, place: Place) -> WeightReading | None:
    if place.device.type != "cuda" or dispatch.fused is None:
        return None
    from scoff.bench.weights import measure_reading  # it needs triton

    return measure_reading(setting, place.device, place.dtype)


class Pacemaker:
    """The nn.GRU that every layer takes turns with."""

    def __init__(self, setting: Setting, place: Place):
        layer = nn.GRU(setting.input, setting.hidden, device=place.device, dtype=place.dtype)
        self.job = Job(layer, place.randn(setting.length, setting.batch, setting.input))
        self.graph = capture(self.job) if place.device.type == "cuda" else None


def row_of(
    candidate: Candidate, setting: Setting, gru: Pacemaker, floor: Floor, place: Place
) -> Row:
    """Whatever goes wrong with one layer is told in its row: the others are measured still."""
    try:
        return measure(candidate, setting, gru, floor, place)
    except CheckError as error:
        problem, failed = f"FAILS its check: {error}", True
    except Exception as error:
        problem = f"does not run: {brief(error)}"
        failed = candidate.is_ours and not is_refusal(error)
    return Row(setting.name, candidate.name, problem=problem, failed=failed)


def measure(
    candidate: Candidate, setting: Setting, gru: Pacemaker, floor: Floor, place: Place
) -> Row:
    layer = candidate.make()
    errors = None
    positions = ()
    if isinstance(layer, scoff.SCOFF | scoff.RIMs):
        errors = check_backend(layer, setting, place.device, place.dtype)
        positions = (setting.positions,) if setting.positions > 1 else ()
    job = Job(layer, place.randn(setting.length, setting.batch, *positions, setting.input))
    forward = in_turns(job.forward, gru.job.forward, place.device, place.rounds)
    both = in_turns(job.both, gru.job.both, place.device, place.rounds)
    peak = peak_memory(job)
    stages = None
    if place.stages and place.device.type == "cuda" and isinstance(layer, scoff.SCOFF):
        stages = measure_stages(job, layer.backend, setting.length, place.rounds)
    graph, note = graph_timing(job, gru, place)
    return Row(
        setting.name,
        candidate.name,
        parameters=sum(weight.numel() for weight in layer.parameters()),
        check_error=max(errors.values()) if errors else None,
        forward=forward,
        both=both,
        graph=graph,
        peak_mib=peak,
        floor_ratio=(graph or both).ms / floor.ms if isinstance(layer, scoff.SCOFF) else None,
        note=note,
        stages=stages,
    )


def graph_timing(job: Job, gru: Pacemaker, place: Place) -> tuple[Timing | None, str | None]:
    """Of forward and backward, replayed; None, and why, where they cannot be captured."""
    if gru.graph is None:
        return None, None
    try:
        graph = capture(job)
    except RuntimeError as error:
        return None, f"no CUDA graph: {brief(error)}"
    return in_turns(graph.replay, gru.graph.replay, place.device, place.rounds), None


def is_refusal(error: Exception) -> bool:
    """Rather than a bug; what torch calls a CUDA error is a kernel that crashed."""
    return isinstance(error, REFUSALS) and "CUDA error" not in str(error)


def brief(error: BaseException) -> str:
    """An error in a line, named where it is not of the kinds that a backend refuses with."""
    message = str(error).strip().partition("\n")[0]
    return message if isinstance(error, REFUSALS) else f"{type(error).__name__}: {message}"


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
