"""Draws docs/figures/quadruplet.png: python docs/figures/quadruplet.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from scoff.worlds.intphys import quadruplets

NUMBER, PIXELS, SHOWN = 58, 160, 8


def main() -> None:
    four = quadruplets(0, torch.tensor([NUMBER]), "O1", pixels=PIXELS)
    frames = four.movies().frames[0]
    cut, hidden = int(four.cuts[0, 0]), int(four.hidden[0, 0])
    first, last = cut - hidden - 4, cut + hidden + 5
    times = [round(first + (last - first) * i / (SHOWN - 1)) for i in range(SHOWN)]
    order = (~four.possible[0]).long().argsort(stable=True).tolist()
    figure, axes = plt.subplots(4, SHOWN, figsize=(SHOWN * 1.25, 4 * 1.25 + 0.3))
    for row, movie in enumerate(order):
        for column, time in enumerate(times):
            axis = axes[row, column]
            axis.imshow(frames[movie, time])
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(f"frame {time + 1}", fontsize=8)
        is_possible = bool(four.possible[0, movie])
        label = "possible" if is_possible else "impossible"
        axes[row, 0].set_ylabel(label, fontsize=9, color="#2f7d4f" if is_possible else "#b2182b")
    figure.subplots_adjust(0.03, 0.005, 0.998, 0.945, 0.03, 0.03)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
