"""The least time possible: what is counted, and which of the three bounds holds."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scoff.bench.floor import Machine, Work, floor_of, measure_machine, multiply_adds, work_of
from scoff.bench.layers import make_scoff
from scoff.bench.settings import Setting

TINY = Setting("tiny", 3, 4, object_files=2, size=5, schemata=3, positions=6, input=7)


def cell_of(setting):
    return make_scoff(setting, "reference", "cpu", torch.float32).cells[0]


def test_operations_counted_by_hand():
    """The default sizes: keys of 64, schema keys of 16, four heads of 32 that communicate."""
    files, size, schemata, positions, features = 2, 5, 3, 6, 7
    input_attention = (
        files * size * 64  # queries
        + positions * features * 64  # keys
        + files * positions * 64  # scores
        + positions * features * size  # values
        + files * positions * size  # what each object file reads
    )
    gates = files * schemata * 3 * size * (size + size)
    choice = files * size * 16 + files * schemata * size * 16  # queries, keys of the candidates
    choice += files * schemata * 16 + files * schemata * size  # logits, the candidates' sum
    communication = (
        3 * files * size * 4 * 32  # queries, keys, values
        + 2 * files * files * 4 * 32  # scores, what each object file hears
        + 2 * files * 4 * 32 * size  # joined, and the gate
    )
    by_hand = input_attention + gates + choice + communication
    assert multiply_adds(TINY, cell_of(TINY)) == by_hand == 13456


def test_operations_are_those_of_the_reference():
    layer = make_scoff(TINY, "reference", "cpu", torch.float32)
    x = torch.randn(TINY.length, TINY.batch, TINY.positions, TINY.input, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x)[0].sum().backward()
    assert counter.get_total_flops() == work_of(TINY, cell_of(TINY), torch.float32).operations


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_and_steps(dtype, size):
    cell = cell_of(TINY)
    inputs, outputs = 3 * 4 * 6 * 7, 3 * 4 * 2 * 5
    weights = sum(weight.numel() for weight in cell.parameters())
    work = work_of(TINY, cell, dtype)
    assert work.bytes == size * (2 * inputs + outputs + weights)
    assert work.steps == 2 * 4


@pytest.mark.parametrize(
    ("work", "ms"),
    [
        (Work(bytes=8000, operations=0, steps=0), 4000),
        (Work(bytes=0, operations=9000, steps=0), 3000),
        (Work(bytes=0, operations=0, steps=14), 7000),
        (Work(bytes=8000, operations=9000, steps=14), 7000),
    ],
)
def test_the_floor_is_the_largest_bound(work, ms):
    machine = Machine("abacus", bandwidth=2000, rate=3000, latency=0.5)
    assert floor_of(work, machine).ms == pytest.approx(ms)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_machine_is_measured(device):
    machine = measure_machine(torch.device(device), torch.float32)
    assert machine.device
    assert 1e8 < machine.bandwidth < 1e13
    assert 1e8 < machine.rate < 1e16
    assert 1e-8 < machine.latency < 1e-2
