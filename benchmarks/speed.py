"""SCOFF's time and memory beside those of nn.GRU, as results/speed.md has them.

`scoff bench` several times in turns, each in a process of its own: `fused`, or for the maze `wide`,
on a GPU, `batched` on one CPU thread. Prints the tables of the first run and then, by setting, the
ratios of all runs, in turns with nn.GRU, and their medians: of turns, over the time that nn.GRU
takes alone, and in a CUDA graph; and the peak memory over that of `batched`. On a GPU nothing else
should run, nor on a CPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

BACKENDS = {"adding": "fused", "balls": "fused", "balls-512": "fused", "maze": "wide"}


def bench(backend: str, settings: list[str], others: list[str], shown: bool) -> list[Any]:
    """SCOFF's rows, with the time of nn.GRU alone as `alone_ms`"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "scoff", "bench", "--backends", backend, "--json", path]
        command += ["--settings", *settings, *others]
        subprocess.run(command, check=True, stdout=None if shown else subprocess.DEVNULL)
        rows = json.loads(path.read_text())["rows"]
    alone = {row["setting"]: row["both"]["ms"] for row in rows if row["layer"] == "nn.GRU"}
    return [row | {"alone_ms": alone[row["setting"]]} for row in rows if "SCOFF" in row["layer"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", choices=[*BACKENDS])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("others", nargs="*", help="after --: options of scoff bench")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    settings: list[str] = args.settings or ([*BACKENDS] if on_gpu else ["adding"])
    others = ["--device", args.device, *args.others]
    by_backend: dict[str, list[str]] = {}
    for setting in settings:
        by_backend.setdefault(BACKENDS[setting] if on_gpu else "batched", []).append(setting)

    rows = [
        row
        for run in range(args.runs)
        for backend, own in by_backend.items()
        for row in bench(backend, own, [*others, *(["--stages"] if on_gpu else [])], run == 0)
    ]
    memory = bench("batched", settings, [*others, "--rounds", "1"], False) if on_gpu else rows
    peak = {row["setting"]: row["peak_mib"] for row in memory}

    print(f"\n{'':14}{'forward and backward, times nn.GRU':36}{'median':>8}{'alone':>8}", end="")
    print(f"{'in a graph':>12}{'memory':>8}" if on_gpu else "")
    for setting in settings:
        own = [row for row in rows if row["setting"] == setting]
        ratios = [row["both"]["ratio"] for row in own]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        alone = statistics.median(row["both"]["ms"] / row["alone_ms"] for row in own)
        print(f"{setting:14}{each:36}{statistics.median(ratios):>8.2f}{alone:>8.2f}", end="")
        if on_gpu:
            in_graph = statistics.median(row["graph"]["ratio"] for row in own)
            memory_ratio = own[0]["peak_mib"] / peak[setting]
            print(f"{in_graph:>12.2f}{memory_ratio:>8.3f}", end="")
        print()


if __name__ == "__main__":
    main()
