"""How to get to the object: mazes searched and flooded cell by cell, without any cleverness."""

from collections import deque

import torch

from scoff.worlds.maze.cells import CLOSED_DOOR, EMPTY, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.levels import Levels
from scoff.worlds.maze.mazes import FORWARD, TOGGLE, TURN_LEFT, TURN_RIGHT


def is_door(cell: int) -> bool:
    return OPEN_DOOR <= cell < OBJECT or CLOSED_DOOR <= cell < WALL


def actions_to_target(maze: Levels, number: int) -> list[int]:
    """The fewest moves from cell to cell, with the turns and door handles in between"""
    width = maze.grid.shape[2]
    cells = maze.grid[number].flatten().tolist()
    start, facing, target = (part[number].item() for part in maze[1:])
    steps = (1, width, -1, -width)
    came_from: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for direction, step in enumerate(steps):
            there = cell + step
            if there == start or there in came_from:
                continue
            if there == target or cells[there] == EMPTY or is_door(cells[there]):
                came_from[there] = (cell, direction)
                if there != target:
                    queue.append(there)
    way, cell = [], target
    while cell != start:
        cell, direction = came_from[cell]
        way.append((cell + steps[direction], direction))
    actions = []
    for there, direction in reversed(way):
        turns = (direction - facing) % 4
        actions += [TURN_LEFT] if turns == 3 else [TURN_RIGHT] * turns
        facing = direction
        if CLOSED_DOOR <= cells[there] < WALL:
            actions.append(TOGGLE)
        actions.append(FORWARD)
    return actions[:-1]  # the last would step onto the object


def flood(levels: Levels) -> torch.Tensor:
    """Whether all doors and the object can be reached; the object is in the way  -> [N] bool"""
    grid = levels.grid
    door = ((grid >= OPEN_DOOR) & (grid < OBJECT)) | ((grid >= CLOSED_DOOR) & (grid < WALL))
    is_open = (grid == EMPTY) | door
    reached = torch.zeros_like(grid).flatten(1).scatter_(1, levels.position[:, None], 1)
    reached = reached.view_as(grid).bool()
    while True:
        source = reached & is_open
        spread = reached.clone()
        spread[:, 1:] |= source[:, :-1]
        spread[:, :-1] |= source[:, 1:]
        spread[:, :, 1:] |= source[:, :, :-1]
        spread[:, :, :-1] |= source[:, :, 1:]
        if torch.equal(spread, reached):
            break
        reached = spread
    is_thing = (grid != EMPTY) & (grid != WALL)
    return (reached | ~is_thing).flatten(1).all(1)
