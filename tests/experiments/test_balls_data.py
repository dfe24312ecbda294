"""Bouncing balls of a file instead of generated ones: the same clips give the same run."""

import json
import shutil
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from scoff.cli import main
from scoff.experiments import balls_data, find_experiment
from scoff.experiments.balls import BallsTask, Config, evaluate
from scoff.experiments.balls_data import read_clips
from scoff.experiments.video import make_model
from scoff.worlds.balls import VARIANTS, balls
from scoff.worlds.balls_file import MORE, write_balls
from tests.training.helpers import content, outcome, signalled
from tests.worlds.test_balls import same

CPU = torch.device("cpu")
SIZES = {"train": 6, "valid": 3, "test": 5}
CONFIG = Config(
    hidden_size=16,
    features=8,
    frames=9,
    context=4,
    train_clips=5,
    valid_clips=3,
    test_clips=4,
    data_seed=2,
)
OPTIONS = {
    "preset": "quick",
    "steps": 4,
    "batch-size": 2,
    "checkpoint-every": 1,
    "validate-every": 2,
    "hidden-size": 16,
    "features": 8,
    "frames": 9,
    "context": 4,
    "train-clips": 5,
    "valid-clips": 3,
    "test-clips": 4,
    "data-seed": 2,
    "progress": "off",
    "device": "cpu",
}


def call(*args) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


def train(out, *more, experiment="balls") -> int:
    options = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    return call("train", experiment, *options, "--no-tensorboard", *more, "--out", out)


def told(run, name="evaluation.json"):
    found = json.loads((run / name).read_text())
    for apart in ("seconds", "environment"):
        found.pop(apart, None)
    return found


