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

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scoff.models.agent import Decision, Noise
from scoff.training.environments import Environment, Transition
from scoff.training.means import Means
from scoff.training.ppo_config import PPOConfig
from scoff.training.ppo_objective import (
    Agent,
    Batch,
    Rollout,
    advantages,
    loss,
    pick,
    sample,
    sequences,
)

UPDATE_NAMES = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "grad_norm",
)


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
        self.checked = torch.zeros(2, device=self.device)
        with torch.no_grad():
            noise = agent.draw_noise(1, self.num_envs)
            self.state = agent.initial_state(noise).clone()
        # clones, for all of these are written to
        self.observation = environment.reset().clone()
        self.reset = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.episode_return = torch.zeros(self.num_envs, device=self.device)
        self.episode_length = torch.zeros(self.num_envs, device=self.device)
        with torch.no_grad():
            agent.train()
            first = agent(self.observation[None], self.state, self.reset[None], noise)
        self.rollout = Rollout.empty(config, self.observation, self.state, noise, first.choice)

    def iterate(self) -> None:
        """One rollout, and an update from it."""
        self.collect()
        self.update()
        self.count_frames()

    def count_frames(self) -> None:
        self.frames += self.config.rollout_steps * self.num_envs

    def enter(self, environment: Environment) -> None:
        """Goes on elsewhere, with new episodes: as many environments, on the same device."""
        if (environment.num_envs, environment.device) != (self.num_envs, self.device):
            got = f"{environment.num_envs} on {environment.device}"
            wants = f"{self.num_envs} on {self.device}"
            raise ValueError(f"environment: got {got}, wants {wants}, as before")
        self.environment = environment
        self.observation.copy_(environment.reset())
        self.reset.fill_(True)
        self.episode_return.zero_()
        self.episode_length.zero_()

    @torch.no_grad()
    def collect(self) -> None:
        """Acts for `rollout_steps` steps."""
        self.agent.train()
        self.environment.prepare()
        count = self.config.rollout_steps // self.config.length
        last = [self._collect_sequence(number) for number in range(count)][-1]
        after = self.agent(self.observation[None], self.state, self.reset[None], last)
        self.rollout.last_value.copy_(after.value[0])

    def update(self) -> None:
        """Learns from the last rollout."""
        self.agent.train()
        config, rollout = self.config, self.rollout
        advantage = advantages(rollout, config.discount, config.gae_lambda)
        target = rollout.value + advantage
        explained = 1 - advantage.var() / target.var().clamp(min=1e-12)
        whole = sequences(rollout, advantage, config.length)
        self.checked.zero_()
        for _ in range(config.epochs):
            # torch.randperm would do, if it were sure never to wait for a GPU
            order = torch.rand(self.num_sequences, device=self.device).argsort()
            for index in order.chunk(config.minibatches):
                more = self._learn(whole.select(index))
                self.updates.add({**more, "explained_variance": explained})
                self.checked += torch.stack([more["loss"], more["grad_norm"]]).detach()

    def statistics(self) -> dict[str, float]:
        """Means since they were last asked for; waits for the device.

        Returns and lengths are of episodes that ended since then. A success is an episode that
        terminated with a reward in its last step.
        """
        return {**self.episodes.read(), **self.updates.read()}

    def glance(self) -> dict[str, float]:
        """How it goes, in one wait for the device; leaves the statistics as they are.

        Loss and norm are sums over the last update: not finite if any of it was not.
        """
        means = [self.episodes.glance(name) for name in ("success", "episode_return")]
        values = torch.cat([self.checked, torch.stack(means)]).tolist()
        return dict(zip(("loss", "grad_norm", "success", "return"), values, strict=True))

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

        It may have been on another device; then noise differs from there on. Without "random" in
        it, the generators stay as they are.
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
        random = state.get("random", {})
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if self.on_gpu and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)

    def tensors(self) -> list[Tensor]:
        """All that an iteration changes, where it is"""
        moments = [t for s in self.optimiser.state.values() for t in s.values()]
        return [
            *self.agent.state_dict().values(),
            *moments,
            *self.environment.state_dict().values(),
            *self._now().values(),
        ]

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
        if decision.choice is not None:
            self.rollout.write(step, choice=decision.choice[0])
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
        return {**more, "loss": total, "grad_norm": norm}
