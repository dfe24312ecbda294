"""The `scoff` command: what a newcomer types, right and wrong."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scoff.cli import main
from scoff.training.run import Run

TINY = [
    "--preset",
    "quick",
    "--steps",
    "3",
    "--batch-size",
    "4",
    "--length",
    "6",
    "--hidden-size",
    "10",
    "--test-lengths",
    "8",
    "--test-operands",
    "2",
    "4",
    "--test-sequences",
    "6",
    "--valid-sequences",
    "5",
    "--no-tensorboard",
]


def run(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with two runs that were trained and tested."""
    folder = tmp_path_factory.mktemp("runs")
    for model in ("scoff-sparse", "gru"):
        out = folder / f"{model}-0"
        assert run("train", "adding", "--model", model, *TINY, "--out", out, "--evaluate") == 0
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def test_help_of_every_command(capsys):
    assert run("--help") == 0
    overview = capsys.readouterr().out
    for command in ("list", "train", "eval", "reproduce", "report", "bench", "data"):
        assert f"scoff {command}" in overview
        assert run(command, "--help") == 0
        assert "usage: scoff " + command in capsys.readouterr().out


def test_help_of_train_explains_every_option(capsys):
    assert run("train", "adding", "--help") == 0
    text = capsys.readouterr().out
    for option in [
        "model",
        "preset",
        "seed",
        "steps",
        "checkpoint-every",
        "out",
        "device",
        "hidden-size",
        "length",
    ]:
        assert f"--{option} " in text
    # an option, what it takes, then what it does
    options = re.split(r"\n│ (?=-)", text)[1:]
    for option in options:
        words = re.sub(r"[│╭╮╰╯─\n]", " ", option).split("(default:")[0]
        assert re.search(r"[a-z]{2,} [a-z]+", words), option
    assert "pyright" not in text


def test_defaults_follow_the_preset(capsys):
    run("train", "adding", "--preset", "quick", "--help")
    quick = capsys.readouterr().out
    run("train", "adding", "--preset=paper", "--help")
    paper = capsys.readouterr().out
    assert "(default: 156250)" in paper
    assert "(default: 156250)" not in quick


