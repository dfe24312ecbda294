"""An agent with a memory: encoder, recurrent layer, policy and value.

Axis letters: T steps, N agents, P positions, C features, H hidden size, A actions, K tensors of
size H that make up the state of one agent (layers, and for an LSTM h and c of each), F object
files, S schemata. Noise and states have the agents on one of their first two axes, so that they can
be stored and picked like observations.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from scoff.nn import SCOFF, SCOFFCell
from scoff.nn.noise import gumbel_
from scoff.nn.recurrent import RecurrentLayer
from scoff.nn.types import State, Trace


class Noise(NamedTuple):
    """All that is random in a memory. Run again on the same noise, it does the same again.

    Where nothing is random the tensors are there and hold no numbers.
    """

    step: Tensor  # [T, N, ...]: of each step
    start: Tensor  # [N, ...]: of the state that every reset starts anew from
    # [T, N, ...]: what was chosen at each step, to be chosen again; None: chosen anew
    choice: Tensor | None = None


class Decision(NamedTuple):
    logits: Tensor  # [T, N, A]
    value: Tensor  # [T, N]
    state: Tensor  # [N, K, H]: after the last step
    choice: Tensor | None = None  # [1, N, ...]: what was chosen, if it was but one step


class Memory(nn.Module):
    """A recurrent layer whose state is one tensor and whose noise is an argument.

    Args:
        rnn: RIMs, RMC, or one of those that the subclasses are for; `memory(rnn)` picks.
    """

    def __init__(self, rnn: nn.Module):
        super().__init__()
        check_layer(rnn)
        self.rnn = rnn

    def draw_noise(self, steps: int, num_agents: int) -> Noise:
        """Fresh in training; in evaluation that of a deterministic run."""
        like = next(self.rnn.parameters())
        return Noise(like.new_empty(steps, num_agents, 0), like.new_empty(num_agents, 0))

    def initial_state(self, noise: Tensor) -> Tensor:
        """The state that an episode starts from  [N, ...] -> [N, K, H]"""
        return pack(cast(RecurrentLayer, self.rnn).initial_state(len(noise)))

    def forward(
        self, features: Tensor, state: Tensor, reset: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T, N, C] or [T, N, P, C], [N, K, H], [T, N] -> [T, N, H], the state after the last step,
        and, of a single step, what was chosen in it [1, N, ...], if there is anything to choose

        `reset` is true at the first step of an episode.
        """
        output, after = self.rnn(features, **self._states(state, reset, noise))
        return output, pack(after), None

    def _states(self, state: Tensor, reset: Tensor, noise: Noise) -> dict[str, Any]:
        hx, restart = self._unpack(state), self._unpack(self.initial_state(noise.start))
        return {"hx": hx, "reset": reset, "restart": restart}

    def _unpack(self, state: Tensor) -> State:
        return unpack(state, cast(RecurrentLayer, self.rnn).num_states)


