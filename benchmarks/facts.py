"""Figures that docs/ and results/ tell and no command of scoff prints, each by a name of its own.

`python benchmarks/facts.py --help` lists them. On one CPU thread each takes minutes at most.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import scoff
from scoff.experiments import balls, intphys, switching
from scoff.experiments.division import persistence
from scoff.experiments.evaluate import load, precision
from scoff.experiments.measures import joint_counts
from scoff.experiments.one_ball import least_errors
from scoff.experiments.rollouts import roll_out
from scoff.experiments.video import chunks
from scoff.experiments.video_measures import agreement
from scoff.models.likelihoods import LEVELS, DiscreteNormal
from scoff.models.video import VideoModel
from scoff.training.engine import Runtime, fit
from scoff.training.run import Run
from scoff.worlds import dynamics
from scoff.worlds.intphys import render, training_scenes
from scoff.worlds.intphys.scenes import FIRST_ELEMENT, OBJECTS

CPU = torch.device("cpu")
SEEDS = 5  # of weights that are not trained
KEPT = (1e-6, 1e-2)  # how far predictions are kept from 0 and 1
UNSURE = 0.05, 0.95
HORIZONS = (10, 30)


class Fact(NamedTuple):
    about: str
    tell: Callable[[argparse.Namespace], None]
    clips: int
    of_runs: str = ""


def opened(path: Path, experiment: str) -> tuple[Any, VideoModel]:
    found, config, model = load(Run.open(path), CPU)
    if found.name != experiment:
        raise SystemExit(f"{path}: got a run of {found.name}, wants one of {experiment}")
    return config, cast(VideoModel, model)


def few(clips: int, what: object) -> Iterator[Tensor]:
    """Their numbers, some at a time"""
    yield from tqdm(chunks(clips, CPU), str(what), leave=False, disable=None)


# --- worlds, and what is not trained


def lasting(args: argparse.Namespace) -> None:
    config = switching.divide("scoff")
    index = torch.arange(args.clips)
    truth = dynamics.switching_trajectories(config.data_seed, index, config.frames)
    in_force = truth.dynamics[:, config.stack - 1 : -1]  # at the steps of a model
    first, steps = in_force[:, :1], in_force.shape[1]
    halves = torch.where(torch.arange(steps) < steps // 2, first, 1 - first)
    for name, schema in (("halves", halves), ("dynamics", in_force)):
        certain = F.one_hot(schema, config.schemata)[:, :, None].double()
        print(f"{name:10}{persistence(certain, config.persistence_lag):.3f}")


@torch.no_grad()
def forgetting(args: argparse.Namespace) -> None:
    config = replace(balls.quick("scoff", "678balls"), frames=51, train_clips=args.clips)
    print(f"{'frames seen':12}{'mean':>8}{'least':>8}{'most':>8}")
    for is_training in (False, True):
        spreads = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            task = balls.BallsTask(config, CPU)
            model = task.model.train(is_training)
            layer = model.trace(task.clips(torch.arange(args.clips), "train").frames).layer
            states = cast(Tensor, cast(scoff.Trace, layer).output)  # [N, T, F * size]
            spreads.append(states.unflatten(-1, (config.object_files, -1)).std(2).mean((0, 2)))
        for frames in (1, 10, 50):
            now = torch.stack(spreads)[:, frames - 1]
            mode = "in training" if is_training else "in evaluation"
            print(f"{frames:<12}{now.mean():8.3f}{now.min():8.3f}{now.max():8.3f}  {mode}")


def returning(args: argparse.Namespace) -> None:
    config = intphys.quick("scoff")
    watched = slice(None, None, config.skip)
    number = FIRST_ELEMENT + torch.arange(OBJECTS, dtype=torch.uint8)[:, None, None]
    returns = frames = 0
    for index in few(args.clips, "movies"):
        scenes = training_scenes(config.data_seed, index, "train", config.length, config.min_hidden)
        scenes = scenes._replace(centre=scenes.centre[:, watched], tilt=scenes.tilt[:, watched])
        identity = render(scenes, config.frame_size).identity
        seen = (identity[:, :, None] == number).any(-1).any(-1)  # [N, T, K]
        before = seen[:, :-1]
        is_back = seen[:, 1:] & ~before & before.cummax(1).values
        returns += int(is_back.any(-1).sum())
        frames += seen.shape[0] * seen.shape[1]
    print(f"in {returns} of {frames} frames, {returns / frames:.3f}")


# --- a ball that changes its way to move


def changing_clips(config: switching.Config, clips: int, what: object) -> Iterator[dynamics.Clips]:
    """Of the test set"""
    for index in few(clips, what):
        yield dynamics.switching_dynamics(config.data_seed, index, config.frames, "test")


@torch.no_grad()
def bulbs(args: argparse.Namespace) -> None:
    print(f"{'change':>8}{'might':>9}{'all frames':>12}")
    for path in args.runs:
        config, model = opened(path, "switching")
        changes = dynamics.when_it_changes(config.frames)
        added, they_change, they_might = [], [], []
        for clips in changing_clips(config, args.clips, path):
            target = clips.frames[:, config.stack :]
            low = slice(int(dynamics.FLOOR), None)
            errors = model.likelihood.pixels(model(clips.frames[:, :-1]).logits, target)
            more = errors[..., low, :].mean((-2, -1))
            more -= least_errors(target[..., low, :], config.doubt)
            # their share in the mean over the picture
            added.append(more * (1 - dynamics.FLOOR / dynamics.PIXELS))
            is_new = clips.dynamics != clips.dynamics[:, :1]
            frame = torch.arange(config.stack, config.frames)
            may_be_now = (frame >= changes[0]) & (frame <= changes[-1])
            they_change.append((is_new.diff(dim=1) > 0)[:, config.stack - 1 :])
            they_might.append(~is_new[:, config.stack :] & may_be_now)
        all_of_them = torch.cat(added)
        change, might = (all_of_them[torch.cat(w)].mean() for w in (they_change, they_might))
        print(f"{change:8.4f}{might:9.4f}{all_of_them.mean():12.5f}  {path}", flush=True)


@torch.no_grad()
def mistakes(args: argparse.Namespace) -> None:
    for path in args.runs:
        config, model = opened(path, "switching")
        if config.object_files > 1 or "scoff" not in config.model:
            raise SystemExit(f"{path}: wants a SCOFF with one object file")
        chosen, true, first = [], [], []
        for clips in changing_clips(config, args.clips, path):
            layer = cast(scoff.Trace, model.trace(clips.frames[:, :-1]).layer)
            in_force = clips.dynamics[:, config.stack - 1 : -1]
            is_new = in_force.diff(dim=1, prepend=in_force[:, :1]) != 0
            chosen.append(layer.schema[:, switching.BURN_IN :, 0])
            true.append(in_force[:, switching.BURN_IN :])
            first.append(is_new[:, switching.BURN_IN :])
        schema, in_force = torch.cat(chosen), torch.cat(true)
        counts = joint_counts(schema, in_force, config.schemata, len(switching.DYNAMICS))
        is_wrong = torch.tensor(agreement(counts).match)[schema] != in_force
        at_once = is_wrong & torch.cat(first)
        steps = f"{is_wrong.sum()} of {is_wrong.numel()} steps"
        print(f"{steps}, {at_once.sum()} of them the first after a change  {path}", flush=True)


# --- bouncing balls


@torch.no_grad()
def sureness(args: argparse.Namespace) -> None:
    ahead = "".join(f"{f'up to {h}':>10}" for h in HORIZONS)
    print(f"{'unsure':>8}{'kept within':>13}{'next frame':>12}{ahead}")
    for path in args.runs:
        config, model = opened(path, "balls")
        config = replace(config, test_clips=args.clips)
        task = balls.BallsTask(config, CPU, ["test"])
        told, rolled, grey = [], [], []
        for index in few(args.clips, path):
            frames = task.clips(index, "test").frames
            with precision(config, CPU):
                one = model(frames[:, :-1]).frames.float()
                many = roll_out(model, frames, config.context).frames.float()
            told.append(kept_errors(one, frames[:, config.stack :]))
            rolled.append(kept_errors(many, frames[:, config.context :]))
            grey.append(((many > UNSURE[0]) & (many < UNSURE[1])).double().mean((2, 3, 4)))
        share = torch.cat(grey)[:, : HORIZONS[-1]].mean()
        errors = torch.cat(rolled, 1)
        for kept, each, further in zip(KEPT, torch.cat(told, 1).mean((1, 2)), errors, strict=True):
            to = "".join(f"{further[:, :h].mean():10.3f}" for h in HORIZONS)
            print(f"{share:8.3f}{kept:>13}{each:12.3f}{to}  {path}", flush=True)


def kept_errors(told: Tensor, frames: Tensor) -> Tensor:
    """[N, T, C, H, W] both -> [KEPT, N, T]"""
    errors = [
        F.binary_cross_entropy(told.clamp(kept, 1 - kept), frames, reduction="none")
        for kept in KEPT
    ]
    return torch.stack(errors).mean((3, 4, 5))


class DiscreteLogistic(DiscreteNormal):
    """The same but for longer tails"""

    def pixels(self, logits: Tensor, target: Tensor) -> Tensor:
        off, half, scale = target - self.means(logits), 0.5 / (LEVELS - 1), self.stds()
        above, below = F.logsigmoid((off + half) / scale), F.logsigmoid((half - off) / scale)
        inner = above + below + torch.log(-torch.expm1(-2 * half / scale))
        outer = torch.where(target > 1 - half, below, inner)
        return -torch.where(target < half, above, outer).mean(-3)


def tails(args: argparse.Namespace) -> None:
    preset = balls.quick("scoff", "coloured4balls")
    config = replace(preset, steps=args.steps, test_clips=args.clips)
    for likelihood in (DiscreteNormal, DiscreteLogistic):
        print(f"{likelihood.__name__:18}{trained_masks(config, likelihood):6.3f}", flush=True)


def trained_masks(config: balls.Config, likelihood: type[DiscreteNormal]) -> float:
    """Trains, and tells the adjusted Rand index within frames"""

    def make_task(device: torch.device) -> balls.BallsTask:
        task = balls.BallsTask(config, device)
        task.model.likelihood = likelihood(task.model.options.channels)
        return task

    task = make_task(CPU)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", "balls", "quick", config)
        fit(make_task, config, run, Runtime("cpu", tensorboard=False))
        task.model.load_state_dict(run.read_weights())
    return balls.measure(task, task.model.eval())["binding"]["mask_ari"]


FACTS = {
    "lasting": Fact("what persistence gives choices that cut clips in halves", lasting, 400),
    "forgetting": Fact("how far apart object files are, untrained", forgetting, 8),
    "returning": Fact("how often objects come back into sight in training", returning, 3600),
    "bulbs": Fact("what the bulbs add to the error", bulbs, 1000, "switching"),
    "mistakes": Fact("when the schema is not that of the dynamics", mistakes, 64, "switching"),
    "sureness": Fact("errors of predictions kept away from 0 and 1", sureness, 200, "balls"),
    "tails": Fact("trains on colours, with normal and logistic levels: masks, ARI", tails, 48),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = parser.add_subparsers(dest="fact", required=True)
    for name, fact in FACTS.items():
        own = names.add_parser(name, help=fact.about, description=fact.about)
        if fact.of_runs:
            own.add_argument("runs", type=Path, nargs="+", help=f"of scoff train {fact.of_runs}")
        if name == "tails":
            own.add_argument("--steps", type=int, default=800)
        own.add_argument("--clips", type=int, default=fact.clips)
    args = parser.parse_args()
    torch.set_num_threads(1)
    FACTS[args.fact].tell(args)


if __name__ == "__main__":
    main()