def test_list(capsys):
    assert run("list") == 0
    text = capsys.readouterr().out
    for word in (
        "adding",
        "scoff-sparse",
        "rims",
        "rmc",
        "quick",
        "paper",
        "4balls, 4balls-further, dynamics",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "there is no command 'trian' (did you mean train?)"),
        ("train", "wants an experiment or --resume RUN: adding"),
        ("train --steps 3 adding", "the experiment comes first: scoff train adding ..."),
        ("train addin", "there is no experiment 'addin' (did you mean adding?)"),
        ("train adding --stpes 3", "there is no option --stpes (did you mean --steps?)"),
        ("train adding --steps many", "--steps"),
        ("train adding --steps 0", "--steps: got 0, wants at least 1"),
        ("train adding --model transformer", "--model: got 'transformer', wants one of scoff,"),
        ("train adding --preset large", "--preset: got 'large', wants one of quick,"),
        ("train adding --device cuda:99", "--device: got 'cuda:99', but torch finds"),
        ("train adding --device tpu", "--device: got 'tpu', wants cpu"),
        (
            "train adding --hidden-size 7",
            "--hidden-size: got 7, wants a multiple of --object-files",
        ),
        ("train adding --operands 2 99", "operands (2, 99) among 50 numbers"),
        ("train adding --precision 8", "--precision"),
        ("train adding --test-lengths", "--test-lengths: got none"),
        ("train adding --data-seed -1", "--data-seed: got -1"),
        ("train adding --readout-std -1", "--readout-std: got -1"),
        ("train adding --keep nan", "--keep: got"),
        ("train adding --keep 1 2 3", "--keep: got 3 numbers, wants 1 or --schemata = 2"),
        ("train adding --valid-length 0", "among 0 numbers"),
        ("train adding --acceleration graph --device cpu", "wants a single GPU"),
        (
            "train adding --backend fused --device cpu",
            "--backend: got fused, which runs on a GPU, not on --device cpu",
        ),
        ("train balls --preset quick --persistence nan", "--persistence: got nan, wants a number"),
        ("train balls --preset quick --initial-std -1", "initial_std: got -1.0, wants at least 0"),
        ("train balls --data-seed 18446744073709551616", "wants a number below 2^64"),
        (
            "train balls --preset quick --model gru-matched --map-size 64",
            "--model: got gru-matched, but the nearest GRU has 390,",
        ),
        ("train adding --resume nowhere", "takes no experiment"),
        ("eval nowhere --threads 0", "--threads: got 0"),
        ("report nowhere --out notes.md", "wants a name that ends in .html"),
        ("reproduce adding --hidden-size 101", "--hidden-size: got 101"),
        ("train --resume nowhere", "nowhere holds no run"),
        ("train --resume", "--resume"),
        ("eval", "wants the folder of at least one run"),
        ("eval nowhere", "nowhere holds no run"),
        ("report nowhere", "nowhere holds no run"),
        ("reproduce adding --models scof", "--models: got 'scof', wants some of scoff,"),
        ("reproduce adding --seed 3", "--seed is no option of reproduce (did you mean --seeds?)"),
        ("reproduce", "wants an experiment: adding"),
        ("reproduce adding --seeds 0", "--seeds: got 0"),
        ("reproduce adding --jobs 0", "--jobs: got 0"),
        ("reproduce adding --models nothing", "--models: got 'nothing'"),
        ("reproduce adding --model gru", "--model is no option of reproduce"),
        ("reproduce adding --preset nothing", "--preset: got 'nothing'"),
        ("reproduce adding --bogus 1", "there is no option --bogus"),
        ("bench --rounds 0", "--rounds: got 0"),
        ("bench --settings maize", "--settings: got 'maize', wants one of adding, balls,"),
        ("bench --backends slow", "--backends: got 'slow', wants one of fused, wide, batched,"),
        ("bench --object-files 0", "--object-files: got 0, wants at least 1"),
        ("bench --dtype float8", "--dtype"),
        ("bench --device tpu", "--device: got 'tpu', wants cpu"),
        ("bench --json nowhere/bench.json", "--json: got nowhere/bench.json, wants a file in"),
        ("list everything", "everything"),
        ("data", "wants the world to take clips of: balls"),
        ("data bowls", "got 'bowls', wants the world"),
        ("data balls", "--out"),
        ("data intphys", "--out"),
        ("data intphys --out new --train -1", "--train: got -1, wants at least 0"),
        ("data intphys --out new --train 0 --dev 0 --test 0", "wants at least one of them above"),
        ("data intphys --out new --min-hidden 3", "--min-hidden: got 3, wants at least 4"),
        ("data intphys --out new --frames 10", "--frames: got 10, wants at least 40"),
        ("data intphys --out new --seed -1", "--seed: got -1"),
        ("data intphys --out new --layout 2020", "--layout"),
        ("data intphys --out nowhere/new", "wants a name in a folder that there is"),
        ("data intphys-cache nowhere --out new --size 0", "--size: got 0, wants at least 1"),
        ("data balls --out balls.h5 --variant 5balls", "--variant"),
        ("data balls --out balls.h5 --clips 0", "--clips: got 0, wants at least 1"),
        ("data balls --out balls.h5 --test-clips -1", "--test-clips: got -1, wants at least 0"),
        ("data balls --out balls.h5 --seed -1", "--seed: got -1"),
        ("data balls --out balls.h5 --device tpu", "--device: got 'tpu', wants cpu"),
        ("data balls --out balls.npz", "--out: got balls.npz, wants a name that ends in .h5"),
        ("data balls --out nowhere/balls.h5", "in a folder that there is"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith("scoff: ")
    assert message in told.err
    assert list(tmp_path.iterdir()) == []


def bytes_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "gru"], "already holds this run; go on with: scoff train --resume"),
        (
            ["--model", "gru", "--lr", "0.5"],
            "already holds another run: its --lr is 0.003, not 0.5",
        ),
        (["--model", "lstm"], "already holds another run: its --model is gru, not lstm"),
    ],
)
def test_a_folder_that_holds_a_run_is_left_alone(more, message, trained, capsys):
    before = bytes_of(trained)
    assert run("train", "adding", *TINY, *more, "--out", trained / "gru-0") == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert bytes_of(trained) == before


