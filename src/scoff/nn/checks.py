"""Errors that name the argument, what it got and what it wants."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check_size(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, wants an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}: got {value}, wants an integer of at least {least}")


def check_rate(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r}, wants a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}, wants a number from 0 to 1")


def check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r}, wants a number")
    if not math.isfinite(value):
        raise ValueError(f"{name}: got {value}, wants a finite number")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        wants = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: got {value!r}, wants one of {wants}")


def check_divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise ValueError(f"{name}: got {value}, wants a multiple of {by_name} = {by}")


def check_tensor(
    name: str, value: object, like: Tensor, shape: Sequence[int] | None = None
) -> None:
    """A floating-point tensor on the device and of the dtype of `like`, a parameter."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, wants a tensor")
    if not value.is_floating_point():
        raise TypeError(f"{name}: got dtype {value.dtype}, wants {like.dtype}")
    if value.device != like.device:
        raise ValueError(
            f"{name}: got a tensor on {value.device}, wants it on {like.device}, where the "
            "parameters are"
        )
    if value.dtype != like.dtype and autocast_dtype(like) is None:
        raise TypeError(
            f"{name}: got dtype {value.dtype}, wants {like.dtype}, that of the parameters"
        )
    if shape is not None:
        check_shape(name, value, shape)


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """Under autocast its dtype, to which a recurrence is cast as a whole; float64 stays float64."""
    device = like.device.type
    if like.dtype == torch.float64 or device == "meta":
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, wants True or False")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}, wants a floating-point one")


def check_flags(name: str, value: object, like: Tensor, shape: Sequence[int]) -> None:
    """A boolean tensor."""
    check_kind(name, value, torch.bool, like, shape)


def check_indices(
    name: str, value: object, like: Tensor, shape: Sequence[int], count: int
) -> Tensor:
    """An integer tensor. Its values are looked at where they are at hand: not on a GPU, where
    nearest ones in range are taken."""
    value = check_kind(name, value, torch.int64, like, shape)
    hidden = torch.compiler.is_compiling() or type(value) is not Tensor
    if hidden or value.device.type != "cpu" or torch._C._are_functorch_transforms_active():
        return value.clamp(0, count - 1)
    if value.numel() > 0:
        least, most = (x.item() for x in value.aminmax())
        if least < 0 or most >= count:
            raise ValueError(f"{name}: got {least} to {most}, wants 0 to {count - 1}")
    return value


def check_kind(
    name: str, value: object, dtype: torch.dtype, like: Tensor, shape: Sequence[int]
) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: got {got}, wants a tensor of dtype {dtype}")
    if value.device != like.device:
        raise ValueError(f"{name}: got a tensor on {value.device}, wants it on {like.device}")
    check_shape(name, value, shape)
    return value


def check_shape(name: str, value: Tensor, shape: Sequence[int]) -> None:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, wants {tuple(shape)}")


def check_features(input: Tensor, input_size: int) -> None:
    if input.shape[-1] != input_size:
        raise ValueError(
            f"input: got {input.shape[-1]} features (shape {tuple(input.shape)}), wants "
            f"input_size = {input_size}"
        )


def check_positions(x: Tensor) -> None:
    if x.shape[-2] == 0:
        raise ValueError("input: got 0 positions, wants at least one")
