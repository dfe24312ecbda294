"""The maze for Gymnasium: one environment by `gymnasium.make`, many at once by `make_vec`.

    import gymnasium
    import scoff.worlds.maze.gym  # registers it

    env = gymnasium.make("scoff/GoToObjMaze-v0", room_size=6)
    envs = gymnasium.make_vec("scoff/GoToObjMaze-v0", num_envs=64, room_size=6)

Observations are the agent's views as pictures, or as codes (see cells.py). `info["mission"]` is the
number of the mission, as in MISSIONS. gymnasium is needed, and imported only here.
"""

from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from scoff.worlds.maze.cells import NUM_CODES
from scoff.worlds.maze.levels import mission
from scoff.worlds.maze.mazes import NUM_ACTIONS, Autoreset, Mazes
from scoff.worlds.maze.options import MazeOptions, as_integer
from scoff.worlds.maze.pictures import MazePainter, ViewPainter
from scoff.worlds.random import Split

ENV_ID = "scoff/GoToObjMaze-v0"
AUTORESET: dict[AutoresetMode, Autoreset] = {
    AutoresetMode.NEXT_STEP: "next-step",
    AutoresetMode.SAME_STEP: "same-step",
    AutoresetMode.DISABLED: "disabled",
}

Array = NDArray[Any]
Observation = Literal["rgb", "codes"]


