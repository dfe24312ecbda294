import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoff.worlds.maze import (
    MISSIONS,
    Levels,
    MazeOptions,
    MazePainter,
    Mazes,
    ViewPainter,
    levels,
    mission,
)
from scoff.worlds.maze.cells import AGENT, CLOSED_DOOR, EMPTY, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.levels import (
    build,
    can_reach_all,
    door_cells,
    draw,
    first_good,
    words_of_a_plan,
)
from scoff.worlds.maze.mazes import FORWARD, NUM_ACTIONS, Autoreset, Supply
from scoff.worlds.maze.minigrid_levels import ROOM_SIZES, minigrid_levels
from scoff.worlds.random import words

from .maze_ways import actions_to_target, flood
from .test_adding import OnDevice
from .test_random import deviation

SPLITS = ("train", "valid", "test")
SMALL = MazeOptions(room_size=4)
options_of_any_kind = st.builds(
    MazeOptions,
    room_size=st.integers(4, 12),
    num_rows=st.integers(1, 4),
    num_cols=st.integers(1, 4),
    view_size=st.sampled_from([3, 5, 7, 9]),
    doors_open=st.booleans(),
)


def same(a, b) -> bool:
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def is_door(grid: torch.Tensor) -> torch.Tensor:
    is_open = (grid >= OPEN_DOOR) & (grid < OBJECT)
    return is_open | (grid >= CLOSED_DOOR) & (grid < WALL)


# --- levels


@given(options_of_any_kind, st.integers(0, 99), st.integers(0, 1 << 40))
def test_every_maze_is_well_formed(options, seed, first):
    maze = levels(seed, torch.arange(first, first + 8), options)
    grid = maze.grid
    assert grid.shape == (8, options.height, options.width)
    assert grid.dtype == torch.uint8
    cells = grid.flatten(1)
    at_agent, at_target = (
        cells.gather(1, at[:, None])[:, 0] for at in (maze.position, maze.target)
    )
    assert (at_agent == EMPTY).all()
    assert torch.equal(at_target.long(), OBJECT + mission(maze))
    assert ((grid >= OBJECT) & (grid < CLOSED_DOOR)).flatten(1).sum(1).eq(1).all()
    assert ((maze.direction >= 0) & (maze.direction < 4)).all()
    row, column = (
        abs(of(maze.position, options.width) - of(maze.target, options.width))
        for of in (torch.floor_divide, torch.remainder)
    )
    assert (row + column >= 2).all()

    # walls between rooms, with at most one door each, of which there are enough
    pitch = options.room_size - 1
    rows, columns = torch.arange(options.height), torch.arange(options.width)
    is_wall = (rows % pitch == 0)[:, None] | (columns % pitch == 0)
    door = is_door(grid)
    assert torch.equal((grid == WALL) | door, is_wall.expand_as(grid))
    closed = (grid >= CLOSED_DOOR) & (grid < WALL)
    assert not (closed if options.doors_open else door & ~closed).any()
    place = torch.arange(options.interior)[:, None].expand(-1, options.num_walls)
    doors = door.flatten(1)[:, door_cells(place, options)].sum(1)  # [8, walls]
    assert (doors <= 1).all()
    assert torch.equal(doors.sum(1), door.flatten(1).sum(1))
    assert (doors.sum(1) >= options.num_rooms - 1).all()
    assert flood(maze).all()


@given(
    st.lists(st.integers(0, 59), min_size=1),
    st.sampled_from(SPLITS),
    st.sampled_from([SMALL, MazeOptions(room_size=7, num_cols=2)]),
)
def test_a_maze_depends_on_its_index_alone(chosen, split, options):
    everything = levels(5, torch.arange(60), options, split)
    some = levels(5, torch.tensor(chosen), options, split)
    assert same(some, everything.select(torch.tensor(chosen)))


def test_splits_and_seeds_differ():
    index = torch.arange(5000)
    sets = [levels(0, index, split=split) for split in SPLITS] + [levels(1, index)]
    grids = torch.cat([maze.grid.flatten(1) for maze in sets])
    assert len(grids.unique(dim=0)) == 20_000


def test_mazes_stay_what_they_are():
    # runs of an earlier version must stay comparable
    maze = levels(1, torch.tensor([0, 1 << 33]), SMALL, "test")
    assert (maze.position.tolist(), maze.direction.tolist()) == ([75, 88], [3, 3])
    assert maze.target.tolist() == [15, 48]
    assert bytes(maze.grid[0, 1:-1, 1:-1].flatten().tolist()).hex() == (
        "00001f00181f000000001e0000190000191f1f1f1f1f1f1d00001f00001b0000"
        "00001900001f00001a1f1f1b1f1f191f00001e00001f000000001f00001f0000"
    )


