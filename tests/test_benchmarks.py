"""The benchmarks run; what they say is in results/."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scoff.pretrained import find

ROOT = Path(__file__).parent.parent


def test_the_engine_against_a_bare_loop():
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "engine.py"),
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["gru", "scoff-sparse"]


def test_speed_beside_a_gru():
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--device", "cpu"]
    command += ["--runs", "2", "--", "--rounds", "1", "--batch", "2", "--length", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SCOFF, batched") == 1  # the first run's table
    name, first, second, median, alone = done.stdout.splitlines()[-1].split()
    assert name == "adding"
    assert float(alone) > 0
    assert float(median) == pytest.approx((float(first) + float(second)) / 2, abs=0.011)


def test_how_fast_clips_are_made():
    command = [sys.executable, str(ROOT / "benchmarks" / "worlds.py"), "--clips", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:]]
    assert rows[:4] == ["three", "switching", "4balls", "678balls"]


def test_how_far_balls_can_be_foreseen(tmp_path):
    run, short = find("4balls") / "4balls-scoff-0", tmp_path / "short"
    shutil.copytree(run, short)
    config = json.loads((short / "config.json").read_text())
    config["config"]["frames"] = config["config"]["context"] + 7
    (short / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "benchmarks" / "foresight.py"), "--clips", "2"]
    done = subprocess.run(
        [*command, "--errors", "0", "1", "--runs", str(run), str(short)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    laws, run_table, short_table = (table.splitlines() for table in done.stdout.split("\n\n"))
    exact, _ = (row.split() for row in laws[1:])
    assert exact == ["0.0", *["1.00"] * 6, *["0.000"] * 2]
    assert [row.split()[0] for row in run_table[2:]] == ["nothing", "walls", "balls"]
    # of two clips of four balls, all at each horizon
    cells = [row[12:].split(" of ")[1:] for row in run_table[2:]]
    counts = [[int(cell.split()[0]) for cell in row] for row in cells]
    assert [sum(row) for row in zip(*counts, strict=True)] == [8] * 6
    assert short_table[1].split() == ["met", "1", "5"]
    assert any("-, - of    0" in row for row in run_table)


def told(fact: str, *arguments: str | Path) -> list[list[str]]:
    """The words of each line of benchmarks/facts.py"""
    command = [sys.executable, str(ROOT / "benchmarks" / "facts.py"), fact, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_facts_of_worlds_and_untrained_models():
    assert told("lasting") == [["halves", "0.477"], ["dynamics", "0.438"]]  # as docs/video.md says
    rows = told("forgetting", "--clips", "2")[1:]
    apart = [[float(word) for word in row[:4]] for row in rows]
    assert [row[0] for row in apart] == 2 * [1, 10, 50]
    assert apart[0][1] > 2 * apart[1][1] > 4 * apart[2][1]
    assert [row[-1] for row in rows] == 3 * ["evaluation"] + 3 * ["training"]
    assert apart[5][1] > 4 * apart[2][1]  # what is drawn keeps them apart
    assert all(least <= mean <= most for _, mean, least, most in apart)
    _, returns, _, frames, *_ = told("returning", "--clips", "36")[0]
    assert frames == str(36 * 25)
    assert 9 < int(returns) < 90


def test_facts_of_a_ball_that_changes_its_way(tmp_path):
    run, stuck = find("switching") / "scoff-2", tmp_path / "stuck"
    shutil.copytree(run, stuck)
    weights = load_file(run / "weights.safetensors")
    weights["rnn.cells.0.schema_query"] *= 0  # all schemata have the same merit: the first is taken
    save_file(weights, stuck / "weights.safetensors")
    right, wrong = told("mistakes", run, stuck, "--clips", "4")
    assert right[:3] == ["0", "of", str(4 * 44)]
    # of four clips two change to the dynamics for which no schema is left
    assert 44 < int(wrong[0]) < 132
    assert wrong[4] == "2"
    change, might, everywhere = map(float, told("bulbs", run, "--clips", "4")[1][:3])
    assert change > might > everywhere
    # of the 46 predictions of a clip one is of the frame in which they change
    assert 46 * everywhere > change + might


def test_facts_of_bouncing_balls(tmp_path):
    run, sure = find("4balls") / "4balls-gru-matched-0", tmp_path / "sure"
    shutil.copytree(run, sure)
    config = json.loads((sure / "config.json").read_text())
    config["config"]["doubt"] = 0.0
    (sure / "config.json").write_text(json.dumps(config))
    _, *rows = told("sureness", run, sure, "--clips", "1")
    assert [row[1] for row in rows] == ["1e-06", "0.01"] * 2
    unsure, _, one, ten, thirty = map(float, rows[0][:5])
    assert 0 < unsure < 1
    assert 0.01 < one < ten < thirty
    assert rows[0][2:] == rows[1][2:]  # with doubt it is never surer than that
    assert float(rows[2][4]) > float(rows[3][4])  # without, that saves much of what is lost


def test_levels_with_longer_tails():
    rows = told("tails", "--steps", "2", "--clips", "2")
    assert [row[0] for row in rows] == ["DiscreteNormal", "DiscreteLogistic"]
    assert all(-1 <= float(row[1]) <= 1 for row in rows)
    path = ROOT / "benchmarks" / "facts.py"
    spec = importlib.util.spec_from_file_location("facts", path)
    assert spec is not None
    assert spec.loader is not None
    facts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(facts)
    levels = (torch.arange(256) / 255)[:, None, None, None]
    for logit in (-3.0, 0.2):
        errors = facts.DiscreteLogistic(1).pixels(torch.full_like(levels, logit), levels)
        assert (-errors).exp().sum().item() == pytest.approx(1, abs=1e-4)


def test_how_fast_agents_walk():
    command = [sys.executable, str(ROOT / "benchmarks" / "maze.py"), "--room-sizes", "4", "8"]
    command += ["--steps", "2", "--num-envs", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["levels", "codes", "pictures"]
    assert all(len(row) == 3 for row in rows)


def test_how_fast_movies_of_physics_are_made():
    command = [sys.executable, str(ROOT / "benchmarks" / "intphys.py")]
    done = subprocess.run(
        [*command, "--quadruplets", "1", "--clips", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:]]
    assert rows == ["O1", "O2", "O3", "training", "files"]


def test_how_fast_video_models_train():
    command = [sys.executable, str(ROOT / "benchmarks" / "video.py"), "--batch", "1"]
    command += ["--frames", "8", "--clips", "2", "--steps", "1", "--rounds", "1"]
    command += ["--models", "scoff", "gru"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:] if line]
    assert rows[:2] == ["scoff", "gru"]
    assert rows[3:] == ["clips", "encoder", "layer", "decoder", "likelihood", "(mixing)"]


def profile_of_ppo(device: str) -> tuple[list[str], dict[str, dict[str, list[str]]]]:
    """The rows of speed, and the tables of the parts: by title, by part, the numbers"""
    command = [sys.executable, str(ROOT / "benchmarks" / "ppo.py"), "--preset", "quick"]
    command += ["--batch-size", "4", "--hidden-size", "10", "--rounds", "1", "--profile"]
    command += ["--rollout-steps", "4", "--sequence-steps", "2", "--room-size", "4"]
    done = subprocess.run([*command, "--device", device], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    speed, *tables = done.stdout.split("\n\n")
    parts = {}
    for table in tables:
        title, *rows = table.splitlines()
        parts[title[:26].strip()] = {row[:26].strip(): row[26:].split() for row in rows}
    return speed.splitlines()[2:], parts


def test_how_fast_agents_learn():
    speed, parts = profile_of_ppo("cpu")
    rows = [row.split() for row in speed]
    assert [row[0] for row in rows] == ["scoff", "gru"]
    assert all(len(row) == 5 for row in rows)
    titles = [f"{model}, {phase}" for model in ("scoff", "gru") for phase in ("rollout", "update")]
    assert list(parts) == titles
    for rows in parts.values():
        assert {"encoder", "layer", "all else", "whole"} < set(rows)
        *some, whole = (float(row[0]) for row in rows.values())
        assert sum(some) == pytest.approx(whole, abs=0.1)
        assert rows["whole"][1:] == ["100%"]


@pytest.mark.gpu
def test_the_parts_of_learning_have_no_more_kernels_than_the_whole():
    _, parts = profile_of_ppo("cuda")
    assert len(parts) == 4
    for rows in parts.values():
        assert all(int(row[2].replace(",", "")) > 0 for row in rows.values())