class MazeVectorEnv(gymnasium.vector.VectorEnv[Array, Array, Array]):
    """Many mazes, NumPy in and out. Options are those of MazeOptions."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        observation: Observation = "rgb",
        tile_size: int = 8,
        split: Split = "train",
        device: torch.device | str = "cpu",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **options: Any,
    ):
        if observation not in ("rgb", "codes"):
            raise ValueError(f"observation: got {observation!r}, wants 'rgb' or 'codes'")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode: got {render_mode!r}, wants None or 'rgb_array'")
        num_envs, tile_size = as_integer("num_envs", num_envs), as_integer("tile_size", tile_size)
        if tile_size < 1:
            raise ValueError(f"tile_size: got {tile_size}, wants an integer of at least 1")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.mazes = Mazes(
            num_envs,
            MazeOptions(**options),
            split=split,
            device=device,
            autoreset=AUTORESET[self.autoreset_mode],
            final_views=self.autoreset_mode == AutoresetMode.SAME_STEP,
        )
        self.num_envs = num_envs
        self.metadata = {"render_modes": ["rgb_array"], "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode
        size = self.mazes.options.view_size
        self._paint_view = ViewPainter(tile_size, device) if observation == "rgb" else None
        self._paint_maze = MazePainter(self.mazes.eyes, tile_size, device) if render_mode else None
        if observation == "rgb":
            pixels = size * tile_size
            self.single_observation_space = spaces.Box(0, 255, (pixels, pixels, 3), np.uint8)
        else:
            self.single_observation_space = spaces.Box(0, NUM_CODES - 1, (size, size), np.uint8)
        self.single_action_space = spaces.Discrete(NUM_ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.is_seeded = False
        self._used = 0  # mazes, since they were last replaced
        self._has_ended = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """`options={"reset_mask": mask}` resets some only; all views are given."""
        super().reset(seed=seed)
        if seed is not None or not self.is_seeded:
            self.mazes.seed(int(self.np_random.integers(1 << 63)) if seed is None else seed)
            self.is_seeded, self._used = True, 0
        where = self._reset_mask(options)
        view = self.mazes.reset(torch.from_numpy(where).to(self.mazes.device))
        self._has_ended &= ~where
        self._replace(where.sum())
        return self._observe(view), self._info(where)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        if not self.is_seeded:
            raise ResetNeeded("step() needs reset() before it")
        actions = np.asarray(actions)
        if actions not in self.action_space:
            raise ValueError(
                f"actions: got {actions.dtype} of shape {actions.shape} with values {actions}, "
                f"wants {self.num_envs} integers from 0 to {NUM_ACTIONS - 1}"
            )
        if self.autoreset_mode == AutoresetMode.DISABLED and self._has_ended.any():
            raise ResetNeeded(f"these episodes have ended: {np.flatnonzero(self._has_ended)}")
        missions = self._missions()
        done = self.mazes.step(torch.from_numpy(actions).to(self.mazes.device, torch.int64))
        terminated, truncated = done.terminated.numpy(force=True), done.truncated.numpy(force=True)
        has_ended = terminated | truncated
        info = self._info(np.ones_like(has_ended))
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            self._replace(self._has_ended.sum())
        if self.autoreset_mode == AutoresetMode.SAME_STEP and has_ended.any():
            assert done.final_view is not None
            info |= _final(self._observe(done.final_view), missions, has_ended)
            self._replace(has_ended.sum())
        self._has_ended = has_ended
        reward = done.reward.double().numpy(force=True)
        return self._observe(done.view), reward, terminated, truncated, info

    def render(self) -> tuple[Array, ...] | None:
        """Each whole maze, lighter where the agent can see"""
        if self._paint_maze is None:
            return None
        return tuple(self._paint_maze(self.mazes.maze).numpy(force=True))

    def _reset_mask(self, options: dict[str, Any] | None) -> NDArray[np.bool_]:
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ValueError(
                f"options['reset_mask']: got {mask.dtype} of shape {mask.shape}, wants bool of "
                f"shape ({self.num_envs},) with at least one that is true"
            )
        return mask

    def _replace(self, used: int) -> None:
        """Keeps the supply of mazes at more than half, so that none ever comes again."""
        self._used += int(used)
        half = self.mazes.spares // 2
        if self._used >= half:
            self.mazes.refill(half)
            self._used -= half

    def _observe(self, view: Tensor) -> Array:
        return (self._paint_view(view) if self._paint_view else view).numpy(force=True)

    def _missions(self) -> Array:
        return mission(self.mazes.maze).numpy(force=True)

    def _info(self, where: NDArray[np.bool_]) -> dict[str, Any]:
        return {"mission": np.where(where, self._missions(), 0), "_mission": where.copy()}


def _final(views: Array, missions: Array, has_ended: NDArray[np.bool_]) -> dict[str, Any]:
    """What Gymnasium tells of episodes that were over before the view was made"""
    final_obs = np.full(len(has_ended), None, dtype=object)
    for i in np.flatnonzero(has_ended):
        final_obs[i] = views[i]
    return {
        "final_obs": final_obs,
        "_final_obs": has_ended.copy(),
        "final_info": {
            "mission": np.where(has_ended, missions, 0),
            "_mission": has_ended.copy(),
        },
        "_final_info": has_ended.copy(),
    }


class MazeEnv(gymnasium.Env[Array, Any]):
    """One maze. Options are those of MazeVectorEnv."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's)

    def __init__(self, *, render_mode: str | None = None, **options: Any):
        self._one = MazeVectorEnv(
            1, render_mode=render_mode, autoreset_mode=AutoresetMode.DISABLED, **options
        )
        self.render_mode = render_mode
        self.observation_space = self._one.single_observation_space
        self.action_space = self._one.single_action_space

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 (there are none)
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and not self._one.is_seeded:
            seed = int(self.np_random.integers(1 << 63))
        views, info = self._one.reset(seed=seed)
        return views[0], {"mission": int(info["mission"][0])}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        views, reward, terminated, truncated, info = self._one.step(np.asarray([action]))
        info = {"mission": int(info["mission"][0])}
        return views[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Any:
        pictures = self._one.render()
        return None if pictures is None else pictures[0]


gymnasium.register(
    ENV_ID,
    entry_point="scoff.worlds.maze.gym:MazeEnv",
    vector_entry_point="scoff.worlds.maze.gym:MazeVectorEnv",
)
