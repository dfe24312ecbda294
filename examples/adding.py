"""A small SCOFF and an nn.GRU learn to add, side by side, on the CPU.

Both read a sequence of numbers, two or four of them marked, and are to tell the sum of those. Then
they are tested on sequences four times as long. Run `python examples/adding.py --help`.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from tqdm import tqdm

import scoff
from scoff.worlds.adding import draw_additions

LENGTH, OPERANDS = 30, (2, 4)
FILES, SCHEMATA = 5, 2


class Adder(nn.Module):
    """Embedding, recurrent layer, and a readout of the last step."""

    def __init__(self, rnn: nn.Module, slots: int):
        super().__init__()
        self.embed = nn.Linear(2, 16)
        self.rnn = rnn
        self.read = scoff.Readout(rnn.hidden_size, 1, slots, pool="sum")  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(self.embed(x))
        return self.read(output[:, -1])[:, 0]


def make_scoff() -> Adder:
    rnn = scoff.SCOFF(
        16,
        100,
        batch_first=True,
        num_object_files=FILES,
        num_schemata=SCHEMATA,
        active_object_files=3,
        input_key_size=16,
        comm_heads=1,
    )
    return Adder(rnn, FILES)


def make_gru() -> Adder:
    return Adder(nn.GRU(16, 100, batch_first=True), slots=1)


def train(model: Adder, steps: int, name: str, show: bool = True) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, steps, pct_start=0.1)
    data = torch.Generator().manual_seed(0)
    model.train()
    smooth = None
    with tqdm(total=steps, desc=f"{name:6}", disable=not show, mininterval=0.5) as bar:
        for _ in range(steps):
            batch = draw_additions(64, LENGTH, OPERANDS, data)
            loss = nn.functional.mse_loss(model(batch.x), batch.target)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            value = loss.item()
            smooth = value if smooth is None else 0.95 * smooth + 0.05 * value
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
            bar.update()


@torch.no_grad()
def error(model: Adder, length: int) -> float:
    data = draw_additions(1000, length, OPERANDS, torch.Generator().manual_seed(1))
    return nn.functional.mse_loss(model.eval()(data.x), data.target).item()


@torch.no_grad()
def schema_use(model: Adder) -> Tensor:
    """How often each object file, when active, chose each schema  [F, (else, operand), S]"""
    data = draw_additions(1000, LENGTH, OPERANDS, torch.Generator().manual_seed(1))
    rnn = model.eval().rnn
    assert isinstance(rnn, scoff.SCOFF)
    trace = rnn.trace(model.embed(data.x))
    chosen = nn.functional.one_hot(trace.schema, SCHEMATA).double() * trace.active[..., None]
    operand = data.is_operand[..., None, None]
    counts = torch.stack([(chosen * here).sum((0, 1)) for here in (~operand, operand)], 1)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # such small steps are slower with more
    started = time.perf_counter()

    print(f"Learning to add {' or '.join(map(str, OPERANDS))} of {LENGTH} numbers.\n")
    models = {"SCOFF": make_scoff(), "GRU": make_gru()}
    for name, model in models.items():
        train(model, args.steps, name)

    print(f"\nmean squared error     {LENGTH:>4} numbers {4 * LENGTH:>6} numbers   parameters")
    for name, model in models.items():
        count = sum(p.numel() for p in model.parameters())
        short, long = error(model, LENGTH), error(model, 4 * LENGTH)
        print(f"{name:20} {short:>14.4f} {long:>14.4f} {count:>12,}")
    data = draw_additions(1000, LENGTH, OPERANDS, torch.Generator().manual_seed(1))
    guess = data.target.var().item()
    print(f"{'always the mean':20} {guess:>14.4f} {guess:>14.4f}")

    print("\nschema chosen by each object file (share of the steps at which it was active)")
    heads = "  ".join(f"schema {j}" for j in range(SCHEMATA))
    print(f"{'':16}{'at operands':^22}  {'elsewhere':^22}\n{'':16}{heads:^22}  {heads:^22}")
    for k, (elsewhere, operand) in enumerate(schema_use(models["SCOFF"]).tolist()):
        cells = ["  ".join(f"{share:8.0%}" for share in row) for row in (operand, elsewhere)]
        print(f"object file {k:<4}{cells[0]:^22}  {cells[1]:^22}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