class SCOFFMemory(Memory):
    """SCOFF, with the noise of its schema choice and of its initial states made explicit.

    `noise_scale` is that of the schema choice in training: 1 as in the paper, 0 none.
    """

    rnn: SCOFF
    noise_scale: float = 1.0

    def draw_noise(self, steps: int, num_agents: int) -> Noise:
        rnn = self.rnn
        like = next(rnn.parameters())
        choices = (len(rnn.cells), rnn.num_object_files, rnn.num_schemata)
        if not self.training:
            fixed = torch.stack([cell.initial_noise.flatten(1) for cell in self._cells], 1)
            start = fixed.expand(num_agents, -1, -1, -1).flatten(1, 2)  # [N, K, H]
            return Noise(like.new_zeros(steps, num_agents, *choices), start)
        gumbel = gumbel_(like.new_empty(steps, num_agents, *choices)) * self.noise_scale
        start = like.new_empty(num_agents, rnn.num_states * len(rnn.cells), rnn.hidden_size)
        return Noise(gumbel, start.normal_())

    def initial_state(self, noise: Tensor) -> Tensor:
        """As the layer's own, whose learned mean and deviation get gradients through it."""
        files = self.rnn.num_object_files
        mean, std = (
            torch.stack([getattr(cell, name).repeat(1, files) for cell in self._cells], 1)
            for name in ("initial_mean", "initial_std")
        )
        return (mean + std * noise.unflatten(1, mean.shape[:2])).flatten(1, 2)

    def trace(self, features: Tensor, state: Tensor, reset: Tensor, noise: Noise) -> Trace:
        """What happens inside the first layer, for the arguments of `forward`"""
        by_layer = noise.step.movedim(2, 0)  # [layers, T, N, F, S]
        return self.rnn.trace(features, **self._states(state, reset, noise), noise=by_layer)

    def forward(
        self, features: Tensor, state: Tensor, reset: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        given = self._states(state, reset, noise)
        given["noise"] = noise.step.movedim(2, 0)
        if noise.choice is None and len(features) == 1:
            output, after, chosen = self.rnn.choose(features, **given)
            return output, pack(after), chosen.movedim(0, 2)  # [1, N, layers, F]
        if noise.choice is not None:
            given["choice"] = noise.choice.movedim(2, 0)
        output, after = self.rnn(features, **given)
        return output, pack(after), None

    @property
    def _cells(self) -> list[SCOFFCell]:
        return [cast(SCOFFCell, cell) for cell in self.rnn.cells]


class TorchMemory(Memory):
    """nn.GRU or nn.LSTM, step by step, for they cannot start anew within a sequence."""

    rnn: nn.GRU | nn.LSTM

    def initial_state(self, noise: Tensor) -> Tensor:
        count = self.num_states * self.rnn.num_layers
        return noise.new_zeros(len(noise), count, self.rnn.hidden_size)

    @property
    def num_states(self) -> int:
        return 2 if isinstance(self.rnn, nn.LSTM) else 1

    def forward(
        self, features: Tensor, state: Tensor, reset: Tensor, noise: Noise
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        start = self.initial_state(noise.start)
        outputs = []
        for x, is_first in zip(features, reset, strict=True):
            state = torch.where(is_first[:, None, None], start, state)
            output, after = self.rnn(x[None], unpack(state, self.num_states))
            state = pack(after)
            outputs.append(output)
        return torch.cat(outputs), state, None


def memory(rnn: nn.Module) -> Memory:
    """SCOFF, RIMs, RMC, nn.GRU or nn.LSTM as an agent's memory."""
    if isinstance(rnn, SCOFF):
        return SCOFFMemory(rnn)
    if isinstance(rnn, RecurrentLayer):
        return Memory(rnn)
    if isinstance(rnn, nn.GRU | nn.LSTM):
        return TorchMemory(rnn)
    raise TypeError(
        f"rnn: got {type(rnn).__name__}, wants a layer of scoff, an nn.GRU or an nn.LSTM"
    )


class RecurrentAgent(nn.Module):
    """What PPO trains.

    Args:
        encoder: from observations [B, ...], of whatever type, to features [B, C] or, with
            positions, [B, P, C].
        rnn: a layer of `memory`, not batch_first.
        policy: from the layer's output [..., H] to [..., A].
        value: from the layer's output [..., H] to [..., 1].
    """

    def __init__(self, encoder: nn.Module, rnn: nn.Module, policy: nn.Module, value: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.memory = memory(rnn)
        self.policy = policy
        self.value = value

    def draw_noise(self, steps: int, num_agents: int) -> Noise:
        return self.memory.draw_noise(steps, num_agents)

    def initial_state(self, noise: Noise) -> Tensor:
        """[N, K, H]"""
        return self.memory.initial_state(noise.start)

    def encode(self, observation: Tensor) -> Tensor:
        """[T, N, ...] -> [T, N, C] or [T, N, P, C]"""
        return self.encoder(observation.flatten(0, 1)).unflatten(0, observation.shape[:2])

    def forward(self, observation: Tensor, state: Tensor, reset: Tensor, noise: Noise) -> Decision:
        """[T, N, ...], [N, K, H], [T, N] bool"""
        output, state, choice = self.memory(self.encode(observation), state, reset, noise)
        return Decision(self.policy(output), self.value(output).squeeze(-1), state, choice)


def head(hidden_size: int, output_size: int, width: int = 64) -> nn.Sequential:
    """Policy or value as in BabyAI: rows of weights have length 1, biases are 0."""
    layers = nn.Sequential(nn.Linear(hidden_size, width), nn.Tanh(), nn.Linear(width, output_size))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
            with torch.no_grad():
                layer.weight /= layer.weight.norm(dim=1, keepdim=True)
            nn.init.zeros_(layer.bias)
    return layers


def pack(state: State) -> Tensor:
    """[layers, N, H], or a pair of them -> [N, K, H]"""
    whole = torch.cat(state) if isinstance(state, tuple) else state
    return whole.transpose(0, 1)


def unpack(state: Tensor, num_states: int) -> State:
    """The inverse of `pack`"""
    parts = state.transpose(0, 1).contiguous().chunk(num_states)
    return parts[0] if num_states == 1 else (parts[0], parts[1])


def check_layer(rnn: nn.Module) -> None:
    """Refuses what would make a second run differ from the first, or cannot be run step by step."""
    for name in ("batch_first", "bidirectional"):
        if getattr(rnn, name):
            raise ValueError(f"{name}: got True, wants False in an agent's memory")
    for module in rnn.modules():
        for name in ("dropout", "input_dropout", "comm_dropout"):
            if rate := getattr(module, name, 0.0):
                raise ValueError(
                    f"{name}: got {rate}, wants 0 in an agent's memory: a decision could not be "
                    "repeated"
                )
