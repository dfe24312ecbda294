"""Pictures of what a trained model predicts and of what goes on inside it, for reports.

They are made from the weights in a run's folder, in a second or so on a CPU, of one run of each
group of seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import scoff
from scoff.experiments.base import Finished
from scoff.experiments.rollouts import roll_out
from scoff.experiments.video import make_model
from scoff.experiments.video_measures import to_pixels
from scoff.models.video import VideoModel, VideoTrace
from scoff.report import Figure
from scoff.report.films import NAMED, PALETTE, Lane, animation, strip, timeline
from scoff.training.run import Run

if TYPE_CHECKING:
    Groups = Mapping[str, list[Finished]]

LEVELS = 16  # of brightness: more would hardly be seen, and make a page larger
OUTLINE = (240, 110, 30)
COLUMNS = 8
DIM = 0.45  # of a frame under what is laid over it


class Clip(Protocol):
    """What all worlds' clips have, one clip here."""

    @property
    def frames(self) -> Tensor: ...  # [1, T, C, H, W]

    @property
    def identity(self) -> Tensor: ...  # [1, T, H, W]


Example = Callable[[Any], Clip]  # of a config
Story = Callable[[Finished], Sequence[Lane]]  # what happens in the example in truth


class Chosen(NamedTuple):
    """The run of a group of seeds that pictures are made of."""

    group: str
    run: Finished
    name: str
    """The group's, and the seed where there are several."""


class Watched(NamedTuple):
    """One model and one clip. S is the model's stack."""

    name: str
    model: VideoModel
    frames: Tensor  # [T, C, H, W]
    identity: Tensor  # [T, H, W]
    context: int
    predicted: Tensor  # [T - context, C, H, W] in a rollout
    seen: VideoTrace  # of true frames S - 1 to T - 2
    dreamt: VideoTrace  # of given and then of predicted frames

    @property
    def whole(self) -> Tensor:
        """Frames that are given, and then those predicted"""
        return torch.cat([self.frames[: self.context], self.predicted])


class Pictures(NamedTuple):
    """Of some models, one after the other in each part."""

    rollouts: Sequence[Figure] = ()
    """Those of all in one strip, and a film of each."""
    lanes: Sequence[Figure] = ()
    """Schemata over time."""
    shares: Sequence[Sequence[Figure]] = ()
    """Attention and masks of object files, by model."""


def choose(groups: "Groups") -> list[Chosen]:
    """The first run of each group that has weights; none of a group without."""
    chosen = []
    for group, runs in groups.items():
        run = next(filter(has_weights, runs), None)
        if run is not None:
            name = f"{group}, seed {run.config.seed}" if len(runs) > 1 else group
            chosen.append(Chosen(group, run, name))
    return chosen


def has_weights(run: Finished) -> bool:
    return run.path is not None and Run(run.path).finished


def left_out(groups: "Groups") -> str:
    """A paragraph that names the runs of groups without pictures, if there are such."""
    missing = [runs for runs in groups.values() if not any(map(has_weights, runs))]
    names = ", ".join(f"`{run.name}`" for runs in missing for run in runs)
    return f"\n\nThere are no pictures of runs without weights: {names}." if names else ""


def trained(run: Finished) -> VideoModel:
    """In evaluation mode, on a CPU."""
    # not all backends run there that it may have been trained with
    model = make_model(replace(run.config, backend="auto"))
    model.load_state_dict(Run(cast(Path, run.path)).read_weights())
    return model.eval()


@torch.no_grad()
def watch(chosen: Chosen, example: Example) -> Watched:
    run, model = chosen.run, trained(chosen.run)
    clip = example(run.config)
    frames, context = clip.frames, run.config.context
    rollout = roll_out(model, frames, context)
    dreamt = torch.cat([frames[:, :context], rollout.frames], 1)
    return Watched(
        chosen.name,
        model,
        frames[0],
        clip.identity[0],
        context,
        rollout.frames[0],
        model.trace(frames[:, :-1]),
        model.trace(dreamt[:, :-1]),
    )


def film_figures(
    groups: "Groups", example: Example, story: Story | None = None, every: int = 1
) -> Pictures:
    """Films have every so many-th frame."""
    chosen = choose(groups)
    if not chosen:
        return Pictures()
    watched = [watch(one, example) for one in chosen]
    return Pictures(
        [rollout_strip(watched), *(rollout_film(one, every) for one in watched)],
        [
            schema_lanes(one, () if story is None else story(own.run))
            for one, own in zip(watched, chosen, strict=True)
            if isinstance(one.model.rnn, scoff.SCOFF)
        ],
        [shares(one) for one in watched],
    )


