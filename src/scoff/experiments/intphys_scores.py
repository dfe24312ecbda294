"""From a model's errors to the benchmark's measures, and who followed what was hidden.

N quadruplets, T frames. Plausibilities are fixed in advance: the mean of the log-likelihood over
time is what counts, the others are told beside it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import scoff
from scoff.experiments.measures import joint_counts
from scoff.experiments.one_ball import holders
from scoff.experiments.video_measures import last_owners
from scoff.models.video import VideoModel
from scoff.worlds.intphys import MOVEMENTS, Quadruplets
from scoff.worlds.intphys.metrics import (
    Measures,
    bootstrap,
    measure,
    measure_groups,
    pairwise_accuracies,
    relative_errors,
)
from scoff.worlds.intphys.oracles import copy_scores, frame_scores, state_scores, track_scores
from scoff.worlds.intphys.scenes import FIRST_ELEMENT

if TYPE_CHECKING:
    from scoff.experiments.intphys import Config

WAYS = ("mean", "max", "window", "objects")
LAGS = (1, 4, 16, 64)  # of copies, in frames of the whole movie
SHORT, LONG = 8, 16  # frames, up to which an occlusion is short, and from above which it is long
HIDING = (f"up to {SHORT}", f"{SHORT + 1} to {LONG}", f"above {LONG}")


class Surprise(NamedTuple):
    """Errors of the frames that count, [N, 4, T] each."""

    whole: Tensor
    objects: Tensor  # what pixels that show an object add to it


class Judged(NamedTuple):
    """Of some quadruplets, what each score says of their four movies."""

    scores: Tensor  # [N, 4, WAYS] float64
    references: Tensor  # [N, 4, REFERENCES] float64
    possible: Tensor  # [N, 4] bool
    start: Tensor  # [N, 4]
    movement: Tensor  # [N]
    hidden: Tensor  # [N], frames: the shortest of its occlusions; 0: none


def reference_names(length: int) -> list[str]:
    copies = [f"copy, {lag} {'frame' if lag == 1 else 'frames'} before" for lag in lags(length)]
    return [*copies, "single frames", "tracker", "state oracle"]


def lags(length: int) -> list[int]:
    return [lag for lag in LAGS if lag < length]


def plausibilities(errors: Tensor, window: int) -> Tensor:
    """[..., T] -> [..., 3] float64, the higher the more plausible: the first three of WAYS"""
    errors = errors.double()
    windows = errors.unfold(-1, window, 1).mean(-1)
    return -torch.stack([errors.mean(-1), errors.amax(-1), windows.amax(-1)], -1)


def judge(
    tests: Quadruplets,
    identity: Tensor,
    whole: Tensor,
    seen: Tensor,
    surprise: Surprise,
    window: int,
) -> Judged:
    """`whole` and `seen` are what is observed, of all frames and of those that are watched."""
    length = whole.shape[2]
    channels = as_channels(whole)
    references = [copy_scores(channels, lag) for lag in lags(length)]
    references += [frame_scores(seen), track_scores(identity, length), state_scores(tests)]
    hidden = torch.where(tests.hidden > 0, tests.hidden, length).amin(1)
    objects = -surprise.objects.double().mean(-1, keepdim=True)
    return Judged(
        torch.cat([plausibilities(surprise.whole, window), objects], -1).cpu(),
        torch.stack([r.cpu() for r in references], -1),
        tests.possible.cpu(),
        tests.start.cpu(),
        tests.movement.cpu(),
        torch.where((tests.hidden > 0).any(1), hidden, 0).cpu(),
    )


def as_channels(seen: Tensor) -> Tensor:
    """Classes have no order: a channel each, so that all differ by as much"""
    if seen.ndim > 5:
        return seen
    kinds = torch.arange(3, dtype=torch.uint8, device=seen.device)
    return (seen[..., None] == kinds).to(torch.uint8)


def join(parts: Sequence[Judged]) -> Judged:
    return Judged(*(torch.cat(part) for part in zip(*parts, strict=True)))


# --- measures as JSON


def describe(judged: Mapping[str, Judged], length: int) -> dict[str, Any]:
    """Of tests by their names, such as occluded/O1, of movies of this length."""
    tests, movements, hiding, directions, errors = {}, {}, {}, {}, {}
    references: dict[str, dict[str, Any]] = {}
    for name, one in judged.items():
        mean = one.scores[..., 0]
        tests[name] = {
            way: as_json(measure(one.scores[..., number], one.possible, one.start))
            for number, way in enumerate(WAYS)
        }
        groups = {kind: one.movement == number for number, kind in enumerate(MOVEMENTS)}
        movements[name] = group_json(mean, one, groups)
        if bool(one.hidden.any()):
            hiding[name] = group_json(mean, one, by_hiding(one.hidden))
        if name.endswith("O1"):
            directions[name] = direction_json(mean, one)
        errors[name] = relative_errors(mean, one.possible).tolist()
        for number, label in enumerate(reference_names(length)):
            scores = one.references[..., number]
            references.setdefault(label, {})[name] = as_json(
                measure(scores, one.possible, one.start)
            )
    return {
        "tests": tests,
        "movements": movements,
        "hiding": hiding,
        "directions": directions,
        "errors": errors,
        "references": references,
    }


def by_hiding(hidden: Tensor) -> dict[str, Tensor]:
    is_short, is_long = hidden <= SHORT, hidden > LONG
    return dict(zip(HIDING, (is_short, ~is_short & ~is_long, is_long), strict=True))


def group_json(scores: Tensor, judged: Judged, groups: Mapping[str, Tensor]) -> dict[str, Any]:
    found = measure_groups(scores, judged.possible, groups, judged.start)
    return {name: as_json(measures) for name, measures in found.items()}


def direction_json(scores: Tensor, judged: Judged) -> dict[str, Any]:
    """Pairwise accuracy by what the magic object does first. In O1 run 0 has it."""
    found = {}
    for number, name in enumerate(("vanishes", "appears")):
        # the two movies that start from this run; the others as if they were all told apart
        others = torch.where(judged.possible, 0.0, -1.0) + scores.amax(1, keepdim=True)
        own = torch.where(judged.start == number, scores, others)
        accuracy = 2 * pairwise_accuracies(own, judged.possible, judged.start) - 1
        found[name] = list(
            bootstrap(lambda drawn, values=accuracy: values[drawn].mean(1), len(accuracy))
        )
    return found


def as_json(measures: Measures) -> dict[str, Any]:
    told = {"relative": measures.relative, "absolute": measures.absolute}
    if measures.pairwise is not None:
        told["pairwise"] = measures.pairwise
    # the same measure summed in another order is the same
    return {name: [round(x, 12) for x in value] for name, value in told.items()}


# --- who followed the hidden object


class Followed(NamedTuple):
    """Of possible movies in which the magic object was seen, hidden and seen again."""

    same: int  # its object file was the same before and after
    all: int
    behind: Tensor | None  # [2, S], schemata that its object file chose: seen, and hidden


def follow(
    config: "Config", model: VideoModel, tests: Quadruplets, identity: Tensor, seen: Tensor
) -> Followed | None:
    """None for a model that has no object files."""
    from scoff.experiments.intphys import WATCHED, as_frames, at_once

    if model.options.slots == 1:
        return None
    # one movie of each four: the first possible one
    first = tests.possible.long().argmax(1)
    every = torch.arange(len(first), device=first.device)
    movies, identity = seen[every, first], identity[every, first, :: config.skip]
    shown = identity == (FIRST_ELEMENT + tests.magic)[:, None, None, None]
    same, total, counts = 0, 0, []
    for part, mine in zip(
        movies.split(at_once(WATCHED, seen.device)),
        shown.split(at_once(WATCHED, seen.device)),
        strict=True,
    ):
        trace = model.trace(as_frames(config, part)[:, :-1])
        owner = holders(model, trace, mine)
        if owner is None:
            return None
        last = last_owners(owner)
        back = (owner[:, 1:] >= 0) & (owner[:, :-1] < 0) & (last[:, :-1] >= 0)
        same += int((back & (owner[:, 1:] == last[:, :-1])).sum())
        total += int(back.sum())
        if isinstance(model.rnn, scoff.SCOFF):
            layer = cast(scoff.Trace, trace.layer)
            chosen = layer.schema.gather(-1, last.clamp(min=0))
            # before it was seen and after it is last seen it is not hidden but away
            later = owner.flip(1).cummax(1).values.flip(1) >= 0
            is_hidden = (owner < 0) & (last >= 0) & later
            known = (owner >= 0) | is_hidden
            pairs = is_hidden.long()[known], chosen[known]
            counts.append(joint_counts(*pairs, 2, model.rnn.num_schemata).cpu())
    return Followed(same, total, torch.stack(counts).sum(0) if counts else None)


def describe_following(parts: Sequence[Followed]) -> dict[str, Any] | None:
    if not parts:
        return None
    total = sum(part.all for part in parts)
    told: dict[str, Any] = {
        "same": sum(part.same for part in parts) / total if total else None,
        "times": total,
    }
    counts = [part.behind for part in parts if part.behind is not None]
    if counts:
        share = F.normalize(torch.stack(counts).sum(0).double(), p=1, dim=1)
        told["schemata"] = dict(zip(("seen", "hidden"), share.tolist(), strict=True))
    return told
