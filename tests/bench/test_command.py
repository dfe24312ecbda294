"""`scoff bench` as it is typed."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import scoff.bench
from scoff.bench.floor import Floor, Machine, Work
from scoff.bench.settings import SETTINGS, choose_settings
from scoff.bench.table import Row, Section, section_text
from scoff.bench.timing import Timing
from scoff.cli import main
from scoff.ops.scoff import dispatch

TINY = "--device cpu --rounds 1 --batch 2 --length 3 --object-files 2 --size 4 --schemata 3"
MACHINE = Machine("abacus", bandwidth=1e9, rate=1e9, latency=1e-6)


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A known one: to measure it is tested elsewhere."""
    monkeypatch.setattr(scoff.bench, "measure_machine", lambda *_: MACHINE)


def run(command):
    with pytest.raises(SystemExit) as end:
        main(["bench", *command.split()])
    return end.value.code


def rows_of(text):
    """What follows the name of each layer."""
    names = ("nn.GRU ", "nn.LSTM ", "flashrnn, LSTM ", "SCOFF, ")
    lines = (line for line in text.splitlines() if line.startswith(names))
    return {line[:18].strip(): line[18:].split() for line in lines if "read one" not in line}


def test_one_table(capsys):
    assert run(TINY) == 0
    told = capsys.readouterr()
    rows = rows_of(told.out)
    assert list(rows) == ["nn.GRU", "nn.LSTM", "SCOFF, batched", "SCOFF, reference"]
    for name, (parameters, *times, peak, floor) in rows.items():
        assert int(parameters.replace(",", "")) > 0
        assert len(times) == 5
        assert all(float(time) >= 0 for time in [*times, peak])
        assert (floor == "-") == name.startswith("nn.")
    assert "adding: 2 sequences x 3 steps, input 64, state 8 = 2 x 4, 3 schemata" in told.out
    assert "\nfloor: " in told.out
    assert "allow_tf32: matmul" in told.out
    assert "adding: SCOFF, batched (3 of 4)" in told.err
    assert max(map(len, told.out.splitlines())) <= 120


def test_several_settings_positions_and_json(tmp_path):
    path = tmp_path / "bench.json"
    more = f"--settings maze balls --positions 3 --backends batched --json {path}"
    assert run(f"{TINY} {more}") == 0
    held = json.loads(path.read_text())
    assert [s["name"] for s in held["settings"]] == ["maze", "balls"]
    sizes = ("batch", "length", "object_files", "size", "schemata", "positions")
    assert all([s[name] for name in sizes] == [2, 3, 2, 4, 3, 3] for s in held["settings"])
    assert held["machine"]["device"] == "abacus"
    assert len(held["rows"]) == 6
    ours = [row for row in held["rows"] if row["layer"] == "SCOFF, batched"]
    for row, setting in zip(ours, held["settings"], strict=True):
        floor = max(setting["floor_ms"].values())
        assert row["floor_ratio"] == pytest.approx(row["both"]["ms"] / floor)
        assert row["check_error"] < 1e-4
        assert row["graph"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, capsys):
    assert run(f"{TINY} --dtype {dtype}") == 0
    assert dtype in capsys.readouterr().out


def test_a_broken_backend_gets_no_speed(monkeypatch, capsys):
    right = dispatch.scoff_batched

    def wrong(*args):
        run = right(*args)
        return run._replace(output=1.01 * run.output)

    monkeypatch.setattr(dispatch, "scoff_batched", wrong)
    assert run(TINY) == 1
    told = capsys.readouterr()
    row = " ".join(rows_of(told.out)["SCOFF, batched"])
    assert row.startswith(
        "FAILS its check: the output differs by 1.0e-02, more than 1e-04, with 17"
    )
    assert len(rows_of(told.out)["SCOFF, reference"]) == 8
    assert told.err.splitlines()[-1] == (
        "scoff: not fit for use, see the table: SCOFF, batched at adding"
    )


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RuntimeError("wants a GPU"), 0, "does not run: wants a GPU"),
        (ValueError("size: got 4"), 0, "does not run: size: got 4"),
        (IndexError("of a bug"), 1, "does not run: IndexError: of a bug"),
        (RuntimeError("CUDA error: lost"), 1, "does not run: CUDA error: lost"),
    ],
)
def test_a_backend_that_does_not_run_says_why(error, code, told, monkeypatch, capsys):
    def refuse(*_):
        raise error

    monkeypatch.setattr(dispatch, "scoff_batched", refuse)
    assert run(TINY) == code
    rows = rows_of(capsys.readouterr().out)
    assert " ".join(rows["SCOFF, batched"]) == told
    assert len(rows["SCOFF, reference"]) == 8


