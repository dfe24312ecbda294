"""The real GoToObjMaze, from the package `minigrid`, and its mazes in our terms."""

import contextlib
import io

import torch
from minigrid.core.constants import COLOR_TO_IDX
from minigrid.core.world_object import WorldObj
from minigrid.envs.babyai import GoTo
from minigrid.wrappers import RGBImgPartialObsWrapper

from scoff.worlds.maze.cells import CLOSED_DOOR, COLOURS, EMPTY, KINDS, OBJECT, OPEN_DOOR, WALL
from scoff.worlds.maze.levels import Levels, Plan, door_cells
from scoff.worlds.maze.options import MazeOptions


class AnyLevel(GoTo):
    """Keeps mazes that it should draw again, and says so."""

    def check_objs_reachable(self, raise_exc: bool = True) -> bool:  # noqa: ARG002
        self.can_reach_all = super().check_objs_reachable(raise_exc=False)
        return self.can_reach_all


def real_maze(options: MazeOptions, kind: type[GoTo] = GoTo) -> GoTo:
    return kind(
        room_size=options.room_size,
        num_rows=options.num_rows,
        num_cols=options.num_cols,
        num_dists=1,
        doors_open=options.doors_open,
        agent_view_size=options.view_size,
    )


def with_pictures(env: GoTo, tile_size: int = 8) -> RGBImgPartialObsWrapper:
    return RGBImgPartialObsWrapper(env, tile_size=tile_size)


def restart(env, seed: int | None = None):
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how often it draws again
        observation, _ = env.reset(seed=seed)
    return observation


def code(cell: WorldObj | None) -> int:
    if cell is None:
        return EMPTY
    if cell.type == "wall":
        return WALL
    colour = COLOR_TO_IDX[cell.color]
    if cell.type == "door":
        assert not cell.is_locked
        return (OPEN_DOOR if cell.is_open else CLOSED_DOOR) + colour
    return OBJECT + KINDS.index(cell.type) * len(COLOURS) + colour


def level_of(env: GoTo) -> Levels:
    """The maze as it is now, as a batch of one"""
    env = env.unwrapped
    width, height = env.grid.width, env.grid.height
    grid = [[code(env.grid.get(x, y)) for x in range(width)] for y in range(height)]
    x, y = env.agent_pos
    (target_x, target_y), *others = env.instrs.desc.find_matching_objs(env)[1]
    assert not others
    return Levels(
        torch.tensor([grid], dtype=torch.uint8),
        torch.tensor([int(y * width + x)]),
        torch.tensor([int(env.agent_dir)]),
        torch.tensor([int(target_y * width + target_x)]),
    )


def stack(levels: list[Levels]) -> Levels:
    return Levels(*map(torch.cat, zip(*levels, strict=True)))


def plan_of(levels: Levels, options: MazeOptions) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """The plan, the doors' colours and the mission of mazes; the place of no door is 0."""
    cells = levels.grid.flatten(1).long()
    places = torch.arange(options.interior)[:, None, None]
    at_place = door_cells(places.expand(-1, 1, options.num_walls), options)[:, 0]  # [k, walls]
    slots = cells[:, at_place]  # [N, k, walls]
    is_door = slots != WALL
    has_door = is_door.any(1)
    place = is_door.int().argmax(1)
    slot = slots.gather(1, place[:, None])[:, 0]
    closed, opened = slot - CLOSED_DOOR, slot - OPEN_DOOR
    colour = torch.where(slot >= CLOSED_DOOR, closed, opened) * has_door
    mission = cells.gather(1, levels.target[:, None])[:, 0] - OBJECT
    return Plan(place, has_door, *levels[1:]), colour, mission
