"""Calls whose launches are recorded and replayed, against calls that launch one by one."""

import contextlib
import functools
import gc
import queue
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import scoff
from tests.ops.cases import EVERYTHING, Choices, Sizes, make_case
from tests.ops.compare import assert_same, results

replay = pytest.importorskip("scoff.ops.scoff.replay")
fused = pytest.importorskip("scoff.ops.scoff.fused")
fused_gradients = pytest.importorskip("scoff.ops.scoff.fused_gradients")
fused_layout = pytest.importorskip("scoff.ops.scoff.fused_layout")
wide = pytest.importorskip("scoff.ops.scoff.wide")
BACKENDS = {"fused": (fused, fused.scoff_fused), "wide": (wide, wide.scoff_wide)}


class Tape:
    """In the place of a CUDA graph: does the work again, on the tensors of the first time."""

    def __init__(self, work):
        self.work, self.replays = work, 0

    def replay(self):
        self.replays += 1
        self.work()


class Recorder:
    def __init__(self):
        self.tapes, self.lock = [], threading.Lock()
        self.small = torch.empty(2**24, dtype=torch.uint8)

    def arena(self, nbytes: int) -> Tensor:
        assert nbytes <= len(self.small)
        return self.small

    def record(self, work) -> Tape:
        self.tapes.append(Tape(work))
        return self.tapes[-1]

    @property
    def replays(self) -> list[int]:
        return [tape.replays for tape in self.tapes]


