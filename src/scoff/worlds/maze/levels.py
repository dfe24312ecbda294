"""Random mazes, as a function of (seed, split, index).

Rooms stand in rows and columns; neighbours share a wall, which may have one door. The agent starts
anywhere, and so does the one object, its target, though not next to it. Doors are added to walls in
random order until all rooms are connected. A maze is drawn anew, from start to end, if the object
stands before doors in such a way that the agent cannot get to every door and to the object.

To have no loop without bound, and none that waits for the device, ATTEMPTS mazes are drawn and the
first good one is taken. If none is good, the object of the first goes to the room that is the most
doors away. It blocks nothing there: all other rooms are connected without that one.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from scoff.worlds.maze.cells import CLOSED_DOOR, COLOURS, EMPTY, MISSIONS, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.options import MazeOptions
from scoff.worlds.random import STREAMS, Split, words

# the chance that none is good is 5e-6 for rooms of 4, of which 22 % are bad, 1e-10 for rooms of 6
ATTEMPTS = 8


class Levels(NamedTuple):
    """Mazes as an episode starts. A cell's number is row * width + column."""

    grid: Tensor  # [N, H, W] uint8: see cells.py
    position: Tensor  # [N] int64: the agent's cell
    direction: Tensor  # [N] int64: where it looks; 0 right, 1 down, 2 left, 3 up
    target: Tensor  # [N] int64: the object's cell

    def select(self, mazes: Tensor) -> Self:
        """Some of them, by their places [M] int64"""
        return self._make(part[mazes] for part in self)


class Plan(NamedTuple):
    """Where things are. Walls: those to the right of a room, row by row, then those below one."""

    place: Tensor  # [N, walls] int64: how far along its wall a door is, or would be, from 0
    has_door: Tensor  # [N, walls] bool
    position: Tensor  # [N] int64, and so on as in Levels
    direction: Tensor
    target: Tensor


def levels(
    seed: int, index: Tensor, options: MazeOptions | None = None, split: Split = "train"
) -> Levels:
    """The mazes number `index` [N] int64 of the split, on the device of `index`."""
    if split not in STREAMS:
        raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, STREAMS))}")
    options = options or MazeOptions()
    walls = options.num_walls
    sizes = [walls, 1, ATTEMPTS * words_of_a_plan(options)]
    chances = words(seed, STREAMS[split], index, sum(sizes))
    tint, errand, chances = chances.split(sizes, 1)
    plan = first_good(chances.unflatten(1, (ATTEMPTS, -1)), options)
    return build(plan, _below(tint, len(COLOURS)), _below(errand[:, 0], len(MISSIONS)), options)


def build(plan: Plan, colour: Tensor, mission: Tensor, options: MazeOptions) -> Levels:
    """From a plan, its doors' colours [N, walls] and the numbers of the missions [N]"""
    device = plan.position.device
    pitch = options.room_size - 1
    is_wall_row = torch.arange(options.height, device=device) % pitch == 0
    is_wall_column = torch.arange(options.width, device=device) % pitch == 0
    is_wall = is_wall_row[:, None] | is_wall_column
    empty_maze = torch.where(is_wall, WALL, EMPTY).to(torch.uint8).flatten()
    grid = empty_maze.repeat(len(plan.position), 1)  # [N, H * W]

    door = (OPEN_DOOR if options.doors_open else CLOSED_DOOR) + colour
    door = torch.where(plan.has_door, door, WALL).to(torch.uint8)
    grid.scatter_(1, door_cells(plan.place, options), door)
    grid.scatter_(1, plan.target[:, None], (OBJECT + mission).to(torch.uint8)[:, None])
    grid = grid.unflatten(1, (options.height, options.width))
    return Levels(grid, plan.position, plan.direction, plan.target)


def mission(level: Levels) -> Tensor:
    """Which of MISSIONS  -> [N] int64"""
    return level.grid.flatten(1).gather(1, level.target[:, None])[:, 0].long() - OBJECT