@pytest.mark.parametrize("command", ["train", "reproduce"])
def test_a_folder_that_cannot_be_written(command, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert run(command, "adding", *TINY, "--out", tmp_path / "file" / "run") == 2
    told = capsys.readouterr().err
    assert "cannot write to" in told
    assert told.count("\n") == 1
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_foreign_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert run("train", "adding", *TINY, "--out", tmp_path) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_folder_holds_what_it_should(trained):
    run_folder = trained / "scoff-sparse-0"
    names = {path.name for path in run_folder.iterdir()}
    trained_files = {"config.json", "metrics.jsonl", "checkpoints", "training.json"}
    assert names == trained_files | {"weights.safetensors", "evaluation.json"}
    held = json.loads((run_folder / "config.json").read_text())
    assert (held["experiment"], held["preset"], held["config"]["steps"]) == ("adding", "quick", 3)
    assert held["environment"]["torch"]
    result = json.loads((run_folder / "evaluation.json").read_text())
    assert result["errors"]["8"].keys() == {"2", "4"}
    assert result["steps"] == 3
    assert result["seconds"]["training"] > 0
    assert {"schemata", "example", "parameters", "environment"} <= result.keys()


def test_training_a_finished_run_again_changes_nothing(trained, capsys):
    before = bytes_of(trained)
    assert run("train", "--resume", trained / "gru-0") == 0
    assert "is trained already" in capsys.readouterr().err
    assert bytes_of(trained) == before


def test_eval_gives_the_same_numbers_again(copied, capsys):
    path = copied / "scoff-sparse-0" / "evaluation.json"
    before = json.loads(path.read_text())
    assert run("eval", copied / "scoff-sparse-0") == 0
    assert "Mean squared error on 8 numbers" in capsys.readouterr().out
    after = json.loads(path.read_text())
    assert after["errors"] == before["errors"]
    assert after["schemata"] == before["schemata"]


@pytest.mark.parametrize("other", ["of another experiment", "nowhere"])
def test_eval_of_runs_that_do_not_go_together_tests_none(copied, capsys, other):
    second, message = copied / "nowhere", "nowhere holds no run"
    if other == "of another experiment":
        second, message = copied / "gru-0", "wants runs of one experiment, got adding, balls"
        path = second / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "experiment": "balls"}))
    before = bytes_of(copied)
    assert run("eval", copied / "scoff-sparse-0", second) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert bytes_of(copied) == before


def test_training_tells_the_size_and_what_eval_tells(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", "adding", "--model", "gru", *TINY, "--out", out, "--evaluate"]
    assert run(*command) == 0
    told = capsys.readouterr()
    parameters = json.loads((out / "evaluation.json").read_text())["parameters"]
    assert told.err.splitlines()[0] == f"adding gru 0: {parameters:,} parameters"
    assert run("eval", out) == 0
    assert told.out == capsys.readouterr().out
    assert "Mean squared error on 8 numbers" in told.out
    # as reproduce asks for
    quiet = [*command[:-2], tmp_path / "other", "--evaluate", "--progress", "off"]
    assert run(*quiet) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "other" / "evaluation.json").exists()


