"""The backend for wide states against the reference: by Triton's interpreter, or on a GPU."""

import collections
import contextlib
import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scoff.ops.scoff import scoff_reference
from tests.ops import compare
from tests.ops.cases import EVERYTHING, Case, Choices, Sizes, choices, make_case, seeds, sizes
from tests.ops.compare import assert_errors_at_most_twice_batched, results

wide = pytest.importorskip("scoff.ops.scoff.wide")
wide_backward = pytest.importorskip("scoff.ops.scoff.wide_backward")
wide_forward = pytest.importorskip("scoff.ops.scoff.wide_forward")
wide_launch = pytest.importorskip("scoff.ops.scoff.wide_launch")
wide_layout = pytest.importorskip("scoff.ops.scoff.wide_layout")
launch = pytest.importorskip("scoff.ops.scoff.launch")
on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
interpreted = pytest.mark.skipif(on_gpu, reason="float64 is for the interpreter")
assert_same = functools.partial(compare.assert_same, wide.scoff_wide)


@interpreted
@settings(max_examples=4)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_wide_equals_reference(sizes: Sizes, choices: Choices, seed: int):
    assert_same(make_case(sizes, choices, seed))


@interpreted
@settings(max_examples=4)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_one_object_file_equals_reference(sizes: Sizes, choices: Choices, seed: int):
    assert_same(make_case(sizes._replace(files=1), choices, seed))


@interpreted
@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("files", [1, 3])
def test_every_option_at_once(files, cell, communication):
    sizes = Sizes(batch=2, positions=3, files=files, input_heads=2)
    assert_same(
        make_case(sizes, EVERYTHING._replace(cell=cell, communication=communication), 1),
    )


@interpreted
@pytest.mark.parametrize("files", [1, 3])
def test_errors_may_stop_at_what_is_asked(files):
    choices = EVERYTHING._replace(detach=True, reduction="sum", active=3)
    assert_same(make_case(Sizes(positions=3, files=files, input_heads=2), choices, 1))


def name_of(sizes: Sizes) -> str:
    return "-".join(f"{k}{v}" for k, v in sizes._asdict().items() if v != getattr(Sizes(), k))


@interpreted
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(steps=1, batch=1),
        Sizes(batch=3, files=1, positions=2, value=6),
        Sizes(files=17, steps=1, batch=1),
        Sizes(positions=66, steps=1, batch=1),
        Sizes(size=130, steps=1, batch=1, files=2),
        Sizes(size=1030, steps=1, batch=1, files=1, schemata=3),
        Sizes(schemata=5, comm_heads=3, comm_key=66, comm_value=7, steps=1, batch=1),
        Sizes(key=65, value=65, steps=1, batch=1, files=2),
    ],
    ids=name_of,
)
def test_sizes_at_the_edges_of_blocks(sizes):
    assert_same(make_case(sizes, Choices(), 2, scale=0.1))


@interpreted
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(("steps", "length"), [(3, 1), (5, 2), (4, 2)])
def test_chunks_of_steps(steps, length, files, monkeypatch):
    for module in (wide_forward, wide_backward):
        monkeypatch.setattr(module, "longest_chunk", lambda *_: length)
    assert_same(make_case(Sizes(steps, 1, files=files), Choices("lstm", reset=True), 3))
    assert_same(make_case(Sizes(steps, 1, files=files), Choices(reset=steps == 5), 3))


