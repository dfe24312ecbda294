"""The maze as others see it, through Gymnasium."""

import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from scoff.worlds.maze import MazeOptions, MazePainter, Mazes, ViewPainter, levels, mission
from scoff.worlds.maze.gym import ENV_ID, MazeEnv, MazeVectorEnv

MODES = list(AutoresetMode)
SMALL = {"room_size": 4, "num_rows": 2, "num_cols": 2}


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        SMALL,
        {"observation": "codes", "view_size": 7, "doors_open": True},
        {"tile_size": 5, "split": "test"},
    ],
)
def test_gymnasiums_own_check(options, render_mode):
    env = gymnasium.make(ENV_ID, render_mode=render_mode, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=render_mode is None)
        env.reset(seed=0)
        for _ in range(20):  # with the passive checks of make
            _, _, terminated, _, _ = env.step(env.action_space.sample())
            if terminated:
                env.reset()


def test_one_maze():
    env = gymnasium.make(ENV_ID, render_mode="rgb_array", room_size=6)
    options = MazeOptions(room_size=6)
    mazes = Mazes(1, options, seed=5, autoreset="disabled")
    paint, paint_maze = ViewPainter(), MazePainter(mazes.eyes)
    for episode in range(3):
        level = levels(5, torch.tensor([episode]), options)
        view, info = env.reset(seed=5 if episode == 0 else None)
        np.testing.assert_array_equal(view, paint(mazes.reset(start=level))[0])
        assert info == {"mission": mission(level).item()}
        has_ended = False
        while not has_ended:
            action = env.action_space.sample()
            view, reward, terminated, truncated, info = env.step(action)
            step = mazes.step(torch.tensor([action]))
            np.testing.assert_array_equal(view, paint(step.view)[0])
            assert [reward, terminated, truncated] == [part.item() for part in step[1:4]]
            has_ended = terminated or truncated
        np.testing.assert_array_equal(env.render(), paint_maze(mazes.maze)[0])


def play(envs, actions, mode: AutoresetMode) -> list:
    """All that an environment says, as often as there are actions"""
    said = [envs.reset(seed=3)]
    for action in actions:
        said.append(envs.step(action))
        has_ended = said[-1][2] | said[-1][3]
        if mode == AutoresetMode.DISABLED and has_ended.any():
            said.append(envs.reset(options={"reset_mask": has_ended}))
    return said


