"""The Triton kernels against the reference: by Triton's interpreter, or compiled on a GPU."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from torch import Tensor

import scoff
from scoff.ops.scoff import dispatch, run_scoff, scoff_reference
from tests.ops import compare
from tests.ops.cases import EVERYTHING, Choices, Sizes, choices, make_case, seeds, sizes
from tests.ops.compare import assert_errors_at_most_twice_batched, errors, results

fused = pytest.importorskip("scoff.ops.scoff.fused")
fused_fold = pytest.importorskip("scoff.ops.scoff.fused_fold")
fused_gradients = pytest.importorskip("scoff.ops.scoff.fused_gradients")
fused_layout = pytest.importorskip("scoff.ops.scoff.fused_layout")
launch = pytest.importorskip("scoff.ops.scoff.launch")
on_gpu = torch.cuda.is_available()
interpreted = pytest.mark.skipif(on_gpu, reason="float64 is for the interpreter")
assert_same = functools.partial(compare.assert_same, fused.scoff_fused)


@interpreted
@settings(max_examples=4)
@given(sizes=sizes, choices=choices, seed=seeds)
def test_fused_equals_reference(sizes: Sizes, choices: Choices, seed: int):
    assert_same(make_case(sizes, choices, seed), seed)


@interpreted
@pytest.mark.parametrize("communication", ["gated", "residual", None])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_every_option_at_once(cell, communication):
    sizes = Sizes(steps=4, batch=2, positions=3, input_heads=2)
    assert_same(
        make_case(sizes, EVERYTHING._replace(cell=cell, communication=communication), 1),
    )


@interpreted
@pytest.mark.parametrize("heads", [1, 2])
def test_errors_may_stop_at_what_is_asked(heads):
    sizes = Sizes(steps=2, batch=1, positions=3, input_heads=heads)
    assert_same(make_case(sizes, Choices(detach=True), 1))


@interpreted
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(steps=1, batch=1),
        Sizes(batch=7, files=1),
        Sizes(files=17, steps=2),
        Sizes(positions=70, steps=2),
        Sizes(positions=1024, steps=1, batch=1),
        Sizes(size=65, steps=2, batch=1),
        Sizes(schemata=5, comm_heads=3, comm_key=11, comm_value=23, steps=2),
        Sizes(features=67, value=33, input_heads=2, steps=2),
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s._asdict().items() if v != getattr(Sizes(), k)),
)
def test_sizes_at_the_edges_of_blocks(sizes):
    assert_same(make_case(sizes, Choices(), 2, scale=0.3))


@pytest.fixture
def busy(monkeypatch):
    """More sequences than processors"""
    monkeypatch.setattr(fused_layout, "gpu_of", lambda _: fused_layout.GPU(1, 0))
    monkeypatch.setattr(fused_layout, "cut_for", fused_layout.cut_for.__wrapped__)


@interpreted
@pytest.mark.usefixtures("busy")
def test_several_sequences_to_a_program():
    sizes = Sizes(batch=7, positions=3, steps=2)
    assert_same(make_case(sizes, EVERYTHING, 3))
    assert_same(make_case(sizes._replace(positions=1, files=5), Choices(), 3))


@interpreted
@pytest.mark.parametrize("hold", [1, 2])
def test_weights_may_stay_in_shared_memory(hold, monkeypatch):
    monkeypatch.setattr(fused_layout, "held", lambda *_: hold)
    monkeypatch.setattr(fused_layout, "cut_for", fused_layout.cut_for.__wrapped__)
    sizes = Sizes(steps=2, batch=2, positions=3, schemata=3)
    for cell, communication in (("gru", "gated"), ("lstm", "residual"), ("gru", None)):
        choices = EVERYTHING._replace(cell=cell, communication=communication)
        case = make_case(sizes, choices, 8)
        assert_same(case)
    other = 2 - scoff_reference(*case).schema
    assert_same(case._replace(inputs=case.inputs._replace(choice=other, noise=None)))


@pytest.mark.parametrize(
    ("sizes", "cell", "memory", "expected"),
    [
        (Sizes(files=5, size=60, schemata=2), "gru", 232448, 2),
        (Sizes(files=5, size=60, schemata=2), "lstm", 232448, 1),
        (Sizes(files=5, size=60, schemata=2), "gru", 101376, 1),  # that of a smaller GPU
        (Sizes(files=5, size=60, schemata=2), "gru", 65536, 0),
        (Sizes(files=4, size=100, schemata=4), "gru", 232448, 1),
        (Sizes(files=4, size=100, schemata=4, input_heads=2), "gru", 232448, 0),
        (Sizes(files=4, size=100, schemata=4), "gru", 0, 0),
        (Sizes(files=9, size=60, schemata=2), "gru", 232448, 0),  # 16 columns
    ],
)
def test_as_many_weights_stay_as_there_is_space_for(sizes, cell, memory, expected):
    sizes = sizes._replace(features=64, comm_heads=4, comm_key=32, comm_value=32)
    inputs, weights, _ = make_case(sizes, Choices(cell), 0, torch.float32)
    for precision, most in (("tf32", expected), ("ieee", 0)):
        how = fused.Settings(cell == "lstm", sizes.files, False, precision)
        plan = fused_layout.plan_for(fused.prepare(inputs, weights), how)
        assert fused_layout.held(plan, memory) == most


@interpreted
def test_products_of_many_rows(monkeypatch):
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", 0)
    for communication in ("gated", "residual", None):
        choices = Choices(communication=communication)
        assert_same(make_case(Sizes(batch=2, steps=2), choices, 5))


@interpreted
@pytest.mark.parametrize("heads", [1, 2])
def test_few_positions_at_once(heads, monkeypatch):
    lay_out, few = fused_layout.lay_out, launch.FEWEST_POSITIONS
    monkeypatch.setattr(fused_layout, "lay_out", lambda *x: lay_out(*x)._replace(positions=few))
    monkeypatch.setattr(fused_layout, "cut_for", fused_layout.cut_for.__wrapped__)
    assert_same(make_case(Sizes(2, 1, positions=33, input_heads=heads), EVERYTHING, 4))


@interpreted
@pytest.mark.parametrize("steps", [1, 4, 5, 7, 11])
def test_chunks_of_the_backward_pass(steps):
    assert_same(make_case(Sizes(steps=steps, batch=1, files=2), Choices(reset=True), 4))


KEPT = Sizes(steps=3, batch=2, files=5, size=8, positions=2)


def keeping(run) -> tuple:
    """What the forward pass kept for the backward pass"""
    return run.output.grad_fn.saved_tensors[fused._N + 1 + fused._R :]


@interpreted
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(("cell", "steps"), [("gru", 1), ("lstm", 3)])
def test_the_last_steps_are_kept_where_all_processors_are_busy(steps, cell):
    case = make_case(KEPT._replace(steps=steps), EVERYTHING._replace(cell=cell), 4)
    assert_same(case)
    rows, _ = keeping(fused.scoff_fused(*case))
    assert rows.numel() > 0
    assert len(rows) < steps * 10 or steps == 1
    with torch.no_grad():
        torch.testing.assert_close(fused.scoff_fused(*case).output, scoff_reference(*case).output)


@interpreted
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(("heads", "choices"), [(1, EVERYTHING), (2, Choices())])
def test_the_last_steps_are_kept_with_a_given_choice(heads, choices):
    case = make_case(KEPT._replace(input_heads=heads), choices, 4)
    other = 1 - scoff_reference(*case).schema
    assert_same(case._replace(inputs=case.inputs._replace(choice=other)))


@interpreted
@pytest.mark.usefixtures("busy")
def test_what_is_kept_is_not_kept_from_checkpoints():
    case = make_case(KEPT, Choices(), 4)
    wanted = [x for x in case.weights if isinstance(x, Tensor)]

    def run(*_):
        return fused.scoff_fused(*case).output.square().sum()

    expected = torch.autograd.grad(run(), wanted)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.shape) or x, lambda x: x):
        rows, _ = keeping(fused.scoff_fused(*case))
    assert rows.shape in held
    again = torch.utils.checkpoint.checkpoint(run, *wanted, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again, wanted), expected, strict=True):
        torch.testing.assert_close(a, b)


@interpreted
def test_nothing_is_kept_where_processors_are_idle():
    assert keeping(fused.scoff_fused(*make_case(KEPT, Choices(), 4))) == ()


@interpreted
@pytest.mark.usefixtures("busy")
def test_a_second_backward_pass_gives_the_same():
    case = make_case(KEPT, Choices(), 4)
    wanted = [x for x in case.weights if isinstance(x, Tensor)]
    output = fused.scoff_fused(*case).output.square().sum()
    first = torch.autograd.grad(output, wanted, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(output, wanted), strict=True):
        torch.testing.assert_close(a, b)


@interpreted
@pytest.mark.parametrize(("value_projection", "heads"), [(True, 1), (True, 2), (False, 2)])
def test_wide_inputs_are_projected_beforehand(value_projection, heads, monkeypatch):
    monkeypatch.setattr(fused, "MAX_FEATURES", 3)
    choices = Choices(value_projection=value_projection, cell="lstm")
    assert_same(make_case(Sizes(positions=2, input_heads=heads), choices, 5))


def test_weights_of_half_precision_are_multiplied_with_all_digits():
    case = make_case(Sizes(features=20, size=20, value=20, key=16), Choices(), 5, torch.bfloat16)
    with torch.no_grad():
        exact, found = (
            fused_fold.fold(fused.prepare(*x[:2]), folds=True)
            for x in (case.to("cpu", torch.float64), case)
        )
    for a, b in zip(exact, found, strict=True):
        torch.testing.assert_close(b.double(), a, rtol=1e-5, atol=1e-5)


def test_weights_beyond_what_16_bits_hold_are_the_largest(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    case = make_case(Sizes(steps=1, batch=8, schema_key=16), Choices(), 0)
    scaled = {
        name: (getattr(case.weights, name).detach() * 30).requires_grad_()
        for name in ("schema_query", "schema_key")
    }
    case = case._replace(weights=case.weights._replace(**scaled))
    assert (scaled["schema_key"].T @ scaled["schema_query"]).abs().max() > 2048
    exact = scoff_reference(*case)
    case = case.to("cuda" if on_gpu else "cpu", torch.float32)
    run = fused.scoff_fused(*case)
    assert (run.schema.cpu() != exact.schema).double().mean() < 0.1
    for name, x in results(run, case).items():
        assert x.isfinite().all(), name


@interpreted
def test_backward_can_run_again():
    case = make_case(Sizes(2, 1, files=2), Choices(reset=True), 4)
    output, leaves = fused.scoff_fused(*case).output.sum(), list(case.leaves().values())
    first, second = (
        torch.autograd.grad(output, leaves, retain_graph=True, allow_unused=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@interpreted
@pytest.mark.parametrize(("heads", "reduction"), [(1, "sum"), (1, "mean"), (2, "sum")])
def test_inputs_may_be_the_values(heads, reduction):
    choices = Choices(value_projection=False, reduction=reduction)
    case = make_case(Sizes(2, 1, positions=3, files=2, input_heads=heads), choices, 5)
    assert (fused.prepare(*case[:2]).value is None) == (heads == 1)
    assert_same(case)


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_no_uninitialised_memory_is_read(cell):
    assert_same(make_case(Sizes(positions=3, size=7), EVERYTHING._replace(cell=cell), 6))
    assert_same(make_case(Sizes(files=1), Choices(cell=cell, communication=None), 6))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("where", ["x", "state"])
def test_nan_stays_nan(where):
    case = make_case(Sizes(batch=3), Choices(), 7, torch.float32).to("cuda" if on_gpu else "cpu")
    value = getattr(case.inputs, where).detach().clone()
    value[0, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(
        torch.float32
    )  # as CUDA makes it
    # the interpreter cannot choose among NaN
    choice = scoff_reference(*case).schema
    inputs = case.inputs._replace(**{where: value}, choice=choice)
    run = fused.scoff_fused(inputs, *case[1:])
    assert run.output[:, 1].isnan().any(-1).all()
    assert run.output[:, [0, 2]].isfinite().all()


@interpreted
def test_a_thousand_steps():
    sizes = Sizes(1000, 1, 1, 2, 1, 2, 1, 1, 2, 2, 2)
    assert_same(make_case(sizes, Choices(active=1, communication=None), 0, scale=0.3))


@interpreted
def test_the_choice_can_be_given():
    case = make_case(Sizes(), Choices(), 7)
    other = 1 - scoff_reference(*case).schema
    case = case._replace(inputs=case.inputs._replace(choice=other))
    assert torch.equal(fused.scoff_fused(*case).schema, other)
    assert_same(case)


SMALL = Sizes(5 if on_gpu else 3, 4 if on_gpu else 2, 9, 12, 3, 20, 3, 2, 8, 10, 4, 2, 8, 8)


@pytest.mark.parametrize(
    ("dtype", "tf32"),
    [
        (torch.float32, False),
        pytest.param(torch.float32, True, marks=pytest.mark.gpu),
        # the interpreter has no products of bfloat16
        pytest.param(torch.bfloat16, True, marks=pytest.mark.gpu),
        (torch.float16, True),
    ],
)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        pytest.param(SMALL._replace(positions=1), marks=pytest.mark.gpu),
        pytest.param(SMALL._replace(positions=3, batch=300), marks=pytest.mark.gpu),  # busy
        pytest.param(SMALL._replace(positions=1, files=12), marks=pytest.mark.gpu),
        pytest.param(  # all weights stay in shared memory; an LSTM's do not fit
            Sizes(5, 4, 1, 64, 5, 60, 2, 1, 64, 60, 16, 4, 32, 32), marks=pytest.mark.gpu
        ),
    ],
    ids=lambda s: f"{s.positions}-{s.files}-{s.size}",
)
def test_errors_are_at_most_twice_those_of_batched(cell, sizes, dtype, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", 1000)  # gradients of 16 bits, where busy
    # with larger weights wide states are chaotic, and all errors alike
    scale = 0.4 if sizes.size < 60 else 0.1
    cases = [
        make_case(sizes, Choices(cell=cell, reset=True), seed, scale=scale)
        for seed in range(8, 16 if on_gpu else 9)
    ]
    device = "cuda" if on_gpu else "cpu"
    assert_errors_at_most_twice_batched(fused.scoff_fused, cases, device, dtype, tf32)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize(("cell", "times"), [("gru", 1), ("lstm", 2)])
def test_gradients_of_gates_may_be_of_16_bits(cell, times, scale, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", 0)
    for module in (fused, fused_gradients):  # the first chunk is of one step
        monkeypatch.setattr(module, "chunks_of", lambda *_: fused_layout.Chunks(2, times))
    weighed, launch_weigh = [], fused_gradients.launch_weigh
    monkeypatch.setattr(
        fused_gradients, "launch_weigh", lambda *x: [weighed.append(x), launch_weigh(*x)]
    )
    # some object files are not updated, some steps are no part of a sequence
    choices = Choices(cell=cell, active=2, padding=True)
    case = make_case(Sizes(3, 3, files=3, size=7, schemata=3), choices, 3, scale=0.4)
    reference = scoff_reference(*case)
    # a sequence of which little depends, and one of which nothing does
    share = torch.tensor([1.0, 1e-3, 0.0])[:, None, None]

    def gradients(run, leaves):
        # the scale is not to overflow: it is given to autograd alone
        d_output = (scale * share).expand_as(run.output).to(run.output)
        found = torch.autograd.grad(run.output, list(leaves.values()), d_output, allow_unused=True)
        return {
            n: x.double().cpu() / scale for n, x in zip(leaves, found, strict=True) if x is not None
        }

    exact = gradients(reference, case.leaves())
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    case = case.to("cuda" if on_gpu else "cpu", torch.float32)
    found = gradients(fused.scoff_fused(*case), case.leaves())
    assert weighed
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        assert (found[name] - x).norm() <= 3e-3 * x.norm(), name


def test_gradients_of_each_column_have_their_own_digits(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", 0)
    sizes = Sizes(2, 4, files=2, size=5, schemata=2, value=4, key=4)
    choices = Choices(active=2, communication=None, value_projection=False)
    case = make_case(sizes, choices, 3, scale=0.4)
    # what a weight multiplies is there in one sequence alone
    x = torch.eye(4).to(case.inputs.x)[:, None].expand_as(case.inputs.x)
    case = case._replace(inputs=case.inputs._replace(x=x))
    share = torch.tensor([1.0, 1e-3, 1e-6, 1e-8])[:, None, None]

    def gradient(run, weight):
        d_output = share.expand_as(run.output).to(run.output)
        return torch.autograd.grad(run.output, weight, d_output)[0].double().cpu()

    reference = scoff_reference(*case)
    exact = gradient(reference, case.weights.weight_ih).flatten(0, -2)
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    case = case.to("cuda" if on_gpu else "cpu", torch.float32)
    found = gradient(fused.scoff_fused(*case), case.weights.weight_ih).flatten(0, -2)
    assert ((found - exact).norm(dim=0) <= 3e-3 * exact.norm(dim=0)).all()


def test_gradients_of_inputs_that_gates_hardly_let_in(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # factors of 16 bits, scaled
    case = make_case(Sizes(2, 1, 1, 8, size=16, value=8), Choices(noise=False), 1, scale=0.4)
    bias = case.weights.bias_ih
    assert bias is not None
    bias.data[:, 16:32] += 11  # the state stays as it is, but for a share of some 1e-5
    reference = scoff_reference(*case)
    exact = results(reference, case)
    case = case._replace(inputs=case.inputs._replace(choice=reference.schema))
    case = case.to("cuda" if on_gpu else "cpu", torch.float32)
    assert errors(case, exact, fused.scoff_fused(*case))["d_x"] < 5e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_what_a_state_was_before_it_starts_anew_does_not_matter(cell, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # factors of 16 bits, scaled
    case = make_case(Sizes(steps=2), Choices(cell=cell, reset=True), 1, dtype=torch.float32)
    # the second sequence starts with padding
    reset, valid = torch.eye(2).bool(), torch.tensor([[True, False], [True, True]])
    inputs = case.inputs._replace(reset=reset, valid=valid)

    def run(*states: float):
        state = torch.tensor(states)[:, None].expand_as(inputs.state)
        given = case._replace(inputs=inputs._replace(state=state))
        with torch.no_grad():
            return fused.scoff_fused(*given.to("cuda" if on_gpu else "cpu"))

    expected, found = run(0.5, 0.5, 0.5), run(1e6, 1e30, float("inf"))
    assert torch.equal(found.output[0, 0], expected.output[0, 0])
    assert torch.equal(found.output[1], expected.output[1])
    assert torch.equal(found.state, expected.state)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_layer_with_packed_input(cell):
    rnn = scoff.SCOFF(4, 10, num_object_files=2, num_schemata=2, cell=cell, num_layers=2)
    rnn = rnn.to("cuda" if on_gpu else "cpu").eval()
    x = [torch.randn(n, 4, device=rnn.cells[0].like.device) for n in (3, 5, 1)]
    packed = torch.nn.utils.rnn.pack_sequence(x, enforce_sorted=False)
    outcomes = []
    for backend in ("batched", "fused"):
        rnn.backend = backend
        output, state = rnn(packed)
        outcomes.append([output.data, *(state if cell == "lstm" else [state])])
    for expected, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)


def test_layer_compiles_into_one_graph():
    rnn = scoff.SCOFF(4, 10, num_object_files=2, num_schemata=2, backend="fused")
    rnn = rnn.to("cuda" if on_gpu else "cpu").eval()
    x = torch.randn(3, 2, 4, device=rnn.cells[0].like.device, requires_grad=True)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    (expected, _), (got, _) = rnn(x), compiled(x)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.sum(), [x, *rnn.parameters()], allow_unused=True)
    found = torch.autograd.grad(got.sum(), [x, *rnn.parameters()], allow_unused=True)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_layer_takes_other_sizes(dynamic):
    torch._dynamo.reset()
    rnn = scoff.SCOFF(4, 6, num_object_files=2, num_schemata=2, communication=None, backend="fused")
    rnn = rnn.to("cuda" if on_gpu else "cpu").eval()
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size, temperature in ((2, 0.9), (3, 0.5)):  # of steps, sequences and positions
        rnn.temperature = temperature
        x = torch.randn(size, size, size, 4, device=rnn.cells[0].like.device, requires_grad=True)
        outcomes = []
        for run in (rnn, compiled):
            output, state = run(x)
            loss = output.square().sum() + state.sum()
            outcomes.append((output, *torch.autograd.grad(loss, [x, *rnn.parameters()])))
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b)


def test_operators_pass_torchs_own_checks():
    choices = Choices(reset=True, padding=True)
    case = make_case(Sizes(1, 1, positions=2), choices, 0, torch.float32)
    inputs, weights, _ = case.to("cuda" if on_gpu else "cpu")
    turned = {  # as matrices lie in memory that were transposed
        name: x.detach().mT.contiguous().mT
        for name, x in weights._asdict().items()
        if isinstance(x, Tensor)
    }
    p = fused.prepare(inputs, weights._replace(**turned))
    p = [None if x is None else x.detach() for x in p]
    settings = (False, 2, False, "ieee", False)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused._forward, (*p, *settings), test_utils=checks)
    *ran, packed = fused._forward(*p, *settings)
    gradients = [torch.ones_like(x) for x in ran[:2]]
    given = (*p, *settings, torch.ones_like(packed[:1]), packed, *ran, *gradients)
    torch.library.opcheck(fused._backward, given, test_utils=checks)


@interpreted
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    # without the interpreter, hence in another process
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.ops.compile_kernels"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert launch.TRITON == (3, 8) or "to fit" not in run.stdout  # there it lacks 160 bytes
    # and those that run again, and one that keeps
    assert sum("forward_kernel" in line for line in lines) == 9
    assert sum("backward_kernel" in line for line in lines) == 5  # one writes in 16 bits
    assert sum("measure_kernel" in line or "weigh_kernel" in line for line in lines) == 2
    assert sum("pack_kernel" in line for line in lines) == 4
    assert sum("share_kernel" in line for line in lines) == 4
    assert sum("read_kernel" in line for line in lines) == 1


# --- which backend runs


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (Sizes(size=300), "300 numbers in an object file are more than 128"),
        (Sizes(files=65), "65 object files are more than 64"),
        (Sizes(value=257), "257 numbers that an object file reads are more than 256"),
        (Sizes(comm_heads=5, comm_key=60), "300 numbers in keys or values of the communication"),
        (Sizes(files=64, comm_heads=4, comm_key=32), "393216 bytes of shared memory are more"),
        (Sizes(files=9, comm_heads=8, comm_key=32), "393216 bytes of shared memory are more"),
    ],
)
def test_what_does_not_fit_is_refused_when_asked_for(sizes, why):
    case = make_case(sizes._replace(steps=1), Choices(), 0, torch.float32)
    with pytest.raises(ValueError, match=f"backend: got 'fused', but {why}"):
        run_scoff("fused", *case.to("cuda" if on_gpu else "cpu"), keep=False)


LARGE, MANY = Sizes(size=128, comm_key=32), Sizes(size=32, comm_heads=4, comm_key=32)


@pytest.mark.parametrize(
    ("sizes", "tf32", "least"),
    [
        (LARGE._replace(features=64, value=64), True, 101376),
        (LARGE._replace(features=128, value=128), True, 101376),
        (LARGE._replace(features=128, value=128), False, 101376),
        (LARGE._replace(features=256, value=256), True, 166912),  # two matrices of a gate
        (LARGE._replace(features=256, value=256), False, 166912),
        (
            LARGE._replace(features=256, value=128),
            True,
            166912,
        ),  # from what is seen to what is read
        (Sizes(size=64, features=256, value=64), True, 101376),
        (LARGE._replace(features=256, value=64, input_heads=2), True, 166912),
        (LARGE._replace(features=256, value=128, input_heads=2), True, 2**18),
        (Sizes(size=64, features=256, value=64, files=64), True, 166912),  # back from what is seen
        (Sizes(size=64, features=256, value=64, files=64, positions=64), True, 232448),
        (Sizes(size=32, features=256, value=256, files=17, positions=64), True, 166912),
        (Sizes(features=256, value=64, files=64, positions=64, input_heads=2), True, 2**18),
        (MANY._replace(files=9), True, 101376),  # what object files tell each other
        (MANY._replace(files=17), True, 232448),
        (MANY._replace(files=17), False, 232448),
        (LARGE._replace(comm_heads=4, comm_key=64), False, 166912),
    ],
)
def test_what_has_no_space_on_a_smaller_gpu_is_refused(sizes, tf32, least, monkeypatch):
    # the kernels of what is accepted were compiled for these
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    case = make_case(sizes._replace(steps=1), Choices(), 0, torch.float32)
    for memory in (101376, 166912, 232448):  # of compute capabilities 8.6 and 12.0, 8.0, 9.0
        monkeypatch.setattr(fused, "memory_of", lambda _, memory=memory: memory)
        why = fused.why_not(*case.to("cuda" if on_gpu else "cpu")[:2])
        assert (why is None) == (memory >= least), why


def test_why_another_backend_runs_is_logged_once(caplog):
    dispatch.log_once.cache_clear()
    for reason in (None, "no space", "no space", "no kernels"):
        dispatch.refuse("auto", "fused", reason)
    assert [record.getMessage() for record in caplog.records] == [
        "SCOFF does without its backend 'fused': no space",
        "SCOFF does without its backend 'fused': no kernels",
    ]


def test_that_kernels_have_no_float64_is_logged(caplog, monkeypatch):
    dispatch.log_once.cache_clear()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "scoff_batched", lambda *x: x)
    case = make_case(Sizes(), Choices(), 0)
    shape = case.inputs.x.shape  # of what looks as if it were on a GPU
    x = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.float64, shape=shape)
    for _ in range(2):
        run_scoff("auto", case.inputs._replace(x=x), *case[1:], keep=False)
    assert [record.getMessage() for record in caplog.records] == [
        "SCOFF does without its backend 'fused': it has no float64",
        "SCOFF does without its backend 'wide': it has no float64",
    ]


@interpreted
def test_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="it runs on a CUDA device, not on cpu"):
        scoff.SCOFF(4, 8, backend="fused")(torch.randn(2, 3, 4))


def test_an_old_triton_is_refused(monkeypatch):
    monkeypatch.setattr(launch, "TRITON", (3, 5))
    with pytest.raises(ValueError, match=r"it needs triton 3\.6, and this is "):
        scoff.SCOFF(4, 8, backend="fused")(torch.randn(2, 3, 4))


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "fused", None)
    with pytest.raises(ValueError, match="triton is not installed"):
        scoff.SCOFF(4, 8, backend="fused")(torch.randn(2, 3, 4))


def test_a_trace_is_batched_and_an_empty_batch_is_empty():
    rnn = scoff.SCOFF(4, 8, backend="fused").to("cuda" if on_gpu else "cpu")
    device = rnn.cells[0].like.device
    assert rnn.trace(torch.randn(2, 3, 4, device=device)).schema.shape == (3, 2, 4)
    assert rnn(torch.randn(2, 0, 4, device=device))[0].shape == (2, 0, 8)