def test_none_of_thousands_is_out_of_reach():
    for room_size in (4, 5, 6, 8):
        assert flood(levels(3, torch.arange(5000), MazeOptions(room_size=room_size))).all()


@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (1, 5), (4, 1), (1, 2)])
@pytest.mark.parametrize("room_size", [4, 5, 7])
def test_the_rule_of_rooms_agrees_with_a_flood_of_cells(room_size, shape):
    options = MazeOptions(room_size, *shape)
    chances = words(0, 0, torch.arange(4000), words_of_a_plan(options))
    plan = draw(chances, options)
    no_colour = torch.zeros_like(plan.place)
    raw = build(plan, no_colour, no_colour[:, 0], options)
    is_good = can_reach_all(plan, options)
    assert torch.equal(is_good, flood(raw))
    assert 0 < is_good.sum() < 4000 or shape == (1, 2)
    # and if there is no other attempt, a bad one is mended
    mended = build(first_good(chances[:, None], options), no_colour, no_colour[:, 0], options)
    assert flood(mended).all()
    assert same(mended.select(is_good.nonzero()[:, 0]), raw.select(is_good.nonzero()[:, 0]))


# --- distributions


def differs(observed: torch.Tensor, reference: torch.Tensor) -> float:
    """Chi-square of counts against the shares of many more, in standard deviations"""
    expected = reference.double() * observed.sum() / reference.sum()
    is_common = expected >= 5
    df = int(is_common.sum())  # and all rare ones together
    assert df > 2

    def pool(counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([counts[is_common], counts[~is_common].sum()[None]]).double()

    expected, observed = pool(expected).clamp_(min=1e-9), pool(observed)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    variance = 2 / (9 * df)  # of the cube root (Wilson–Hilferty)
    return ((chi_square / df) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)


@pytest.mark.parametrize("room_size", ROOM_SIZES)
def test_mazes_are_distributed_as_real_ones(room_size):
    options = MazeOptions(room_size=room_size)
    real, ours = minigrid_levels(options), levels(0, torch.arange(20_000), options)

    def rooms(cell: torch.Tensor) -> torch.Tensor:
        pitch = room_size - 1
        return cell // options.width // pitch * 3 + cell % options.width // pitch

    def doors(maze: Levels) -> torch.Tensor:
        return is_door(maze.grid).flatten(1).sum(1)

    def distance(maze: Levels) -> torch.Tensor:
        width = options.width
        rows = maze.position // width - maze.target // width
        return rows.abs() + (maze.position % width - maze.target % width).abs()

    def door_places(maze: Levels) -> torch.Tensor:
        return is_door(maze.grid).flatten(1).nonzero()[:, 1]

    def door_colours(maze: Levels) -> torch.Tensor:
        return maze.grid[is_door(maze.grid)].long()

    measures = (
        doors,
        distance,
        mission,
        door_places,
        door_colours,
        lambda maze: maze.direction,
        lambda maze: maze.position // options.width,
        lambda maze: maze.position % options.width,
        lambda maze: maze.target // options.width,
        lambda maze: maze.target % options.width,
        lambda maze: rooms(maze.position) * 9 + rooms(maze.target),
    )
    for measure in measures:
        got, wanted = measure(real), measure(ours)
        bins = int(max(got.max(), wanted.max())) + 1
        counts = [values.bincount(minlength=bins) for values in (got, wanted)]
        assert differs(*counts) < 3.5, measure


def test_how_many_doors_there_are():
    """Exactly: how many of all choices of walls connect the rooms"""
    pairs = [(r * 3 + c, r * 3 + c + 1) for r in range(3) for c in range(2)]
    pairs += [(r * 3 + c, r * 3 + c + 3) for r in range(2) for c in range(3)]
    connected = torch.zeros(13)
    for choice in range(1 << 12):
        component = list(range(9))
        for wall in range(12):
            if choice >> wall & 1:
                one, other = (component[room] for room in pairs[wall])
                component = [one if room == other else room for room in component]
        connected[choice.bit_count()] += len(set(component)) == 1
    share = connected / torch.tensor([math.comb(12, doors) for doors in range(13)])
    share = share.diff()[7:]  # of 8 to 12 doors
    plan = draw(words(0, 0, torch.arange(100_000), 29), MazeOptions())
    counts = plan.has_door.sum(1).bincount(minlength=13)
    assert not counts[:8].any()
    assert not counts[12]
    assert share[4] == 0
    error = (share * (1 - share) / 100_000).sqrt()
    assert ((counts[8:] / 100_000 - share).abs() <= 4 * error).all()


def test_what_does_not_matter_for_reach_is_uniform():
    maze = levels(0, torch.arange(20_000))
    for values, count in ((mission(maze), len(MISSIONS)), (maze.direction, 4)):
        assert abs(deviation(values.bincount(minlength=count))) < 4


# --- steps


def walk(mazes: Mazes, count: int, seed: int = 0) -> list:
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(0, NUM_ACTIONS, (count, mazes.num_envs), generator=generator)
    return list(map(mazes.step, actions))


def test_the_fewest_steps_lead_to_the_object():
    mazes = Mazes(40, MazeOptions(room_size=6), autoreset="disabled")
    mazes.reset()
    ways = [actions_to_target(mazes.maze, agent) for agent in range(40)]
    longest = max(map(len, ways))
    actions = torch.tensor([way + [FORWARD] * (longest - len(way)) for way in ways])
    arrival = torch.full((40,), longest + 1)
    reward = torch.zeros(40)
    for step in range(longest):
        done = mazes.step(actions[:, step])
        is_first = done.terminated & (arrival > longest)
        arrival[is_first] = step + 1
        reward[is_first] = done.reward[is_first]
        assert not done.reward[~done.terminated].any()
    assert arrival.tolist() == list(map(len, ways))
    assert torch.allclose(reward, 1 - 0.9 * arrival / 324)


@settings(max_examples=30)
@given(options_of_any_kind, st.integers(0, 99))
def test_only_doors_and_the_agent_change(options, seed):
    mazes = Mazes(8, options, seed=seed, autoreset="disabled", spares=8)
    mazes.reset()
    before = Levels(*(part.clone() for part in mazes.maze))
    limit = min(40, options.max_steps)
    for number in range(limit):
        (step,) = walk(mazes, 1, number)
        grid = mazes.maze.grid
        changed = grid != before.grid
        assert not (changed & ~is_door(before.grid)).any()
        both = grid.int() + before.grid - CLOSED_DOOR - OPEN_DOOR  # twice the colour
        assert (both % 2 == 0)[changed].all()
        here = grid.flatten(1).gather(1, mazes.maze.position[:, None])
        assert (here < OBJECT).all()
        assert torch.equal(step.reward > 0, step.terminated)
    assert torch.equal(mazes.maze.target, before.target)
    assert mazes.steps.eq(limit).all()


def test_an_episode_ends_in_time():
    mazes = Mazes(5, SMALL, autoreset="disabled")
    mazes.reset()
    for step in range(1, 145):
        done = mazes.step(torch.full((5,), 6))
        assert done.truncated.all() == (step == 144)
        assert not done.terminated.any()


def test_the_same_step_begins_the_next_episode():
    same_step = Mazes(200, SMALL, autoreset="same-step", spares=2000, final_views=True)
    first = same_step.reset()
    assert torch.equal(first, same_step.eyes(levels(0, torch.arange(200), SMALL)))
    number = torch.arange(200)  # of the maze that each is in
    taken = 200
    alone = Mazes(200, SMALL, autoreset="disabled", spares=200)
    alone.reset(start=levels(0, number, SMALL))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        action = torch.randint(0, NUM_ACTIONS, (200,), generator=generator)
        step, expected = same_step.step(action), alone.step(action)
        for part in ("reward", "terminated", "truncated"):
            assert torch.equal(getattr(step, part), getattr(expected, part))
        assert torch.equal(step.final_view, expected.view)
        is_over = step.terminated | step.truncated
        ended = is_over.nonzero().flatten()
        number[ended] = torch.arange(taken, taken + len(ended))
        taken += len(ended)
        view = alone.reset(is_over, levels(0, number, SMALL))
        assert torch.equal(step.view, view)
    assert taken > 500


def test_the_next_step_begins_the_next_episode():
    mazes = Mazes(100, SMALL, autoreset="next-step", spares=2000)
    mazes.reset()
    alone = Mazes(100, SMALL, autoreset="disabled", spares=100)
    number, taken = torch.arange(100), 100
    alone.reset(start=levels(0, number, SMALL))
    is_over = torch.zeros(100, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        action = torch.randint(0, NUM_ACTIONS, (100,), generator=generator)
        step, expected = mazes.step(action), alone.step(action)
        ended = is_over.nonzero().flatten()
        number[ended] = torch.arange(taken, taken + len(ended))
        taken += len(ended)
        view = alone.reset(is_over, levels(0, number, SMALL))
        assert torch.equal(step.view, view)
        for part in ("reward", "terminated", "truncated"):
            assert torch.equal(getattr(step, part), getattr(expected, part) * ~is_over)
        is_over = step.terminated | step.truncated
    assert taken > 300


@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(2, 3))
def test_mazes_come_in_order(needs, refills):
    supply = Supply(0, SMALL, "train", 8, torch.device("cpu"))
    taken, drawn = 0, 8
    for need in needs:
        got = supply.take(torch.arange(4) < need)
        numbers = torch.arange(taken, taken + need)
        assert same(got.select(torch.arange(need)), levels(0, numbers, SMALL))
        taken += need
        for _ in range(refills):
            supply.refill(3)
            drawn = min(drawn + 3, taken + 8)
        assert (supply.taken, supply.drawn) == (taken, drawn)


def test_mazes_come_again_when_there_are_no_others():
    supply = Supply(0, SMALL, "train", 8, torch.device("cpu"))
    everyone = torch.ones(6, dtype=torch.bool)
    for numbers in ([0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3], [4, 5, 6, 7, 0, 1]):
        assert same(supply.take(everyone), levels(0, torch.tensor(numbers), SMALL))
    supply.refill(8)
    fresh = levels(0, torch.tensor([10, 11, 12, 13, 14, 15]), SMALL)
    assert same(supply.take(everyone), fresh)


def test_going_on_from_a_saved_state():
    options = MazeOptions(room_size=5)
    straight, stopped = Mazes(30, options, seed=4), Mazes(30, options, seed=4)
    for mazes in (straight, stopped):
        mazes.reset()
        walk(mazes, 250)
        mazes.refill()
    state = {name: part.clone() for name, part in stopped.state_dict().items()}
    resumed = Mazes(30, options, seed=4)
    resumed.load_state_dict(state)
    for mazes in (straight, resumed):
        mazes.refill()
    for one, other in zip(walk(straight, 250), walk(resumed, 250), strict=True):
        assert same(one[:4], other[:4])
    with pytest.raises(ValueError, match=r"state\['maze.grid'\]: got shape \(30, 13, 13\), wants"):
        Mazes(30, SMALL).load_state_dict(state)
    with pytest.raises(ValueError, match="state: got"):
        resumed.load_state_dict({})


@pytest.mark.parametrize("autoreset", ["same-step", "next-step", "disabled"])
def test_nothing_goes_through_the_host_or_moves(autoreset: Autoreset):
    mazes = Mazes(6, SMALL, autoreset=autoreset, final_views=True)
    paint, paint_maze = ViewPainter(), MazePainter(mazes.eyes)
    action = torch.full((6,), FORWARD)
    places = {name: part.data_ptr() for name, part in mazes.state_dict().items()}
    with OnDevice():
        mazes.reset()
        paint(mazes.step(action).view)
        paint_maze(mazes.maze)
        mazes.refill()
    assert places == {name: part.data_ptr() for name, part in mazes.state_dict().items()}


def test_the_agent_is_in_its_view():
    mazes = Mazes(50, MazeOptions(view_size=7))
    view = mazes.reset()
    assert (view[:, 6, 3] == AGENT).all()
    assert (view == AGENT).sum() == 50


def test_torch_is_enough():
    code = (
        "import sys\n"
        "for name in ('numpy', 'safetensors', 'gymnasium', 'minigrid'): sys.modules[name] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from scoff.worlds.maze import Mazes, ViewPainter\n"
        "ViewPainter()(Mazes(2).reset())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pictures_of_no_maze():
    assert levels(0, torch.arange(0)).grid.shape == (0, 22, 22)
    assert ViewPainter()(torch.zeros(0, 5, 5, dtype=torch.uint8)).shape == (0, 40, 40, 3)


# --- what is refused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"room_size": 3}, "room_size: got 3, wants an integer of at least 4"),
        ({"room_size": 8.0}, r"room_size: got 8\.0, wants an integer"),
        ({"num_rows": True}, "num_rows: got True, wants an integer"),
        ({"num_cols": "3"}, "num_cols: got '3', wants an integer"),
        ({"doors_open": "no"}, "doors_open: got 'no', wants True or False"),
        ({"doors_open": 1}, "doors_open: got 1, wants True or False"),
        ({"view_size": 4}, "view_size: got 4, wants an odd number from 3 to 9"),
        ({"view_size": 1}, "view_size: got 1, wants an odd number from 3 to 9"),
        ({"view_size": 11}, "view_size: got 11, wants an odd number from 3 to 9"),
        ({"num_rows": 0}, "num_rows: got 0, wants an integer of at least 1"),
        ({"num_cols": -1}, "num_cols: got -1, wants an integer of at least 1"),
        ({"num_rows": 8, "num_cols": 8}, "got 8 and 8, that is 64 rooms; wants at most 62"),
        ({"num_cols": 40}, "num_cols: got 40, and so many rooms of 8 take 281 cells; wants at"),
    ],
)
def test_impossible_options(wrong, message):
    with pytest.raises(ValueError, match=message):
        MazeOptions(**wrong)


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint16])
def test_numpys_integers_are_integers(kind):
    names = ("room_size", "num_rows", "num_cols", "view_size")
    sizes = dict(zip(names, (4, 2, 3, 5), strict=True))
    options = MazeOptions(**{name: kind(size) for name, size in sizes.items()})
    assert options == MazeOptions(**sizes)
    assert all(type(getattr(options, name)) is int for name in names)