@pytest.mark.parametrize("mode", MODES)
def test_the_same_as_gymnasiums_vector_of_one(mode):
    """Views, rewards, ends, infos: numbers, types and names"""
    ours = MazeVectorEnv(1, autoreset_mode=mode, **SMALL)
    theirs = SyncVectorEnv([lambda: MazeEnv(**SMALL)], autoreset_mode=mode)
    for name in ("observation_space", "action_space", "single_observation_space"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"] == mode
    rng = np.random.default_rng(0)
    actions = rng.choice([0, 1, 2, 2, 2, 5], (600, 1))
    got, wanted = play(ours, actions, mode), play(theirs, actions, mode)
    assert len(got) == len(wanted)
    assert sum(len(said) == 5 and bool(said[2].any()) for said in got) > 3
    for one, other in zip(got, wanted, strict=True):
        for mine, yours in zip(one, other, strict=True):
            assert data_equivalence(mine, yours, exact=True)
            assert getattr(mine, "dtype", None) == getattr(yours, "dtype", None)


@pytest.mark.parametrize("mode", MODES)
def test_many_mazes_do_what_tensors_do(mode):
    envs = MazeVectorEnv(70, autoreset_mode=mode.value, observation="codes", **SMALL)
    autoreset = {"NextStep": "next-step", "SameStep": "same-step", "Disabled": "disabled"}
    mazes = Mazes(
        70,
        MazeOptions(**SMALL),
        seed=3,
        autoreset=autoreset[mode.value],
        spares=4000,
        final_views=mode == AutoresetMode.SAME_STEP,
    )
    view, info = envs.reset(seed=3)
    np.testing.assert_array_equal(view, mazes.reset())
    rng = np.random.default_rng(0)
    for _ in range(400):
        action = rng.integers(7, size=70)
        view, reward, terminated, truncated, info = envs.step(action.astype(np.uint8))
        step = mazes.step(torch.from_numpy(action))
        np.testing.assert_array_equal(view, step.view)
        np.testing.assert_array_equal(reward, step.reward.double())
        np.testing.assert_array_equal(terminated, step.terminated)
        np.testing.assert_array_equal(truncated, step.truncated)
        np.testing.assert_array_equal(info["mission"], mission(mazes.maze))
        has_ended = terminated | truncated
        if mode == AutoresetMode.SAME_STEP and has_ended.any():
            np.testing.assert_array_equal(info["_final_obs"], has_ended)
            for place in has_ended.nonzero()[0]:
                np.testing.assert_array_equal(info["final_obs"][place], step.final_view[place])
        if mode == AutoresetMode.DISABLED and has_ended.any():
            view, _ = envs.reset(options={"reset_mask": has_ended})
            np.testing.assert_array_equal(view, mazes.reset(torch.from_numpy(has_ended)))
        # no maze comes twice
        assert envs.mazes.supply.taken <= envs.mazes.supply.drawn
        assert torch.equal(envs.mazes.supply.taken, mazes.supply.taken)
    assert mazes.supply.taken > 4 * 70


def test_make_vec_and_wrappers():
    envs = gymnasium.make_vec(ENV_ID, 16, autoreset_mode=AutoresetMode.SAME_STEP, **SMALL)
    assert isinstance(envs, MazeVectorEnv)
    envs = RecordEpisodeStatistics(envs)
    envs.reset(seed=0)
    lengths = []
    for _ in range(300):
        *_, info = envs.step(envs.action_space.sample())
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()
    assert len(lengths) > 16
    assert max(lengths) == 64
    envs.close()


def test_seeds():
    def first(seed: int | None) -> np.ndarray:
        return MazeVectorEnv(20, **SMALL).reset(seed=seed)[0]

    np.testing.assert_array_equal(first(7), first(7))
    assert (first(7) != first(8)).any()
    assert (first(None) != first(None)).any()
    env = MazeEnv()
    again = [env.reset(seed=1)[0], env.reset()[0], env.reset(seed=1)[0]]
    np.testing.assert_array_equal(again[0], again[2])


def test_pictures_of_all():
    envs = MazeVectorEnv(3, render_mode="rgb_array", **SMALL)
    envs.reset(seed=0)
    pictures = envs.render()
    assert len(pictures) == 3
    assert pictures[0].shape == (56, 56, 3)
    assert MazeVectorEnv(3).render() is None


def test_what_is_refused():
    envs = MazeVectorEnv(2, autoreset_mode=AutoresetMode.DISABLED, **SMALL)
    with pytest.raises(ResetNeeded, match="reset"):
        envs.step(np.array([0, 0]))
    envs.reset(seed=0)
    for wrong in (np.array([0, 7]), np.array([0]), np.array([0.5, 1.0])):
        with pytest.raises(ValueError, match=r"actions: got .* wants 2 integers from 0 to 6"):
            envs.step(wrong)
    with pytest.raises(ValueError, match="reset_mask"):
        envs.reset(options={"reset_mask": np.zeros(2, dtype=bool)})
    for _ in range(64):
        envs.step(np.array([6, 6]))
    with pytest.raises(ResetNeeded, match=r"have ended: \[0 1\]"):
        envs.step(np.array([6, 6]))
    for options, message in (
        ({"observation": "text"}, "observation: got 'text', wants 'rgb' or 'codes'"),
        ({"render_mode": "human"}, "render_mode: got 'human', wants None or 'rgb_array'"),
        ({"tile_size": 0}, "tile_size: got 0, wants an integer of at least 1"),
        ({"tile_size": 2.5}, r"tile_size: got 2\.5, wants an integer"),
        ({"num_envs": 2.0}, r"num_envs: got 2\.0, wants an integer"),
        ({"num_envs": 0}, "num_envs: got 0, wants an integer of at least 1"),
        ({"doors_open": "no"}, "doors_open: got 'no', wants True or False"),
        ({"room_size": 2}, "room_size: got 2, wants an integer of at least 4"),
    ):
        with pytest.raises(ValueError, match=message):
            MazeVectorEnv(**{"num_envs": 2, **options})


def test_numpys_integers_are_integers():
    sizes = {"num_envs": 3, "tile_size": 4, **SMALL}
    ours = MazeVectorEnv(**{name: np.int64(size) for name, size in sizes.items()})
    plain = MazeVectorEnv(**sizes)
    assert ours.observation_space == plain.observation_space
    np.testing.assert_array_equal(ours.reset(seed=1)[0], plain.reset(seed=1)[0])
