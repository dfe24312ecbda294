"""Where forward and backward go: which launch belongs to which stage, and how it is told."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import scoff.bench
from scoff.bench.floor import Floor, Machine, Work
from scoff.bench.layers import make_scoff
from scoff.bench.settings import SETTINGS, Setting
from scoff.bench.stages import KERNELS, Launch, Stage, Stages, by_stage, measure_stages, stages_of
from scoff.bench.table import Report, Row, Section, section_text
from scoff.bench.timing import Job
from scoff.cli import main

pytest.importorskip("scoff.ops.scoff.fused", exc_type=ImportError)

from scoff.ops.scoff import kernels, wide_launch

COPY = "Memcpy DtoD (Device -> Device)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
PRODUCTS = (
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize64x64x32",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align4>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
    "nvjet_tss_64x32_64x13_2x1_v_bz_TNN",
    "void gemv2T_kernel_val<int, int, float, float, float, 128, 16, 4, 4>",
)


def test_fused_computes_again_with_the_kernel_of_the_forward_pass():
    told = {
        FILL: "everything else",
        PRODUCTS[0]: "everything else",  # of weights with weights
        "pack_kernel": "pack",
        "forward_kernel": "forward",
    }
    assert stages_of("fused", list(told)) == list(told.values())
    assert stages_of("fused", ["forward_kernel"] * 2) == ["forward"] * 2  # the last steps are kept
    told[COPY] = "everything else"
    chunk = {
        "forward_kernel": "computing again",
        "backward_kernel": "running back",
        **dict.fromkeys(PRODUCTS, "weight gradients"),
        COPY: "everything else",
        "share_kernel": "weight gradients",
    }
    names, wanted = [*told, *chunk, *chunk], [*told.values(), *chunk.values(), *chunk.values()]
    assert stages_of("fused", names) == wanted


def test_wide_and_batched():
    names = ["look_kernel", "look_back_kernel", "update_back_kernel", PRODUCTS[1], FILL]
    wide = ["look", "look, back", "update, back", "products", "everything else"]
    assert stages_of("wide", names) == wide
    for backend in ("batched", "reference"):
        assert (
            stages_of(backend, [*PRODUCTS, COPY, FILL])
            == ["products"] * 5 + ["everything else"] * 2
        )


def test_what_is_looked_for_are_kernels():
    for backend, module in {"fused": kernels, "wide": wide_launch}.items():
        for name in KERNELS[backend]:
            assert getattr(module, name).__name__ == name


NAMES = [*KERNELS["fused"], *KERNELS["wide"], *PRODUCTS, COPY, FILL, ""]
LAUNCHES = st.lists(st.builds(Launch, st.sampled_from(NAMES), st.floats(0, 100)))


@given(st.sampled_from(["fused", "wide", "batched"]), LAUNCHES, st.integers(1, 50))
def test_every_launch_is_in_one_stage(backend, launches, steps):
    stages = by_stage(backend, launches, steps)
    assert sum(stage.launches for stage in stages) == len(launches)
    assert sum(stage.ms for stage in stages) == pytest.approx(sum(x.ms for x in launches))
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        over_time = backend == "fused" and stage.name in ("forward", "running back")
        assert stage.us_a_step == (pytest.approx(1e3 * stage.ms / steps) if over_time else None)


def test_stages_follow_the_table_and_are_in_the_json():
    found = Stages(
        3.456,
        1234.5678,
        1003,
        [Stage("forward", 0.56, 1, 11.2), Stage("everything else", 1234.0078, 1002)],
    )
    row = Row("balls", "SCOFF, fused", 1, stages=found)
    section = Section(SETTINGS["balls"], Work(1, 1, 1), Floor(1, 1, 1), [row])
    *_, titles, forward, rest, whole, host = section_text(section, "cuda").splitlines()
    assert titles.split() == ["SCOFF,", "fused", "GPU", "ms", "launches", "us", "a", "step"]
    assert forward.split() == ["forward", "0.560", "1", "11.2"]
    assert rest.split() == ["everything", "else", "1,234.008", "1,002"]
    assert whole.split() == ["all", "1,234.568", "1,003"]
    assert host == "host: 3.46 ms until the calls of both return"
    assert len(titles) == len(forward)
    report = Report(Machine("abacus", 1, 1, 1), "cuda", torch.float32, [section])
    held = json.loads(json.dumps(report.as_json()))["rows"][0]["stages"]
    assert held["stages"][0] == {"name": "forward", "ms": 0.56, "launches": 1, "us_a_step": 11.2}
    assert (held["host_ms"], held["gpu_ms"], held["launches"]) == (3.456, 1234.5678, 1003)


def test_a_profiler_that_sees_nothing_is_not_taken_for_a_gpu_that_does_nothing():
    row = Row("balls", "SCOFF, wide", 1, stages=Stages(3.456, 0, 0, []))
    section = Section(SETTINGS["balls"], Work(1, 1, 1), Floor(1, 1, 1), [row])
    *_, told, host = section_text(section, "cuda").splitlines()
    assert told.endswith("the profiler saw nothing of the GPU")
    assert host == "host: 3.46 ms until the calls of both return"


def test_a_cpu_has_none(monkeypatch, capsys):
    monkeypatch.setattr(scoff.bench, "measure_machine", lambda *_: Machine("abacus", 1, 1, 1))
    tiny = "--device cpu --rounds 1 --batch 2 --length 3 --object-files 2 --size 4 --schemata 3"
    with pytest.raises(SystemExit) as end:
        main(["bench", *tiny.split(), "--backends", "batched", "--stages"])
    assert end.value.code == 0
    told = capsys.readouterr().out.splitlines()
    assert told.count("--stages: where the time goes is told of a GPU only") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused", "wide", "batched"])
def test_stages_of_a_gpu_sum_to_all(backend):
    setting = Setting("small", 4, 6, object_files=2, size=16, schemata=2, positions=3, input=8)
    layer = make_scoff(setting, backend, "cuda", torch.float32)
    job = Job(layer, torch.randn(6, 4, 3, 8, device="cuda"))
    job.both()
    found = measure_stages(job, backend, setting.length, rounds=2)
    assert found.host_ms > 0
    assert found.gpu_ms == pytest.approx(sum(stage.ms for stage in found.stages))
    assert found.launches == sum(stage.launches for stage in found.stages)
    launches = {stage.name: stage.launches for stage in found.stages}
    assert all(stage.ms > 0 for stage in found.stages)
    if backend == "fused":
        assert launches["forward"] == launches["pack"] == 1
        assert launches["running back"] == launches["computing again"] >= 1
        assert launches["weight gradients"] >= 2
    else:
        assert launches["products"] >= 6
    if backend == "wide":
        assert launches["update"] >= 6
        assert launches["update, back"] == 6