def test_as_many_rooms_as_fit():
    options = MazeOptions(room_size=4, num_rows=2, num_cols=31)
    assert flood(levels(0, torch.arange(20), options)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: levels(0, torch.arange(2), split="exam"), "split: got 'exam', wants one of"),
        (lambda: Mazes(0), "num_envs: got 0, wants an integer of at least 1"),
        (lambda: Mazes(2, autoreset="never"), "autoreset: got 'never', wants one of 'same-step'"),
        (lambda: Mazes(9, spares=8), "spares: got 8, wants at least num_envs = 9"),
        (lambda: Mazes(2).refill(99), "count: got 99, wants from 1 to 64"),
        (
            lambda: Mazes(2).reset(start=levels(0, torch.arange(3))),
            r"start: got grids of shape \(3, 22, 22\), wants \(2, 22, 22\)",
        ),
        (lambda: minigrid_levels(MazeOptions(room_size=5)), "room_size: got 5, wants one in the"),
        (lambda: minigrid_levels(MazeOptions(num_rows=2)), "got 2 and 3, wants 3 and 3"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [SMALL, MazeOptions(room_size=8, doors_open=True)])
def test_the_gpu_makes_the_same_mazes_and_steps(options):
    index = torch.arange(5000)
    got = levels(7, index.cuda(), options)
    assert got.grid.is_cuda
    assert same([part.cpu() for part in got], levels(7, index, options))
    here, there = (Mazes(500, options, seed=7, device=device) for device in ("cpu", "cuda"))
    paint, paint_there = ViewPainter(), ViewPainter(device="cuda")
    assert torch.equal(there.reset().cpu(), here.reset())
    for _ in range(200):
        action = torch.randint(0, NUM_ACTIONS, (500,))
        step, step_there = here.step(action), there.step(action.cuda())
        assert same(step[:4], [part.cpu() for part in step_there[:4]])
        assert torch.equal(paint_there(step_there.view).cpu(), paint(step.view))


@pytest.mark.gpu
def test_a_cuda_graph_steps_and_refills():
    mazes, replayed = (Mazes(64, SMALL, device="cuda") for _ in range(2))
    paint = ViewPainter(device="cuda")
    action = torch.zeros(64, dtype=torch.int64, device="cuda")
    initial = {name: part.clone() for name, part in replayed.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        paint(replayed.step(action).view)
        replayed.refill()
    torch.cuda.current_stream().wait_stream(side)
    step_graph, refill_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(step_graph):
        step = replayed.step(action)
        picture = paint(step.view)
    with torch.cuda.graph(refill_graph):
        replayed.refill()
    replayed.load_state_dict(initial)
    mazes.reset()
    replayed.reset()
    for number in range(300):
        action.copy_(torch.randint(0, NUM_ACTIONS, (64,)))
        step_graph.replay()
        expected = mazes.step(action)
        assert same(step[:4], expected[:4])
        assert torch.equal(picture, paint(expected.view))
        if number % 20 == 0:
            refill_graph.replay()
            mazes.refill()
    assert same(replayed.state_dict().values(), mazes.state_dict().values())
