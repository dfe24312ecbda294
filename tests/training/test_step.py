"""Ways to compute a step: eagerly, compiled, from a CUDA graph, in half the precision."""

import shutil
from dataclasses import replace

import pytest
import torch

from scoff.experiments.adding import AddingTask
from scoff.training import checkpoint
from scoff.training.devices import pick_device
from scoff.training.engine import Loop, Runtime, check, fit
from scoff.training.errors import DivergedError, StoppedError, UsageError
from scoff.training.run import Run
from scoff.training.settings import Settings
from tests.training.helpers import (
    CONFIG,
    QUIET,
    fit_toy,
    outcome,
    records,
    signalled,
    stop_at,
    train,
)

SETTINGS = Settings(steps=12, batch_size=4, log_every=1, checkpoint_every=5)
GPU = replace(QUIET, device="cuda")


def losses(path):
    return [r["train/loss"] for r in records(path) if "train/loss" in r]


def test_a_toy_learns(tmp_path):
    fit_toy(tmp_path / "run", Settings(steps=300, batch_size=4, lr=0.05))
    found = losses(tmp_path / "run")
    assert found[-1] < 0.1 * found[0]


@pytest.fixture
def updates(monkeypatch):
    """Learning rate and norm of the gradients of every update"""
    seen: list[tuple[float, float]] = []
    original = torch.optim.AdamW.step

    def step(self, *args, **options):
        (group,) = self.param_groups
        norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"]])
        seen.append((group["lr"], norm.item()))
        return original(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def test_updates_follow_the_schedule(tmp_path, updates):
    settings = replace(SETTINGS, warmup=0.3, decay="cosine")
    fit_toy(tmp_path / "run", settings)
    expected = [settings.lr_at(step) for step in range(settings.steps)]
    assert [lr for lr, _ in updates] == expected
    logged = [r["train/lr"] for r in records(tmp_path / "run") if "train/lr" in r]
    assert logged == expected


class TimedTask(AddingTask):
    """Tells in its loss how far training has come."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.share = torch.zeros((), device=device)

    def set_progress(self, share):
        self.share.fill_(share)

    def loss(self, model, batch):
        loss, more = super().loss(model, batch)
        return loss, {**more, "share": 1.0 * self.share}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_task_is_told_how_far_training_has_come(tmp_path, monkeypatch, device):
    config = replace(CONFIG, log_every=1)
    run = Run.create(tmp_path, "adding", "quick", config)
    runtime = replace(QUIET, device=device)
    with signalled(7, monkeypatch), pytest.raises(StoppedError):
        fit(lambda device: TimedTask(config, device), config, run, runtime)
    fit(lambda device: TimedTask(config, device), config, run, runtime)
    told = [r["train/share"] for r in records(tmp_path) if "train/share" in r]
    assert told == pytest.approx([step / config.steps for step in range(config.steps)])


def test_gradients_are_clipped(tmp_path, updates):
    for clip in (None, 1e-3):
        fit_toy(tmp_path / str(clip), replace(SETTINGS, steps=1, clip=clip))
    free, clipped = (norm for _, norm in updates)
    assert free > 0.1
    assert clipped == pytest.approx(1e-3, rel=1e-3)
    # what is logged is the norm before
    logged = [records(tmp_path / str(clip))[0]["train/grad_norm"] for clip in (None, 1e-3)]
    assert logged == [pytest.approx(free)] * 2


def test_bfloat16(tmp_path):
    fit_toy(tmp_path / "full", SETTINGS)
    fit_toy(tmp_path / "half", replace(SETTINGS, precision="bf16-mixed"))
    full, half = losses(tmp_path / "full"), losses(tmp_path / "half")
    assert full != half
    assert half == pytest.approx(full, rel=0.05)
    assert all(w.dtype == torch.float32 for w in Run(tmp_path / "half").read_weights().values())


def test_bfloat16_resumes_exactly(tmp_path, monkeypatch):
    config = replace(CONFIG, precision="bf16-mixed")
    train(tmp_path / "undisturbed", config)
    with pytest.raises(StoppedError):
        stop_at(tmp_path / "run", 16, monkeypatch, config=config)
    train(tmp_path / "run", config)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled(tmp_path):
    fit_toy(tmp_path / "eager", SETTINGS)
    settings = replace(SETTINGS, acceleration="compile")
    fit_toy(tmp_path / "compiled", settings)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    # weights have the names of the bare model, and a run goes on from a checkpoint
    run = Run(tmp_path / "compiled")
    assert run.read_weights().keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    before = outcome(run.path)
    run.weights_path.unlink()
    checkpoint.find(run.checkpoints)[0].unlink()
    fit_toy(run.path, settings)
    assert outcome(run.path) == before


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        ({"acceleration": "graph"}, "cpu", "--acceleration graph: wants a single GPU"),
        ({}, "cuda:99", "--device: got 'cuda:99', but torch finds"),
        ({}, "mps", "--device: got 'mps', wants cpu, cuda"),
        ({}, "gpu", "--device: got 'gpu', wants cpu, cuda"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(tmp_path, settings, device, message):
    given, runtime = replace(SETTINGS, **settings), replace(QUIET, device=device)
    with pytest.raises(UsageError, match=message):
        check(given, runtime)
    with pytest.raises(UsageError, match=message):
        fit_toy(tmp_path / "run", given, runtime=runtime)


def test_auto_needs_no_gpu():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == expected


# --- on a GPU

GRU = replace(CONFIG, model="gru", steps=20, log_every=1, hidden_size=32, batch_size=16)


def steps_made(monkeypatch) -> list[str]:
    kinds = []
    original = Loop.train

    def note(self, *args):
        kinds.append(type(self.step).__name__)
        return original(self, *args)

    monkeypatch.setattr(Loop, "train", note)
    return kinds


@pytest.mark.gpu
def test_a_graph_gives_the_losses_of_eager_steps(tmp_path, monkeypatch):
    kinds = steps_made(monkeypatch)
    train(tmp_path / "graph", replace(GRU, acceleration="auto"), GPU)
    train(tmp_path / "eager", replace(GRU, acceleration="none"), GPU)
    assert kinds == ["GraphStep", "EagerStep"]
    graph, eager = losses(tmp_path / "graph"), losses(tmp_path / "eager")
    assert len(graph) == 20
    assert graph == pytest.approx(eager, rel=1e-5)  # Adam corrects its bias on the GPU there


@pytest.mark.gpu
def test_a_graph_gives_the_losses_of_the_cpu(tmp_path):
    train(tmp_path / "graph", GRU, GPU)
    train(tmp_path / "cpu", GRU, QUIET)
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("acceleration", ["graph", "none"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_gpu_resumes_exactly(tmp_path, monkeypatch, acceleration, precision):
    config = replace(CONFIG, acceleration=acceleration, precision=precision)
    train(tmp_path / "undisturbed", config, GPU)
    path = tmp_path / "run"
    for step in (3, 16):
        with pytest.raises(StoppedError):
            stop_at(path, step, monkeypatch, config=config, runtime=GPU)
        assert Run(path).step() == step + 1
    train(path, config, GPU)
    assert outcome(path) == outcome(tmp_path / "undisturbed")


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_moves_between_devices(tmp_path, first, then):
    path = tmp_path / "run"
    train(path, GRU, replace(QUIET, device=first))
    before = losses(path)
    (path / "weights.safetensors").unlink()
    checkpoint.find(path / "checkpoints")[0].unlink()
    train(path, GRU, replace(QUIET, device=then))
    assert losses(path) == pytest.approx(before, rel=1e-3)


@pytest.mark.gpu
def test_a_loss_that_is_not_finite_stops_a_graph(tmp_path):
    class Broken(AddingTask):
        def loss(self, model, batch):
            loss, more = super().loss(model, batch)
            return loss / (batch.target.sum() * 0), more

    run = Run.create(tmp_path / "run", "adding", "quick", GRU)
    with pytest.raises(DivergedError, match=r"step 1: .*not finite: gradient of "):
        fit(lambda device: Broken(GRU, device), GRU, run, GPU)
    assert not checkpoint.find(run.checkpoints)


@pytest.mark.gpu
def test_a_step_needs_no_more_memory_than_the_one_before(tmp_path, monkeypatch):
    used = []
    original = Loop.one_step

    def one_step(self, number):
        values = original(self, number)
        used.append(torch.cuda.memory_allocated())
        assert all(p.device.type == "cuda" for p in self.weights.parameters())
        return values

    monkeypatch.setattr(Loop, "one_step", one_step)
    train(tmp_path / "run", GRU, GPU)
    assert len(set(used[3:6])) == 1
    assert Runtime().device == "auto"
