"""All that a call launches, launched at once.

For a short recurrence the host takes longer to launch than the GPU to compute. So the launches of a
call are recorded in a CUDA graph, and replayed by later calls of the same kind. A graph is bound to
the memory with which it was recorded. What is small has a place for that, into which it is copied
before and out of which after, and which all calls share. What is large is where the caller put it,
or is about to get it: torch's allocator hands out the same large pieces, over and over, to a loop
that does the same things over and over. A call whose pieces are new launches one by one.

`SCOFF_REPLAY=0` in the environment turns it off.
"""

import atexit
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

ENABLED = os.environ.get("SCOFF_REPLAY", "1") != "0"
ALIGNED = 256  # bytes, as torch does it
SMALL = 2**20  # bytes up to which torch takes memory from common pieces, now here, now there
MOST_KINDS = 8  # of calls of an operator, by shapes and settings: those that were used last
MOST_GRAPHS = 8  # of a kind: a loop has one or two sets of addresses
MOST_SEEN = 32  # sets of addresses that are remembered until they are seen again
DEFAULT_STREAM = 0
UNUSED = 256  # calls after which a graph makes way for another

Addresses = tuple[int, ...]

_log = logging.getLogger(__name__)

_here = threading.local()  # .take: where memory comes from, if not from torch


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """As like.new_empty. All that a call returns is made by this, and most of what is large: what
    torch makes by itself stays with a graph."""
    take = getattr(_here, "take", None)
    if take is None:
        return like.new_empty(shape, dtype=dtype)
    return take(like, shape, dtype)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return empty(x, *x.shape, dtype=x.dtype if dtype is None else dtype)


def is_small(x: Any) -> bool:
    return isinstance(x, Tensor) and x.nbytes <= SMALL


