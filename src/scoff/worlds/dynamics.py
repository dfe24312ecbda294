"""One grey ball whose way of moving is to be found out: three ways, or two that take turns.

The paper gives no sizes or speeds; those here are ours. All are in pixels and frames. A clip is a
function of (seed, split, index): three_trajectories() and switching_trajectories() say what
happens, render() adds the pictures, three_dynamics() and switching_dynamics() do both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.worlds.random import STREAMS, Split, directions, uniform

PIXELS = 64
RADIUS = 5.0

# three dynamics
ACCELERATE, CONSTANT, RANDOM_WALK = 0, 1, 2
DISTANCE = 20.0, 40.0  # that a ball goes in a whole clip

# switching dynamics
HORIZONTAL, VERTICAL = 0, 1
SPEED = 2.0, 4.0
FLOOR = 56.0  # below it are the bulbs, and no ball
BULBS = (4.0, 60.0), (11.0, 60.0)  # centres: of the horizontal, of the vertical dynamics
BULB_RADIUS = 3.0
LIT, UNLIT = 1.0, 0.25


class Trajectories(NamedTuple):
    """What happens, without pictures."""

    position: Tensor  # [N, T, 2] float32: x to the right, y down
    velocity: Tensor  # [N, T, 2] float32: with which the ball leaves this frame
    dynamics: Tensor  # [N, T] int64: in force from this frame to the next
    markers: Tensor  # [N, T, bulbs] bool: which are lit; there are two bulbs or none
    bounces: Tensor  # [N, T] int64: collisions with walls since the frame before


class Clips(NamedTuple):
    frames: Tensor  # [N, T, 1, 64, 64] float32 from 0 to 1
    identity: Tensor  # [N, T, 64, 64] uint8: 1 where the centre of a pixel is in the ball
    position: Tensor  # as in Trajectories, and so are those below
    velocity: Tensor
    dynamics: Tensor
    markers: Tensor
    bounces: Tensor


def three_dynamics(seed: int, index: Tensor, frames: int = 20, split: Split = "train") -> Clips:
    """The clips number `index` [N] int64 of the split, on the device of `index`."""
    return render(three_trajectories(seed, index, frames, split))


def switching_dynamics(seed: int, index: Tensor, frames: int = 51, split: Split = "train") -> Clips:
    """The clips number `index` [N] int64 of the split, on the device of `index`."""
    return render(switching_trajectories(seed, index, frames, split))


def three_trajectories(
    seed: int, index: Tensor, frames: int = 20, split: Split = "train"
) -> Trajectories:
    """What happens in the clips number `index` [N] int64 of the split.

    Clip i accelerates from rest, moves at a constant velocity, or takes a step of constant length
    in a random direction at each frame, as i % 3 is 0, 1 or 2. All three go as far, at the same
    mean speed, and start in the same places: only the motion tells them apart. None meets a wall;
    a step of the random walk that would is mirrored.
    """
    _check(frames, 3, split)
    draws = uniform(seed, STREAMS[split], index, 4 + frames).double()
    far, start, angle = draws.split([1, 2, 1 + frames], 1)
    heading = directions(angle)  # [N, 1 + T, 2]
    distance = _between(*DISTANCE, far)
    way = heading[:, 0] * distance  # [N, 2]
    low, high = RADIUS, PIXELS - RADIUS
    # from where both ends of the way are in the picture
    start = low + way.clamp(max=0).abs() + start * (high - low - way.abs())

    last = frames - 1
    time = (torch.arange(frames, device=index.device).double() * (1 / last))[:, None]  # [T, 1]
    start, way = start[:, None], way[:, None]
    accelerated = start + way * (time * time), way * (2 / last) * time
    constant = start + way * time, (way * (1 / last)).expand(-1, frames, -1)
    walked = _walk(start[:, 0], heading[:, 1:] * (distance * (1 / last))[:, None], low, high)
    which = (index % 3).view(-1, 1, 1)
    position, velocity = (
        torch.where(which == ACCELERATE, a, torch.where(which == CONSTANT, c, w))
        for a, c, w in zip(accelerated, constant, walked, strict=True)
    )
    dynamics = which[..., 0].expand(-1, frames)
    no_bulbs = torch.zeros_like(position[..., :0], dtype=torch.bool)
    no_bounces = torch.zeros_like(position[..., 0], dtype=torch.int64)
    return Trajectories(position.float(), velocity.float(), dynamics, no_bulbs, no_bounces)


def when_it_changes(frames: int) -> range:
    """At which frames of a clip switching dynamics may change"""
    middle, spread = (frames - 1) // 2, frames // 10
    return range(middle - spread, middle + spread + 1)


def switching_trajectories(
    seed: int, index: Tensor, frames: int = 51, split: Split = "train"
) -> Trajectories:
    """What happens in the clips number `index` [N] int64 of the split.

    The ball goes to and fro between two walls, left and right or up and down, and changes once from
    one to the other near the middle of the clip. Clip i starts as i % 2: 0 horizontally. At the
    change it turns by a right angle and keeps its speed, always to the same side: downwards or to
    the right. A bulb shows what is in force from this frame to the next, so that the next frame
    always follows from the last few.
    """
    _check(frames, 3, split)
    draws = uniform(seed, STREAMS[split], index, 5).double()
    fast, start, sign, when = draws.split([1, 2, 1, 1], 1)
    changes = when_it_changes(frames)
    switch = changes[0] + (when * len(changes)).long()  # [N, 1]
    speed = _between(*SPEED, fast)  # [N, 1]
    axis = torch.arange(2, device=index.device)
    high = torch.where(axis == HORIZONTAL, PIXELS - RADIUS, FLOOR - RADIUS).double()
    room = high - RADIUS  # [2]
    start = start * room

    first = (index % 2)[:, None]  # [N, 1]
    is_first = axis == first  # [N, 2]
    # If where the ball is, or went, decided to which side it turns, a hair would decide in some
    # clips: next to the middle, or to a wall that it may just have left.
    heading = torch.where(is_first & (sign >= 0.5), -1.0, 1.0).double()
    time = torch.arange(frames, device=index.device)[:, None]  # [T, 1]
    # how long each axis has been moving
    moving = torch.where(
        is_first[:, None], time.minimum(switch[:, None]), (time - switch[:, None]).clamp(min=0)
    )
    gone = start[:, None] + (heading * speed)[:, None] * moving  # [N, T, 2]
    position, turned = _fold(gone, room)
    passed = gone.div(room, rounding_mode="floor").sum(-1, keepdim=True)  # walls, if it went on
    bounces = passed.diff(dim=1, prepend=passed[:, :1])[..., 0].abs().long()
    in_force = torch.where(time[:, 0] < switch, first, 1 - first)  # [N, T]
    velocity = torch.where(axis == in_force[..., None], (heading * speed)[:, None] * turned, 0.0)
    lit = in_force[..., None] == axis
    return Trajectories((position + RADIUS).float(), velocity.float(), in_force, lit, bounces)


def render(truth: Trajectories) -> Clips:
    """A white disc whose rim fades to black within one pixel, and the bulbs if there are any."""
    distance = _distance(truth.position)
    frames = (RADIUS + 0.5 - distance).clamp_(0, 1)
    ground = frames[..., int(FLOOR) :, :]
    for number in range(truth.markers.shape[-1]):
        light = UNLIT + (LIT - UNLIT) * truth.markers[..., number, None, None].float()
        is_bulb = (_bulb(number, frames) < BULB_RADIUS)[int(FLOOR) :]
        ground.copy_(torch.where(is_bulb, light, ground))
    identity = (distance < RADIUS).view(torch.uint8)
    return Clips(frames[:, :, None], identity, *truth)


def stack_frames(frames: Tensor, count: int = 5) -> Tensor:
    """The last `count` frames at each one, as channels  [N, T, C, H, W] -> [N, T - count + 1, ...]

    The oldest comes first. It starts at the first frame that has so many before it.
    """
    if not 1 <= count <= frames.shape[1]:
        raise ValueError(f"count: got {count}, wants from 1 to {frames.shape[1]}, that of frames")
    return frames.unfold(1, count, 1).movedim(-1, 2).flatten(2, 3)


def _check(frames: int, least: int, split: Split) -> None:
    if frames < least:
        raise ValueError(f"frames: got {frames}, wants an integer of at least {least}")
    if split not in STREAMS:
        raise ValueError(f"split: got {split!r}, wants one of {', '.join(map(repr, STREAMS))}")


def _between(low: float, high: float, chance: Tensor) -> Tensor:
    return low + (high - low) * chance


def _walk(start: Tensor, steps: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Positions, and the steps that are taken from them  [N, 2], [N, T, 2] -> [N, T, 2] both"""
    position, taken = [start], []
    for step in steps.unbind(1):
        there = position[-1] + step
        # the other way is free: the picture is more than two steps wide
        step = torch.where((there < low) | (there > high), -step, step)
        taken.append(step)
        position.append(position[-1] + step)
    return torch.stack(position[:-1], 1), torch.stack(taken, 1)


def _fold(gone: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Where one is who turns at 0 and at `room`, and whether one goes back: 1 or -1"""
    round_trip = gone.remainder(2 * room)
    return room - (round_trip - room).abs(), torch.where(round_trip < room, 1.0, -1.0).double()


def _bulb(number: int, like: Tensor) -> Tensor:
    """Of each pixel's centre from a bulb  -> [64, 64]"""
    x, y = BULBS[number]
    return _distance(torch.stack([like.new_full((), x), like.new_full((), y)]))


def _distance(point: Tensor) -> Tensor:
    """Of each pixel's centre  [..., 2] -> [..., 64, 64]"""
    centre = torch.arange(PIXELS, dtype=point.dtype, device=point.device) + 0.5
    across, down = ((centre - axis[..., None]) ** 2 for axis in point.unbind(-1))
    return (across[..., None, :] + down[..., :, None]).sqrt()
