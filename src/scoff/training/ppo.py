"""Recurrent PPO, whole on the device.

    ppo = PPO(agent, environment, PPOConfig())
    while ppo.frames < 1_000_000:
        ppo.iterate()
    print(ppo.statistics())

Nothing waits for the device but `statistics` and `state_dict`: `collect` and `update` write into
tensors that keep their place and have no shape that depends on the data, so that CUDA graphs of
them can be replayed.

Axis letters: T steps of a rollout, N environments, L steps of a sequence, which gradients go back
through, B sequences of a minibatch, A actions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn

from scoff.models.agent import Decision, Noise
from scoff.training.environments import Environment, Transition

Truncation = Literal["final-value", "last-value", "terminal"]

UPDATE_NAMES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "grad_norm",
)


@dataclass(frozen=True)
class PPOConfig:
    """The defaults suit hundreds of environments; `paper()` is BabyAI's setting."""

    rollout_steps: int = 64
    """Steps of each environment between updates."""
    sequence_steps: int | None = 32
    """Steps that gradients go back through; divides rollout_steps. None: all of a rollout."""
    epochs: int = 2
    """Times that an update goes through a rollout."""
    minibatches: int = 4
    """Parts of an epoch; each has the same number of whole sequences."""
    lr: float = 7e-4
    """Learning rate of Adam."""
    adam_eps: float = 1e-5
    """Added to Adam's denominator. torch's own default is 1e-8."""
    discount: float = 0.99
    """Of the reward, by each step that it is later."""
    gae_lambda: float = 0.95
    """Of generalised advantages: 0 trusts the value after one step, 1 the rewards alone."""
    reward_scale: float = 1.0
    """Rewards are multiplied by it before anything is learned from them."""
    truncation: Truncation = "final-value"
    """What an episode that was cut off would still have brought: the value of its final
    observation, for which the agent decides a second time in each step; that of the one before it
    (last-value), which costs nothing; or nothing, as if it had ended (terminal)."""
    clip: float = 0.2
    """How far the probability of an action may move from that of the rollout, as a share of it."""
    value_clip: float | None = None
    """How far values may move from those of the rollout. None: as far as they will."""
    value_weight: float = 0.5
    """Of the squared error of values, in the loss."""
    entropy_weight: float = 0.01
    """Of the policy's entropy, in the loss."""
    normalise_advantages: bool = True
    """Advantages of a minibatch get mean 0 and deviation 1."""
    max_grad_norm: float | None = 0.5
    """Largest norm of the gradient; larger ones are scaled down. None: no limit."""

    @classmethod
    def paper(cls) -> "PPOConfig":
        """BabyAI's, for 64 environments, with the learning rate of SCOFF's paper (BabyAI: 1e-4)."""
        return cls(
            rollout_steps=40,
            sequence_steps=20,
            epochs=4,
            minibatches=2,
            lr=3e-4,
            gae_lambda=0.99,
            reward_scale=20.0,
            truncation="terminal",
            value_clip=0.2,
            normalise_advantages=False,
        )

    def __post_init__(self) -> None:
        for name in ("rollout_steps", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants at least 1")
        if self.length < 1 or self.rollout_steps % self.length:
            raise ValueError(
                f"sequence_steps: got {self.sequence_steps}, wants a divisor of rollout_steps = "
                f"{self.rollout_steps}"
            )
        if self.truncation not in get_args(Truncation):
            wants = ", ".join(map(repr, get_args(Truncation)))
            raise ValueError(f"truncation: got {self.truncation!r}, wants one of {wants}")
        for name in ("lr", "adam_eps", "clip", "value_clip", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, wants a number above 0")
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wants a number from 0 to 1")

    @property
    def length(self) -> int:
        """Steps of a sequence"""
        return self.rollout_steps if self.sequence_steps is None else self.sequence_steps


class Agent(Protocol):
    """What PPO asks of an agent; `scoff.models.agent.RecurrentAgent` is one."""

    def draw_noise(self, steps: int, num_agents: int) -> Noise: ...

    def initial_state(self, noise: Noise) -> Tensor: ...

    def __call__(
        self, observation: Tensor, state: Tensor, reset: Tensor, noise: Noise
    ) -> Decision: ...

    def train(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class Rollout(NamedTuple):
    """All that an update needs, in tensors that every rollout fills again."""

    observation: Tensor  # [T, N, ...]
    reset: Tensor  # [T, N] bool: it is the first of an episode
    action: Tensor  # [T, N] int64
    log_prob: Tensor  # [T, N]: of the action
    value: Tensor  # [T, N]
    reward: Tensor  # [T, N]: scaled
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    end_value: Tensor  # [T, N]: if the episode was cut off here, of what would have followed
    last_value: Tensor  # [N]: of the observation after the last step
    step_noise: Tensor  # [T, N, ...]
    # sequences run from the very states and noise that they had
    state: Tensor  # [T / L, N, K, H]
    start_noise: Tensor  # [T / L, N, ...]

    @classmethod
    def empty(
        cls, config: PPOConfig, observation: Tensor, state: Tensor, noise: Noise
    ) -> "Rollout":
        """Shapes, types and device are those of the examples."""
        steps, device = config.rollout_steps, observation.device
        sequences = steps // config.length
        shape = (steps, len(observation))

        def flags() -> Tensor:
            return torch.zeros(shape, dtype=torch.bool, device=device)

        def numbers() -> Tensor:
            return torch.zeros(shape, device=device)

        return cls(
            observation.new_zeros(steps, *observation.shape),
            flags(),
            torch.zeros(shape, dtype=torch.int64, device=device),
            numbers(),
            numbers(),
            numbers(),
            flags(),
            flags(),
            numbers(),
            torch.zeros(shape[1:], device=device),
            noise.step.new_zeros(steps, *noise.step.shape[1:]),
            state.new_zeros(sequences, *state.shape),
            noise.start.new_zeros(sequences, *noise.start.shape),
        )

    def write(self, step: int, **values: Tensor) -> None:
        for name, value in values.items():
            getattr(self, name)[step].copy_(value)


class Batch(NamedTuple):
    """Whole sequences, with what the agent did then and what it was worth."""

    observation: Tensor  # [L, B, ...]
    reset: Tensor  # [L, B]
    action: Tensor  # [L, B]
    log_prob: Tensor  # [L, B]
    value: Tensor  # [L, B]
    advantage: Tensor  # [L, B]
    step_noise: Tensor  # [L, B, ...]
    state: Tensor  # [B, K, H]
    start_noise: Tensor  # [B, ...]

    def select(self, index: Tensor) -> "Batch":
        axes = {"state": 0, "start_noise": 0}
        picked = {
            name: x.index_select(axes.get(name, 1), index) for name, x in self._asdict().items()
        }
        return Batch(**picked)


def advantages(rollout: Rollout, discount: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation  [T, N]

    An episode's advantages depend on nothing after its end; if it was cut off, the value of what
    would have followed stands for the rest of it.
    """
    following = torch.cat([rollout.value[1:], rollout.last_value[None]])
    following = torch.where(rollout.truncated, rollout.end_value, following)
    following = following.masked_fill(rollout.terminated, 0)
    surprise = rollout.reward + discount * following - rollout.value
    goes_on = ~(rollout.terminated | rollout.truncated)
    result = torch.empty_like(surprise)
    ahead = torch.zeros_like(rollout.last_value)
    for t in reversed(range(len(surprise))):
        ahead = surprise[t] + discount * gae_lambda * goes_on[t] * ahead
        result[t] = ahead
    return result


def sequences(rollout: Rollout, advantage: Tensor, length: int) -> Batch:
    """A rollout cut into sequences of `length` steps, those of the first steps first."""

    def cut(x: Tensor) -> Tensor:  # [T, N, ...] -> [L, T / L * N, ...]
        return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)

    return Batch(
        cut(rollout.observation),
        cut(rollout.reset),
        cut(rollout.action),
        cut(rollout.log_prob),
        cut(rollout.value),
        cut(advantage),
        cut(rollout.step_noise),
        rollout.state.flatten(0, 1),
        rollout.start_noise.flatten(0, 1),
    )


def loss(agent: Agent, batch: Batch, config: PPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, and more numbers to look at."""
    noise = Noise(batch.step_noise, batch.start_noise)
    logits, value, _ = agent(batch.observation, batch.state, batch.reset, noise)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()

    log_ratio = pick(log_probs, batch.action) - batch.log_prob
    ratio = log_ratio.exp()
    advantage = batch.advantage
    if config.normalise_advantages:
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()

    target = batch.value + batch.advantage
    error = (value - target).square()
    if config.value_clip is not None:
        moved = (value - batch.value).clamp(-config.value_clip, config.value_clip)
        error = torch.maximum(error, (batch.value + moved - target).square())
    value_loss = error.mean()

    total = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
    return total, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # http://joschu.net/blog/kl-approx.html: never negative, little variance
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clip_fraction": ((ratio - 1).abs() > config.clip).float().mean(),
    }


def pick(log_probs: Tensor, action: Tensor) -> Tensor:
    """[..., A], [...] -> [...]"""
    return log_probs.gather(-1, action[..., None]).squeeze(-1)


def sample(log_probs: Tensor) -> Tensor:
    """An action for each row  [N, A] -> [N]

    The Gumbel trick, for torch.multinomial may look at the probabilities, which waits for a GPU.
    """
    waits = torch.empty_like(log_probs).exponential_()
    return (log_probs - waits.clamp_(min=torch.finfo(waits.dtype).tiny).log()).argmax(-1)


class Means:
    """Means of named numbers, summed up on the device until someone asks."""

    def __init__(self, names: tuple[str, ...], device: torch.device):
        self.names = names
        self.sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, values: Mapping[str, Tensor], where: Tensor | None = None) -> None:
        """A number for each name, or [N] of them, of which those `where` [N] bool count."""
        rows = torch.stack([values[name].detach() for name in self.names])
        if where is None:
            self.sums += rows
            self.count += 1
        else:
            self.sums += rows.masked_fill(~where, 0).sum(1)
            self.count += where.sum()

    def read(self) -> dict[str, float]:
        """Waits for the device, and starts anew. Nothing, if there was nothing."""
        count = self.count.item()
        if count == 0:
            return {}
        means = (self.sums / count).tolist()
        self.sums.zero_()
        self.count.zero_()
        return dict(zip(self.names, means, strict=True))


class PPO:
    """Trains `agent` in `environment`.

    The agent's parameters have to be on the environment's device already. Random numbers come from
    the device's default generator.
    """

    def __init__(self, agent: Agent, environment: Environment, config: PPOConfig):
        self.agent, self.environment, self.config = agent, environment, config
        self.num_envs, self.device = environment.num_envs, environment.device
        self.num_sequences = config.rollout_steps // config.length * self.num_envs
        if self.num_sequences % config.minibatches:
            raise ValueError(
                f"minibatches: got {config.minibatches}, wants a divisor of the "
                f"{self.num_sequences} sequences of a rollout"
            )
        self.on_gpu = self.device.type == "cuda"
        self.optimiser = torch.optim.Adam(
            agent.parameters(), config.lr, eps=config.adam_eps, capturable=self.on_gpu
        )
        self.set_lr(config.lr)
        self.frames = 0
        self.episodes = Means(("episode_return", "episode_length", "success"), self.device)
        self.updates = Means(UPDATE_NAMES, self.device)
        with torch.no_grad():
            noise = agent.draw_noise(1, self.num_envs)
            self.state = agent.initial_state(noise).clone()
        # clones, for all of these are written to
        self.observation = environment.reset().clone()
        self.reset = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.episode_return = torch.zeros(self.num_envs, device=self.device)
        self.episode_length = torch.zeros(self.num_envs, device=self.device)
        self.rollout = Rollout.empty(config, self.observation, self.state, noise)

    def iterate(self) -> None:
        """One rollout, and an update from it."""
        self.collect()
        self.update()

    @torch.no_grad()
    def collect(self) -> None:
        """Acts for `rollout_steps` steps."""
        self.agent.train()
        self.environment.prepare()
        count = self.config.rollout_steps // self.config.length
        last = [self._collect_sequence(number) for number in range(count)][-1]
        after = self.agent(self.observation[None], self.state, self.reset[None], last)
        self.rollout.last_value.copy_(after.value[0])
        self.frames += self.config.rollout_steps * self.num_envs

    def update(self) -> None:
        """Learns from the last rollout."""
        self.agent.train()
        config, rollout = self.config, self.rollout
        advantage = advantages(rollout, config.discount, config.gae_lambda)
        target = rollout.value + advantage
        explained = 1 - advantage.var() / target.var().clamp(min=1e-12)
        whole = sequences(rollout, advantage, config.length)
        for _ in range(config.epochs):
            # torch.randperm would do, if it were sure never to wait for a GPU
            order = torch.rand(self.num_sequences, device=self.device).argsort()
            for index in order.chunk(config.minibatches):
                more = self._learn(whole.select(index))
                self.updates.add({**more, "explained_variance": explained})

    def statistics(self) -> dict[str, float]:
        """Means since they were last asked for; waits for the device.

        Returns and lengths are of episodes that ended since then. A success is an episode that
        terminated with a reward in its last step.
        """
        return {**self.episodes.read(), **self.updates.read()}

    def set_lr(self, value: float) -> None:
        for group in self.optimiser.param_groups:
            if self.on_gpu:  # a graph reads it from where it was
                group["lr"] = torch.as_tensor(group["lr"], device=self.device).fill_(value)
            else:
                group["lr"] = value

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs, between iterations; the tensors themselves."""
        random = {"cpu": torch.get_rng_state()}
        if self.on_gpu:
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "agent": self.agent.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "environment": self.environment.state_dict(),
            "frames": self.frames,
            "now": self._now(),
            "random": random,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a PPO with the same config, and an agent and an environment of the same options.

        It may have been on another device; then noise differs from there on.
        """
        self.agent.load_state_dict(state["agent"])
        (group,) = state["optimiser"]["param_groups"]
        lr = float(group["lr"])
        group = {**group, "lr": lr, "capturable": self.on_gpu}
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": [group]})
        self.set_lr(lr)
        self.environment.load_state_dict(state["environment"])
        self.frames = state["frames"]
        for name, tensor in self._now().items():
            tensor.copy_(state["now"][name])
        torch.set_rng_state(state["random"]["cpu"])
        if self.on_gpu and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def _now(self) -> dict[str, Tensor]:
        """What one rollout hands to the next."""
        return {
            "observation": self.observation,
            "state": self.state,
            "reset": self.reset,
            "episode_return": self.episode_return,
            "episode_length": self.episode_length,
            "episode_sums": self.episodes.sums,
            "episode_count": self.episodes.count,
            "update_sums": self.updates.sums,
            "update_count": self.updates.count,
        }

    def _collect_sequence(self, number: int) -> Noise:
        """Acts for one sequence; gives noise for the step after it."""
        length = self.config.length
        noise = self.agent.draw_noise(length + 1, self.num_envs)
        start = number * length
        self.rollout.step_noise[start : start + length].copy_(noise.step[:-1])
        self.rollout.write(number, state=self.state, start_noise=noise.start)
        moments = [Noise(step[None], noise.start) for step in noise.step]
        for i, (here, ahead) in enumerate(pairwise(moments)):
            self._act(start + i, here, ahead)
        return moments[-1]

    def _act(self, step: int, noise: Noise, noise_ahead: Noise) -> None:
        decision = self.agent(self.observation[None], self.state, self.reset[None], noise)
        log_probs = decision.logits[0].log_softmax(-1)
        action = sample(log_probs)
        result = self.environment.step(action)
        self.rollout.write(
            step,
            observation=self.observation,
            reset=self.reset,
            action=action,
            log_prob=pick(log_probs, action),
            value=decision.value[0],
            reward=self.config.reward_scale * result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            end_value=self._end_value(result, decision, noise_ahead),
        )
        self._count(result)
        self.observation.copy_(result.observation)
        self.state.copy_(decision.state)
        torch.logical_or(result.terminated, result.truncated, out=self.reset)

    def _end_value(self, result: Transition, decision: Decision, noise: Noise) -> Tensor:
        """What would have followed, where the step was cut off  [N]"""
        if self.config.truncation == "terminal":
            return torch.zeros_like(decision.value[0])
        if self.config.truncation == "last-value":
            return decision.value[0]
        if result.final_observation is None:
            raise ValueError(
                "truncation: got 'final-value', but the environment gives no final observations; "
                "wants 'last-value' or 'terminal'"
            )
        same_episode = torch.zeros_like(self.reset)[None]
        return self.agent(
            result.final_observation[None], decision.state, same_episode, noise
        ).value[0]

    def _count(self, result: Transition) -> None:
        ended = result.terminated | result.truncated
        self.episode_return += result.reward
        self.episode_length += 1
        success = result.terminated & (result.reward > 0)
        self.episodes.add(
            {
                "episode_return": self.episode_return,
                "episode_length": self.episode_length,
                "success": success.float(),
            },
            ended,
        )
        self.episode_return.masked_fill_(ended, 0)
        self.episode_length.masked_fill_(ended, 0)

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        self.optimiser.zero_grad()
        total, more = loss(self.agent, batch, self.config)
        total.backward()
        norm = nn.utils.clip_grad_norm_(
            self.agent.parameters(), self.config.max_grad_norm or torch.inf
        )
        self.optimiser.step()
        return {**more, "grad_norm": norm}
