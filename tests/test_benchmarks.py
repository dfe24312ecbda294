"""The benchmarks run; what they say is in results/."""

import subprocess
import sys
from pathlib import Path

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


def test_how_fast_clips_are_made():
    command = [sys.executable, str(ROOT / "benchmarks" / "worlds.py"), "--clips", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:]]
    assert rows[:4] == ["three", "switching", "4balls", "678balls"]


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
    command += ["--frames", "3", "--clips", "2", "--steps", "1", "--rounds", "1"]
    command += ["--models", "scoff", "gru"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:] if line]
    assert rows[:2] == ["scoff", "gru"]
    assert rows[3:] == ["clips", "encoder", "layer", "decoder", "likelihood", "(mixing)"]


def test_how_fast_agents_learn():
    command = [sys.executable, str(ROOT / "benchmarks" / "ppo.py"), "--preset", "quick"]
    command += ["--batch-size", "4", "--hidden-size", "10", "--rounds", "1"]
    command += ["--rollout-steps", "4", "--sequence-steps", "2", "--room-size", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["scoff", "gru"]
    assert all(len(row) == 5 for row in rows)
