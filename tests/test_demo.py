"""What `make demo` runs."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import torch

from scoff.worlds.adding import draw_additions

DEMO = Path(__file__).parent.parent / "examples" / "adding.py"


def load():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_object_files_separate():
    demo = load()
    model = demo.make_scoff()
    before = demo.error(model, demo.LENGTH)
    demo.train(model, 150, "SCOFF", show=False)
    assert demo.error(model, demo.LENGTH) < 0.5 * before
    data = draw_additions(50, demo.LENGTH)
    with torch.no_grad():
        files = model.rnn(model.embed(data.x))[0][:, -1].unflatten(-1, (demo.FILES, -1))
    for a, b in itertools.combinations(range(demo.FILES), 2):
        apart = (files[:, a] - files[:, b]).norm(dim=-1) / files.norm(dim=-1).mean()
        assert apart.mean() > 0.2
    use = demo.schema_use(model)
    assert use.shape == (demo.FILES, 2, demo.SCHEMATA)
    torch.testing.assert_close(use.sum(-1).round(), use.sum(-1))  # shares of 1, or of nothing


def test_it_runs():
    done = subprocess.run(
        [sys.executable, str(DEMO), "--steps", "3"], capture_output=True, text=True, check=True
    )
    for line in ("SCOFF", "GRU", "always the mean", "object file 4", "at operands", "Done in"):
        assert line in done.stdout
    assert "loss=" in done.stderr  # the progress bar
