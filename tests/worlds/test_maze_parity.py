"""The same, step by step and pixel by pixel, as the maze of the package minigrid."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
pytest.importorskip("minigrid")

from minigrid.core.constants import COLOR_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Key, Wall

from scoff.worlds.maze import MazeOptions, MazePainter, Mazes, ViewPainter, mission
from scoff.worlds.maze.cells import CLOSED_DOOR, MISSIONS, OBJECT, UNSEEN, WALL
from scoff.worlds.maze.levels import Levels, can_reach_all
from scoff.worlds.maze.mazes import DONE, FORWARD, NUM_ACTIONS, TOGGLE
from scoff.worlds.maze.minigrid_levels import ROOM_SIZES, minigrid_levels
from scoff.worlds.maze.tiles import tile, view_tiles
from scoff.worlds.maze.view import Eyes

from .make_maze_levels import real_levels
from .maze_ways import actions_to_target, flood
from .minigrid_oracle import (
    AnyLevel,
    code,
    level_of,
    plan_of,
    real_maze,
    restart,
    stack,
    with_pictures,
)


class Pair:
    """Our mazes beside as many real ones, that do the same and must be the same."""

    def __init__(self, options: MazeOptions, num_envs: int, tile_size: int = 8):
        self.real = [with_pictures(real_maze(options), tile_size) for _ in range(num_envs)]
        self.ours = Mazes(num_envs, options, autoreset="disabled", spares=num_envs)
        self.paint = ViewPainter(tile_size)
        first = [restart(env, seed) for seed, env in enumerate(self.real)]
        self.compare(self.ours.reset(start=self.levels()), first)
        assert all(env.unwrapped.max_steps == options.max_steps for env in self.real)
        missions = [MISSIONS[number] for number in mission(self.ours.maze)]
        assert missions == [env.unwrapped.mission for env in self.real]
        self.transitions = self.arrivals = self.timeouts = self.both = 0

    def levels(self) -> Levels:
        return stack([level_of(env) for env in self.real])

    def compare(self, view: torch.Tensor, observations: list) -> None:
        real = np.stack([observation["image"] for observation in observations])
        np.testing.assert_array_equal(self.paint(view).numpy(), real)

    def step(self, actions: list[int]) -> torch.Tensor:
        """-> [N] bool: whose episode has ended, and begun anew"""
        step = self.ours.step(torch.tensor(actions))
        observations, rewards, terminated, truncated, _ = zip(
            *(env.step(action) for env, action in zip(self.real, actions, strict=True)), strict=True
        )
        self.compare(step.view, observations)
        assert step.terminated.tolist() == list(terminated)
        assert step.truncated.tolist() == list(truncated)
        assert torch.equal(step.reward, torch.tensor(rewards, dtype=torch.float64).float())
        self.transitions += len(actions)
        self.arrivals += sum(terminated)
        self.timeouts += sum(truncated)
        self.both += (step.terminated & step.truncated).sum().item()

        ended = step.terminated | step.truncated
        if ended.any():
            first = {i: restart(self.real[i]) for i in ended.nonzero().flatten().tolist()}
            view = self.ours.reset(ended, self.levels())
            self.compare(view[ended], list(first.values()))
        return ended


def random_actions(pair: Pair, agent: int, rng: np.random.Generator) -> Iterator[int]:  # noqa: ARG001
    while True:
        yield int(rng.integers(NUM_ACTIONS))


def restless_actions(pair: Pair, agent: int, rng: np.random.Generator) -> Iterator[int]:  # noqa: ARG001
    while True:
        yield int(rng.choice([0, 1, FORWARD, FORWARD, FORWARD, TOGGLE]))


def direct_actions(pair: Pair, agent: int, rng: np.random.Generator) -> Iterator[int]:  # noqa: ARG001
    yield from actions_to_target(pair.ours.maze, agent)


def late_actions(pair: Pair, agent: int, rng: np.random.Generator) -> Iterator[int]:
    """Arrives with the last step, or is one too late."""
    way = actions_to_target(pair.ours.maze, agent)
    wait = pair.ours.options.max_steps - len(way) + int(rng.integers(2))
    yield from [DONE] * wait + way


def play(pair: Pair, policies: list, steps: int) -> None:
    rng = np.random.default_rng(0)
    agents = [policy(pair, agent, rng) for agent, policy in enumerate(policies)]
    for _ in range(steps):
        ended = pair.step([next(actions) for actions in agents])
        for agent in ended.nonzero().flatten().tolist():
            agents[agent] = policies[agent](pair, agent, rng)


@pytest.mark.parametrize("doors_open", [False, True])
@pytest.mark.parametrize("room_size", range(4, 13))
def test_transitions(room_size, doors_open):
    pair = Pair(MazeOptions(room_size=room_size, doors_open=doors_open), 9)
    play(pair, 3 * [random_actions, restless_actions, direct_actions], 200)
    assert pair.transitions == 1800  # 32,400 over all sizes
    assert pair.arrivals > 3


@pytest.mark.parametrize("doors_open", [False, True])
def test_the_last_step(doors_open):
    pair = Pair(MazeOptions(room_size=4, doors_open=doors_open), 8)
    play(pair, [late_actions] * 8, 2 * 144)
    assert pair.both > 2
    assert pair.timeouts > pair.both
    assert pair.arrivals == pair.both


@pytest.mark.parametrize(
    ("options", "tile_size"),
    [
        (MazeOptions(room_size=6, view_size=3), 4),
        (MazeOptions(room_size=5, view_size=7), 5),
        (MazeOptions(room_size=4, num_rows=2, num_cols=4, view_size=9), 12),
        (MazeOptions(room_size=7, num_rows=1, num_cols=1), 8),
    ],
)
def test_other_options(options, tile_size):
    pair = Pair(options, 6, tile_size)
    play(pair, 3 * [restless_actions, direct_actions], 60)


def test_whole_mazes():
    for options in (MazeOptions(room_size=6), MazeOptions(room_size=4, view_size=7, num_cols=2)):
        pair = Pair(options, 6)
        paint = MazePainter(pair.ours.eyes)
        for _ in range(10):
            play(pair, [direct_actions] * 6, 3)
            pictures = paint(pair.ours.maze).numpy()
            for picture, env in zip(pictures, pair.real, strict=True):
                np.testing.assert_array_equal(picture, env.unwrapped.get_full_render(True, 8))


@pytest.mark.parametrize("tile_size", [4, 7, 8, 12, 32])
def test_tiles(tile_size):
    def real(cell, highlight, agent=None) -> np.ndarray:
        return Grid.render_tile(cell, agent, highlight, tile_size).astype(np.uint8)

    objects = [kind(colour) for kind in (Key, Ball, Box) for colour in COLOR_TO_IDX]
    doors = [Door(colour, is_open) for colour in COLOR_TO_IDX for is_open in (False, True)]
    cells = [None, Wall(), *objects, *doors]
    assert sorted(map(code, cells)) == list(range(UNSEEN))
    tiles = view_tiles(tile_size).numpy()
    for cell in cells:
        np.testing.assert_array_equal(tiles[code(cell)], real(cell, True))
        np.testing.assert_array_equal(tile(code(cell), tile_size, False), real(cell, False))
    np.testing.assert_array_equal(tiles[UNSEEN], real(None, False))
    for agent in range(4):
        np.testing.assert_array_equal(
            tile(0, tile_size, True, agent), real(None, True, agent), err_msg=str(agent)
        )
    np.testing.assert_array_equal(tiles[UNSEEN + 1], real(None, True, 3))


@pytest.mark.parametrize("size", [3, 5, 7, 9])
def test_visibility_of_any_scene(size):
    rng = np.random.default_rng(size)
    squares = (rng.random((300, size, size)) < rng.random((300, 1, 1))) * CLOSED_DOOR
    visible = Eyes(MazeOptions(view_size=size)).visible(torch.from_numpy(squares).byte())
    for square, seen in zip(squares, visible.numpy(), strict=True):
        grid = Grid(size, size)
        for y, x in zip(*square.nonzero(), strict=True):
            grid.set(int(x), int(y), Wall())
        np.testing.assert_array_equal(seen, grid.process_vis((size // 2, size - 1)).T)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (MazeOptions(room_size=4), 900),
        (MazeOptions(room_size=5), 500),
        (MazeOptions(room_size=6), 400),
        (MazeOptions(room_size=4, num_rows=2, num_cols=2), 600),
        (MazeOptions(room_size=4, num_rows=1, num_cols=4), 600),
    ],
)
def test_which_mazes_are_drawn_again(options, count):
    env = real_maze(options, AnyLevel)
    levels, real = [], []
    for seed in range(count):
        restart(env, seed)
        levels.append(level_of(env))
        real.append(env.can_reach_all)
    assert 10 < sum(real) < count - 10
    levels = stack(levels)
    plan, _, _ = plan_of(levels, options)
    assert can_reach_all(plan, options).tolist() == real
    assert flood(levels).tolist() == real


@pytest.mark.parametrize("room_size", ROOM_SIZES)
def test_the_file_holds_real_mazes(room_size):
    options = MazeOptions(room_size=room_size)
    levels = minigrid_levels(options)
    assert len(levels.grid) >= 1000
    real = real_levels(options, 20)
    for ours, theirs in zip(levels.select(torch.arange(20)), real, strict=True):
        assert torch.equal(ours, theirs)
    assert (levels.grid == WALL).any()
    assert ((levels.grid >= OBJECT) & (levels.grid < CLOSED_DOOR)).sum() == len(levels.grid)