class Sized(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def size_of(x: Tensor) -> Sized:
    return Sized(x.shape, x.stride(), x.dtype, x.nbytes)


def placed(sizes: Sequence[Sized], arena: Tensor) -> list[Tensor]:
    """Tensors of these sizes, one after the other"""
    start, found = 0, []
    typed: dict[torch.dtype, Tensor] = {}
    for shape, stride, dtype, nbytes in sizes:
        if dtype not in typed:
            typed[dtype] = arena.view(dtype)
        numbers = typed[dtype]
        offset = numbers.storage_offset() + start // dtype.itemsize
        found.append(numbers.as_strided(shape, stride, offset))
        start += aligned(nbytes)
    return found


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def copy_all(into: list[Tensor], out_of: list[Tensor]) -> None:
    torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


Places = list[tuple[list[int], list[Tensor]]]


def by_dtype(places: Mapping[int, Tensor]) -> Places:
    """What is copied in one launch: all of one type. Which they are, and where"""
    found: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
    for i, x in places.items():
        if x.numel() > 0:
            numbers, tensors = found.setdefault(x.dtype, ([], []))
            numbers.append(i)
            tensors.append(x)
    return list(found.values())


class Piece(NamedTuple):
    """Where a result is: in which of the tensors that a call made, and how it lies there"""

    made: int | None  # None: it is empty
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int

    def of(self, made: Tensor) -> Tensor:
        if made.shape == self.shape and made.stride() == self.stride:
            return made
        return made.as_strided(self.shape, self.stride, made.storage_offset() + self.offset)


class Kind:
    """Calls with the same shapes and settings: what they make, and what they launched.

    Of what is made, small things have a place. Of large ones, those that are returned have memory
    of their own, and the others share a piece."""

    def __init__(
        self,
        args: Sequence[Any],
        made: Sequence[Tensor],
        results: Sequence[Tensor],
        stay: range = range(0),
        together: bool = False,
    ):
        places = {x.untyped_storage()._cdata: i for i, x in enumerate(made)}
        self.results = [
            Piece(
                None if x.numel() == 0 else places.get(x.untyped_storage()._cdata, -1),
                x.shape,
                x.dtype,
                x.stride(),
                int(x.storage_offset()),
            )
            for x in results
        ]
        # something that torch made would be somewhere else the next time
        self.can_replay = all(piece.made != -1 for piece in self.results)
        # weights in half precision may be copies, for autocast, which are made anew
        held = {i for i in stay if isinstance(args[i], Tensor) and args[i].dtype == torch.float32}
        self.copied = [i for i, x in enumerate(args) if is_small(x) and i not in held]
        self.others = [
            i for i, x in enumerate(args) if isinstance(x, Tensor) and i not in self.copied
        ]
        self.argument_sizes = [size_of(args[i]) for i in self.copied]
        self.sizes = [size_of(x) for x in made]
        returned = {piece.made for piece in self.results}
        small = [i for i, x in enumerate(made) if is_small(x)]
        large = [i for i, x in enumerate(made) if not is_small(x)]
        self.small = [i for i in small if i not in returned]
        self.small_results = [i for i in small if i in returned]
        self.large = [i for i in large if i not in returned]
        self.large_results = [i for i in large if i in returned]
        self.shared = sum(aligned(self.sizes[i].nbytes) for i in self.large)
        self.together = together
        self.region: Tensor | None = None  # where small results are
        self.given: dict[int, Tensor] = {}  # the places of small arguments
        self.own: dict[int, Tensor] = {}  # and of what is small of what is made
        self.copied_in: Places = []
        self.copied_out: Places = []
        self.graphs: dict[Addresses, Any] = {}
        self.used: dict[Addresses, int] = {}  # at which call; in the order of the last use
        self.calls = 0

    def settle(self, arena_of: Callable[[int], Tensor]) -> None:
        """Small things get their places, once, when those of the first call are gone."""
        if self.region is not None:
            return
        own = self.small + self.small_results  # so that results can be copied at once
        sizes = self.argument_sizes + [self.sizes[i] for i in own]
        starts = [0, *itertools.accumulate(aligned(x.nbytes) for x in sizes)]
        with torch.inference_mode(False):  # or no later call could write there outside of it
            arena = arena_of(starts[-1])[: starts[-1]]
            places = placed(sizes, arena)
            self.region = arena[starts[len(sizes) - len(self.small_results)] :]
        count = len(self.copied)
        self.given = dict(zip(self.copied, places[:count], strict=True))
        self.own = dict(zip(own, places[count:], strict=True))
        self.copied_in = by_dtype(self.given)
        self.copied_out = by_dtype({i: self.own[i] for i in self.small_results})

    def pieces(self, like: Tensor) -> list[Tensor]:
        """Memory for large results, and for all else that is large"""
        sizes = [self.sizes[i] for i in self.large_results]
        found = [like.new_empty(x.shape, dtype=x.dtype) for x in sizes]
        return [*found, like.new_empty(self.shared, dtype=torch.uint8)] if self.shared else found

    def space(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """To be filled by a call; what is small is always the same."""
        found = self.own | dict(zip(self.large_results, pieces, strict=False))
        if self.shared:
            places = placed([self.sizes[i] for i in self.large], pieces[-1])
            found |= zip(self.large, places, strict=True)
        return [found[i] for i in range(len(self.sizes))]

    def take(self, args: Sequence[Any]) -> None:
        """Copies the small arguments into the place where they always are."""
        for numbers, own in self.copied_in:
            copy_all(own, [args[i] for i in numbers])

    def taken(self, args: Sequence[Any]) -> list[Any]:
        """The same arguments, the small ones in their place"""
        return [self.given.get(i, x) for i, x in enumerate(args)]

    def handed_out(self, pieces: Sequence[Tensor], like: Tensor) -> tuple[Tensor, ...]:
        """The results; of what the next call fills again, copies"""
        made = dict(zip(self.large_results, pieces, strict=False))
        if self.small_results and self.together:
            assert self.region is not None
            sizes = [self.sizes[i] for i in self.small_results]
            made |= zip(self.small_results, placed(sizes, self.region.clone()), strict=True)
        elif self.small_results:
            copies = {i: torch.empty_like(self.own[i]) for i in self.small_results}
            for numbers, own in self.copied_out:
                copy_all([copies[i] for i in numbers], own)
            made |= copies
        return tuple(
            like.new_empty(piece.shape, dtype=piece.dtype)
            if piece.made is None
            else piece.of(made[piece.made])
            for piece in self.results
        )

    def is_to_record(self, at: Addresses) -> bool:
        """What was used before, if there is room; notes the use."""
        self.calls += 1
        again = self.used.pop(at, None) is not None
        self.used[at] = self.calls
        if len(self.used) > MOST_SEEN + MOST_GRAPHS:
            oldest = next(iter(self.used))
            del self.used[oldest]
            self.graphs.pop(oldest, None)
        if not again or at in self.graphs:
            return False
        if len(self.graphs) >= MOST_GRAPHS:
            longest = min(self.graphs, key=lambda x: self.used[x])
            if self.calls - self.used[longest] < UNUSED:
                return False
            del self.graphs[longest]
        return True


def watched(
    run: Callable[..., Any], args: Sequence[Any]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Runs it: what it makes, and what it returns"""
    made: list[Tensor] = []

    def take(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        made.append(like.new_empty(shape, dtype=dtype))
        return made[-1]

    results = taking(take, run, args)
    return made, results


def filled(space: Sequence[Tensor], run: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs it in the given space, in which its results are then."""
    left = iter(space)

    def take(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:  # noqa: ARG001
        found = next(left)
        assert found.shape == shape, "a call of one kind made something else than those before it"
        return found

    taking(take, run, args)


def taking(take: Callable[..., Tensor], run: Callable[..., Any], args: Sequence[Any]) -> Any:
    _here.take = take
    try:
        return run(*args)
    finally:
        _here.take = None


class Recorder:
    """Records what is launched on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.side = torch.cuda.Stream(device)  # the default stream cannot be recorded
        self.pool = torch.cuda.graph_pool_handle()
        self.lock = threading.Lock()  # small things are always in the same place
        self.small = torch.empty(0, dtype=torch.uint8, device=device)
        # torch gives up a pool, for good, with the last graph in it
        self.keeper = self.record(lambda: torch.zeros(1, device=device).add_(1))

    def arena(self, nbytes: int) -> Tensor:
        """The place for small things. If it is too small, those who have it keep it."""
        if nbytes > len(self.small):
            self.small = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.small

    def record(self, work: Callable[[], object]) -> Any:
        """A failure in between leaves torch's allocator and random numbers in disorder: whatever
        could fail is done before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            torch.cuda.current_blas_handle()  # a thread's own: the first product would make it
            # the random state of graphs, which all share, is filled on the stream that records
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                with torch.inference_mode(False):  # it may be made here, and filled at any time
                    graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            here.wait_stream(self.side)
        return graph


_recorders: dict[torch.device, Recorder] = {}
_making = threading.Lock()


def recorder_for(x: Tensor) -> Recorder | None:
    """None: launches go one by one"""
    if not ENABLED or not x.is_cuda or torch._C._cuda_isCurrentStreamCapturing():
        return None
    # all graphs share what little torch's own products take for themselves, and so one stream
    if torch._C._cuda_getCurrentRawStream(x.device.index) != DEFAULT_STREAM:
        return None
    with _making:
        if x.device not in _recorders:
            _recorders[x.device] = Recorder(x.device)
        return _recorders[x.device]


class Replay:
    """A function of tensors, which lie in memory without gaps, and of numbers. It launches on their
    device and makes what it returns with `empty`. `stay`: which arguments are weights, that stay
    where they are; `together`: whether small results share memory, which stays as long as one of
    them does."""

    everything: ClassVar[list["Replay"]] = []

    def __init__(
        self,
        run: Callable[..., tuple[Tensor, ...]],
        stay: range = range(0),
        together: bool = False,
    ):
        self.run, self.stay, self.together = run, stay, together
        self.kinds: dict[Any, Kind] = {}
        self.lock = threading.Lock()  # of the kinds, which are those of all devices
        self.everything.append(self)

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        recorder = recorder_for(args[0])
        if recorder is None:
            return self.run(*args)
        if torch.is_autocast_enabled("cuda"):  # it has been heeded, and is not to be recorded
            with torch.autocast("cuda", enabled=False):
                return self._replay(recorder, args)
        return self._replay(recorder, args)

    def _replay(self, recorder: Recorder, args: Sequence[Any]) -> tuple[Tensor, ...]:
        like = args[0]
        key = (like.device, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in args))
        with self.lock:
            kind = self.kinds.pop(key, None)
            if kind is not None:
                self.kinds[key] = kind  # the last now
        if kind is None:
            made, results = watched(self.run, args)
            kind = Kind(args, made, results, self.stay, self.together)
            with self.lock:
                while len(self.kinds) >= MOST_KINDS:
                    self.kinds.pop(next(iter(self.kinds)))
                self.kinds[key] = kind
            return results
        if not kind.can_replay:
            return self.run(*args)
        with recorder.lock:
            kind.settle(recorder.arena)
            kind.take(args)
            pieces = kind.pieces(like)
            at = tuple([args[i].data_ptr() for i in kind.others] + [x.data_ptr() for x in pieces])
            if kind.is_to_record(at):
                graph = self._record(recorder, kind.space(pieces), kind.taken(args))
                if graph is None:
                    kind.can_replay = False
                else:
                    kind.graphs[at] = graph
            if (graph := kind.graphs.get(at)) is not None:
                graph.replay()
            else:
                filled(kind.space(pieces), self.run, kind.taken(args))
            return kind.handed_out(pieces, like)

    def _record(self, recorder: Recorder, space: Sequence[Tensor], args: Sequence[Any]) -> Any:
        try:
            return recorder.record(lambda: filled(space, self.run, args))
        except RuntimeError as error:
            _log.warning("launches go one by one, for they could not be recorded: %s", error)
            return None


@atexit.register
def forget() -> None:
    """Gives back all graphs, which at the end have to go before the driver does, and the place for
    small things."""
    for replay in Replay.everything:
        replay.kinds.clear()
    for recorder in _recorders.values():
        recorder.small = recorder.small.new_empty(0)
