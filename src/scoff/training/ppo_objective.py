"""What PPO keeps of a rollout, and what it learns from that.

Axis letters: T steps of a rollout, N environments, L steps of a sequence, which gradients go back
through, B sequences of a minibatch, A actions.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from scoff.models.agent import Decision, Noise
from scoff.nn.noise import gumbel_
from scoff.training.ppo_config import PPOConfig


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
    choice: Tensor  # [T, N, ...] int64: what the memory chose; nothing if there is nothing to

    @classmethod
    def empty(
        cls,
        config: PPOConfig,
        observation: Tensor,
        state: Tensor,
        noise: Noise,
        choice: Tensor | None = None,
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
            torch.zeros(
                *shape,
                *(choice.shape[2:] if choice is not None else (0,)),
                dtype=torch.int64,
                device=device,
            ),
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
    choice: Tensor  # [L, B, ...]

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
        cut(rollout.choice),
    )


def loss(agent: Agent, batch: Batch, config: PPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, and more numbers to look at."""
    repeats = config.repeat_choices and batch.choice.numel() > 0
    noise = Noise(batch.step_noise, batch.start_noise, batch.choice if repeats else None)
    logits, value, *_ = agent(batch.observation, batch.state, batch.reset, noise)
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
    return (log_probs + gumbel_(torch.empty_like(log_probs))).argmax(-1)
