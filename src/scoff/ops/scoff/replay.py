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
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
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
    """As like.new_empty. All that a call returns, and all that is large, is made by this."""
    take = getattr(_here, "take", None)
    if take is None:
        return like.new_empty(shape, dtype=dtype)
    return take(like, shape, dtype)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return empty(x, *x.shape, dtype=x.dtype if dtype is None else dtype)


def is_small(x: Any) -> bool:
    return isinstance(x, Tensor) and x.nbytes <= SMALL


Sized = tuple[torch.Size, torch.dtype, int]


def placed(sizes: Sequence[Sized | None], arena: Tensor) -> list[Tensor | None]:
    """Tensors of these sizes, one after the other"""
    start, found = 0, []
    for size in sizes:
        if size is None:
            found.append(None)
            continue
        shape, dtype, nbytes = size
        found.append(arena[start : start + nbytes].view(dtype).view(shape))
        start += aligned(nbytes)
    return found


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The second of each pair into the first: one launch for all of one type"""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for to, x in pairs:
        if x.numel() > 0:
            into, out_of = by_dtype.setdefault(x.dtype, ([], []))
            into.append(to)
            out_of.append(x)
    for into, out_of in by_dtype.values():
        torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


class Piece(NamedTuple):
    """Where a result is: in which of the tensors that a call made, and how it lies there"""

    made: int | None  # None: it is empty
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, space: Sequence[Tensor], like: Tensor) -> Tensor:
        if self.made is None:
            return like.new_empty(self.shape)
        whole = space[self.made]
        if whole.shape == self.shape and whole.stride() == self.stride:
            return whole
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Kind:
    """Calls with the same shapes and settings: what they make, and what they launched."""

    def __init__(
        self,
        args: Sequence[Any],
        made: Sequence[Tensor],
        results: Sequence[Tensor],
        stay: range = range(0),
    ):
        # weights in half precision may be copies, for autocast, which are made anew
        held = {i for i in stay if isinstance(args[i], Tensor) and args[i].dtype == torch.float32}
        small = [x if is_small(x) and i not in held else None for i, x in enumerate(args)]
        small += [x if is_small(x) else None for x in made]
        self.small = [None if x is None else (x.shape, x.dtype, x.nbytes) for x in small]
        self.given: list[Tensor | None] = []  # the places of small arguments
        self.own: list[Tensor | None] = []  # and of what is small of what is made
        self.sizes = [(x.shape, x.dtype) for x in made]
        places = {x.untyped_storage()._cdata: i for i, x in enumerate(made)}
        self.results = [
            Piece(
                None if x.numel() == 0 else places.get(x.untyped_storage()._cdata, -1),
                x.shape,
                x.stride(),
                int(x.storage_offset()),
            )
            for x in results
        ]
        # something that torch made would be somewhere else the next time
        self.can_replay = all(piece.made != -1 for piece in self.results)
        self.graphs: dict[Addresses, Any] = {}
        self.used: dict[Addresses, int] = {}  # at which call; in the order of the last use
        self.calls = 0

    def settle(self, arena_of: Callable[[int], Tensor]) -> None:
        """Small things get their places, once, when those of the first call are gone."""
        if not self.own:
            nbytes = sum(aligned(x[2]) for x in self.small if x is not None)
            with torch.inference_mode(False):  # or no later call could write there outside of it
                places = placed(self.small, arena_of(nbytes))
            count = len(self.small) - len(self.sizes)
            self.given, self.own = places[:count], places[count:]

    def space(self, like: Tensor) -> list[Tensor]:
        """To be filled by a call; what is small is always the same."""
        return [
            like.new_empty(shape, dtype=dtype) if own is None else own
            for own, (shape, dtype) in zip(self.own, self.sizes, strict=True)
        ]

    def taken(self, args: Sequence[Any]) -> list[Any]:
        """The same arguments, the small ones in the place where they always are"""
        copy_all((own, x) for x, own in zip(args, self.given, strict=True) if own is not None)
        return [x if own is None else own for x, own in zip(args, self.given, strict=True)]

    def handed_out(self, space: Sequence[Tensor], like: Tensor) -> tuple[Tensor, ...]:
        """The results; of what the next call fills again, copies"""
        found = [piece.of(space, like) for piece in self.results]
        copies = []
        for i, piece in enumerate(self.results):
            if piece.made is not None and self.own[piece.made] is not None:
                copies.append((torch.empty_like(found[i]), found[i]))
                found[i] = copies[-1][0]
        copy_all(copies)
        return tuple(found)

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
    where they are."""

    everything: ClassVar[list["Replay"]] = []

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], stay: range = range(0)):
        self.run, self.stay = run, stay
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
            kind = Kind(args, made, results, self.stay)
            with self.lock:
                while len(self.kinds) >= MOST_KINDS:
                    self.kinds.pop(next(iter(self.kinds)))
                self.kinds[key] = kind
            return results
        if not kind.can_replay:
            return self.run(*args)
        with recorder.lock:
            kind.settle(recorder.arena)
            space, args = kind.space(like), kind.taken(args)
            places = (*kind.given, *kind.own)
            at = tuple(
                x.data_ptr()
                for x, place in zip((*args, *space), places, strict=True)
                if place is None and isinstance(x, Tensor)
            )
            if kind.is_to_record(at):
                graph = self._record(recorder, kind, space, args)
                if graph is not None:
                    kind.graphs[at] = graph
            if (graph := kind.graphs.get(at)) is not None:
                graph.replay()
            else:
                filled(space, self.run, args)
            return kind.handed_out(space, like)

    def _record(
        self, recorder: Recorder, kind: Kind, space: Sequence[Tensor], args: Sequence[Any]
    ) -> Any:
        try:
            return recorder.record(lambda: filled(space, self.run, args))
        except RuntimeError as error:
            kind.can_replay = False
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
