"""The folder of a run: nothing in it is ever overwritten by another."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from scoff.training.errors import StorageError, UsageError
from scoff.training.run import Run, differences, read_records, restarted
from scoff.training.settings import Settings
from tests.training.helpers import content, fit_toy

SETTINGS = Settings(steps=3, batch_size=4)


@pytest.fixture
def made(tmp_path):
    Run.create(tmp_path / "run", "toy", "quick", SETTINGS)
    return tmp_path / "run"


def refused(path, message, settings=SETTINGS, experiment="toy"):
    before = content(path.parent)
    with pytest.raises(UsageError, match=message) as error:
        Run.create(path, experiment, "quick", settings)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert content(path.parent) == before


def test_a_new_folder(tmp_path):
    run = Run.create(tmp_path / "some" / "run", "toy", "quick", SETTINGS)
    held = run.read_config()
    assert (held["experiment"], held["preset"]) == ("toy", "quick")
    assert held["config"] == vars(SETTINGS)
    assert held["environment"].keys() >= {"scoff", "commit", "torch", "python", "gpu"}
    assert (run.finished, run.step(), run.seconds()) == (False, 0, 0.0)
    assert run.read_metrics() == []
    assert run.read_evaluation() is None
    with pytest.raises(UsageError, match="has neither weights nor a checkpoint yet"):
        run.read_weights()


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "run").mkdir()
    Run.create(tmp_path / "run", "toy", "quick", SETTINGS)


def test_so_will_that_of_one_killed_while_it_made_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.123.tmp").write_text("{")
    run = Run.create(tmp_path / "run", "toy", "quick", SETTINGS)
    fit_toy(run.path, SETTINGS)
    assert not list(run.path.glob(".*"))


def test_the_same_run(made):
    refused(made, f"already holds this run; go on with: scoff train --resume {made}")


def test_the_same_run_again_after_a_restart(made, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Run.create(made, "toy", "quick", SETTINGS) == Run(made)
    refused(made, "already holds another run", replace(SETTINGS, lr=0.5))


def test_another_config(made):
    refused(
        made,
        "already holds another run: its --lr is 0.001, not 0.5; choose another --out",
        replace(SETTINGS, lr=0.5),
    )
    other = replace(SETTINGS, lr=0.5, seed=3, steps=9, clip=None)
    refused(made, r"its --seed is 0, not 3, .* and 1 more; choose", other)


def test_two_processes_do_not_train_in_one_folder(made):
    before = content(made)
    with Run(made).locked():
        with pytest.raises(UsageError, match="another process is training in"):
            fit_toy(made, SETTINGS)
        assert content(made) == before
    fit_toy(made, SETTINGS)
    assert Run(made).finished


def test_another_experiment(made):
    refused(made, "another run: its experiment is toy", experiment="adding")


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    refused(tmp_path / "run", "is not empty and holds no run; choose another --out")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("a file")
    refused(tmp_path / "run", "--out: cannot write to .*run: Not a directory")
    refused(tmp_path / "run" / "inside", "--out: cannot write to .*inside: Not a directory")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"experiment": "toy"}', "\udcff", "null"])
def test_a_damaged_config(made, text):
    (made / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(made, r"config\.json is damaged")
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        Run.open(made).read_config()


def test_opening_what_is_none(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=f"{path} holds no run"):
            Run.open(path)


def test_a_folder_that_cannot_be_written_to(made, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may always
    with pytest.raises(UsageError, match=f"cannot write to {made}"):
        Run.open(made, to_write=True)


def test_tuples_are_not_a_difference():
    held = json.loads(json.dumps({"experiment": "toy", "config": vars(SETTINGS)}))
    assert differences(held, "toy", SETTINGS) == ""
    del held["config"]["lr"]  # of an older version
    assert differences(held, "toy", SETTINGS) == "its --lr is None, not 0.001"


def test_weights_of_a_run(tmp_path):
    run = fit_toy(tmp_path / "run", SETTINGS)
    final = run.read_weights()
    (tmp_path / "run" / "weights.safetensors").unlink()
    newest = run.read_weights()
    assert final.keys() == newest.keys()
    assert all(torch.equal(final[name], newest[name]) for name in final)
    assert run.step() == 3
    assert run.seconds() > 0


def test_weights_that_are_no_safetensors_are_refused(tmp_path):
    ran = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    run = fit_toy(tmp_path / "run", SETTINGS)
    whole = run.weights_path.read_bytes()
    torch.save({"a.weight": Payload()}, run.weights_path)
    with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
        run.read_weights()
    assert not ran.exists()
    for data in (b"", whole[:-1], whole[:7]):
        run.weights_path.write_bytes(data)
        with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
            run.read_weights()


def test_records_that_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_bytes(b'{"step": 1, "x": 0.5}\n{"step": 2, "x": null}\n{"step": 3, "x": \xff')
    first, second = read_records(path)
    assert first == {"step": 1, "x": 0.5}
    assert math.isnan(second["x"])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TORCHELASTIC_RESTART_COUNT", "0", False),
        ("TORCHELASTIC_RESTART_COUNT", "2", True),
        ("SLURM_RESTART_COUNT", "1", True),
        ("SLURM_RESTART_COUNT", "", False),
    ],
)
def test_restarts_are_noticed(monkeypatch, name, value, expected):
    assert not restarted()
    monkeypatch.setenv(name, value)
    assert restarted() is expected