def lane_figures(groups: "Groups", example: Example, story: Story, about: str) -> list[Figure]:
    """Schemata over time alone, of models that have any and a clip that is `about` this."""
    return [schema_lanes(watch(one, example), story(one.run), about) for one in choose(groups)]


def rollout_strip(watched: Sequence[Watched]) -> Figure:
    """The truth, and under it each model's rollout with the truth as outlines."""
    first = watched[0]
    ahead = len(first.predicted)
    steps = spread(ahead, COLUMNS - 1)
    last_given = first.context - 1
    shown = torch.tensor([last_given, *(first.context + step for step in steps)])
    rows = [("truth", to_rgb(first.frames[shown]))]
    for one in watched:
        rows.append((one.name, outlined(one.whole[shown], one.identity[shown], scale=2)))
    return strip(
        rows,
        ["given", *(f"{step + 1}" for step in steps)],
        title="Rollouts",
        caption=f"The last of {first.context} given frames and predictions 1 to {ahead} frames "
        "ahead, of a test clip. Outlines: where the balls are in truth.",
    )


def rollout_film(one: Watched, every: int) -> Figure:
    films = [("truth", to_rgb(one.frames)), ("prediction", outlined(one.whole, one.identity))]
    told = "The bar turns orange where frames are no longer given."
    lit = by_object_file(one)
    if lit is not None:
        films.append(("by object file", lit))
        told += " By object file: the colour of the one whose mask has the pixel."
    panels = [(name, with_bar(film, one.context)[::every]) for name, film in films]
    return animation(panels, title=f"Film: {one.name}", caption=told)


def by_object_file(one: Watched) -> Tensor | None:
    """Its frames, in the colours of those whose masks have the pixels  [T, H, W, 3]"""
    masks, whole = one.dreamt.decoded.masks, one.whole
    if masks is None or masks.shape[2] == 1:
        return None
    # what is painted before the first prediction is nobody's
    owner = F.pad(masks[0], (0, 0, 0, 0, 0, 0, len(whole) - masks.shape[1], 0))
    coloured = (owner[..., None] * colours(owner.shape[1])[:, None, None]).sum(1)
    return as_bytes(coloured * whole.amax(1)[..., None])


def schema_lanes(one: Watched, truth: Sequence[Lane], about: str = "") -> Figure:
    """Which schema each of a SCOFF's object files chose while true frames were watched."""
    layer = cast(scoff.Trace, one.seen.layer)
    frames = len(one.frames)
    lanes = [*truth, *schema_rows(layer, one.model.options.stack)]
    at = spread(frames, COLUMNS)
    names = named(cast(scoff.SCOFF, one.model.rnn).num_schemata)
    return timeline(
        to_rgb(one.frames[torch.tensor(at)]),
        at,
        frames,
        lanes,
        title=f"{one.name}: schemata over time" + (f", {about}" if about else ""),
        caption=f"Colour: the schema that an object file chose at a frame, to bring about the next "
        f"({names}). Pale: not updated. True frames were watched.",
    )


def schema_rows(layer: scoff.Trace, stack: int) -> list[Lane]:
    """A lane for each object file of the first clip, with the schema that it chose."""
    before: list[int | None] = [None] * (stack - 1)
    lanes = []
    for number in range(layer.schema.shape[-1]):
        chosen = [*before, *layer.schema[0, :, number].tolist(), None]
        idle = [*(False for _ in before), *(~layer.active[0, :, number]).tolist(), False]
        lanes.append(Lane(f"obj. file {number + 1}", chosen, idle))
    return lanes


def named(count: int) -> str:
    """Numbers and the colours that they have"""
    return ", ".join(f"{n + 1} {colour_name(n)}" for n in range(count))


def colour_name(number: int) -> str:
    return [*NAMED][number % len(NAMED)]


