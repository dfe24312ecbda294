"""PPO replayed from CUDA graphs: no launch of a kernel costs time on the CPU."""

from typing import Any

import torch
from torch import Tensor

from scoff.training.ppo import PPO

WARM_UP = 2


class Replay:
    """Rollouts and updates of `ppo`, each one graph; leaves it as it was before it is captured.

    Random numbers come from torch's generator, whose place in its stream each replay reads anew
    and moves on, as the same work without a graph would. A checkpoint has to be loaded before, not
    after, and an environment that is entered later is not in the graph: make a new one then.
    """

    def __init__(self, ppo: PPO):
        self.ppo = ppo
        device = ppo.device
        values = Snapshot(ppo)
        random = torch.cuda.get_rng_state(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):  # libraries set themselves up; the optimiser makes its state
                ppo.collect()
                ppo.update()
        torch.cuda.current_stream(device).wait_stream(side)
        ppo.optimiser.zero_grad()
        self.rollout, self.learning = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.rollout):
            ppo.collect()
        with torch.cuda.graph(self.learning, pool=self.rollout.pool()):
            ppo.update()
        values.put_back()
        torch.cuda.set_rng_state(random, device)

    def iterate(self) -> None:
        """As `ppo.iterate`"""
        self.rollout.replay()
        self.learning.replay()
        self.ppo.count_frames()


class Snapshot:
    """What a PPO has in its tensors, to put back into the very same ones."""

    def __init__(self, ppo: PPO):
        self.ppo = ppo
        self.tensors = ppo.tensors()
        self.values = [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)
        known = {id(tensor) for tensor in self.tensors}
        for moments in self.ppo.optimiser.state.values():
            for moment in of_tensors(moments):
                if id(moment) not in known:  # made since
                    moment.zero_()


def of_tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]