def door_cells(place: Tensor, options: MazeOptions) -> Tensor:
    """[N, walls] -> [N, walls]: cell numbers"""
    pitch, width = options.room_size - 1, options.width
    row = torch.arange(options.num_rows, device=place.device)[:, None] * pitch
    column = torch.arange(options.num_cols, device=place.device) * pitch
    right = (row + 1) * width + column[1:]
    down = row[1:] * width + column + 1
    first = torch.cat([right.flatten(), down.flatten()])
    along = torch.cat([torch.full_like(right, width).flatten(), torch.ones_like(down).flatten()])
    return first + place * along


# --- plans


def words_of_a_plan(options: MazeOptions) -> int:
    return 2 * options.num_walls + 5


def first_good(chances: Tensor, options: MazeOptions) -> Plan:
    """[N, attempts, words of a plan] -> N plans"""
    n, attempts, _ = chances.shape
    plan = draw(chances.flatten(0, 1), options)
    is_good = can_reach_all(plan, options).view(n, attempts)
    chosen = is_good.int().argmax(1)  # the first good one, or the first if there is none
    chosen = torch.arange(0, n * attempts, attempts, device=chances.device) + chosen
    plan = Plan(*(part.index_select(0, chosen) for part in plan))
    _, target_cell = _room_and_cell(plan.target, options)
    harmless = _cell_number(_farthest_room(plan, options), target_cell, options)
    return plan._replace(target=torch.where(is_good.any(1), plan.target, harmless))


def draw(chances: Tensor, options: MazeOptions) -> Plan:
    """[M, words of a plan] -> M plans, good or not"""
    walls, side = options.num_walls, options.interior
    place, order, rest = chances.split([walls, walls, 5], 1)
    room, cell, direction, target_room, target_cell = rest.unbind(1)
    room, cell = _below(room, options.num_rooms), _below(cell, side * side)
    target_room = _below(target_room, options.num_rooms)
    target_cell = _cell_apart(target_cell, cell, target_room == room, side)
    return Plan(
        _below(place, side),
        order <= _last_door(order, options)[:, None],
        _cell_number(room, cell, options),
        _below(direction, 4),
        _cell_number(target_room, target_cell, options),
    )


def can_reach_all(plan: Plan, options: MazeOptions) -> Tensor:
    """Whether the agent can get to all doors and to the object  -> [M] bool

    A room without one cell stays connected, so the object is in the way only if it stands before
    doors, and those are closed from its room. All doors are within reach, from one side or the
    other, and so is the object, if the agent can get into every room but the object's own.
    """
    room, _ = _room_and_cell(plan.position, options)
    target_room, _ = _room_and_cell(plan.target, options)
    ways = _bits(plan.has_door & ~_is_blocked(plan, options), options)
    reached = 1 << room
    for _ in range(options.num_rooms - 1):
        reached = _through_doors(reached, *ways, options)
    return (reached | 1 << target_room) == (1 << options.num_rooms) - 1


def _below(word: Tensor, count: int | Tensor) -> Tensor:
    """From 32 random bits to an integer from 0 to count - 1"""
    return word * count >> 32


def _cell_number(room: Tensor, cell: Tensor, options: MazeOptions) -> Tensor:
    """Of a cell of a room in the whole maze. In a room they are numbered without its walls."""
    pitch, side = options.room_size - 1, options.interior
    row = room // options.num_cols * pitch + 1 + cell // side
    column = room % options.num_cols * pitch + 1 + cell % side
    return row * options.width + column


def _room_and_cell(number: Tensor, options: MazeOptions) -> tuple[Tensor, Tensor]:
    pitch, side = options.room_size - 1, options.interior
    row, column = number // options.width, number % options.width
    room = row // pitch * options.num_cols + column // pitch
    return room, (row % pitch - 1) * side + column % pitch - 1


def _cell_apart(chance: Tensor, agent: Tensor, is_same_room: Tensor, side: int) -> Tensor:
    """A cell of the target's room, neither the agent's nor next to it  [M] -> [M]"""
    row, column = agent // side, agent % side
    # in ascending order, each with whether it is in the room
    neighbours = (
        (agent - side, row > 0),
        (agent - 1, column > 0),
        (agent, row >= 0),
        (agent + 1, column < side - 1),
        (agent + side, row < side - 1),
    )
    taken = [(cell, is_inside & is_same_room) for cell, is_inside in neighbours]
    free = torch.full_like(chance, side * side)
    for _, is_taken in taken:
        free -= is_taken.long()
    choice = _below(chance, free)  # counts free cells only
    for cell, is_taken in taken:
        choice += is_taken & (choice >= cell)
    return choice


