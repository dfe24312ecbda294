"""Possible physics: objects that roll, fly, fall, bounce and hit each other; walls that move.

Small steps of a fixed number, + - * / and roots in float64: the same bits on every device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.worlds.intphys.stages import GRAVITY

STEPS = 4  # for each frame
BOUNCE = 0.72  # what is left of the speed after hitting the floor
KNOCK = 0.92  # and after hitting each other
ROLLING = 0.0015  # of the speed that is lost at each step on the floor
_REST = 0.03  # what hits the floor more slowly stays there


class Tracks(NamedTuple):
    x: Tensor  # [N, T, K]
    y: Tensor  # [N, T, K]: of the lowest point
    knocks: Tensor  # [N, T] bool: whether two have hit each other since the frame before


def roll(
    x: Tensor, y: Tensor, speed: Tensor, rise: Tensor, radius: Tensor, meets: Tensor, frames: int
) -> Tracks:
    """Objects [N, K] that keep their depth; where `meets` [N] the first two are in one plane."""
    step = 1 / STEPS
    xs, ys, knocks = [x], [y], [torch.zeros_like(meets)]
    for _ in range(frames - 1):
        knocked = torch.zeros_like(meets)
        for _ in range(STEPS):
            rise = rise - GRAVITY * step
            x, y = x + speed * step, y + rise * step
            is_down = y <= 0
            y = y.clamp(min=0)
            rebound = torch.where(rise < -_REST, -BOUNCE * rise, 0.0)
            rise = torch.where(is_down, rebound, rise)
            speed = torch.where(is_down, speed * (1 - ROLLING), speed)
            x, y, speed, rise, hit = _collide(x, y, speed, rise, radius, meets)
            knocked |= hit
        xs.append(x)
        ys.append(y)
        knocks.append(knocked)
    return Tracks(torch.stack(xs, 1), torch.stack(ys, 1), torch.stack(knocks, 1))


def _collide(
    x: Tensor, y: Tensor, speed: Tensor, rise: Tensor, radius: Tensor, meets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Balls of one mass, in a vertical plane: they exchange speed along the line between them."""
    right = x[:, 1] - x[:, 0]
    up = (y[:, 1] + radius[:, 1]) - (y[:, 0] + radius[:, 0])
    apart = (right * right + up * up).sqrt().clamp(min=1e-6)
    right, up = right / apart, up / apart
    closing = (speed[:, 0] - speed[:, 1]) * right + (rise[:, 0] - rise[:, 1]) * up
    overlap = radius[:, 0] + radius[:, 1] - apart
    touch = meets & (overlap > 0)
    hit = touch & (closing > 0)
    push = torch.where(hit, 0.5 * (1 + KNOCK) * closing, 0.0)
    part = torch.where(touch, 0.5 * overlap, 0.0)

    def both(values: Tensor, change: Tensor) -> Tensor:
        moved = torch.stack([values[:, 0] - change, values[:, 1] + change], 1)
        return torch.cat([moved, values[:, 2:]], 1)

    x, y = both(x, part * right), both(y, part * up).clamp(min=0)
    return x, y, both(speed, push * right), both(rise, push * up), hit


def swing(stands: Tensor, turns: Tensor, pace: Tensor, frames: int) -> Tensor:
    """How walls lean that stand or lie at first and turn over at some frames.

    [N, W] bool, [N, W, turns] frames, [N, W] -> [N, T, W], from 0 to 1
    """
    lean = torch.where(stands, 0.0, 1.0).double()
    leans = []
    for time in range(frames):
        leans.append(lean)
        has_turned = (turns <= time).sum(-1) % 2 == 1
        aim = torch.where(stands ^ has_turned, 0.0, 1.0).double()
        lean = (lean + (aim - lean).clamp(-1, 1).minimum(pace).maximum(-pace)).clamp(0, 1)
    return torch.stack(leans, 1)
