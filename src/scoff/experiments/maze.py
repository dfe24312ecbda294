"""Finding an object in a maze of rooms, seen through a small window; tested in larger rooms.

BabyAI's GoToObjMaze: 3×3 rooms with doors between them and one object to go to. The agent sees the
5×5 cells before it, as pixels, and learns by PPO. The paper (section "Reinforcement learning")
trains on rooms of 6×6 and tests on rooms of 10×10: SCOFF reaches the object in 82 % of the trials,
a GRU in 56 %, one with as many parameters in 74 %. A room of 6×6 cells is one of size 8 here, as
walls are counted; whether 10×10 has walls is not told, so that 10 and 12 are both tested.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from scoff.experiments.base import Experiment, Finished, Preset
from scoff.experiments.maze_agents import MODELS, VIEW_SIZE, AgentOptions, make_agent
from scoff.experiments.maze_policies import AgentPolicy
from scoff.experiments.maze_walks import evaluate_agent, validate_agent
from scoff.models.agent import RecurrentAgent
from scoff.training.data import seed_for
from scoff.training.environments import MazeEnvironment
from scoff.training.errors import UsageError
from scoff.training.ppo_config import PPOConfig, Truncation
from scoff.training.settings import Settings, flag
from scoff.worlds.maze import MazeOptions, Mazes
from scoff.worlds.maze.minigrid_levels import COUNT, ROOM_SIZES

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from scoff.report import Section
    from scoff.training.ppo_loop import PPOLoop
    from scoff.training.run import Run


@dataclass(frozen=True)
class Config(AgentOptions, Settings):
    steps: int = 366
    """Rollouts, with an update from each. Frames: this times --batch-size times --rollout-steps."""
    batch_size: int = 512
    """Agents that walk at once, each in a maze of its own."""
    lr: float = 5e-4
    """Learning rate of Adam, after the warm-up."""
    clip: float | None = 0.5
    """Largest norm of the gradient; larger ones are scaled down. None: no limit."""
    precision: Literal["32-true"] = "32-true"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Numbers that the agent computes with."""
    acceleration: Literal["auto", "none", "graph"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Run rollouts and updates eagerly (none) or from CUDA graphs (graph). auto: graphs on a GPU,
    else none."""
    log_every: int = 5
    """Rollouts over which what is logged is averaged."""
    validate_every: int = 100
    """Rollouts between validations; there is one at the end in any case."""
    checkpoint_every: int = 100
    """Rollouts between checkpoints; there is one at the end in any case."""

    rooms: tuple[int, ...] = (4, 6, 8)
    """Sizes of the rooms that are learned in, walls included, one after the other."""
    shares: tuple[float, ...] = (0.5, 0.2, 0.3)
    """How much of the training is spent in each."""
    doors_open: bool = False
    """Whether doors are open at first, in training; not in tests."""
    valid_mazes: int = 256
    """Mazes of the validation set, of the last size of --rooms."""
    test_rooms: tuple[int, ...] = (8, 10, 12)
    """Sizes of the rooms that are tested in: 4, 6, 8, 10 or 12."""
    test_mazes: int = COUNT
    """Test mazes of each size, made by minigrid: the first so many of 1,024."""

    rollout_steps: int = 64
    """Steps of each agent between updates."""
    sequence_steps: int = 32
    """Steps that gradients go back through; divides --rollout-steps."""
    epochs: int = 2
    """Times that an update goes through a rollout."""
    minibatches: int = 4
    """Parts of an epoch."""
    repeat_choices: bool = False
    """An update takes the schemata that the rollout took, else it chooses anew."""
    discount: float = 0.99
    """Of the reward, by each step that it is later."""
    gae_lambda: float = 0.95
    """Of generalised advantages."""
    reward_scale: float = 1.0
    """Rewards are multiplied by it before anything is learned from them."""
    truncation: Truncation = "last-value"
    """What an episode that was cut off would still have brought: the value of what it saw last
    (final-value), of what it saw before that (last-value: cheaper), or nothing (terminal)."""
    ratio_clip: float = 0.2
    """How far the probability of an action may move in an update, as a share of it."""
    value_clip: float | None = None
    """How far values may move in an update. None: as far as they will."""
    value_weight: float = 0.5
    """Of the squared error of values, in the loss."""
    entropy_weight: float = 0.01
    """Of the policy's entropy, in the loss."""
    normalise_advantages: bool = True
    """Advantages of a minibatch get mean 0 and deviation 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise UsageError(f"--weight-decay: got {self.weight_decay}, wants 0")
        for name in ("channels", "features"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{flag(name)}: got {getattr(self, name)}, wants at least 1")
        for name in ("schema_noise", "input_gain", "schema_scale", "initial_std"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{flag(name)}: got {getattr(self, name)}, wants 0 or more")
        for name in ("valid_mazes", "test_mazes"):
            most = COUNT if name == "test_mazes" else 2**31
            if not 1 <= getattr(self, name) <= most:
                got = f"--{flag(name)}: got {getattr(self, name)}"
                raise UsageError(f"{got}, wants from 1 to {most:,}")
        for name in ("rooms", "test_rooms"):
            if not getattr(self, name):
                raise UsageError(f"--{flag(name)}: got none, wants at least one")
        if len(self.shares) != len(self.rooms):
            raise UsageError(
                f"--shares: got {len(self.shares)}, wants one for each of {len(self.rooms)} --rooms"
            )
        if min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise UsageError(f"--shares: got {self.shares}, wants numbers above 0 that add up to 1")
        if len(set(self.starts)) < len(self.rooms):
            raise UsageError(f"--steps: got {self.steps}, wants at least one for each of --rooms")
        for size in self.test_rooms:
            if size not in ROOM_SIZES:
                known = ", ".join(map(str, ROOM_SIZES))
                raise UsageError(f"--test-rooms: got {size}, wants some of {known}")
        try:
            for size in self.rooms:
                maze_options(size)
        except ValueError as error:
            raise UsageError(f"--rooms: {error}") from error
        try:
            ppo_config(self)
        except ValueError as error:
            name, _, problem = str(error).partition(":")
            name = "ratio_clip" if name == "clip" else name  # --clip is the gradient's
            raise UsageError(f"--{flag(name)}:{problem}") from error
        sequences = self.batch_size * self.rollout_steps // self.sequence_steps
        if sequences % self.minibatches:
            raise UsageError(
                f"--minibatches: got {self.minibatches}, wants a divisor of the {sequences} "
                "sequences of a rollout"
            )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step in each of `rooms`"""
        return tuple(round(self.steps * sum(self.shares[:i])) for i in range(len(self.rooms)))

    @property
    def frames(self) -> int:
        return self.steps * self.batch_size * self.rollout_steps


def maze_options(room_size: int, doors_open: bool = False) -> MazeOptions:
    return MazeOptions(room_size=room_size, view_size=VIEW_SIZE, doors_open=doors_open)


def ppo_config(config: Config) -> PPOConfig:
    c = config
    return PPOConfig(
        rollout_steps=c.rollout_steps,
        sequence_steps=c.sequence_steps,
        epochs=c.epochs,
        minibatches=c.minibatches,
        repeat_choices=c.repeat_choices,
        lr=c.lr,
        discount=c.discount,
        gae_lambda=c.gae_lambda,
        reward_scale=c.reward_scale,
        truncation=c.truncation,
        clip=c.ratio_clip,
        value_clip=c.value_clip,
        value_weight=c.value_weight,
        entropy_weight=c.entropy_weight,
        normalise_advantages=c.normalise_advantages,
        max_grad_norm=c.clip,
    )


class MazeTask:
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.model = make_agent(config)

    def environment(self, stage: int) -> MazeEnvironment:
        c = self.config
        mazes = Mazes(
            c.batch_size,
            maze_options(c.rooms[stage], c.doors_open),
            seed_for(c.seed, "mazes", stage),
            device=self.device,
            final_views=c.truncation == "final-value",
        )
        return MazeEnvironment(mazes)

    def begin(
        self,
        settings: Config,
        run: "Run",
        fabric: "Fabric",
        start: int,
        state: Mapping[str, Any] | None,
    ) -> "PPOLoop":
        from scoff.training.ppo_loop import Curriculum, PPOLoop

        curriculum = Curriculum(settings.starts, self.environment)
        ppo = ppo_config(settings)
        return PPOLoop.begin(self, self.model, ppo, curriculum, settings, run, fabric, start, state)

    def validate(self, model: nn.Module) -> Mapping[str, float]:
        """In mazes like those of the last stage, with drawn actions"""
        options = maze_options(self.config.rooms[-1])
        policy = AgentPolicy(cast(RecurrentAgent, model), greedy=False)
        return validate_agent(policy, options, self.config.valid_mazes, self.device)


def evaluate(config: Config, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """In minigrid's own mazes, of the size learned last and of all that are to be tested."""
    sizes = sorted({size for size in config.rooms if size in ROOM_SIZES} | set(config.test_rooms))
    example_size = config.rooms[-1] if config.rooms[-1] in sizes else sizes[0]
    return evaluate_agent(
        cast(RecurrentAgent, model),
        {size: maze_options(size) for size in sizes},
        example_size,
        config.test_mazes,
        device,
    )


def report(runs: Sequence[Finished]) -> "Sequence[Section]":
    from scoff.experiments.maze_report import report

    return report(runs)


# --- presets


def tuned(model: str) -> Config:
    """28 million frames in rooms that grow, and that become small again for a while, or what was
    learned in small ones would be forgotten."""
    return Config(
        model=cast(Any, model),
        steps=850,
        lr=7e-4,
        warmup=0.01,
        decay="linear",
        rooms=(4, 6, 8, 4, 6, 8, 6, 8),
        shares=(0.12, 0.10, 0.16, 0.06, 0.08, 0.14, 0.06, 0.28),
        validate_every=50,
    )


def paper(model: str) -> Config:
    """BabyAI's settings of PPO, with the paper's learning rate; 20 million frames, in rooms of one
    size. Cells are GRUs and there is no instruction: there is but one object to go to."""
    ppo = PPOConfig.paper()
    return Config(
        model=cast(Any, model),
        steps=20_000_000 // (64 * ppo.rollout_steps) + 1,
        batch_size=64,
        lr=ppo.lr,
        rooms=(8,),
        shares=(1.0,),
        rollout_steps=ppo.rollout_steps,
        sequence_steps=ppo.length,
        epochs=ppo.epochs,
        minibatches=ppo.minibatches,
        gae_lambda=ppo.gae_lambda,
        reward_scale=ppo.reward_scale,
        truncation=ppo.truncation,
        value_clip=ppo.value_clip,
        normalise_advantages=ppo.normalise_advantages,
        log_every=20,
        validate_every=400,
        checkpoint_every=400,
    )


def quick(model: str) -> Config:
    return replace(
        tuned(model),
        steps=200,
        batch_size=256,
        lr=1e-3,
        rooms=(4,),
        shares=(1.0,),
        hidden_size=120,
        input_value_size=120,
        test_rooms=(4, 6),
        test_mazes=256,
        valid_mazes=128,
        validate_every=20,
        checkpoint_every=20,
    )


EXPERIMENT = Experiment(
    name="maze",
    title="An object in a maze of rooms",
    summary="Find the object in a maze, seen through a small window, by PPO; tested in larger "
    "rooms.",
    claim="An agent walks through rooms, opens doors and looks for the one object, of which it "
    "sees only what is close by and ahead. The question is whether what it learns in small rooms "
    "holds in larger ones, and what its schemata have to do with what it sees.",
    config=Config,
    models=MODELS,
    presets={
        "quick": Preset(
            "rooms of 2 by 2 cells: minutes on two CPU cores", quick, ("scoff", "gru"), seeds=1
        ),
        "tuned": Preset(
            "28 million frames in rooms that grow: minutes on a GPU",
            tuned,
            ("scoff", "gru", "gru-matched"),
        ),
        "paper": Preset(
            "BabyAI's settings and 20 million frames", paper, ("scoff", "gru", "gru-matched")
        ),
    },
    make_task=MazeTask,
    evaluate=evaluate,
    report=report,
)
