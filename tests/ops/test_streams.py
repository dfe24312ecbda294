"""Work in parts, some of it beside the rest."""

import pytest
import torch

from scoff.ops.scoff.streams import pipeline


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_every_part_is_prepared_then_run_then_finished(parts):
    told = []
    note = {name: lambda n, name=name: told.append((n, name)) for name in ("prepare", "run", "end")}
    pipeline(torch.device("cpu"), parts, *note.values())
    assert sorted(told) == sorted((n, name) for n in range(parts) for name in note)
    for n in range(parts):
        assert [name for part, name in told if part == n] == list(note)
    # two take turns in one place
    for n in range(2, parts):
        assert told.index((n - 2, "end")) < told.index((n, "prepare"))


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_run_waits_for_what_was_prepared(recorded):
    parts, device = 7, torch.device("cuda")
    place = torch.zeros(2, 2**22, device=device)
    last, sums = torch.zeros(2**22, device=device), torch.zeros(2**22, device=device)

    def prepare(n: int) -> None:
        place[n % 2].copy_(torch.arange(2**22, device=device) % 1000 + n)

    def run(n: int) -> None:
        last.mul_(0.5).add_(place[n % 2])
        place[n % 2].copy_(last)

    def finish(n: int) -> None:
        sums.add_(place[n % 2])

    def work() -> None:
        last.zero_()
        sums.zero_()
        pipeline(device, parts, prepare, run, finish)

    work()
    if recorded:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    start, wanted, total = torch.arange(2**22, device=device) % 1000, 0, 0
    for n in range(parts):
        wanted = wanted * 0.5 + (start + n)
        total = total + wanted
    for _ in range(50):
        work()
        torch.testing.assert_close(sums, total)