def _by_direction(walls: Tensor, options: MazeOptions) -> tuple[Tensor, Tensor]:
    """[M, walls] -> [M, rows, cols - 1] to the right of rooms, [M, rows - 1, cols] below"""
    rows, cols = options.num_rows, options.num_cols
    right, down = walls.split([rows * (cols - 1), (rows - 1) * cols], 1)
    return right.unflatten(1, (rows, cols - 1)), down.unflatten(1, (rows - 1, cols))


def _last_door(order: Tensor, options: MazeOptions) -> Tensor:
    """The place in the order of the door that connects the last room  [M, walls] -> [M]

    For each room: the least, over all ways to it, of the last door on the way.
    """
    right, down = _by_direction(order, options)
    last = order.new_full((len(order), options.num_rows, options.num_cols), 1 << 32)
    last[:, 0, 0].fill_(-1)  # ways may start in any room
    steps = (
        (last[:, :, :-1], last[:, :, 1:], right),
        (last[:, :-1], last[:, 1:], down),
        (last[:, :, 1:], last[:, :, :-1], right),
        (last[:, 1:], last[:, :-1], down),
    )
    for _ in range(options.num_rooms - 1):  # no way is longer
        for here, there, door in steps:
            torch.minimum(there, torch.maximum(here, door), out=there)
    return last.flatten(1).amax(1)


def _is_blocked(plan: Plan, options: MazeOptions) -> Tensor:
    """Whether the object stands before the place of a wall's door  -> [M, walls] bool"""
    rooms = torch.arange(options.num_rooms, device=plan.target.device)
    rooms = rooms.view(options.num_rows, options.num_cols)
    side = options.interior
    room, cell = (part[:, None] for part in _room_and_cell(plan.target, options))
    row, column = cell // side, cell % side

    def is_before(one: Tensor, other: Tensor, across: Tensor) -> Tensor:
        is_at_far_side = (room == one.flatten()) & (across == side - 1)
        return is_at_far_side | (room == other.flatten()) & (across == 0)

    right = is_before(rooms[:, :-1], rooms[:, 1:], column)
    down = is_before(rooms[:-1], rooms[1:], row)
    along = torch.cat([row.expand_as(right), column.expand_as(down)], 1)
    return torch.cat([right, down], 1) & (plan.place == along)


def _bits(is_open: Tensor, options: MazeOptions) -> tuple[Tensor, Tensor]:
    """Rooms with a way to the right, and those with a way down, as bits  [M, walls] -> [M], [M]"""
    right, down = _by_direction(is_open, options)
    bit = 1 << torch.arange(options.num_rooms, device=is_open.device)
    bit = bit.view(options.num_rows, options.num_cols)
    return (right * bit[:, :-1]).sum((1, 2)), (down * bit[:-1]).sum((1, 2))


def _through_doors(reached: Tensor, right: Tensor, down: Tensor, options: MazeOptions) -> Tensor:
    """Rooms as bits: those that were reached, and those one door further"""
    cols = options.num_cols
    sideways = (reached & right) << 1 | reached >> 1 & right
    return reached | sideways | (reached & down) << cols | reached >> cols & down


def _farthest_room(plan: Plan, options: MazeOptions) -> Tensor:
    """From the agent's, counting doors  -> [M]"""
    ways = _bits(plan.has_door, options)
    reached = 1 << _room_and_cell(plan.position, options)[0]
    rooms = torch.arange(options.num_rooms, device=reached.device)
    doors = torch.zeros_like(reached[:, None] + rooms)
    for _ in range(options.num_rooms - 1):
        doors += 1 - (reached[:, None] >> rooms & 1)
        reached = _through_doors(reached, *ways, options)
    return doors.argmax(1)
