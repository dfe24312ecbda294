"""Which compilation of a kernel is launched the second time: of kernels that only take notes."""

import operator
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

launch = pytest.importorskip("scoff.ops.scoff.launch")


class Staged(NamedTuple):
    STAGES: int
    HOLD: int = 0
    PB: int = 16


class Compiler:
    """A kernel of two arguments, for which Triton is asked, or which is launched without it."""

    arg_names = ("x", "y", "N")

    def __init__(self, most_stages: int = 9, most_held: int = 2, most_positions: int = 64):
        self.asked, self.launched = [], []
        self.most = Staged(most_stages, most_held, most_positions)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_and_launch(*arguments, enable_fp_fusion, **shape):
            assert enable_fp_fusion
            assert all(os.environ[name] == "1" for name in launch.PLAIN_PRODUCTS)
            if "shape" in shape and any(map(operator.gt, shape["shape"], self.most)):
                raise launch.triton.OutOfResources(2, 1, "shared memory")
            self.asked.append((grid[0], arguments, shape))
            return SimpleNamespace(run=self.run, function=None, packed_metadata=None)

        return compile_and_launch

    def run(self, programs, _y, _z, stream, _function, _metadata, _1, _2, _3, *rest):
        self.launched.append((programs, stream, rest))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))


def numbers(offset: int = 0, dtype=torch.float32) -> torch.Tensor:
    memory = torch.zeros(64, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[offset:]


def test_the_second_launch_needs_no_compiler():
    kernel, shape, x = Compiler(), {"N": 3}, numbers()
    for programs in (5, 6):
        launch.launch(kernel, programs, [x, None], shape)
    assert [programs for programs, *_ in kernel.asked] == [5]
    assert kernel.launched == [(6, "stream of None", (x.data_ptr(), None, 3))]


def test_a_shape_that_is_gone_is_not_taken_for_another():
    kernel, x = Compiler(), numbers()
    for n in range(20):
        launch.launch(kernel, 1, [x, None], {"N": n})
    assert [shape["N"] for *_, shape in kernel.asked] == list(range(20))


kinds = st.sampled_from(
    [
        lambda: None,
        lambda: 7,
        numbers,
        lambda: numbers(4),
        lambda: numbers(1),
        lambda: numbers(dtype=torch.int64),
        lambda: numbers(1, torch.bool),
    ]
)


@given(calls=st.lists(st.tuples(kinds, kinds, st.integers(0, 1)), max_size=12))
def test_only_the_same_kinds_of_arguments_are_launched_without_triton(calls):
    # nor any that is not aligned: Triton compiles another kernel for that
    kernel, shapes, x = Compiler(), ({"N": 0}, {"N": 1}), numbers()
    kernel.arg_names = ("w", *kernel.arg_names)
    launch._compiled.clear()
    known = set()
    for one, other, n in calls:
        arguments = [x, one(), other()]
        tensors = [y for y in arguments if isinstance(y, torch.Tensor)]
        aligned = all(y.data_ptr() % 16 == 0 for y in tensors)
        kind = (n, *(getattr(y, "dtype", type(y)) for y in arguments))
        counts = len(kernel.asked), len(kernel.launched)
        launch.launch(kernel, 1, arguments, shapes[n])
        direct = aligned and kind in known
        assert (len(kernel.asked) - counts[0], len(kernel.launched) - counts[1]) == (
            not direct,
            direct,
        )
        if direct:
            addresses = [y.data_ptr() if isinstance(y, torch.Tensor) else y for y in arguments]
            assert kernel.launched[-1][2] == (*addresses, n)
        elif aligned:
            known.add(kind)


def test_as_many_stages_as_fit_are_found_once():
    kernel, shape, x = Compiler(most_stages=2), {"shape": Staged(4)}, numbers()
    kernel.arg_names = ("x", "shape")
    for _ in range(3):
        launch.launch(kernel, 1, [x], shape)
    assert [shape["shape"].STAGES for *_, shape in kernel.asked] == [2]
    assert [rest[-1].STAGES for *_, rest in kernel.launched] == [2, 2]
    kernel = Compiler(most_stages=0)
    with pytest.raises(launch.triton.OutOfResources):
        launch.launch(kernel, 1, [x], shape)


@pytest.mark.parametrize(("stages", "held", "found"), [(4, 1, (4, 1)), (3, 1, (3, 0))])
def test_weights_do_not_stay_rather_than_with_fewer_stages(stages, held, found):
    kernel, shape = Compiler(most_stages=stages, most_held=held), {"shape": Staged(4, 2)}
    kernel.arg_names = ("x", "shape")
    launch.launch(kernel, 1, [numbers()], shape)
    assert [shape["shape"] for *_, shape in kernel.asked] == [Staged(*found)]


def test_at_last_there_are_fewer_positions():
    kernel, shape = Compiler(most_stages=1, most_positions=16), {"shape": Staged(4, 2, 64)}
    kernel.arg_names = ("x", "shape")
    launch.launch(kernel, 1, [numbers()], shape)
    assert [shape["shape"] for *_, shape in kernel.asked] == [Staged(1, 0, 16)]


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize("most_stages", [4, 2, 0])
def test_how_others_compile_products_stays_as_it_was(before, most_stages, monkeypatch):
    # on old versions of triton too, whose products need nothing
    monkeypatch.setattr(launch, "PLAIN_PRODUCTS", ("DISABLE_MMA_V3", "DISABLE_MMA_V5"))
    monkeypatch.delenv("DISABLE_MMA_V5", raising=False)
    monkeypatch.delenv("DISABLE_MMA_V3", raising=False)
    if before is not None:
        monkeypatch.setenv("DISABLE_MMA_V3", before)
    kernel, shape = Compiler(most_stages), {"shape": Staged(4)}
    kernel.arg_names = ("x", "shape")
    with nullcontext() if most_stages else pytest.raises(launch.triton.OutOfResources):
        launch.launch(kernel, 1, [numbers()], shape)
    assert os.environ.get("DISABLE_MMA_V3") == before
    assert "DISABLE_MMA_V5" not in os.environ


@given(offsets=st.lists(st.sampled_from([0, 4, 1]), min_size=1, max_size=4))
def test_a_bound_kernel_is_launched_as_any_other(offsets):
    kernel, shape = Compiler(), {"N": 3}
    launch._compiled.clear()
    for offset in offsets:
        x = numbers(offset)
        bound = launch.Bound(kernel, [x], shape)
        for programs, last in ((5, 6), (7, 8)):
            counts = len(kernel.asked), len(kernel.launched)
            bound(programs, last)
            if len(kernel.launched) > counts[1]:  # by address, of what is aligned alone
                assert offset != 1
                assert kernel.launched[-1] == (programs, "stream of None", (x.data_ptr(), last, 3))
            else:
                assert len(kernel.asked) == counts[0] + 1
                assert kernel.asked[-1] == (programs, (x, last), shape)
        assert offset == 1 or len(kernel.launched) > counts[1]


def test_again_and_again_with_and_without_alignment():
    kernel = Compiler()
    again = launch.prepared(kernel, 4, N=3)
    for offset in (0, 4, 1, 8, 1):
        again(numbers(offset), None)
    assert len(kernel.asked) == 3
    assert len(kernel.launched) == 2
