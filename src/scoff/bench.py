"""Speed and memory of the layers against nn.GRU, as ratios in one run.

`scoff bench` on the CPU (one thread), `--device cuda` on a GPU. Each layer takes
turns with nn.GRU, so that whatever else the machine does falls on both alike; times are medians,
and the ratio is the median of the ratios of neighbours. Memory is the peak during one forward and
backward pass, beyond what there was before it, for sequences of increasing length.
"""

import statistics
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

import scoff

BATCH, LENGTH, INPUT, FILES, SIZE, SCHEMATA = 64, 50, 64, 5, 60, 2
HIDDEN = FILES * SIZE


def make_scoff(**options: Any) -> nn.Module:
    return scoff.SCOFF(
        INPUT, HIDDEN, num_object_files=FILES, num_schemata=SCHEMATA, **cast(Any, options)
    )


def make_layers(device: str) -> dict[str, nn.Module]:
    layers = {
        "nn.GRU": nn.GRU(INPUT, HIDDEN),
        "nn.LSTM": nn.LSTM(INPUT, HIDDEN),
        "SCOFF": make_scoff(),
        "SCOFF, 4 input heads": make_scoff(input_heads=4),  # as in the paper's adding task
        "SCOFF, 3 of 5 active": make_scoff(active_object_files=3),
        "SCOFF, LSTM": make_scoff(cell="lstm"),
        "SCOFF, reference": make_scoff(backend="reference"),
        "RIMs": scoff.RIMs(INPUT, HIDDEN, num_modules=FILES, active_modules=3),
        "RMC": scoff.RMC(INPUT, HIDDEN, num_slots=FILES, num_heads=4),
    }
    return {name: layer.to(device) for name, layer in layers.items()}


def run(layer: nn.Module, x: Tensor, backward: bool) -> None:
    if backward:
        layer.zero_grad()
        layer(x)[0].sum().backward()
    else:
        with torch.no_grad():
            layer(x)


def timed(layer: nn.Module, x: Tensor, backward: bool) -> float:
    """Milliseconds"""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(layer, x, backward)
    if x.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def against_gru(gru: nn.Module, layer: nn.Module, x: Tensor, backward: bool, rounds: int) -> str:
    pairs = [(timed(gru, x, backward), timed(layer, x, backward)) for _ in range(rounds + 3)][3:]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    return f"{statistics.median(ours for _, ours in pairs):>12.1f}{ratio:>7.2f}"


def graphed(layer: nn.Module, x: Tensor, rounds: int) -> float:
    """Milliseconds of forward and backward replayed from a CUDA graph"""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x)[0].sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.zero_grad(set_to_none=False)
        layer(x)[0].sum().backward()
    times = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def compare(layers: dict[str, nn.Module], device: str, rounds: int) -> None:
    x = torch.randn(LENGTH, BATCH, INPUT, device=device, requires_grad=True)
    print(f"{BATCH} sequences x {LENGTH} steps, input {INPUT}, state {HIDDEN} = {FILES} x {SIZE},")
    print(f"{SCHEMATA} schemata, float32, {device}, torch {torch.__version__}\n")
    print(
        f"{'':22}{'parameters':>11}{'forward ms':>12}{'ratio':>7}{'both ms':>12}{'ratio':>7}"
        + f"{'graph ms':>12}" * x.is_cuda
    )
    for name, layer in layers.items():
        count = sum(p.numel() for p in layer.parameters())
        times = [against_gru(layers["nn.GRU"], layer, x, way, rounds) for way in (False, True)]
        if x.is_cuda:
            times.append(f"{graphed(layer, x, rounds):>12.1f}")
        print(f"{name:22}{count:>11,}" + "".join(times))


def peak_memory(layer: nn.Module, length: int, device: str) -> float:
    """MiB beyond what was allocated before"""
    x = torch.randn(length, BATCH, INPUT, device=device, requires_grad=True)
    run(layer, x, backward=True)  # allocates the gradients
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(layer, x, backward=True)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(profile_memory=True) as profile:
        run(layer, x, backward=True)
    results: Any = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak / 2**20


def memory(layers: dict[str, nn.Module], device: str) -> None:
    lengths = (25, 50, 100, 200)
    print(f"\n{'peak memory, MiB':22}" + "".join(f"{length:>5} steps" for length in lengths))
    for name in ("nn.GRU", "SCOFF", "SCOFF, reference"):
        peaks = [peak_memory(layers[name], length, device) for length in lengths]
        print(f"{name:22}" + "".join(f"{peak:>11.1f}" for peak in peaks))


def main(device: str, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = make_layers(device)
    compare(layers, device, rounds)
    memory(layers, device)
