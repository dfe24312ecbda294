"""Bad input is refused with a word on the argument, what it got and what it wants."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import scoff

FLOAT = torch.float32


def rnn(**options):
    return scoff.SCOFF(4, 12, num_object_files=3, num_schemata=2, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden_size": 13}, ValueError, r"hidden_size: got 13, .* num_object_files = 3"),
        ({"hidden_size": 0}, ValueError, "hidden_size: got 0"),
        ({"hidden_size": 12.0}, TypeError, "hidden_size: got 12.0"),
        ({"input_size": -1}, ValueError, "input_size: got -1"),
        ({"num_layers": 0}, ValueError, "num_layers: got 0"),
        ({"num_object_files": 0}, ValueError, "num_object_files: got 0"),
        ({"num_schemata": 0}, ValueError, "num_schemata: got 0"),
        ({"active_object_files": 0}, ValueError, "active_object_files: got 0"),
        ({"active_object_files": 4}, ValueError, r"active_object_files: got 4, .* = 3"),
        ({"cell": "rnn"}, ValueError, "cell: got 'rnn', wants one of 'gru', 'lstm'"),
        ({"backend": "cudnn"}, ValueError, "backend: got 'cudnn', wants one of 'auto'"),
        ({"communication": "loud"}, ValueError, "communication: got 'loud'"),
        ({"input_reduction": "max"}, ValueError, "input_reduction: got 'max'"),
        ({"temperature": 0}, ValueError, "temperature: got 0, wants a number above 0"),
        ({"temperature": float("nan")}, ValueError, "temperature: got nan"),
        ({"temperature": "1"}, TypeError, "temperature: got '1'"),
        ({"dropout": -0.1}, ValueError, "dropout: got -0.1, wants a number from 0 to 1"),
        ({"input_dropout": 1.5}, ValueError, "input_dropout: got 1.5"),
        ({"comm_dropout": True}, TypeError, "comm_dropout: got True"),
        ({"input_heads": 5}, ValueError, "input_value_size: got 4, .* input_heads = 5"),
        ({"value_projection": False, "input_value_size": 9}, ValueError, "input_value_size: got 9"),
        ({"bias": None}, TypeError, "bias: got None, wants True or False"),
        ({"detach_input_query": 1}, TypeError, "detach_input_query: got 1, wants True or False"),
        ({"bidirectional": "yes"}, TypeError, "bidirectional: got 'yes'"),
        ({"dtype": torch.int32}, TypeError, "dtype: got torch.int32"),
        ({"num_slots": 3}, TypeError, "unknown option 'num_slots', knows num_object_files"),
    ],
)
def test_options(options, error, message):
    given = {"input_size": 4, "hidden_size": 12, "num_object_files": 3} | options
    with pytest.raises(error, match=message):
        scoff.SCOFF(**given)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(5), ValueError, r"input: got 1 axes, wants \(L, N, C\)"),
        (torch.zeros(1, 5, 3, 2, 4), ValueError, "input: got 5 axes"),
        (torch.zeros(5, 3, 7), ValueError, r"input: got 7 features .* input_size = 4"),
        (torch.zeros(0, 3, 4), ValueError, "input: got shape .* at least one step"),
        (torch.zeros(5, 3, 0, 4), ValueError, "input: got 0 positions, wants at least one"),
        (torch.zeros(5, 3, 4, dtype=torch.int64), TypeError, "input: got dtype torch.int64"),
        (
            torch.zeros(5, 3, 4, dtype=torch.float64),
            TypeError,
            r"torch.float64, wants torch.float32",
        ),
        (torch.zeros(5, 3, 4, device="meta"), ValueError, "input: got a tensor on meta"),
        ([[1.0]], TypeError, "input: got list, wants a tensor"),
        (pack_padded_sequence(torch.zeros(5, 1, 7), [5]), ValueError, "input: got 7 features"),
    ],
)
def test_input(x, error, message):
    with pytest.raises(error, match=message):
        rnn()(x)


@pytest.mark.parametrize(
    ("kind", "hx", "error", "message"),
    [
        (
            "gru",
            torch.zeros(1, 2, 12),
            ValueError,
            r"hx: got shape \(1, 2, 12\), wants \(1, 3, 12\)",
        ),
        ("gru", torch.zeros(3, 12), ValueError, r"hx: got shape \(3, 12\)"),
        ("gru", (torch.zeros(1, 3, 12),) * 2, TypeError, "hx: got tuple, wants a tensor"),
        ("gru", torch.zeros(1, 3, 12).double(), TypeError, "hx: got dtype torch.float64"),
        ("lstm", torch.zeros(1, 3, 12), TypeError, r"hx: got Tensor, wants the pair \(h, c\)"),
        ("lstm", (torch.zeros(1, 3, 12),), TypeError, "hx: got 1 of them"),
        ("lstm", (torch.zeros(1, 3, 12), torch.zeros(1)), ValueError, r"hx\[c\]: got shape"),
    ],
)
def test_state(kind, hx, error, message):
    with pytest.raises(error, match=message):
        rnn(cell=kind)(torch.zeros(5, 3, 4), hx)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"reset": torch.zeros(5, 3)}, TypeError, "reset: got torch.float32, .* torch.bool"),
        ({"reset": torch.zeros(3, 5).bool()}, ValueError, r"reset: .* \(3, 5\), wants \(5, 3\)"),
        ({"noise": torch.zeros(5, 3, 3, 2)}, ValueError, r"noise: .* wants \(1, 5, 3, 3, 2\)"),
        ({"restart": torch.zeros(1, 3, 12)}, ValueError, "restart: got a state, .* without reset"),
        (
            {"reset": torch.zeros(5, 3).bool(), "restart": torch.zeros(3, 12)},
            ValueError,
            "restart: got shape",
        ),
    ],
)
def test_what_goes_with_the_input(given, error, message):
    with pytest.raises(error, match=message):
        rnn()(torch.zeros(5, 3, 4), **given)


def test_cell():
    cell = scoff.SCOFFCell(4, 12, num_object_files=3, num_schemata=2)
    with pytest.raises(ValueError, match=r"input: got 4 axes, wants \(C\), \(N, C\)"):
        cell(torch.zeros(1, 1, 1, 4))
    with pytest.raises(ValueError, match="input: got 5 features"):
        cell(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"hx: got shape \(1, 12\), wants \(2, 12\)"):
        cell(torch.zeros(2, 4), torch.zeros(1, 12))
    with pytest.raises(ValueError, match=r"noise: got shape \(2, 2\), wants \(2, 3, 2\)"):
        cell(torch.zeros(2, 4), noise=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="input: got 0 positions"):
        cell(torch.zeros(2, 0, 4))
    with pytest.raises(TypeError, match="input: got list, wants a tensor"):
        cell([1.0], noise=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="batch_size: got 0"):
        cell.initial_state(0)


def test_trace():
    with pytest.raises(ValueError, match="layer: got 1, wants less than num_layers = 1"):
        rnn().trace(torch.zeros(5, 3, 4), layer=1)
    with pytest.raises(ValueError, match="reverse: got True"):
        rnn().trace(torch.zeros(5, 3, 4), reverse=True)


def test_from_gru():
    with pytest.raises(TypeError, match="gru: got LSTM"):
        scoff.SCOFF.from_gru(torch.nn.LSTM(4, 12))
    with pytest.raises(ValueError, match="gru: got num_layers = 2, wants 1"):
        scoff.SCOFF.from_gru(torch.nn.GRU(4, 12, num_layers=2))
    with pytest.raises(ValueError, match="cell: got 'lstm', wants 'gru'"):
        scoff.SCOFF.from_gru(torch.nn.GRU(4, 12), cell="lstm")
    with pytest.raises(ValueError, match="num_object_files: got 0"):
        scoff.SCOFF.from_gru(torch.nn.GRU(4, 12), num_object_files=0)
    with pytest.raises(ValueError, match="value_projection: got False, wants True"):
        scoff.SCOFF.from_gru(torch.nn.GRU(4, 12), num_object_files=2, value_projection=False)


def test_temperature_and_backend_are_checked_when_set():
    layer = rnn()
    with pytest.raises(ValueError, match="temperature: got -1"):
        layer.temperature = -1
    with pytest.raises(ValueError, match="backend: got 'x'"):
        layer.backend = "x"
