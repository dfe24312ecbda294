"""What is not finite stops a run; it is neither learned from nor saved."""

import math

import pytest
import torch

from scoff.training import checkpoint
from scoff.training.errors import DivergedError
from scoff.training.settings import Settings
from tests.training.helpers import QUIET, Toy, fit_toy

SETTINGS = Settings(steps=12, batch_size=4, checkpoint_every=5, log_every=3)


def infinite_loss(step, model, x):
    return model(x).sum() + math.inf if step == 8 else None


def broken_weight(step, model, x):
    if step == 8:
        model.a.bias.data[1] = math.nan
        return model(x).mean()
    return None


def broken_gradient(step, model, x):
    # the loss is 0, its derivative by b.bias 0 / 0
    return (model(x) * 0).sum() + (model.b.bias * 0).sqrt().sum() if step == 8 else None


def huge_gradient(step, model, _x):
    return (model.a.weight * 1e38).sum() if step == 8 else None  # its square overflows


def finite(path):
    for file in checkpoint.find(path / "checkpoints"):
        _, state = checkpoint.load(file)
        moments = [v for s in state["optimiser"]["state"].values() for v in s.values()]
        if not all(t.isfinite().all() for t in [*state["model"].values(), *moments]):
            return False
    return True


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (infinite_loss, r"step 8: the loss is inf .*; not finite: the loss alone; "),
        (broken_weight, r"the loss is nan .* not finite: weight a\.bias, gradient of a\.weight, "),
        (broken_gradient, r"the loss is 0 .* norm nan; not finite: gradient of b\.bias; "),
        (huge_gradient, r"the loss is \S+e\+3\d .* norm inf; not finite: the norm alone; "),
    ],
    ids=["loss", "weight", "gradient", "norm"],
)
def test_the_step_is_not_made(tmp_path, spoil, message, clip):
    task = Toy(spoil)
    before = {}

    def remember(step, model, x):
        if step == 8:
            before.update({k: v.clone() for k, v in model.state_dict().items()})
        return spoil(step, model, x)

    task.spoil = remember
    path = tmp_path / "run"
    with pytest.raises(DivergedError, match=message) as error:
        fit_toy(path, Settings(**{**vars(SETTINGS), "clip": clip}), task)
    last = checkpoint.find(path / "checkpoints")[0]
    assert str(error.value).startswith("step 8: ")
    assert str(error.value).endswith(f"the last good checkpoint is {last}")
    assert error.value.exit_code == 1
    assert checkpoint.step_of(last) == 5
    assert finite(path)
    assert not (path / "weights.safetensors").exists()
    changed = [k for k, v in task.model.state_dict().items() if not torch.equal(v, before[k])]
    assert changed == (["a.bias"] if spoil is broken_weight else [])  # by spoil itself


def test_a_broken_batch_is_named(tmp_path):
    class Broken(Toy):
        def batch(self, index):
            x, y, index = super().batch(index)
            return (x / 0 if index[0] == 8 else x), y, index

    message = r"step 3: .*; not finite: batch\[0\], gradient of .*; there is no checkpoint yet"
    with pytest.raises(DivergedError, match=message):
        fit_toy(tmp_path / "run", SETTINGS, Broken())


@pytest.mark.parametrize("steps", [12, 8], ids=["checkpoint", "end"])
def test_an_update_that_overflows_is_not_saved(tmp_path, steps):
    def spoil(step, model, x):
        if step < steps:
            return 0 * model(x).sum()
        model.b.bias.data.fill_(3.4e38)  # near the largest number
        return -model.b.bias.sum()  # finite, as is its gradient

    path = tmp_path / "run"
    # Adam moves a weight by about the learning rate
    settings = Settings(steps=steps, batch_size=4, checkpoint_every=6, lr=1e37)
    message = rf"after step {steps}: not finite: weight b\.bias; the last .*step-00000006"
    with pytest.raises(DivergedError, match=message):
        fit_toy(path, settings, Toy(spoil))
    assert finite(path)
    assert not (path / "weights.safetensors").exists()


def test_records_before_it_are_kept(tmp_path):
    with pytest.raises(DivergedError):
        fit_toy(tmp_path / "run", SETTINGS, Toy(infinite_loss), QUIET)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [line.split(",")[0] for line in text.splitlines()] == ['{"step": 3', '{"step": 6']
