"""Testing a trained run."""

import time

import torch

from scoff.experiments.base import find_experiment
from scoff.training.devices import pick_device
from scoff.training.errors import StorageError
from scoff.training.run import Run, environment


def evaluate_run(run: Run, device_name: str, threads: int) -> None:
    """Writes the run's evaluation.json."""
    torch.set_num_threads(threads)
    held = run.read_config()
    experiment = find_experiment(held["experiment"])
    config = experiment.read_config(held["config"])
    device = pick_device(device_name)
    model = experiment.make_task(config, device).model
    try:
        model.load_state_dict(run.read_weights())
    except RuntimeError as error:
        raise StorageError(f"{run.path}: the weights are not those of config.json") from error
    step, trained = run.progress()
    started = time.monotonic()
    mixed = config.precision == "bf16-mixed"  # as in the validation during training
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        result = experiment.evaluate(config, model.to(device).eval(), device)
    result |= {
        "steps": step,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": {"training": trained, "evaluation": time.monotonic() - started},
        "environment": environment(),
    }
    run.write_evaluation(result)
