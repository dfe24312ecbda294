"""What a rollout and an update of PPO consist of, each part as often as there.

A kernel in a replayed graph does not tell whose it is, so the parts are run apart: at the same
sizes, on what a rollout left behind, and on a GPU each as a graph of its own. "all else" is what
the whole takes beyond them: in a rollout drawing actions, storing and counting; in an update sums
of what is logged.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scoff.bench.stages import launches_of
from scoff.bench.timing import captured, milliseconds
from scoff.models.agent import Decision, Noise
from scoff.training.ppo import PPO
from scoff.training.ppo_objective import advantages, loss, sequences

Work = Callable[[], object]


class Cost(NamedTuple):
    ms: float
    busy_ms: float = 0.0  # of the GPU, the gaps between kernels left out
    kernels: int = 0


def rollout_parts(ppo: PPO, agent: Any) -> dict[str, Work]:
    steps, length = ppo.config.rollout_steps, ppo.config.length
    # one decision a step, or two, and the value after the last
    decisions = steps * (1 + (ppo.config.truncation == "final-value")) + 1
    observation, reset = ppo.observation[None], ppo.reset[None]
    with torch.no_grad():
        noise = agent.draw_noise(1, ppo.num_envs)
        features = agent.encode(observation)
        output = agent.memory(features, ppo.state, reset, noise)[0]

    def layer() -> None:
        often(lambda: agent.draw_noise(length + 1, ppo.num_envs), steps // length)()
        often(lambda: agent.memory(features, ppo.state, reset, noise), decisions)()

    return {
        "new mazes": ppo.environment.prepare,
        "environment": lambda: [ppo.environment.step(action) for action in ppo.rollout.action],
        "encoder": often(lambda: agent.encode(observation), decisions),
        "layer": layer,
        "heads": often(lambda: (agent.policy(output), agent.value(output)), decisions),
    }


def update_parts(ppo: PPO, agent: Any) -> dict[str, Work]:
    """Forward and backward, where there is a gradient. The optimiser comes last: it changes
    weights."""
    config, rollout = ppo.config, ppo.rollout
    times = config.epochs * config.minibatches

    def batches() -> Iterator[Any]:
        advantage = advantages(rollout, config.discount, config.gae_lambda)
        whole = sequences(rollout, advantage, config.length)
        for _ in range(config.epochs):
            order = torch.rand(ppo.num_sequences, device=ppo.device).argsort()
            yield from map(whole.select, order.chunk(config.minibatches))

    batch = next(batches())
    repeats = config.repeat_choices and batch.choice.numel() > 0
    noise = Noise(batch.step_noise, batch.start_noise, batch.choice if repeats else None)
    with torch.no_grad():
        features = agent.encode(batch.observation)
        output = agent.memory(features, batch.state, batch.reset, noise)[0]
    for tensor in (features, output):
        tensor.requires_grad_()

    def decide(_: Tensor, state: Tensor, *__: object) -> Decision:
        return Decision(agent.policy(output), agent.value(output).squeeze(-1), state)

    def back(result: Tensor, modules: Sequence[nn.Module], inputs: Sequence[Tensor] = ()) -> None:
        weights = [weight for module in modules for weight in module.parameters()]
        d_result = result.detach() if result.dim() else None  # any numbers will do
        torch.autograd.grad(result, [*inputs, *weights], d_result, allow_unused=True)

    def encoder() -> None:
        back(agent.encode(batch.observation), [agent.encoder])

    def layer() -> None:
        result = agent.memory(features, batch.state, batch.reset, noise)[0]
        back(result, [agent.memory], [features])

    def heads() -> None:
        total, _ = loss(decide, batch, config)  # pyright: ignore[reportArgumentType]
        back(total, [agent.policy, agent.value], [output])

    def optimiser() -> None:
        nn.utils.clip_grad_norm_(agent.parameters(), config.max_grad_norm or torch.inf)
        ppo.optimiser.step()

    return {
        "advantages, minibatches": lambda: list(batches()),
        "encoder": often(encoder, times),
        "layer": often(layer, times),
        "heads, loss": often(heads, times),
        "optimiser": often(optimiser, times),
    }


def often(work: Work, times: int) -> Work:
    return lambda: [work() for _ in range(times)]


def cost(work: Work, device: torch.device, rounds: int) -> Cost:
    work()
    ms = statistics.median(milliseconds(work, device) for _ in range(rounds))
    if device.type != "cuda":
        return Cost(ms)
    launches = launches_of(work)
    return Cost(ms, sum(launch.ms for launch in launches), len(launches))


def print_parts(title: str, whole: Work, parts: dict[str, Work], ppo: PPO, rounds: int) -> None:
    """A table; call it without gradients for a rollout."""
    total = cost(whole, ppo.device, rounds)
    rows = {}
    for name, work in parts.items():
        once = captured(work).replay if ppo.on_gpu else work
        rows[name] = cost(once, ppo.device, rounds)
    ms, busy_ms, kernels = (sum(column) for column in zip(*rows.values(), strict=True))
    rows["all else"] = Cost(total.ms - ms, total.busy_ms - busy_ms, total.kernels - int(kernels))
    gpu = f"{'kernels':>10}{'µs each':>10}{'GPU busy':>10}" if ppo.on_gpu else ""
    print(f"\n{title:26}{'ms':>10}{'share':>10}{gpu}")
    for name, row in {**rows, "whole": total}.items():
        line = f"{name:26}{row.ms:>10.2f}{row.ms / total.ms:>10.0%}"
        if ppo.on_gpu:
            each = 1e3 * row.busy_ms / max(row.kernels, 1)
            line += f"{row.kernels:>10,}{each:>10.1f}{row.busy_ms / row.ms:>10.0%}"
        print(line, flush=True)
