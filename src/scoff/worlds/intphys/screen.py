"""Where on the screen an element or its shadow can be seen: boxes of pixels, rather too large.

What a pixel shows does not depend on these, only which pixels have to be looked at.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.worlds.intphys.scenes import HALF_VIEW, Scenes
from scoff.worlds.intphys.shapes import NONE

_CLOSE = 0.3  # what comes nearer to the camera may be anywhere on the screen


class Boxes(NamedTuple):
    """Left, right, top and bottom pixel [N, T, K, 4] int32; empty where right < left"""

    body: Tensor
    shade: Tensor  # with the shadow


def boxes(scenes: Scenes, pixels: int) -> Boxes:
    corners = torch.tensor(
        [[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)],
        device=scenes.half.device,
    )
    # [N, T, K, 8, 3]
    x, y, z = (scenes.half[:, None, :, None] * corners).unbind(-1)
    cos, sin = (part[..., None] for part in scenes.tilt.unbind(-1))
    y, z = cos * y - sin * z, sin * y + cos * z
    cos, sin = (part[:, None, :, None] for part in scenes.yaw.unbind(-1))
    x, z = cos * x + sin * z, cos * z - sin * x
    point = torch.stack([x, y, z], -1) + scenes.centre[..., None, :]
    sun = scenes.look.sun[:, None, None, None]
    shadow = point - sun * (point[..., 1:2] / sun[..., 1:2])
    body = _cover(point, scenes, pixels)
    both = _cover(torch.cat([point, shadow], -2), scenes, pixels)
    there = (scenes.kind != NONE)[:, None, :, None]
    nothing = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=body.device)
    return Boxes(torch.where(there, body, nothing), torch.where(there, both, nothing))


def _cover(point: Tensor, scenes: Scenes, pixels: int) -> Tensor:
    """[N, T, K, P, 3] -> [N, T, K, 4]"""
    seen = (point - scenes.look.eye[:, None, None, None]) @ scenes.look.view.transpose(1, 2)[
        :, None, None
    ]
    right, up, far = seen.unbind(-1)
    is_close = (far < _CLOSE).any(-1)
    far = far.clamp(min=_CLOSE)
    scale = pixels / (2 * HALF_VIEW)
    column = right / far * scale + pixels / 2
    row = pixels / 2 - up / far * scale
    first = torch.stack([column.amin(-1), row.amin(-1)], -1).floor() - 1
    last = torch.stack([column.amax(-1), row.amax(-1)], -1).floor() + 1
    first = torch.where(is_close[..., None], 0.0, first).clamp(0, pixels)
    last = torch.where(is_close[..., None], pixels - 1.0, last).clamp(-1, pixels - 1)
    return torch.stack([first, last], -1).flatten(-2).to(torch.int32)
