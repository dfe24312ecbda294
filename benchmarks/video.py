"""How fast video models train on bouncing balls: steps a second of the engine, and where time goes.

`python benchmarks/video.py --device cuda` measures the models of preset tuned at batch 64 with the
engine's own step: a CUDA graph, clips made on the GPU. `--precision bf16-mixed` computes in
bfloat16, `--painter broadcast` paints pictures in another way than the preset.

Then the parts of a step of the first model, each by itself, forward and backward, run eagerly;
`--profile` also lists the GPU's kernels by the time that they take. On a CPU (one thread) give a
small `--batch` and `--steps`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from scoff.bench.timing import milliseconds
from scoff.experiments.balls import COMPARED, EXPERIMENT, BallsTask, Config
from scoff.models.decoders import MaskedDecoder
from scoff.models.pictures import PAINTERS
from scoff.ops.mixture import mix
from scoff.training.devices import make_fabric, pick_device
from scoff.training.engine import prepare
from scoff.training.run import Run

WARM_UP = 5


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def steps_a_second(config: Config, device: torch.device, steps: int) -> tuple[float, float, int]:
    """Steps a second, seconds until the first step was done, and parameters"""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run = Run.create(Path(folder) / "run", "balls", "tuned", config)
        fabric = make_fabric(device, config.precision)
        loop = prepare(lambda place: BallsTask(config, place), config, run, fabric)
        loop.one_step(0)
        synchronise(device)
        ready = time.perf_counter() - started
        for number in range(1, WARM_UP):
            loop.one_step(number)
        synchronise(device)
        began = time.perf_counter()
        for number in range(WARM_UP, WARM_UP + steps):
            loop.one_step(number)
        synchronise(device)
        rate = steps / (time.perf_counter() - began)
        return rate, ready, sum(p.numel() for p in loop.weights.parameters())


def parts_of(config: Config, device: torch.device) -> dict[str, Callable[[], Any]]:
    """What a step consists of, each from what the one before gave"""
    torch.manual_seed(0)
    task = BallsTask(config, device)
    model = task.model.to(device).train()
    index = torch.arange(config.batch_size, device=device) % config.train_clips
    frames = task.batch(index)[0]
    stack = model.options.stack
    mixed = config.precision == "bf16-mixed"

    def run(module: Any, *inputs: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            result = module(*inputs)
        return result[0] if isinstance(result, tuple) else result

    def there_and_back(module: Any, *inputs: Tensor) -> Callable[[], None]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]

        def once() -> None:
            run(module, *leaves).sum().backward()

        return once

    given = frames[:, :-stack].flatten(0, 1)
    with torch.no_grad():
        x = run(model.encoder, given).unflatten(0, frames[:, :-stack].shape[:2])
        output = run(model.rnn, x)
        logits = run(lambda o: model.decoder(o).logits, output)
    target = frames[:, stack:]

    def likelihood(told: Tensor) -> Tensor:
        return cast(Tensor, model.likelihood(told, target))

    parts = {
        "clips": lambda: task.batch(index),
        "encoder": there_and_back(model.encoder, given),
        "layer": there_and_back(model.rnn, x),
        "decoder": there_and_back(lambda o: model.decoder(o).logits, output),
        "likelihood": there_and_back(likelihood, logits),
    }
    if isinstance(model.decoder, MaskedDecoder):
        painted = logits[:, :, None].expand(-1, -1, model.decoder.slots, -1, -1, -1)
        # part of the decoder's time
        parts["(mixing)"] = there_and_back(
            lambda a, b: mix(a, b)[0], painted, painted[..., 0, :, :]
        )
    return parts


def typical_ms(once: Callable[[], Any], device: torch.device, rounds: int) -> float:
    once()
    return statistics.median(milliseconds(once, device) for _ in range(rounds))


def kernels(parts: dict[str, Callable[[], Any]]) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for once in parts.values():
            once()
        torch.cuda.synchronize()
    return seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--variant", default="4balls")
    parser.add_argument("--models", nargs="+", default=[*COMPARED])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--frames", type=int, default=51)
    parser.add_argument("--train-frames", type=int, help="of the pieces into which clips are cut")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9, help="of the parts")
    parser.add_argument("--clips", type=int, default=50_000, help="of the training set")
    parser.add_argument("--preset", default="tuned", choices=[*EXPERIMENT.presets])
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--acceleration", default="auto", choices=["auto", "none", "compile"])
    parser.add_argument("--painter", choices=[*PAINTERS], help="default: the preset's")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = pick_device(args.device)

    def config(model: str) -> Config:
        preset = cast(Config, EXPERIMENT.preset(args.preset, model, variant=args.variant))
        return replace(
            preset,
            painter=args.painter or preset.painter,
            batch_size=args.batch,
            frames=args.frames,
            context=min(15, args.frames - 1),
            train_frames=args.train_frames or preset.train_frames,
            train_clips=args.clips,
            precision=args.precision,
            acceleration=args.acceleration,
        )

    name = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU thread"
    print(
        f"{name}, torch {torch.__version__}, {args.variant}, preset {args.preset}, batch "
        f"{args.batch}, {args.frames} frames in pieces of {config(args.models[0]).train_frames}, "
        f"{args.precision}, painter {config(args.models[0]).painter}"
    )
    print(f"{'':14}{'parameters':>12}{'steps/s':>10}{'ready after s':>15}")
    for model in args.models:
        rate, ready, size = steps_a_second(config(model), device, args.steps)
        print(f"{model:14}{size:>12,}{rate:>10.2f}{ready:>15.1f}", flush=True)
    parts = parts_of(config(args.models[0]), device)
    print(f"\nparts of a step of {args.models[0]}, eager, ms")
    for part, once in parts.items():
        print(f"{part:14}{typical_ms(once, device, args.rounds):>12.2f}", flush=True)
    if args.profile and device.type == "cuda":
        print(kernels(parts))


if __name__ == "__main__":
    main()