@pytest.fixture
def recorder(monkeypatch):
    """Records on the CPU."""
    found = Recorder()
    monkeypatch.setattr(replay, "recorder_for", lambda _: found)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize(
    ("backend", "files", "cell", "dtype"),
    [
        ("fused", 3, "gru", torch.float64),
        ("wide", 3, "gru", torch.float64),
        ("wide", 1, "gru", torch.float32),  # multiplied in 16 bits
        ("wide", 1, "lstm", torch.float64),
    ],
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_replayed_calls_give_the_same(way, backend, files, cell, dtype, recorder, monkeypatch):
    module, run = BACKENDS[backend]
    sizes = Sizes(steps=2 if backend == "wide" else 1, batch=1, positions=2, files=files)
    choices = EVERYTHING._replace(active=min(2, files), cell=cell, reset=cell == "gru")
    case, given = make_case(sizes, choices, 1, dtype), []
    monkeypatch.setattr(replay, "SMALL", 2**30)  # or large things would have to be in their places
    plain, replayed = (getattr(module, f"_{name}_{way}") for name in ("run", "replayed"))
    with monkeypatch.context() as patched:
        patched.setattr(module, f"_replayed_{way}", lambda *x: given.extend(x) or plain(*x))
        results(run(*case), case)
    given = [x.detach() if isinstance(x, Tensor) else x for x in given]
    first = [x.clone() if isinstance(x, Tensor) else x for x in given]

    def numbers(scale: float) -> list:
        """Others in other memory, which a call may overwrite; but for the weights"""
        found = []
        for i, x in enumerate(given):
            if isinstance(x, Tensor):
                place = x if i in replayed.stay else torch.empty_like(x)
                x = place.copy_(first[i] * scale if x.is_floating_point() else first[i])
            found.append(x)
        return found

    with torch.no_grad():
        for scale in (1, 1, 1, 1.5):  # seen first, used first, recorded, replayed
            found = replayed(*numbers(scale))
        assert recorder.replays == [2]
        wanted = plain(*numbers(1.5))
    # what the forward pass leaves beside its outputs may have gaps
    for i in range(len(wanted) if way == "backward" else 4):
        assert torch.equal(found[i], wanted[i])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_changes_is_replayed(backend, recorder, monkeypatch):
    monkeypatch.setattr(replay, "SMALL", 2**30)  # or large things would have to be in their places
    _, run = BACKENDS[backend]
    case = make_case(Sizes(steps=1, batch=1, files=2), Choices(active=2), 1)
    for temperature in (1.0, 0.9, 0.7, 0.4):  # seen first, used first, recorded, replayed
        case = case._replace(options=case.options._replace(temperature=temperature))
        assert_same(run, case)
    assert recorder.replays == [2, 2]


def made(*args) -> tuple[Tensor, ...]:
    """Something of all kinds: a whole, a part, turned round, and nothing"""
    x, scale = args
    both = replay.empty(x, 2, *x.shape)
    both[0] = x * scale
    both[1] = -x
    whole = replay.empty_like(x).copy_(both[0])
    return whole, both[1], both[0].T, x.new_empty(0)


def test_parts_of_what_was_made_are_returned(recorder):
    call, x = replay.Replay(made), torch.randn(3, 4)
    for _ in range(5):
        x.normal_()
        found = call(x, 2.0)
        expected = (2 * x, -x, 2 * x.T, torch.empty(0))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert recorder.replays == [3]


def test_numbers_and_shapes_are_kinds_of_their_own(recorder):
    call, x, y = replay.Replay(made), torch.randn(3, 4), torch.randn(4, 3)
    for _ in range(4):
        for z, scale in ((x, 2.0), (x, 3.0), (y, 2.0)):
            assert torch.equal(call(z, scale)[0], scale * z)
    assert recorder.replays == [2, 2, 2]


def large() -> Tensor:
    return torch.randn(replay.SMALL // 16, 5)


def test_large_things_in_other_places_are_not_replayed(recorder):
    call = replay.Replay(made)
    held, results = [large() for _ in range(6)], []
    for x in held:
        results.append(call(x, 2.0)[0])
        assert torch.equal(results[-1], 2 * x)
    assert recorder.tapes == []


def test_small_results_are_nobody_elses(recorder):
    call = replay.Replay(made)
    given = [torch.randn(3, 4) for _ in range(6)]
    results = [call(x, 2.0) for x in given]
    for x, (whole, part, turned, _) in zip(given, results, strict=True):
        assert torch.equal(whole, 2 * x)
        assert torch.equal(part, -x)
        assert torch.equal(turned, 2 * x.T)
    assert recorder.replays == [4]


def test_small_things_may_stay_where_they_are(recorder):
    call, held = replay.Replay(made, stay=range(1)), [torch.randn(3, 4) for _ in range(2)]
    for x in [*held, *held, *held, *held]:
        x.normal_()
        assert torch.equal(call(x, 2.0)[0], 2 * x)
    (kind,) = call.kinds.values()
    assert kind.copied == []
    assert recorder.replays == [3, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_may_be_changed_in_place(backend, request):
    _, run = BACKENDS[backend]
    case = make_case(Sizes(steps=1, batch=1, files=1), Choices(), 1, torch.float32)
    if torch.cuda.is_available():
        case = case.to("cuda")
    else:
        request.getfixturevalue("recorder")
    leaves = [case.weights.weight_hh, case.weights.bias_hh]
    # those of the last are of a replayed call
    *_, gradients = (torch.autograd.grad(run(*case).output.sum(), leaves) for _ in range(3))
    loss = (leaves[0] * gradients[0]).sum()
    gradients[1].zero_()
    loss.backward()
    gradients[0].add_(leaves[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_final_state_that_nobody_uses_has_no_gradient(backend):
    _, run = BACKENDS[backend]
    case = make_case(Sizes(steps=2, batch=1, files=2), Choices(), 1, torch.float32)
    if torch.cuda.is_available():
        case = case.to("cuda")
    leaves = [case.weights.weight_hh, case.inputs.state]
    without = torch.autograd.grad(run(*case).output.sum(), leaves)
    found = run(*case)
    expected = torch.autograd.grad(found.output.sum() + 0 * found.state.sum(), leaves)
    assert all(map(torch.equal, without, expected))


def test_small_results_may_share_memory(recorder):
    call, given = replay.Replay(made, together=True), [torch.randn(3, 4) for _ in range(6)]
    results = [call(x, 2.0) for x in given]  # which stay as they are
    for x, (whole, part, turned, _) in zip(given, results, strict=True):
        assert torch.equal(whole, 2 * x)
        assert torch.equal(part, -x)
        assert torch.equal(turned, 2 * x.T)
    assert recorder.replays == [4]
    addresses = {x.untyped_storage().data_ptr() for x in results[-1][:3]}
    assert len(addresses) == 1
    assert addresses.isdisjoint(x.untyped_storage().data_ptr() for x in results[-2][:3])


@pytest.mark.usefixtures("recorder")
def test_what_is_large_and_not_returned_is_one_piece(monkeypatch):
    monkeypatch.setattr(replay, "SMALL", 4)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        a, b, c = (replay.empty_like(x, t) for t in (None, torch.float64, None))
        torch.mul(x, 2, out=a)
        b.copy_(a)
        return (torch.add(b.float(), a, out=c),)

    call = replay.Replay(run)
    x = torch.randn(3, 5)
    for _ in range(6):
        assert torch.equal(call(x.normal_())[0], 4 * x)
    (kind,) = call.kinds.values()
    assert [len(kind.large_results), len(kind.pieces(x))] == [1, 2]


def test_the_first_calls_may_be_in_inference_mode(recorder, monkeypatch):
    monkeypatch.setattr(recorder, "arena", functools.cache(lambda n: torch.empty(n).byte()))
    call, x = replay.Replay(made), torch.randn(3, 4)
    for inference in (True, True, False, False, True, False):
        with torch.inference_mode(inference):
            found = call(x.normal_(), 2.0)
        assert torch.equal(found[0], 2 * x)
        assert found[0].is_inference() == inference
    found[0].requires_grad_().square().sum().backward()
    assert recorder.replays == [4]


def test_all_calls_share_one_place(recorder):
    calls = [replay.Replay(made), replay.Replay(made)]
    given = [torch.randn(3, 4), torch.randn(5, 6), torch.randn(4, 4)]
    for _ in range(5):
        for x in given:
            x.normal_()
            found = [call(x, scale) for call in calls for scale in (2.0, 3.0)]
            for (whole, *_), scale in zip(found, (2, 3, 2, 3), strict=True):
                assert torch.equal(whole, scale * x)
    assert len(recorder.tapes) == 12


def test_what_torch_made_is_never_recorded(recorder):
    call, x = replay.Replay(lambda x: (x + 1,)), torch.randn(3)
    for _ in range(5):
        x.normal_()
        assert torch.equal(call(x)[0], x + 1)
    assert recorder.tapes == []


def test_graphs_are_few_and_those_in_use_stay():
    kind, most = replay.Kind([], [], []), replay.MOST_GRAPHS
    recorded = []

    def use(at: int) -> None:
        if kind.is_to_record((at,)):
            recorded.append(at)
            kind.graphs[at,] = object()

    for _ in range(4):
        for at in range(most + 2):
            use(at)
    assert recorded == list(range(most))
    for _ in range(replay.UNUSED + 2):  # the others have not been seen for long
        use(most)
    assert recorded == list(range(most + 1))
    assert len(kind.graphs) == most
    for at in range(100, 200):  # never again
        use(at)
    assert len(recorded) == most + 1
    assert len(kind.used) <= replay.MOST_SEEN + most


def test_kinds_are_few(recorder):  # noqa: ARG001
    call = replay.Replay(made)
    for n in range(1, replay.MOST_KINDS + 5):
        call(torch.randn(n, 2), 2.0)
    assert len(call.kinds) == replay.MOST_KINDS


def test_what_cannot_be_recorded_is_launched_one_by_one(recorder, monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("no")

    monkeypatch.setattr(recorder, "record", fail)
    call, x = replay.Replay(made), torch.randn(3, 4)
    for _ in range(5):
        assert torch.equal(call(x, 2.0)[0], 2 * x)
    assert len(caplog.records) == 1


def test_threads_may_make_kinds_at_the_same_time(recorder):  # noqa: ARG001
    class Slow(dict):
        def pop(self, *args):
            time.sleep(0.01)
            return super().pop(*args)

    call, wrong = replay.Replay(made), []
    call.kinds = Slow()

    def use(sizes: range) -> None:
        for n in sizes:
            try:
                call(torch.randn(n, 2), 2.0)
            except Exception as error:
                wrong.append(error)

    starts = range(1, 61, 20)
    threads = [threading.Thread(target=use, args=(range(n, n + 12),)) for n in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(call.kinds) == replay.MOST_KINDS


class Log(list):
    """In the place of all of torch.cuda that a recorder uses: what was called, and in which mode"""

    def __getattr__(self, name):
        def call(*_, **__):
            self.append((name, torch.is_inference_mode_enabled()))
            return contextlib.nullcontext() if name in ("device", "stream") else self

        return call


def test_before_it_records_nothing_is_left_that_could_fail(monkeypatch):
    log = Log()
    monkeypatch.setattr(torch, "cuda", log)
    with torch.inference_mode():
        recorder = replay.Recorder(torch.device("cpu"))
        log.clear()
        recorder.record(log.work)
    # what torch fills for each graph was made by the first, and is no tensor of inference mode
    assert log[log.index(("capture_begin", False)) :] == [
        ("capture_begin", False),
        ("work", True),
        ("capture_end", True),
        ("wait_stream", True),
    ]
    before = [name for name, _ in log[: log.index(("capture_begin", False))]]
    assert before.index("current_blas_handle") < before.index("stream")
    assert before.index("wait_stream") < before.index("stream")


# --- on a GPU


@pytest.fixture
def graphs():
    """How many were recorded"""
    return lambda: sum(len(k.graphs) for r in replay.Replay.everything for k in r.kinds.values())


LAYERS = {
    "fused": {"hidden_size": 60, "num_object_files": 3, "num_schemata": 2},
    "wide": {"hidden_size": 150, "num_object_files": 1, "num_schemata": 2},
    "wide, several": {"hidden_size": 300, "num_object_files": 2, "num_schemata": 2},
    "fused, lstm": {"hidden_size": 60, "num_object_files": 3, "num_schemata": 2, "cell": "lstm"},
}


def layer_of(name: str, dtype=torch.float32) -> scoff.SCOFF:
    torch.manual_seed(0)
    backend: Any = name.split(",")[0]
    return scoff.SCOFF(7, backend=backend, **LAYERS[name]).to("cuda", dtype)


def gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad.cpu()


def trained(layer, dtype, steps=12, between=lambda: None, autocast=False) -> list[Tensor]:
    """Outputs and gradients of a training loop, copied"""
    g = torch.Generator("cuda").manual_seed(1)
    optimiser, found = torch.optim.SGD(layer.parameters(), lr=0.05), []
    for _ in range(steps):
        x = torch.randn(9, 5, 7, generator=g, device="cuda", dtype=dtype, requires_grad=True)
        torch.manual_seed(3)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output, _ = layer(x)
        optimiser.zero_grad()
        output.square().mean().backward()
        optimiser.step()
        found += [output.detach().cpu(), gradient_of(x)]  # on the GPU they would take up memory
        between()
    return [*found, *map(gradient_of, layer.parameters())]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_gpu_training_is_the_same(name, dtype, graphs, monkeypatch):
    found = trained(layer_of(name, dtype), dtype)
    assert graphs() >= 2
    monkeypatch.setattr(replay, "ENABLED", False)
    expected = trained(layer_of(name, dtype), dtype)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("many", [fused_gradients.MANY_ROWS, 0])  # gradients of 16 bits
@pytest.mark.parametrize("name", ["fused", "fused, lstm"])
def test_gpu_training_is_the_same_where_all_processors_are_busy(name, many, graphs, monkeypatch):
    monkeypatch.setattr(fused_gradients, "MANY_ROWS", many)
    gpu_of = fused_layout.gpu_of
    monkeypatch.setattr(fused_layout, "gpu_of", lambda x: gpu_of(x)._replace(processors=1))
    found = trained(layer_of(name), torch.float32)
    assert graphs() >= 2
    monkeypatch.setattr(replay, "ENABLED", False)
    expected = trained(layer_of(name), torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_gpu_autocast_is_the_same(graphs, monkeypatch):
    found = trained(layer_of("fused"), torch.float32, autocast=True)
    assert graphs() >= 2
    monkeypatch.setattr(replay, "ENABLED", False)
    expected = trained(layer_of("fused"), torch.float32, autocast=True)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_gpu_memory_may_be_given_back_and_filled_in_between(name, graphs, monkeypatch):
    def disturb():
        gc.collect()
        torch.cuda.empty_cache()
        torch.full((2**22,), float("nan"), device="cuda")
        torch._C._cuda_clearCublasWorkspaces()

    found = trained(layer_of(name), torch.float32, between=disturb)
    assert graphs() > 0
    monkeypatch.setattr(replay, "ENABLED", False)
    expected = trained(layer_of(name), torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_gpu_two_calls_wait_for_their_backward(name, graphs):
    layer = layer_of(name)
    x, y = (torch.randn(9, 5, 7, device="cuda", requires_grad=True) for _ in range(2))

    def gradients(*inputs):
        for z in inputs:
            z.grad = None
        layer.zero_grad()
        torch.stack([layer(z)[0].square().sum() for z in inputs]).sum().backward()
        return [gradient_of(z) for z in inputs]

    found = []
    for inputs in [(x, y)] * 6 + [(x,)]:
        torch.manual_seed(5)
        found.append(gradients(*inputs))
    assert graphs() > 0
    assert all(torch.equal(first, found[-1][0]) for first, *_ in found)


@pytest.mark.gpu
def test_gpu_other_streams_and_threads(graphs, monkeypatch):
    # torch has one precision of products for all threads, which fused sets for its own
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    layer = layer_of("fused").eval()  # without noise
    x = torch.randn(9, 5, 7, device="cuda")
    state = layer.initial_state(5)

    def run():
        with torch.no_grad():
            return layer(x, state)[0]

    expected = [run() for _ in range(6)][-1]
    assert graphs() > 0
    found = []

    def elsewhere():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found.append(run())
        torch.cuda.synchronize()

    threads = [threading.Thread(target=elsewhere) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: found.extend(run() for _ in range(20))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 80
    assert all(torch.equal(expected, y) for y in found)


@pytest.mark.gpu
def test_gpu_each_call_may_be_a_new_threads_first(graphs, caplog):
    layer, x = layer_of("fused").eval(), torch.randn(9, 5, 7, device="cuda")
    state, outputs, done = layer.initial_state(5), queue.Queue(), threading.Event()

    def once():
        with torch.no_grad():
            outputs.put(layer(x, state)[0])
        done.wait()  # what torch made for a thread, the next would have after its end

    threads = [threading.Thread(target=once, daemon=True) for _ in range(5)]
    found = []
    for thread in threads:
        thread.start()
        found.append(outputs.get(timeout=120))
    done.set()
    for thread in threads:
        thread.join()
    assert graphs() > 0
    assert caplog.records == []
    assert all(torch.equal(found[0], y) for y in found)
    torch.randn(3, device="cuda")  # which fails after a recording that was broken off


@pytest.mark.gpu
def test_gpu_inside_a_graph_of_the_users(graphs):
    layer, x = layer_of("fused").eval(), torch.randn(9, 5, 7, device="cuda")
    state = layer.initial_state(5)
    with torch.no_grad():
        for _ in range(5):
            layer(x, state)
        before = graphs()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, _ = layer(x, state)
        x.normal_()
        graph.replay()
        assert torch.equal(output, layer(x, state)[0])
    assert graphs() == before
