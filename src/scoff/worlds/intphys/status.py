"""status.json: the truth behind a movie, told as the benchmark tells it.

Lengths are in its units, of which a metre has 100, and along its axes: x forward, y to the right, z
up. A mask's numbers and names are where a layout of that age has them.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from scoff.worlds.intphys.scenes import (
    ELEMENTS,
    FIRST_ELEMENT,
    FLOOR,
    HALF_VIEW,
    OBJECTS,
    SKY,
    Scenes,
)
from scoff.worlds.intphys.shapes import NAMES, NONE
from scoff.worlds.random import words

Layout = Literal["2019", "2018", "v1.0"]
LAYOUTS: tuple[Layout, ...] = ("2019", "2018", "v1.0")
SHOWN = FIRST_ELEMENT + ELEMENTS  # what a pixel can show
_MASK_STREAM = 1 << 20


def element_names(scenes: Scenes) -> list[str]:
    """By what a pixel shows"""
    objects = [f"object_{k + 1}" for k in range(OBJECTS)]
    walls = [f"occluder_{k + 1}" for k in range(scenes.kind.shape[1] - OBJECTS)]
    return ["sky", "floor", *objects, *walls]


def mask_numbers(seed: int, stream: int, number: int, frames: int, layout: Layout) -> np.ndarray:
    """Which grey what is shown has, frame by frame; the same in all runs of a scene  [T, SHOWN]

    They change with every frame in the layout of 2019, and with every movie in the others.
    """
    index = torch.arange(frames) + number * frames
    drawn = words(seed, _MASK_STREAM + stream, index, 256).argsort(dim=1, stable=True)[:, :SHOWN]
    if layout != "2019":
        drawn = drawn[:1].expand(frames, -1)
    return drawn.numpy().astype(np.uint8)


def full_status(
    scenes: Scenes,
    n: int,
    header: dict[str, Any],
    greys: np.ndarray,
    shown: np.ndarray,
    layout: Layout,
    kind: Tensor,
    centre: Tensor,
) -> dict[str, Any]:
    """Of one movie: kinds [T, K] and places [T, K, 3] may be spliced from several runs

    `shown` [T, SHOWN] says what is seen in each frame, `greys` [T, SHOWN] in which grey.
    """
    names = element_names(scenes)
    look = scenes.look
    forward = look.view[n, 2].tolist()
    head: dict[str, Any] = {
        **header,
        "camera": {
            "location": _location(look.eye[n].tolist()),
            "rotation": {
                "roll": 0.0,
                "pitch": math.degrees(math.asin(forward[1])),
                "yaw": math.degrees(math.atan2(forward[0], forward[2])),
            },
            "field_of_view": 2 * math.degrees(math.atan(HALF_VIEW)),
            "aspect_ratio": 1,
        },
        "light_1": {"type": "DirectionalLight", "direction": _location(look.sun[n].tolist())},
    }
    frames = []
    lean = scenes.tilt[n].tolist()
    half = scenes.half[n].tolist()
    yaw = scenes.yaw[n].tolist()
    kinds, places = kind.tolist(), centre.tolist()
    for t, (of_frame, where) in enumerate(zip(kinds, places, strict=True)):
        step: dict[str, Any] = {}
        for k, shape in enumerate(of_frame):
            if shape == NONE:
                continue
            cos, sin = lean[t][k]
            step[names[FIRST_ELEMENT + k]] = {
                "location": _location(where[k]),
                "rotation": {
                    "roll": 0.0,
                    "pitch": math.degrees(math.atan2(sin, cos)),
                    "yaw": math.degrees(math.atan2(yaw[k][1], yaw[k][0])),
                },
                "scale": {a: 2 * half[k][i] for a, i in (("x", 2), ("y", 0), ("z", 1))},
                "shape": NAMES[shape],
            }
        if layout == "2019":
            step["masks"] = {names[i]: int(greys[t, i]) for i in range(SHOWN) if shown[t, i]}
        frames.append(step)
    numbers = {names[i]: int(greys[0, i]) for i in range(SHOWN) if shown[:, i].any()}
    if layout == "v1.0":
        return {
            "possible": head.pop("is_possible"),
            "block": head.pop("block_name"),
            "masks_grayscale": [[grey, name] for name, grey in numbers.items()],
            "header": head,
            "frames": frames,
        }
    if layout == "2018":
        head["masks"] = numbers
    return {"header": head, "frames": frames}


def shown_in(identity: np.ndarray) -> np.ndarray:
    """What is seen in each frame  [T, H, W] -> [T, SHOWN] bool"""
    seen = np.zeros((len(identity), SHOWN), bool)
    for t, picture in enumerate(identity):
        seen[t] = np.bincount(picture.reshape(-1), minlength=SHOWN) > 0
    assert seen[:, [SKY, FLOOR]].any()
    return seen


def _location(point: list[float]) -> dict[str, float]:
    x, y, z = point
    return {"x": 100 * z, "y": 100 * x, "z": 100 * y}