def only_the_originals(path):
    """Leaves what R-NEM's files tell."""
    with h5py.File(path, "a") as file:
        for group in file.values():
            for name in MORE.keys() & group.keys():
                del group[name]
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By variant; with more clips and frames than are asked for"""
    folder = tmp_path_factory.mktemp("files")
    sizes = ["--clips", 6, "--valid-clips", 3, "--test-clips", 5, "--seed", 2, "--device", "cpu"]
    assert call("data", "balls", *sizes, "--out", folder / "4balls.h5") == 0
    for variant in ("678balls", "curtain", "coloured4balls"):
        write_balls(folder / f"{variant}.h5", SIZES, variant, seed=2, frames=12)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, files):
    """The same, on generated clips and on those of a file"""
    folder = tmp_path_factory.mktemp("runs")
    assert train(folder / "generated", "--evaluate") == 0
    assert train(folder / "file", "--data", files / "4balls.h5", "--evaluate") == 0
    return folder


# --- the same clips, the same run


@pytest.mark.parametrize("variant", ["4balls", "curtain", "coloured4balls"])
def test_batches_are_those_of_generated_clips(files, variant, monkeypatch):
    monkeypatch.setattr(balls_data, "READ_AT_ONCE", 2)
    config = replace(CONFIG, variant=variant, colour=VARIANTS[variant].has_colours)
    generated = BallsTask(config, CPU)
    task = BallsTask(replace(config, data=str(files / f"{variant}.h5")), CPU)
    index = torch.tensor([4, 0, 3, 4])
    assert torch.equal(task.batch(index)[0], generated.batch(index)[0])
    assert task.kept["train"].pixels.shape == (5, 9, 64, 64)  # the file has more of both
    assert task.kept["train"].pixels.element_size() == 1
    index = torch.tensor([2, 1])
    assert torch.equal(task.clips(index, "valid").frames, generated.clips(index, "valid").frames)
    assert same(task.clips(index, "test"), generated.clips(index, "test"))


def test_a_run_on_a_file_is_the_one_on_its_clips(runs):
    file, generated = (outcome(runs / name) for name in ("file", "generated"))
    assert file["metrics"] == generated["metrics"]
    assert file["weights"] == generated["weights"]
    assert told(runs / "file") == told(runs / "generated")


def test_a_run_is_resumed_from_elsewhere(runs, files, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(files)
    with signalled(2, monkeypatch):
        assert train(tmp_path / "run", "--data", "4balls.h5") == 75
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("train", "--resume", tmp_path / "run", "--no-tensorboard", "--device", "cpu") == 0
    assert outcome(tmp_path / "run") == outcome(runs / "file")


def test_the_file_is_part_of_a_runs_identity(runs, tmp_path, capsys):
    assert train(runs / "file") == 2
    assert "already holds another run: its --data is" in capsys.readouterr().err
    assert call("report", runs, "--out", tmp_path / "report.html") == 2
    assert "cannot be compared: --data differs" in capsys.readouterr().err


@pytest.mark.gpu
def test_clips_of_a_file_from_a_cuda_graph(files):
    device = torch.device("cuda")
    for variant in ("4balls", "coloured4balls"):
        config = replace(CONFIG, variant=variant, colour=VARIANTS[variant].has_colours)
        task = BallsTask(replace(config, data=str(files / f"{variant}.h5")), device)
        index = torch.tensor([3, 1], device=device)
        task.batch(index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (frames,) = task.batch(index)
        index.copy_(torch.tensor([0, 4]))
        graph.replay()
        expected = balls(2, torch.tensor([0, 4]), variant, CONFIG.frames).frames
        assert torch.equal(frames.cpu(), expected)


# --- files that tell less


@pytest.mark.parametrize("variant", ["4balls", "curtain"])
def test_what_a_file_does_not_tell_is_not_measured(files, tmp_path, variant):
    config = replace(CONFIG, variant=variant, data=str(files / f"{variant}.h5"))
    model = make_model(config).eval()
    whole = evaluate(config, model, CPU)
    theirs = only_the_originals(shutil.copy(files / f"{variant}.h5", tmp_path / "theirs.h5"))
    found = evaluate(replace(config, data=str(theirs)), model, CPU)
    for key in ("by_event", "event_bits", "event_bits_at_most"):
        del whole["schemata"][key]
    assert found == whole


def test_a_file_without_colours_gets_those_of_generated_clips(files, tmp_path):
    variant = "coloured4balls"
    theirs = only_the_originals(shutil.copy(files / f"{variant}.h5", tmp_path / "theirs.h5"))
    config = replace(CONFIG, variant=variant, colour=True)
    model = make_model(config).eval()
    generated, task = BallsTask(config, CPU), BallsTask(replace(config, data=str(theirs)), CPU)
    index = torch.tensor([4, 0, 3])
    assert torch.equal(task.batch(index)[0], generated.batch(index)[0])
    whole = evaluate(config, model, CPU)
    for key in ("by_event", "event_bits", "event_bits_at_most"):
        del whole["schemata"][key]
    assert evaluate(task.config, model, CPU) == whole


def test_truth_that_no_measure_needs_may_be_laid_out_otherwise(files, tmp_path):
    config = replace(CONFIG, data=str(files / "4balls.h5"))
    model = make_model(config).eval()
    whole = evaluate(config, model, CPU)
    path = shutil.copy(files / "4balls.h5", tmp_path / "theirs.h5")
    with h5py.File(path, "a") as file:
        for group in file.values():
            frames, clips = group["events"].shape
            del group["velocities"], group["positions"], group["events"]
            group["positions"] = np.zeros((frames, clips, 16))
            group["events"] = np.zeros((frames, clips, 3))
    assert evaluate(replace(config, data=str(path)), model, CPU) == whole


def test_what_is_marked_but_not_lit_is_not_seen(files, tmp_path):
    path = shutil.copy(files / "4balls.h5", tmp_path / "theirs.h5")
    coloured = shutil.copy(files / "coloured4balls.h5", tmp_path / "coloured.h5")
    for each in (path, coloured):
        with h5py.File(each, "a") as file:
            file["training" if each == coloured else "test"]["features"][:, :, 20:40] = False
    clips = read_clips(replace(CONFIG, data=str(path)), torch.tensor([3, 1]))
    expected = balls(2, torch.tensor([3, 1]), "4balls", 9, "test").identity
    expected[:, :, 20:40] = 0
    assert torch.equal(clips.identity, expected)
    assert torch.equal(clips.frames[:, :, 0], (expected > 0).float())
    config = replace(CONFIG, variant="coloured4balls", colour=True, data=str(coloured))
    (frames,) = BallsTask(config, CPU).batch(torch.arange(3))
    assert frames[..., :20, :].any()
    assert not frames[..., 20:40, :].any()


@pytest.mark.parametrize(
    ("experiment", "variant"), [("balls", "4balls"), ("balls", "curtain"), ("schemata", "curtain")]
)
def test_a_page_about_such_a_run(files, tmp_path, capsys, experiment, variant):
    file = only_the_originals(shutil.copy(files / f"{variant}.h5", tmp_path / "theirs.h5"))
    more = ["--variant", variant, "--data", file, "--evaluate"]
    assert train(tmp_path / "run", *more, experiment=experiment) == 0, capsys.readouterr().err
    page = tmp_path / "report.html"
    assert call("report", tmp_path / "run", "--out", page) == 0, capsys.readouterr().err
    text = page.read_text()
    assert "SCOFF: schemata over time" in text
    assert f"--data {file}" in text  # the command that makes the run again
    assert "by what happens to it" not in text
    if experiment == "balls":
        assert "Balls found in rollouts" in text
        assert ("come out from behind the curtain" in text) == (variant == "curtain")
        assert text.count("data:image/gif") == 1
    file.rename(tmp_path / "moved.h5")
    assert call("report", tmp_path / "run", "--out", page) == 0
    text = page.read_text()
    assert "There are no pictures, for they need test clips: --data: there is no file" in text
    assert "SCOFF: schemata over time" not in text
    assert call("eval", tmp_path / "run", "--device", "cpu") == 2
    assert f"--data: there is no file {file}" in capsys.readouterr().err


# --- a file to be tested on


def test_a_run_is_tested_on_a_file(runs, files, tmp_path, capsys):
    before = content(runs)
    for name in ("generated", "file"):
        shutil.copytree(runs / name, tmp_path / name)
        command = ["eval", tmp_path / name, "--device", "cpu", "--data"]
        assert call(*command, files / "4balls.h5") == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "Rollouts, by number of frames" in said
        assert "How many schemata are in use" in said
        assert said.endswith(f"{tmp_path / name / 'data.json'}\n")
        found = told(tmp_path / name, "data.json")["measures"]
        assert found.pop("clips") == 4
        expected = told(runs / name)
        assert found == {key: expected[key] for key in found}
        assert {"rollout", "binding", "schemata", "next_frame"} <= found.keys()
    assert content(runs) == before
    assert "evaluation.json" in content(tmp_path / "file")


def test_all_test_clips_there_are_and_no_others_are_needed(runs, files, tmp_path, capsys):
    with h5py.File(files / "4balls.h5") as file, h5py.File(tmp_path / "test.h5", "w") as small:
        group = small.create_group("test")
        for name, data in file["test"].items():
            group[name] = data[:3] if name in ("radii", "masses") else data[:, :3]
    shutil.copytree(runs / "file", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"]["data"] = "/nowhere.h5"  # what it was trained on is gone
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    command = ["eval", tmp_path / "run", "--device", "cpu", "--data"]
    assert call(*command, tmp_path / "test.h5") == 0, capsys.readouterr().err
    assert told(tmp_path / "run", "data.json")["measures"]["clips"] == 3
    assert call(*command, files / "678balls.h5") == 2
    assert "--variant: got 4balls, which has 4 balls" in capsys.readouterr().err
    assert call(*command, tmp_path / "nothing.h5") == 2
    assert "--data: there is no file" in capsys.readouterr().err


# --- what cannot be


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("nowhere.h5", "", "--data: there is no file {file}"),
        ("notes.h5", "", "--data: {file}: cannot be read as HDF5"),
        ("maze.h5", "", "--data: {file}: no group 'training'; there is maps"),
        ("small.h5", "", "--data: {file} has frames of 32 by 32 pixels, wants 64 by 64"),
        ("untested.h5", "", "--data: {file}: no group 'test'; there is training, validation"),
        ("unmarked.h5", "", "--data: {file}: dataset test/groups: is not there"),
        (
            "swapped.h5",
            "",
            "--data: {file}: dataset test/positions: got shape (5, 51, 4, 2), wants ",
        ),
        (
            "uncoloured.h5",
            "--variant coloured4balls",
            "dataset training/colours: got shape (6, 3), wants (6, 4)",
        ),
        (
            "halfcoloured.h5",
            "--variant coloured4balls",
            "--data: {file} has colours in some of its groups only",
        ),
        (
            "ungrouped.h5",
            "--variant coloured4balls",
            "--data: {file}: dataset validation/groups: is not there",
        ),
        (
            "678balls.h5",
            "",
            "--variant: got 4balls, which has 4 balls without colours, but {file} has 8 balls "
            "without colours",
        ),
        ("coloured4balls.h5", "", "but {file} has 4 balls in colours"),
        ("678balls.h5", "--variant coloured4balls", "which has 4 balls in colours, but {file} has"),
        (
            "curtain.h5",
            "--variant curtain --frames 13",
            "--frames: got 13, wants at most 12, as many as {file} has",
        ),
        (
            "4balls.h5",
            "--train-clips 7 --test-clips 50",
            "--train-clips: got 7, wants at most 6; --test-clips: got 50, wants at most 5: there "
            "are no more in {file}",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(files, tmp_path, capsys, file, options, message):
    path = files / file if (files / file).exists() else tmp_path / file
    if file == "notes.h5":
        path.write_text("not a video")
    elif file == "maze.h5":
        with h5py.File(path, "w") as new:
            new["maps"] = np.zeros(3)
    elif file == "small.h5":
        with h5py.File(path, "w") as new:
            for group in ("training", "validation", "test"):
                new[f"{group}/features"] = np.zeros((12, 6, 32, 32, 1), bool)
                new[f"{group}/positions"] = np.zeros((12, 6, 4, 2))
    elif file in ("untested.h5", "unmarked.h5"):
        shutil.copy(files / "4balls.h5", path)
        with h5py.File(path, "a") as new:
            del new["test" if file == "untested.h5" else "test/groups"]
    elif file in ("halfcoloured.h5", "ungrouped.h5"):
        shutil.copy(files / "coloured4balls.h5", path)
        with h5py.File(path, "a") as new:
            if file == "ungrouped.h5":
                for group in new.values():
                    del group["colours"]
            del new["test/colours" if file == "halfcoloured.h5" else "validation/groups"]
    elif file == "swapped.h5":
        shutil.copy(files / "4balls.h5", path)
        with h5py.File(path, "a") as new:
            positions = new["test/positions"][:]
            del new["test/positions"]
            new["test/positions"] = positions.swapaxes(0, 1)
    elif file == "uncoloured.h5":
        shutil.copy(files / "coloured4balls.h5", path)
        with h5py.File(path, "a") as new:
            del new["training/colours"]
            new["training/colours"] = np.zeros((6, 3), np.uint8)
    assert train(tmp_path / "run", "--data", path, *options.split()) == 2
    said = capsys.readouterr().err
    assert message.format(file=path) in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_damage_is_told_in_a_line(files, tmp_path, capsys):
    path = shutil.copy(files / "4balls.h5", tmp_path / "copy.h5")
    with h5py.File(path) as file:
        chunk = file["training"]["features"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 0x55
    path.write_bytes(data)
    assert train(tmp_path / "run", "--data", path) == 2
    assert "dataset training/features: is damaged" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(files, tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "scoff.worlds.balls_file", raising=False)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert train(tmp_path / "run", "--data", files / "4balls.h5") == 2
    said = capsys.readouterr().err
    assert "--data: the package h5py is not installed: pip install 'scoff[data]'" in said
    assert not (tmp_path / "run").exists()


def test_runs_from_before_there_were_files():
    held = vars(CONFIG) | {}
    del held["data"]
    assert find_experiment("balls").read_config(held) == CONFIG
