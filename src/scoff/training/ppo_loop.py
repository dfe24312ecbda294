"""PPO as the engine runs it: one step is one rollout and the update from it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_fabric import Fabric
from torch import nn

from scoff.training import checkpoint
from scoff.training.environments import Environment
from scoff.training.errors import DivergedError, UsageError
from scoff.training.logs import Progress, ProgressStyle
from scoff.training.loop import Loop, Meter, Validated, loading, some
from scoff.training.ppo import PPO
from scoff.training.ppo_config import PPOConfig
from scoff.training.ppo_graph import Replay
from scoff.training.run import Run
from scoff.training.settings import Settings
from scoff.training.step import not_finite


@dataclass(frozen=True)
class Curriculum:
    """Where an agent learns, from which step on: the stages follow each other."""

    starts: tuple[int, ...]
    """The first step of each stage, from 0 on, in order."""
    make: Callable[[int], Environment]
    """The environment of a stage; the same, whenever it is asked for."""

    def stage(self, number: int) -> int:
        """Of the step with this number"""
        return sum(start <= number for start in self.starts) - 1


@dataclass
class PPOLoop(Loop):
    ppo: PPO
    curriculum: Curriculum
    stage: int
    graph: bool
    replay: Replay | None = None

    @classmethod
    def begin(
        cls,
        task: Validated,
        agent: nn.Module,
        config: PPOConfig,
        curriculum: Curriculum,
        settings: Settings,
        run: Run,
        fabric: Fabric,
        start: int,
        state: Mapping[str, Any] | None,
    ) -> "PPOLoop":
        """`state` is that of a checkpoint, if there is one."""
        if fabric.world_size > 1:
            raise UsageError("agents are trained by a single process: run it without torchrun")
        stage = curriculum.stage(max(start - 1, 0))  # where the last step was made
        agent.train()
        ppo = PPO(agent, curriculum.make(stage), config)  # pyright: ignore[reportArgumentType]
        if state is not None:
            with loading():
                ppo.load_state_dict({"agent": state["model"], **state["ppo"]})
        graph = fabric.device.type == "cuda" and settings.acceleration in ("graph", "auto")
        return cls(
            fabric, task, agent, settings, run, Meter(), start, ppo, curriculum, stage, graph
        )

    def set_lr(self, value: float) -> None:
        self.ppo.set_lr(value)

    def advance(self, number: int) -> list[float]:
        stage = self.curriculum.stage(number)
        if stage != self.stage:
            self.ppo.enter(self.curriculum.make(stage))
            self.stage, self.replay = stage, None
        if self.graph and self.replay is None:
            self.replay = Replay(self.ppo)
        (self.replay or self.ppo).iterate()
        self.seen = self.ppo.glance()
        loss, norm = self.seen["loss"], self.seen["grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            found = some(not_finite((), self.weights)) or "losses or norms alone"
            last = checkpoint.last_good(self.run.checkpoints)
            raise DivergedError(
                f"step {number + 1}: losses sum up to {loss:.4g} and the gradients' norms to "
                f"{norm:.4g}; not finite: {found}; {last}"
            )
        return []  # PPO sums up by itself

    def shown(self, values: list[float]) -> Mapping[str, float]:  # noqa: ARG002
        return {name: self.seen[name] for name in ("success", "return")}

    def means(self) -> Mapping[str, float]:
        return {**self.ppo.statistics(), "frames": self.ppo.frames, "stage": self.stage}

    def state(self) -> dict[str, Any]:
        own = self.ppo.state_dict()
        return {"ppo": {name: own[name] for name in own if name not in ("agent", "random")}}

    def make_progress(self, label: str, style: ProgressStyle) -> Progress:
        frames = self.ppo.config.rollout_steps * self.ppo.num_envs
        return Progress(self.settings.steps, self.start, label, style, "frame", frames)
