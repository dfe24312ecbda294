"""Whether object files bind to balls, and what schemata they choose for them, in numbers.

A model watches true frames. Its masks are those of the frames that it predicts, its attention that
of the frames that it reads. A schema that is chosen at a frame brings about the next, and is
counted under what happens to the ball on the way there.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

import scoff
from scoff.experiments.measures import entropy, mutual_information, or_none
from scoff.experiments.video_measures import (
    EVENTS,
    ball_events,
    distinct_owners,
    foreground_ari,
    hidden_balls,
    identity_switches,
    last_owners,
    owners,
    schema_by_event,
    schema_use,
    to_pixels,
)
from scoff.models.video import VideoModel
from scoff.worlds.balls import BOX, Clips

if TYPE_CHECKING:
    from scoff.experiments.base import Finished
    from scoff.report import Table

    Groups = Mapping[str, list[Finished]]

BURN_IN = 5  # predictions that do not count: object files have yet to find the balls
IN_USE = 0.01  # share from which on a schema counts as used


class Binding(NamedTuple):
    """Of each clip, a mean over its frames  [N]"""

    mask_ari: Tensor | None
    mask_ari_clip: Tensor | None
    attention_ari: Tensor | None
    attention_ari_clip: Tensor | None
    owners: Tensor
    """How many object files have a ball."""
    balls: Tensor
    """How many balls are seen."""
    switches: Tensor
    """How often a ball has another object file than before, as a share of the times it could."""


class Choices(NamedTuple):
    overall: Tensor  # [S]
    by_event: Tensor | None  # [events, S]; None: what happens to balls is not told


@torch.no_grad()
def look_inside(model: VideoModel, clips: Clips) -> tuple[Binding | None, Choices | None]:
    """None where a model has no object files, or no schemata."""
    trace = model.trace(clips.frames[:, :-1])
    stack, size = model.options.stack, model.options.frame_size
    read = clips.identity[:, stack - 1 : -1][:, BURN_IN:]
    painted = clips.identity[:, stack:][:, BURN_IN:]
    balls = clips.position.shape[2]
    masks = trace.decoded.masks
    masks = None if masks is None or masks.shape[2] == 1 else masks[:, BURN_IN:]
    attention = trace.attention
    attention = None if attention is None else to_pixels(attention[:, BURN_IN:], size)
    if masks is None and attention is None:
        return None, None

    def ari(weights: Tensor | None, identity: Tensor, whole_clip: bool) -> Tensor | None:
        if weights is None:
            return None
        found = foreground_ari(weights, identity, balls, whole_clip)
        return found if whole_clip else found.nanmean(1)

    weights, seen = (attention, read) if masks is None else (masks, painted)
    owner = owners(cast(Tensor, weights), seen, balls)
    binding = Binding(
        ari(masks, painted, False),
        ari(masks, painted, True),
        ari(attention, read, False),
        ari(attention, read, True),
        distinct_owners(owner, cast(Tensor, weights).shape[2]).double().mean(1),
        (owner >= 0).sum(-1).double().mean(1),
        identity_switches(owner),
    )
    if not isinstance(model.rnn, scoff.SCOFF):
        return binding, None
    layer = cast(scoff.Trace, trace.layer)
    schema, active = layer.schema[:, BURN_IN:], layer.active[:, BURN_IN:]
    schemata = model.rnn.num_schemata
    event, by_event = events(clips), None
    if event is not None:
        event = event[:, stack:][:, BURN_IN:]
        by_event = schema_by_event(schema, active, last_owners(owner), event, schemata).cpu()
    return binding, Choices(schema_use(schema, active, schemata).cpu(), by_event)


def events(clips: Clips) -> Tensor | None:
    """What happens to each ball on the way to each frame  [N, T, K]

    None of a file that does not tell hits, bounces and radii.
    """
    if clips.hits is None or clips.bounces is None or clips.radius is None:
        return None
    hidden = hidden_balls(clips.identity, to_pixel_units(clips.radius))
    return ball_events(clips.hits, clips.bounces, hidden, (clips.radius > 0)[:, None])


def to_pixel_units(length: Tensor, pixels: int = 64) -> Tensor:
    return length * (pixels / BOX)


def describe_binding(parts: Sequence[Binding]) -> dict[str, float | None]:
    """Means over clips, of what there is."""
    found: dict[str, float | None] = {}
    for name, columns in zip(Binding._fields, zip(*parts, strict=True), strict=True):
        if columns[0] is not None:
            values = torch.cat([cast(Tensor, column) for column in columns])
            found[name] = or_none(values.nanmean().item())
    return found


def describe_choices(parts: Sequence[Choices]) -> dict[str, Any]:
    overall = torch.stack([part.overall for part in parts]).sum(0)
    shares = overall.double() / overall.sum()
    found = {
        "shares": shares.tolist(),
        "bits": entropy(overall),
        "in_use": int((shares >= IN_USE).sum()),
    }
    known = [part.by_event for part in parts if part.by_event is not None]
    if not known:
        return found
    by_event = torch.stack(known).sum(0)
    return found | {
        "by_event": by_event.tolist(),
        "event_bits": or_none(mutual_information(by_event)),
        "event_bits_at_most": or_none(entropy(by_event.sum(1))),
    }


# --- report


def binding_table(groups: "Groups") -> "Table | None":
    from scoff.experiments.rollouts import estimate_known
    from scoff.report import Table

    keys = (*Binding._fields[:4], "owners", "balls", "switches")
    rows: list[list[Any]] = []
    for name, group in groups.items():
        known = [run.evaluation["binding"] for run in group if "binding" in run.evaluation]
        if known:
            values = [[own[key] for own in known if key in own] for key in keys]
            rows.append([name, *(estimate_known(v) if v else None for v in values)])
    if not rows:
        return None
    return Table(
        "How object files bind",
        [
            "",
            "masks, frame",
            "masks, clip",
            "attention, frame",
            "attention, clip",
            "object files with a ball",
            "balls seen",
            "changes of owner",
        ],
        rows,
        note="On true frames, from the sixth prediction on. Masks and attention: adjusted Rand "
        "index of whose pixel it is by the largest weight and by the truth, over the balls' "
        "pixels; 1: as the truth, 0: as by chance. Frame: within each frame; clip: over all "
        "frames, where object files must also stay with their balls. Changes of owner: share of a "
        "ball's steps at which another object file has it than before.",
    )


def choice_table(groups: "Groups") -> "Table | None":
    from scoff.experiments.rollouts import estimate_known
    from scoff.report import Estimate, Table

    rows: list[list[Any]] = []
    for name, group in groups.items():
        known = [run.evaluation["schemata"] for run in group if "schemata" in run.evaluation]
        if not known:
            continue
        of_events = [
            None if bits is None else bits / (k["event_bits_at_most"] or 1)
            for k in known
            for bits in [k.get("event_bits")]
        ]
        rows.append(
            [
                name,
                len(known[0]["shares"]),
                Estimate.of([k["in_use"] for k in known]),
                Estimate.of([k["bits"] for k in known]),
                Estimate.of([2 ** k["bits"] for k in known]),
                estimate_known(of_events),
            ]
        )
    if not rows:
        return None
    return Table(
        "How many schemata are in use",
        ["", "schemata", "in use", "bits", "effective number", "share of events told"],
        rows,
        note=f"In use: chosen in at least {IN_USE:.0%} of the steps. Bits: entropy of what is "
        "chosen; effective number: of schemata that would have it if all were chosen equally "
        "often; where it is 1, one schema does everything, and no choice tells anything. Share "
        "of events told: mutual information between the schema of a ball's object file, where that "
        "is updated, and what happens to the ball (below), as a share of the latter's entropy.",
    )


def event_table(groups: "Groups") -> "Table | None":
    """Of each group's first seed: schemata of other seeds have other numbers."""
    from scoff.report import Table

    rows: list[list[Any]] = []
    most = 0
    for name, group in groups.items():
        known = [run for run in group if "by_event" in run.evaluation.get("schemata", ())]
        if known:
            table = known[0].evaluation["schemata"]["by_event"]
            most = max(most, len(table[0]))
            rows.append([f"{name}, seed {known[0].config.seed}"])
            for event, counts in zip(EVENTS, table, strict=True):
                if sum(counts):
                    rows.append([event, sum(counts), *(c / sum(counts) for c in counts)])
    if not rows:
        return None
    wide = [row if len(row) == 1 else [*row, *[None] * (most + 2 - len(row))] for row in rows]
    columns = ["", "times", *(f"schema {n + 1}" for n in range(most))]
    return Table("Which schema a ball's object file chooses, by what happens to it", columns, wide)