def test_report(trained, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert run("report", trained, "--out", page) == 0
    assert capsys.readouterr().out.strip() == str(page)
    html = page.read_text()
    for text in ("SCOFF, sparse", "GRU", "Mutual information", "scoff train adding --preset quick"):
        assert text in html


def test_report_passes_over_what_lies_beside_the_runs(trained, tmp_path):
    for name in ("gru-0.log", "tables.md"):
        (tmp_path / name).write_text("")
    page = tmp_path / "page.html"
    assert run("report", *sorted(tmp_path.iterdir()), *trained.glob("*/"), "--out", page) == 0
    assert run("report", tmp_path / "tables.md", "--out", page) == 2


def test_a_page_tells_its_command_as_it_was_given(trained, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.chdir(trained)
    assert run("report", "gru-0", "--out", page) == 0
    assert f"<code>scoff report gru-0 --out {page}</code>" in page.read_text()


def test_a_run_that_was_not_tested_is_named(copied, capsys, tmp_path):
    (copied / "gru-0" / "evaluation.json").unlink()
    page = tmp_path / "page.html"
    assert run("report", copied, "--out", page) == 0
    assert f"not tested: scoff eval {copied / 'gru-0'}" in page.read_text()
    capsys.readouterr()
    assert run("report", copied / "gru-0", "--out", tmp_path / "none.html") == 2
    assert "none of these was tested yet" in capsys.readouterr().err
    assert not (tmp_path / "none.html").exists()


def test_what_an_unfinished_run_gave_does_not_stay(tmp_path):
    """Tested at a checkpoint, then trained to the end."""
    command = [*TINY, "--models", "gru", "--seeds", "1", "--out", tmp_path]
    assert run("reproduce", "adding", *command) == 0
    path = tmp_path / "gru-0" / "evaluation.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "steps": 2, "errors": "of step 2"}))
    (tmp_path / "gru-0" / "weights.safetensors").unlink()
    assert run("reproduce", "adding", *command) == 0
    again = json.loads(path.read_text())
    assert (again["steps"], again["errors"]) == (3, result["errors"])


def test_a_page_tells_where_a_run_was_trained(copied, tmp_path):
    path = copied / "gru-0" / "config.json"
    held = json.loads(path.read_text())
    held["environment"]["commit"] = "the-commit-of-training"
    path.write_text(json.dumps(held))
    assert run("report", copied, "--out", tmp_path / "page.html") == 0
    assert "the-commit-of-training" in (tmp_path / "page.html").read_text()


def test_steps_and_time_do_not_need_the_checkpoints(copied):
    shutil.rmtree(copied / "gru-0" / "checkpoints")
    path = copied / "gru-0" / "evaluation.json"
    before = json.loads(path.read_text())
    assert run("eval", copied / "gru-0") == 0
    after = json.loads(path.read_text())
    assert after["steps"] == before["steps"] == 3
    assert after["seconds"]["training"] == before["seconds"]["training"] > 0


def test_the_command_in_a_report_makes_the_same_run(trained, tmp_path):
    from scoff.experiments.reproduce import command_of

    held = json.loads((trained / "scoff-sparse-0" / "config.json").read_text())
    assert "--no-additive" in command_of({**held, "config": {**held["config"], "additive": False}})
    command = command_of(held).split()
    assert command[:3] == ["scoff", "train", "adding"]
    assert run(*command[1:], "--out", tmp_path / "again", "--no-tensorboard") == 0
    for name in ("weights.safetensors", "metrics.jsonl"):
        same = (trained / "scoff-sparse-0" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == same


def test_reproduce_from_nothing_and_again(tmp_path, capfd):
    command = ["reproduce", "adding", *TINY, "--models", "scoff", "lstm", "--out", tmp_path]
    command += ["--progress", "lines"]
    assert run(*command, "--seeds", 1) == 0
    told = capfd.readouterr()
    assert "Mean squared error on 8 numbers" in told.out
    assert str(tmp_path / "report.html") in told.out
    assert "SCOFF" in (tmp_path / "report.html").read_text()
    assert "| LSTM |" in (tmp_path / "tables.md").read_text()
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/weights.safetensors")}
    assert len(stamps) == 2
    # what is there is not done again; what is missing is
    (tmp_path / "lstm-0" / "evaluation.json").unlink()
    assert run(*command, "--seeds", 1) == 0
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert (tmp_path / "lstm-0" / "evaluation.json").exists()
    # and other settings are not mixed in
    assert run(*command, "--seeds", 1, "--lr", "0.1") == 2
    assert "already holds another run: its --lr is" in capfd.readouterr().err


def test_reproduce_stops_its_runs_and_goes_on(tmp_path):
    command = ["reproduce", "adding", *TINY, "--models", "gru", "--seeds", "1", "--out", tmp_path]
    command = [*map(str, command), "--steps", "900", "--checkpoint-every", "20"]
    process = subprocess.Popen([sys.executable, "-m", "scoff", *command], stderr=subprocess.PIPE)
    checkpoints = tmp_path / "gru-0" / "checkpoints"
    while not list(checkpoints.glob("step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 75
    assert b"the same command goes on from here" in told
    with Run(tmp_path / "gru-0").locked():  # nobody trains there any more
        stopped = Run(tmp_path / "gru-0").step()
    assert 0 < stopped < 900
    assert run(*command) == 0
    assert "going on from" in (tmp_path / "gru-0.log").read_text()
    assert Run(tmp_path / "gru-0").step() == 900


def test_reproduce_goes_on_when_a_run_fails(tmp_path, capfd):
    command = ["reproduce", "adding", *TINY, "--models", "gru", "lstm", "--seeds", 1]
    (tmp_path / "lstm-0").mkdir()
    (tmp_path / "lstm-0" / "thesis.tex").write_text("precious")
    assert run(*command, "--out", tmp_path) == 1
    told = capfd.readouterr()
    assert "lstm-0 failed: " in told.err
    assert "Runs that are in none of the tables" in told.out
    assert "is not empty and holds no run" in (tmp_path / "report.html").read_text()
    assert "1 of 2 runs failed" in told.err
    assert "GRU" in told.out


def test_without_h5py_the_command_says_what_to_install(tmp_path):
    code = "import sys\nsys.modules['h5py'] = None\nfrom scoff.__main__ import main\nmain()\n"
    command = [sys.executable, "-c", code, "data", "balls", "--out", str(tmp_path / "balls.h5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "scoff: h5py is missing: pip install 'scoff[data]'\n"


@pytest.mark.parametrize("module", ["tyro", "lightning_fabric"])
def test_without_the_extra_packages_the_command_says_what_to_install(module):
    code = f"import sys\nsys.modules[{module!r}] = None\nfrom scoff.__main__ import main\nmain()\n"
    command = [sys.executable, "-c", code, "train", "adding"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'scoff[experiments]'" in done.stderr


def test_a_page_of_somebody_elses_is_not_overwritten(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # its own page is
        assert run("report", trained / "gru-0") == 0
    Path("report.html").write_text("<p>mine</p>")
    assert run("report", trained / "gru-0") == 2
    assert "is no page of scoff's: not overwritten" in capsys.readouterr().err
    assert Path("report.html").read_text() == "<p>mine</p>"


def test_what_is_about_to_happen_is_told(tmp_path, capsys):
    command = ["reproduce", "adding", "--models", "gru", "--seeds", 1, *TINY, "--device", "cpu"]
    assert run(*command, "--out", tmp_path / "a") == 0
    told = capsys.readouterr().err
    assert told.startswith("Add the marked numbers of a sequence")
    assert "preset quick: small and short" in told
    assert "1 run: gru; seeds: 1" in told
    assert "you may want" not in told
    small = TINY[TINY.index("--steps") :]
    assert run("train", "adding", *small, "--device", "cpu", "--out", tmp_path / "b") == 0
    assert "on a CPU you may want --preset quick" in capsys.readouterr().err
