"""The benchmarks run; what they say is in results/."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