def shares(one: Watched) -> list[Figure]:
    """What of a frame each object file reads, and what of the next it paints."""
    stack, figures = one.model.options.stack, []
    masks, attention = one.seen.decoded.masks, one.seen.attention
    steps = torch.tensor(spread(len(one.frames) - stack, COLUMNS))
    heads = [str(int(step) + stack - 1) for step in steps]
    if attention is not None and attention.shape[2] > 1:
        laid = to_pixels(attention[0, steps], one.model.options.frame_size)
        told = "Colour: attention of each object file to a position of the frame that is read."
        if one.model.options.model == "rims":  # over positions, so that it is small at each
            laid = laid / laid.amax((-2, -1), keepdim=True).clamp(min=1e-9)
            told += " Scaled so that the highest of a picture is full colour."
        else:
            told += " Over all object files it sums to 1."
        figures.append(
            share_strip(one.frames[steps + stack - 1], laid, heads, f"{one.name}: attention", told)
        )
    if masks is not None and masks.shape[2] > 1:
        told = "Colour: mask of each object file, over the frame that is predicted."
        figures.append(
            share_strip(
                one.frames[steps + stack], masks[0, steps], heads, f"{one.name}: masks", told
            )
        )
    return figures


def share_strip(
    frames: Tensor, weights: Tensor, heads: Sequence[str], title: str, told: str
) -> Figure:
    """A row for each object file  [n, C, H, W], [n, F, H, W]"""
    under = DIM * frames.expand(-1, 3, -1, -1).movedim(1, -1)  # [n, H, W, 3]
    rows = []
    for number, colour in enumerate(colours(weights.shape[1])):
        weight = weights[:, number, :, :, None]
        laid = under * (1 - 0.7 * weight) + colour * 0.7 * weight
        rows.append((f"object file {number + 1}", as_bytes(laid)))
    return strip(rows, heads, title=title, caption=f"{told} Numbers: the frame that is read.")


# --- pictures


def spread(size: int, count: int) -> list[int]:
    """So many of the numbers below `size`, from the first to the last, evenly"""
    count = min(size, count)
    return sorted({round(n * (size - 1) / max(count - 1, 1)) for n in range(count)})


def to_rgb(frames: Tensor) -> Tensor:
    """[T, C, H, W] from 0 to 1 -> [T, H, W, 3] uint8"""
    return as_bytes(frames.expand(-1, 3, -1, -1).movedim(1, -1))


def as_bytes(pictures: Tensor) -> Tensor:
    """Floats from 0 to 1 in a few levels"""
    levels = (pictures.clamp(0, 1) * LEVELS).round() / LEVELS
    return (levels * 255).round().to(torch.uint8)


def outlined(frames: Tensor, identity: Tensor, scale: int = 1) -> Tensor:
    """Frames with the rims of true balls  [T, C, H, W], [T, H, W] -> [T, h, w, 3]

    Each pixel becomes `scale` by `scale` of them.
    """

    def enlarge(x: Tensor) -> Tensor:
        return x.repeat_interleave(scale, 1).repeat_interleave(scale, 2)

    pictures, ball = enlarge(to_rgb(frames)), enlarge(identity).int()
    around = F.pad(ball, (1, 1, 1, 1))
    height, width = ball.shape[1:]
    is_rim = torch.zeros_like(ball, dtype=torch.bool)
    for down, across in ((0, 1), (2, 1), (1, 0), (1, 2)):
        is_rim |= around[:, down : down + height, across : across + width] != ball
    if scale == 1:  # the inner half, or the rim would be as thick as the ball
        is_rim &= ball > 0
    return torch.where(is_rim[..., None], torch.tensor(OUTLINE, dtype=torch.uint8), pictures)


def with_bar(pictures: Tensor, context: int) -> Tensor:
    """A bar below that grows: grey while frames are given  [T, h, w, 3] -> [T, h + 2, w, 3]"""
    frames, _, width, _ = pictures.shape
    number = torch.arange(frames)
    done = torch.arange(width) < ((number + 1) * width / frames)[:, None]  # [T, w]
    given = number < context
    grey, orange = torch.tensor((150, 150, 150)), torch.tensor(OUTLINE)
    colour = torch.where(given[:, None], grey, orange)[:, None]  # [T, 1, 3]
    bar = (done[..., None] * colour).to(torch.uint8)[:, None].expand(-1, 2, -1, -1)
    return torch.cat([pictures, bar], 1)


def colours(count: int) -> Tensor:
    """[count, 3] from 0 to 1"""
    return torch.tensor([PALETTE[n % len(PALETTE)] for n in range(count)]) / 255
