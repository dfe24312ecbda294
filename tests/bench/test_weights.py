"""How long `fused` takes to read its weights: what is read, and how often."""

import dataclasses

import pytest
import torch

from scoff.bench.floor import Floor, WeightReading, Work
from scoff.bench.settings import SETTINGS, Setting
from scoff.bench.table import Section, section_text

pytest.importorskip("scoff.ops.scoff.fused", exc_type=ImportError)

from scoff.bench import weights
from scoff.ops.scoff.fused_layout import GPU, packing_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Setting("tiny", 300, 7, object_files=2, size=5, schemata=3, input=7)


@pytest.mark.parametrize("rows", [1, 256, 300, 700])
@pytest.mark.parametrize(("programs", "turns"), [(1, 1), (3, 2)])
def test_every_program_reads_every_word_at_every_turn(rows, programs, turns):
    # small ones: interpreters of Triton before 3.9 refuse sums that overflow
    words = torch.randint(-(2**15), 2**15, (32 * rows,), dtype=torch.int32, device=DEVICE)
    found = weights.read(words, programs, turns)
    assert found.tolist() == [turns * words.sum().item()] * programs


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize(("tf32", "size"), [(True, 2), (False, 4)])
def test_the_weights_of_a_step(tf32, size):
    torch.backends.cudnn.allow_tf32 = tf32
    plan = weights.plan_of(TINY, DEVICE, torch.float32)
    assert plan is not None
    # [64, 64]: the schema query and one head's, two of each gate; of four heads of 32 that
    # communicate [128, 64]: queries, keys, values, what is said and its gate
    assert weights.bytes_of_a_step(plan) == size * 64 * 64 * (2 + 2 * 3 * 3 + 5 * 2)
    numels = packing_of(plan).numels
    half = len(numels) // 2
    assert sum(numels[:half]) == sum(numels[half:])


@pytest.mark.parametrize("setting", [TINY, *SETTINGS.values()], ids=lambda x: x.name)
def test_a_step_is_read_in_whole_rows(setting):
    plan = weights.plan_of(setting, DEVICE, torch.float32)
    assert (plan is None) == (setting.name == "maze")
    if plan is not None:
        assert weights.bytes_of_a_step(plan) % (4 * weights.COLUMNS) == 0


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize(
    ("gpu", "together", "steps"),
    [
        (GPU(50, 300_000), 2, 14),  # 300 sequences, four to a program, which are 75
        (GPU(100, 0), 1, 14),  # three to a program
        (GPU(100, 130_000), 1, 7 * (2 - 6 / 30)),  # of 30 blocks six are asked or said
        (GPU(100, 300_000), 1, 7),
    ],
)
def test_two_programs_of_a_processor_take_turns(gpu, together, steps, monkeypatch):
    torch.backends.cudnn.allow_tf32 = True
    monkeypatch.setattr(weights, "fastest", lambda *_: 5e-3)
    monkeypatch.setattr(weights, "gpu_of", lambda _: gpu)
    found = weights.measure_reading(TINY, DEVICE, torch.float32)
    assert found is not None
    assert found.seconds == pytest.approx(5e-6)
    assert found.rate == pytest.approx(together * found.bytes / 5e-6)
    assert found.ms == pytest.approx(steps * 5e-3)
    wide = dataclasses.replace(TINY, size=200)
    assert weights.measure_reading(wide, DEVICE, torch.float32) is None


def test_it_is_told_beside_the_floor_and_is_no_part_of_it():
    reading = WeightReading(196_608, 100, 2.345e-6, 83.86e9)
    section = Section(SETTINGS["adding"], Work(1, 1, 100), Floor(0.1, 0.2, 0.17), [], reading)
    floor, told = section_text(section, "cuda").splitlines()[-2:]
    assert floor.startswith("floor: 0.2 ms; ")
    assert told == (
        "of one program to a sequence: weights 0.2345 ms "
        "(196.6 KB a step, 83.86 GB/s a processor, 2.345 us a step)"
    )


@pytest.mark.gpu
def test_it_is_measured():
    found = weights.measure_reading(SETTINGS["adding"], DEVICE, torch.float32)
    assert found is not None
    assert 1e9 < found.rate < 1e12
