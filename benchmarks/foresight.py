"""How far bouncing balls can be foreseen, and after what models lose them.

`python benchmarks/foresight.py` gives what one foresees who knows the laws exactly, but where balls
are in the last given frame only to within so many pixels, and how fast they move to within a tenth
of that a frame. `--runs RUN ...`, folders of `scoff train balls`, adds where these models find
balls that since the last given frame met nothing, only walls, or another ball.
"""

import argparse
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm

from scoff.experiments.balls import Config, find_balls, join
from scoff.experiments.blobs import Matches, f1
from scoff.experiments.evaluate import load, precision
from scoff.experiments.rollouts import roll_out
from scoff.experiments.video_measures import horizon_errors
from scoff.models.video import VideoModel
from scoff.training.run import Run
from scoff.worlds import balls
from scoff.worlds.billiards import roll

HORIZONS = (1, 5, 10, 15, 20, 30)
PIXEL = balls.BOX / balls.PIXELS
AT_ONCE = 25
TRIES = 1000


def misplace(truth: balls.Trajectories, frame: int, by: float, dice: torch.Generator) -> Tensor:
    """Positions [N, K, 2] in this frame with a normal error, in pixels, drawn again where balls
    would overlap or be in a wall"""
    right, radius = truth.position[:, frame], truth.radius
    position, left = right.clone(), torch.arange(len(right))
    for _ in range(TRIES):
        error = torch.randn(right[left].shape, generator=dice, dtype=right.dtype)
        told = right[left] + by * PIXEL * error
        fits = is_possible(told, radius[left])
        position[left[fits]] = told[fits]
        left = left[~fits]
        if not len(left):
            return position
    raise ValueError(f"--errors: balls in clips {left.tolist()} have no room to be {by} pixels off")


def is_possible(position: Tensor, radius: Tensor) -> Tensor:
    """Whether balls are in the box and apart  [N, K, 2], [N, K] -> [N]"""
    is_there = radius > 0
    wall = radius[..., None]
    is_inside = ((position >= wall) & (position <= balls.BOX - wall)).all(-1)
    apart = torch.cdist(position, position) > radius[:, :, None] + radius[:, None]
    pair = (is_there[:, :, None] & is_there[:, None]).triu(1)
    return (is_inside | ~is_there).all(1) & (apart | ~pair).all(-1).all(-1)


def foresee(
    config: Config, truth: balls.Trajectories, by: float, dice: torch.Generator
) -> tuple[Matches, Tensor]:
    """By the laws: where balls are found, and squared errors of pixels [N, H]"""
    last, ahead = config.context - 1, slice(config.context, None)
    position = misplace(truth, last, by, dice)
    error = torch.randn(position.shape, generator=dice, dtype=position.dtype)
    velocity = truth.velocity[:, last] + by / 10 * PIXEL * error
    velocity *= (truth.radius > 0)[..., None]
    steps = config.frames - last
    motion = roll(position, velocity, truth.radius, truth.mass, steps, balls.BOX)
    told = truth._replace(
        **{k: part[:, 1:] for k, part in motion._asdict().items() if part.ndim > 1}
    )
    frames, clips = balls.render(told).frames, balls.render(truth)
    squared = (frames - clips.frames[:, ahead]).square().mean((2, 3, 4))
    return find_balls(config, frames, clips.identity[:, ahead], None), squared


def by_laws(config: Config, errors: list[float]) -> None:
    print(f"{'pixels off':12}" + "".join(f"{f'F1, {h}':>8}" for h in HORIZONS), end="")
    print("".join(f"{f'squared, to {h}':>16}" for h in (10, 30)))
    index = torch.arange(config.test_clips)
    for by in errors:
        dice = torch.Generator().manual_seed(0)
        found, squared = [], []
        for part in tqdm(index.split(AT_ONCE), f"{by} pixels off", leave=False, disable=None):
            truth = balls.trajectories(0, part, config.variant, config.frames, "test")
            matches, error = foresee(config, truth, by, dice)
            found.append(matches)
            squared.append(error)
        share = f1(join(found))
        total = horizon_errors(torch.cat(squared)).cumulative
        print(f"{by:<12}" + "".join(f"{share[h - 1]:8.2f}" for h in HORIZONS), end="")
        print("".join(f"{total[h - 1]:16.3f}" for h in (10, 30)), flush=True)


@torch.no_grad()
def by_what_was_met(path: Path, clips: int) -> None:
    """Shares of balls found, and mean distances of those from where they are"""
    cpu = torch.device("cpu")
    _, config, model = load(Run.open(path), cpu)
    if not isinstance(config, Config) or config.data or balls.VARIANTS[config.variant].has_curtain:
        raise SystemExit(f"{path}: wants a run of scoff train balls without a curtain or --data")
    ahead = slice(config.context, None)
    found, hit, bounced, there = [], [], [], []
    for part in tqdm(torch.arange(clips).split(AT_ONCE), str(path), leave=False, disable=None):
        truth = balls.trajectories(config.data_seed, part, config.variant, config.frames, "test")
        seen = balls.render(truth)
        with precision(config, cpu):
            frames = roll_out(cast(VideoModel, model), seen.frames, config.context).frames
        found.append(find_balls(config, frames, seen.identity[:, ahead], None))
        hit.append(truth.hits[:, ahead].cumsum(1) > 0)
        bounced.append(truth.bounces[:, ahead].cumsum(1) > 0)
        there.append((truth.radius > 0)[:, None].expand_as(hit[-1]))
    distance = join(found).distance  # [N, H, K]
    balls_met, walls_met, real = map(torch.cat, (hit, bounced, there))
    horizons = [h for h in HORIZONS if h <= distance.shape[1]]
    print(f"\n{path}\n{'met':12}" + "".join(f"{h:>20}" for h in horizons))
    for name, which in (
        ("nothing", ~balls_met & ~walls_met),
        ("walls", walls_met & ~balls_met),
        ("balls", balls_met),
    ):
        cells = []
        for h in horizons:
            here = distance[:, h - 1][(which & real)[:, h - 1]]
            near = here[here.isfinite()]
            share = f"{len(near) / len(here):.2f}" if len(here) else "-"
            off = f"{near.mean():.2f}" if len(near) else "-"
            cells.append(f"{share}, {off} of {len(here):4}")
        print(f"{name:12}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="4balls", choices=["4balls", "678balls"])
    parser.add_argument("--clips", type=int, default=200, help="of the test set")
    parser.add_argument("--errors", type=float, nargs="*", default=[0.0, 0.05, 0.2, 0.5, 1.0])
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.errors:
        by_laws(Config(variant=args.variant, test_clips=args.clips), args.errors)
    for path in args.runs:
        by_what_was_met(path, args.clips)


if __name__ == "__main__":
    main()