def test_a_backend_that_does_not_apply_here_says_why(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "fused", None)
    assert run(f"{TINY} --backends fused") == 0
    assert " ".join(rows_of(capsys.readouterr().out)["SCOFF, fused"]).startswith("does not run: ")


def fake_flashrnn(gates, weight_hh, bias, function, backend, dtype):
    """With the shapes of the real one."""
    assert (function, backend, dtype) == ("lstm", "cuda_fused", "float32")
    batch, length, four, heads, size = gates.shape
    assert (batch, length, four, heads, size) == (2, 3, 4, 1, 8)
    assert weight_hh.shape == (4, 1, 8, 8)
    states = (gates + bias).tanh()[:, :, :2].permute(2, 0, 1, 3, 4) @ weight_hh[0].mT
    return states, states[:, :, -1:]


def test_flashrnn_where_it_is_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flashrnn", SimpleNamespace(flashrnn=fake_flashrnn))
    assert run(f"{TINY} --backends batched") == 0
    assert len(rows_of(capsys.readouterr().out)["flashrnn, LSTM"]) == 8

    def refuse(*_, **__):
        raise AssertionError("no compiler\nat all")

    monkeypatch.setitem(sys.modules, "flashrnn", SimpleNamespace(flashrnn=refuse))
    assert run(f"{TINY} --backends batched") == 0
    row = " ".join(rows_of(capsys.readouterr().out)["flashrnn, LSTM"])
    assert row == "does not run: AssertionError: no compiler"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype, capsys):
    command = TINY.replace("cpu", "cuda")
    assert run(f"{command} --settings adding balls --backends batched --dtype {dtype}") == 0
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == ["nn.GRU", "nn.LSTM", "SCOFF, batched"]
    for cells in rows.values():
        assert len(cells) == 10
        assert "-" not in cells[:-1]


def test_a_table_of_a_gpu_fits_the_page():
    timing = Timing(1234.567, 123.456, 1345.678)
    row = Row("balls", "SCOFF, fused", 12_345_678, 1e-6, timing, timing, timing, 12345.6, 123.4)
    refused = Row("balls", "SCOFF, batched", problem="does not run: " + "so many words " * 20)
    no_graph = replace(row, graph=None, note="no CUDA graph: " + "so many words " * 20)
    floor = Floor(1234.5678, 123.45678, 12.345678)
    section = Section(
        SETTINGS["balls-512"], Work(10**9, 10**12, 100), floor, [row, refused, no_graph]
    )
    lines = section_text(section, "cuda").splitlines()
    assert max(map(len, lines)) <= 120
    titles = "parameters forward ms ratio both ms ratio GRU ms graph ms ratio peak MiB x floor"
    assert " ".join(lines[2].split()) == titles
    told = "12,345,678 1,234.57 123.46 1,234.57 123.46 1,345.68 1,234.57 123.46 12,345.6 123.4"
    assert lines[3].split()[2:] == told.split()
    assert lines[-1] == (
        "floor: 1235 ms; bytes 1235 (1000 MB), operations 123.5 (1000 GFLOP), "
        "latency 12.35 (100 steps)"
    )


def test_what_is_measured_unless_asked_otherwise():
    names = [[s.name for s in choose_settings((), device, {})] for device in ("cpu", "cuda")]
    assert names == [["adding"], list(SETTINGS)]
    assert scoff.bench.choose_backends((), "cpu") == ("batched", "reference")
    assert scoff.bench.choose_backends((), "cuda") == ("fused", "wide", "batched")


@pytest.mark.usefixtures("tf32_flags")
def test_tf32_is_set_for_products_and_cudnn_alike(capsys):
    assert run(f"{TINY} --backends batched --tf32 off") == 0
    assert "allow_tf32: matmul False, cudnn False" in capsys.readouterr().out
    assert run(f"{TINY} --backends batched --tf32 on") == 0
    assert "allow_tf32: matmul True, cudnn True" in capsys.readouterr().out