@interpreted
@pytest.mark.parametrize("files", [1, 2])
def test_chunks_fit_into_memory(files, monkeypatch):
    case = make_case(Sizes(steps=7, batch=1, files=files), Choices(), 3)
    p = wide.prepare(*case)
    settings = wide_layout.Settings(False, 1, False, 1e-8, "ieee", 1, 1)
    z = wide_layout.layout_of(p, settings)
    each = z.rows * (z.work + z.told + (files > 1) * z.read) * p.state.element_size()
    for most, lengths in ((7 * each, [7]), (3 * each, [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr(wide_layout, "CHUNK_BYTES", most)
        parts = wide_layout.chunks(z.steps, wide_layout.longest_chunk(p, z))
        assert [x.stop - x.start for x in parts] == lengths


@interpreted
@pytest.mark.parametrize("files", [1, 2])
def test_backward_can_run_again(files):
    # what the forward pass keeps for it, the first time overwrites
    case = make_case(Sizes(files=files), Choices(reset=True), 4)
    output, leaves = wide.scoff_wide(*case).output.sum(), list(case.leaves().values())
    first, second = (
        torch.autograd.grad(output, leaves, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@interpreted
def test_what_happened_at_the_last_steps_is_not_kept_from_checkpoints():
    case = make_case(Sizes(files=1), Choices(), 4)
    wanted = [case.weights.weight_ih, case.weights.weight_hh]

    def run(*_):
        return wide.scoff_wide(*case).output.square().sum()

    expected = torch.autograd.grad(run(), wanted)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.shape) or x, lambda x: x):
        sizes = wide.scoff_wide(*case).output.grad_fn.sizes
    assert all(size.numel() > 0 and size in held for size in sizes)
    again = torch.utils.checkpoint.checkpoint(run, *wanted, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again, wanted), expected, strict=True):
        torch.testing.assert_close(a, b)


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_no_uninitialised_memory_is_read(cell):
    assert_same(make_case(Sizes(2, positions=3, size=7), EVERYTHING._replace(cell=cell), 6))
    assert_same(make_case(Sizes(files=1), Choices(cell=cell, communication=None), 6))
    assert_same(make_case(Sizes(files=1, size=8), Choices(cell=cell), 6))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("where", ["x", "state"])
def test_nan_stays_nan(where, files):
    sizes = Sizes(batch=3, files=files, schemata=3)
    case = make_case(sizes, Choices(), 7, torch.float32).to(device)
    value = getattr(case.inputs, where).detach().clone()
    # as CUDA makes it
    value[0, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    run = wide.scoff_wide(case.inputs._replace(**{where: value}), *case[1:])
    assert run.output[:, 1].isnan().any(-1).all()
    assert run.output[:, [0, 2]].isfinite().all()
    assert run.schema.min() >= 0
    assert run.schema.max() < 3


@interpreted
def test_a_thousand_steps():
    sizes = Sizes(1000, 1, 1, 2, 1, 2, 1, 1, 2, 2, 2)
    assert_same(make_case(sizes, Choices(active=1, communication=None), 0, scale=0.3))


@interpreted
@pytest.mark.parametrize("files", [1, 3])
def test_the_choice_can_be_given(files):
    case = make_case(Sizes(files=files), Choices(), 7)
    other = 1 - scoff_reference(*case).schema
    case = case._replace(inputs=case.inputs._replace(choice=other))
    assert torch.equal(wide.scoff_wide(*case).schema, other)
    assert_same(case)


WIDE = Sizes(5, 2, 9, 12, 3, 300, 3, 2, 8, 10, 4, 2, 8, 8)


@pytest.mark.parametrize(
    ("dtype", "tf32", "sizes"),
    [
        (torch.float32, False, WIDE._replace(steps=2, size=20)),
        (torch.float16, True, WIDE._replace(steps=2, size=20)),
        (torch.bfloat16, True, WIDE._replace(steps=2, size=20, files=1)),
        pytest.param(torch.float32, False, WIDE, marks=pytest.mark.gpu),
        pytest.param(torch.float32, True, WIDE, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, True, WIDE, marks=pytest.mark.gpu),
        pytest.param(torch.float16, True, WIDE, marks=pytest.mark.gpu),
        pytest.param(torch.float32, True, WIDE._replace(files=1), marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_errors_are_at_most_twice_those_of_batched(cell, dtype, tf32, sizes, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    cases = [
        make_case(sizes, Choices(cell=cell, reset=True), seed, scale=0.1)
        for seed in range(8, 16 if on_gpu else 9)
    ]
    assert_errors_at_most_twice_batched(wide.scoff_wide, cases, device, dtype, tf32)


def run_one(x: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    run = wide.scoff_wide(case.inputs._replace(x=x), *case[1:])
    return run.output, run.state


@pytest.mark.parametrize("files", [1, 2])
def test_compiles_into_one_graph(files):
    case = make_case(Sizes(2, 1, files=files), Choices(), 0, torch.float32).to(device)
    x = case.inputs.x
    compiled = torch.compile(run_one, fullgraph=True, backend="aot_eager")
    leaves = list(case.leaves().values())
    outcomes = []
    for function in (run_one, compiled):
        output, state = function(x, case)
        loss = output.sum() + state.sum()
        outcomes.append((output, *torch.autograd.grad(loss, leaves, allow_unused=True)))
    for expected, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("files", "precision"), [(1, "ieee"), (1, "tf32"), (3, "ieee")])
def test_operators_pass_torchs_own_checks(files, precision):
    choices = Choices(reset=True, padding=True)
    case = make_case(Sizes(2, 1, positions=2, files=files), choices, 0, torch.float32).to(device)
    p = wide.prepare(*case)
    p = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in p]
    settings = (False, 1, False, 1e-8, precision, 1, 1 if files == 1 else 2, False)
    torch.library.opcheck(
        wide._forward, (*p, *settings), test_utils=("test_schema", "test_faketensor")
    )
    ran = wide._forward(*p, *settings)
    p = [None if x is None else x.detach() for x in p]
    gradients = [torch.ones_like(x) for x in ran[:2]]
    torch.library.opcheck(
        wide._backward,
        (*p, *settings, *(x.detach() for x in ran[2:]), True, gradients[0].new_ones(1), *gradients),
        test_utils=("test_schema", "test_faketensor"),
    )


# --- what it takes


class Counter(TorchDispatchMode):
    """Counts operators, and launches of kernels that take the place of those of the backend."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> "Counter.Kernel":
        return Counter.Kernel(self.counts, name)

    class Kernel:
        def __init__(self, counts: collections.Counter, name: str):
            self.counts, self.name = counts, name

        def __getitem__(self, grid):
            def launch(*_args, **_constants):
                self.counts[self.name] += 1

            return launch


def operators_of(steps: int, files: int, communication: str | None, monkeypatch):
    case = make_case(Sizes(steps, files=files), Choices(communication=communication), 0)
    p = wide_layout.Prepared._make(None if x is None else x.detach() for x in wide.prepare(*case))
    run = wide_layout.Settings(False, files, False, 1e-8, "ieee", 1, 1 if files == 1 else 2)
    found = []
    for backwards in (False, True):
        counter = Counter()
        for name in dir(wide_launch):
            if name.endswith("_kernel"):
                monkeypatch.setattr(wide_launch, name, counter.kernel(name))
        with counter if not backwards else contextlib.nullcontext():
            output, final, left = wide_forward.run_forward(p, run)
        if backwards:
            counter.counts.clear()
            with counter:
                wide_backward.run_back(p, run, left, True, output.new_ones(1), output, final)
        found.append(counter.counts)
    return found


@interpreted
@pytest.mark.parametrize(
    ("files", "communication", "forward", "back"),
    [
        (1, None, "mm update_kernel", "update_back_kernel addmm_"),
        (
            1,
            "gated",
            "mm update_kernel mm talk_kernel",
            "talk_back_kernel addmm_ update_back_kernel addmm_",
        ),
        (
            3,
            "gated",
            "mm look_kernel mm update_kernel mm talk_kernel",
            "talk_back_kernel addmm_ update_back_kernel mm look_back_kernel addmm_",
        ),
    ],
)
def test_a_step_is_a_few_launches_and_nothing_else(
    files, communication, forward, back, monkeypatch
):
    fewer, more = (operators_of(n, files, communication, monkeypatch) for n in (4, 6))
    for wanted, one, other in zip((forward, back), fewer, more, strict=True):
        assert other - one == collections.Counter(wanted.split() * 2)


@pytest.mark.parametrize("files", [1, 3])
def test_what_is_prepared_lies_in_memory_without_gaps(files):
    """Also of weights that do not, as parametrisations make them"""
    case = make_case(Sizes(files=files), Choices(reset=True, comm_dropout=True), 1)

    def other_way_round(x):
        if isinstance(x, tuple):
            return type(x)(*map(other_way_round, x))
        return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x

    given = Case(other_way_round(case.inputs), other_way_round(case.weights), case.options)
    prepared = wide.prepare(*given)
    assert all(x is None or x.is_contiguous() for x in prepared)


def test_too_many_object_files_are_refused():
    case = make_case(Sizes(files=65, steps=1), Choices(), 0, torch.float32).to(device)
    assert wide.why_not(*case[:2]) == "65 object files are more than 64"
    case = make_case(Sizes(size=1500, steps=1), Choices(), 0, torch.float32).to(device)
    assert wide.why_not(*case[:2]) is None


@interpreted
def test_a_cpu_and_an_old_triton_are_refused(monkeypatch):
    case = make_case(Sizes(), Choices(), 0)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert wide.why_not(*case[:2]) == "it runs on a CUDA device, not on cpu"
    monkeypatch.setattr(launch, "TRITON", (3, 5))
    assert wide.why_not(*case[:2]).startswith("it needs triton 3.6, and this is ")


COMPILE = """
import torch
from scoff.ops.scoff import wide, wide_backward, wide_forward, wide_launch
from tests.ops.cases import Choices, Sizes, make_case
from tests.ops.compile_kernels import Recorder, compile_kernel

launches = []
for module in (wide_launch, wide_forward, wide_backward):
    for name in dir(module):
        if name.endswith("_kernel"):
            setattr(module, name, Recorder(getattr(module, name), launches))
cases = [
    (torch.float32, Sizes(2, 2, 1, 64, 1, 510, 4, 1, 64, 64, 16, 4, 32, 32), Choices(active=1)),
    (
        torch.bfloat16,
        Sizes(2, 2, 9, 12, 3, 300, 3, 2, 8, 10, 4, 2, 8, 8),
        Choices("lstm", active=2, reset=True, padding=True, comm_dropout=True, reduction="mean"),
    ),
]
for dtype, sizes, choices in cases:
    launches.clear()
    wide.scoff_wide(*make_case(sizes, choices, 0, dtype)).output.sum().backward()
    for kernel, args, kwargs in {(k, kw.get("ADD")): (k, a, kw) for k, a, kw in launches}.values():
        print(kernel.__name__, compile_kernel(kernel, args, kwargs))
"""


@interpreted
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    # without the interpreter, hence in another process
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    # in one object file's case nobody looks
    assert len(run.stdout.splitlines()) == 6 + 6


# --- on a GPU


def realistic(dtype=torch.float32, **sizes) -> Case:
    all_sizes = Sizes(20, 16, 9, 64, 3, 300, 4, 1, 64, 100, 16, 4, 32, 32)._replace(**sizes)
    return make_case(all_sizes, Choices(active=4), 0, scale=0.1).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("files", [1, 6])
def test_gpu_repeats_itself_bit_for_bit(files):
    case = realistic(files=files)
    first = results(wide.scoff_wide(*case), case)
    for _ in range(50):
        again = results(wide.scoff_wide(*case), case)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
def test_gpu_reads_no_uninitialised_memory():
    for case in (realistic(size=337, features=13, files=5), realistic(files=1, size=510)):
        for name, value in results(wide.scoff_wide(*case), case).items():
            assert value.isfinite().all(), name


@pytest.mark.gpu
def test_gpu_choices_differ_only_at_near_ties():
    # another precision may choose another schema where two are almost as good: from a state that
    # is the same for both, one step
    case = realistic(steps=1, batch=512)
    exact = scoff_reference(*case.to("cpu", torch.float64))
    differ = wide.scoff_wide(*case).schema.cpu() != exact.schema
    best = exact.schema_probs.log().topk(2, -1).values
    margin = best[..., 0] - best[..., 1]
    assert margin[differ].numel() < 0.01 * margin.numel()
    assert (margin[differ] < 0.02).all()
