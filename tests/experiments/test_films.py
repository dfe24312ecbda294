"""Pictures of models: from the command line to a page, and what is in them."""

import json
import re
import shutil

import pytest
import torch

from scoff import pretrained
from scoff.cli import main
from scoff.commands.arguments import take_values
from scoff.commands.reproduce import reproduce
from scoff.experiments import reproduce as work
from scoff.experiments.films import outlined, spread, to_rgb, with_bar
from scoff.training.errors import UsageError
from scoff.training.run import Run

SMALL = {
    "steps": 2,
    "batch-size": 2,
    "frames": 9,
    "context": 4,
    "train-clips": 4,
    "valid-clips": 2,
    "test-clips": 2,
    "hidden-size": 16,
    "features": 8,
}


def call(*args) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


def train(experiment, out, *more, leave=()):
    small = [w for k, v in SMALL.items() if k not in leave for w in (f"--{k}", v)]
    small += ["--preset", "quick", "--no-tensorboard", "--progress", "off"]
    assert call("train", experiment, *small, *more, "--out", out, "--evaluate") == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of two variants, with and without schemata"""
    folder = tmp_path_factory.mktemp("balls")
    train("balls", folder / "a", "--model", "scoff-sparse")
    train("balls", folder / "b", "--model", "gru")
    train("balls", folder / "c", "--model", "scoff", "--variant", "curtain")
    return folder


def test_a_page_about_several_variants(runs, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert call("report", runs, "--out", page) == 0, capsys.readouterr().err
    text = page.read_text()
    assert len(text) < 5_000_000
    for word in (
        "All variants",
        "Four balls: rollouts",
        "Three balls and a curtain: object files and schemata",
        "Balls that come out from behind the curtain",
        "Error relative to GRU",
        "SCOFF, sparse: schemata over time",
        "SCOFF, sparse: attention",
        "SCOFF, sparse: masks",
    ):
        assert word in text, word
    assert text.count("data:image/gif") == 3  # a film of each model
    assert "GRU: schemata" not in text
    assert "--variant curtain" in text  # the command that makes the run again
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)  # nothing is loaded


def test_a_page_without_weights_has_no_pictures(runs, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for part in ("config.json", "evaluation.json", "metrics.jsonl"):
            (tmp_path / name / part).write_bytes((runs / name / part).read_bytes())
    assert call("report", tmp_path, "--out", tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert "data:image" not in text
    assert "over seeds" not in text
    assert "of runs without weights: <code>a</code>, <code>b</code>.</p>" in text
    assert "Rollouts, by number of frames" in text


def test_pictures_name_their_seed_and_who_is_not_in_them(runs, tmp_path):
    for name, source in {"a": "a", "again": "a", "b": "b"}.items():
        shutil.copytree(runs / source, tmp_path / name)
    path = tmp_path / "again" / "config.json"
    held = json.loads(path.read_text())
    held["config"]["seed"] = 7
    path.write_text(json.dumps(held))

    def page() -> str:
        assert call("report", tmp_path, "--out", tmp_path / "r.html") == 0
        return (tmp_path / "r.html").read_text()

    text = page()
    assert "means over seeds, and after ± their standard deviation." in text
    assert "without weights" not in text
    for word in ("Film: SCOFF, sparse, seed 0.", ">SCOFF, sparse, seed 0<", "Film: GRU."):
        assert word in text
    (tmp_path / "a" / "weights.safetensors").unlink()
    (tmp_path / "b" / "weights.safetensors").unlink()
    text = page()
    assert "Film: SCOFF, sparse, seed 7." in text
    assert "of runs without weights: <code>b</code>.</p>" in text


def test_what_was_trained_with_kernels_is_tested_and_drawn_without(runs, tmp_path, capsys):
    path = shutil.copytree(runs / "a", tmp_path / "a")
    held = json.loads((path / "config.json").read_text())
    held["config"]["backend"] = "fused"
    (path / "config.json").write_text(json.dumps(held))
    before = json.loads((path / "evaluation.json").read_text())
    assert call("eval", path, "--device", "cpu") == 0, capsys.readouterr().err
    assert json.loads((path / "evaluation.json").read_text())["rollout"] == before["rollout"]
    assert call("report", path, "--out", tmp_path / "r.html") == 0
    assert "SCOFF, sparse: masks" in (tmp_path / "r.html").read_text()
    (path / "weights.safetensors").unlink()
    assert call("train", "--resume", path, "--device", "cpu") == 2
    assert "--backend: got fused, which runs on a GPU" in capsys.readouterr().err


def test_trained_models_come_with_the_package(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "HERE", tmp_path)
    assert call("report", "--pretrained", "4balls", "--out", tmp_path / "r.html") == 2
    assert "there is no trained model '4balls'; there are none" in capsys.readouterr().err
    assert call("export", runs / "b", "--name", "4balls") == 0
    export = ["export", runs / "a", runs / "b", "--name", "4balls"]
    assert call(*export) == 2
    assert "there is a trained model '4balls' already; --replace" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "4balls").iterdir()] == ["b"]
    assert call(*export, "--replace") == 0
    assert pretrained.names() == ["4balls"]
    shipped = {path.name for path in (tmp_path / "4balls" / "a").iterdir()}
    assert shipped == {
        "config.json",
        "weights.safetensors",
        "training.json",
        "evaluation.json",
        "metrics.jsonl",
    }
    assert call("report", "--pretrained", "4balls", "--out", tmp_path / "r.html") == 0
    assert call("report", runs / "a", runs / "b", "--out", tmp_path / "s.html") == 0
    parts = [
        (tmp_path / name).read_text().split("How to rerun</h2>") for name in ("r.html", "s.html")
    ]
    assert parts[0][0] == parts[1][0]  # the same figures and tables
    capsys.readouterr()
    assert call("report", "--pretrained", "switch", "--out", tmp_path / "r.html") == 2
    assert "there are: 4balls" in capsys.readouterr().err
    assert call("report", "--out", tmp_path / "r.html") == 2
    assert call("report", runs / "a", "--pretrained", "4balls", "--out", tmp_path / "r.html") == 2


def test_only_what_is_whole_and_small_is_shipped(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "HERE", tmp_path)
    with pytest.raises(UsageError, match="wants a name without slashes"):
        pretrained.export([runs / "a"], "../a")
    monkeypatch.setattr(pretrained, "LARGEST", 1000)
    with pytest.raises(UsageError, match="wants at most 1,000"):
        pretrained.export([runs / "a"], "a")
    (tmp_path / "half").mkdir()
    Run(tmp_path / "half").config_path.write_bytes(Run(runs / "a").config_path.read_bytes())
    with pytest.raises(UsageError, match="not trained and tested"):
        pretrained.export([tmp_path / "half"], "a")
    assert pretrained.names() == []


def test_more_schemata_than_needed(tmp_path):
    for count in (2, 5):
        train("schemata", tmp_path / f"{count}", "--schemata", count)
    assert call("report", tmp_path, "--out", tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    for word in (
        "SCOFF (schemata 2)",
        "SCOFF (schemata 5)",
        "Schemata in use",
        "of ten, 3 were used",
        "Error by number of schemata.",
        "Error of rollouts.",
        "Error relative to the fewest schemata.",
        "Rollouts.</strong> The last of 4 given frames",
        "Film: SCOFF (schemata 2).",
        "Film: SCOFF (schemata 5).",
        "SCOFF (schemata 2): schemata over time",
        "SCOFF (schemata 5): schemata over time",
        "SCOFF (schemata 5): attention",
        "SCOFF (schemata 5): masks",
    ):
        assert word in text, word
    assert text.count("data:image/gif") == 2
    assert "SCOFF (schemata 2): attention" not in text
    assert len(text) < 2_000_000


def test_one_ball_has_films_too(tmp_path):
    for model in ("scoff", "gru"):
        out = tmp_path / model
        train("dynamics", out, "--model", model, "--object-files", 2, leave=("train-clips",))
    assert call("report", tmp_path, "--out", tmp_path / "r.html") == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("data:image/gif") == 2
    for word in (
        "Error of rollouts.",
        "Error relative to GRU.",
        "SCOFF: attention",
        "SCOFF: masks",
    ):
        assert word in text, word
    assert "GRU: schemata" not in text
    for name in ("accelerates", "constant velocity", "random walk"):
        assert f"SCOFF: schemata over time, {name}" in text


def test_reproduce_tries_each_value_of_a_grid(monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(work, "reproduce", lambda _, plans, *__: planned.extend(plans))
    quick = ["--preset", "quick", "--seeds", "2", "--out", str(tmp_path)]
    reproduce(["schemata", *quick, "--schemata", "3", "4", "--variant=678balls", "curtain"])
    named = {plan.path.name: plan.config for plan in planned}
    assert len(planned) == len(named) == 2 * 2 * 2
    config = named["678balls-4-scoff-1"]
    assert (config.variant, config.schemata, config.seed) == ("678balls", 4, 1)
    assert config.object_files == 8
    assert named["curtain-3-scoff-0"].object_files == 4
    planned.clear()
    reproduce(["schemata", *quick])
    assert {plan.config.schemata for plan in planned} == {2, 10}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "variant"), [("scoff", "curtain"), ("rims", "4balls"), ("gru", "coloured4balls")]
)
def test_training_from_a_cuda_graph(tmp_path, model, variant):
    more = ["--model", model, "--variant", variant, "--device", "cuda", "--acceleration", "graph"]
    train("balls", tmp_path / "a", *more)
    found = Run(tmp_path / "a").read_evaluation()
    assert found is not None
    assert found["steps"] == SMALL["steps"]


@pytest.mark.parametrize(
    ("args", "values", "rest"),
    [
        ("--a 1 2 --b 3", ("1", "2"), "--b 3"),
        ("--b 3 --a=1 2", ("1", "2"), "--b 3"),
        ("--a 1 --b 3 --a 1 4", ("1", "4"), "--b 3"),
        ("--ab 1 -a", (), "--ab 1 -a"),
    ],
)
def test_an_option_with_several_values(args, values, rest):
    assert take_values(args.split(), "--a") == (values, rest.split())


@pytest.mark.parametrize("scale", [1, 2])
def test_outlines_are_at_the_rims_of_balls_alone(scale):
    identity = torch.zeros(1, 8, 8, dtype=torch.uint8)
    identity[0, 2:6, 3:7] = 1
    drawn = outlined(torch.zeros(1, 1, 8, 8), identity, scale)[0].any(-1)
    assert drawn.shape == (8 * scale, 8 * scale)
    top, left, bottom = 2 * scale, 3 * scale, 6 * scale
    assert drawn[top:bottom, left].all()
    assert drawn[top, left : left + 4 * scale].all()
    assert not drawn[top + 1 : bottom - 1, left + 1 : left + 4 * scale - 1].any()  # inside
    assert drawn[top - 1].any() == (scale > 1)
    assert not drawn[: top - 1].any()
    assert not drawn[bottom + 1 :].any()


def test_a_bar_that_turns_where_frames_are_no_longer_given():
    film = with_bar(to_rgb(torch.zeros(4, 1, 8, 8)), context=2)
    assert film.shape == (4, 10, 8, 3)
    done = film[:, -1].any(-1).sum(-1)
    assert done.tolist() == [2, 4, 6, 8]
    first, last = film[1, -1, 0].tolist(), film[2, -1, 0].tolist()
    assert first[0] == first[1] == first[2]
    assert last[0] > last[2]


def test_numbers_that_are_spread_out():
    assert spread(51, 6) == [0, 10, 20, 30, 40, 50]
    assert spread(3, 8) == [0, 1, 2]
    assert spread(1, 8) == [0]
