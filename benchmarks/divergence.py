"""Why the paper's Step 4 is not the default: the size of the state as the adding task is learned.

Trains the paper's sizes for a few steps of Adam at 1e-3, without clipping gradients, and prints the
largest entry that any state had. `python benchmarks/divergence.py`
"""

import torch
from torch import nn

import scoff
from scoff.ops.scoff.types import Communication
from scoff.worlds.adding import additions

STEPS, SEEDS = 150, 5


def largest_state(communication: Communication, seed: int) -> float:
    torch.manual_seed(seed)
    embed, read = nn.Linear(2, 64), nn.Linear(300, 1)
    rnn = scoff.SCOFF(
        64,
        300,
        batch_first=True,
        num_object_files=5,
        num_schemata=2,
        input_heads=4,
        communication=communication,
    )
    parameters = [*embed.parameters(), *rnn.parameters(), *read.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=1e-3)
    largest = 0.0
    for step in range(STEPS):
        batch = additions(seed, torch.arange(64 * step, 64 * (step + 1)), 50)
        output, _ = rnn(embed(batch.x))
        loss = nn.functional.mse_loss(read(output[:, -1])[:, 0], batch.target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        size = output.abs().max().item()
        if size != size:
            return float("nan")
        largest = max(largest, size)
    return largest


def main() -> None:
    torch.set_num_threads(1)
    for communication in ("residual", "gated"):
        sizes = [largest_state(communication, seed) for seed in range(SEEDS)]
        print(f"{communication:10}" + "".join(f"{size:>12.3g}" for size in sizes))


if __name__ == "__main__":
    main()
