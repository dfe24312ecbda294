"""Launching the kernels of the `wide` backend."""

from collections.abc import Callable
from typing import Any

from scoff.ops.scoff.fused_types import power_of_two
from scoff.ops.scoff.kernels import wide_half, wide_look, wide_talk, wide_update
from scoff.ops.scoff.launch import prepared
from scoff.ops.scoff.wide_layout import (
    BLOCK,
    Layout,
    Settings,
)

# what is launched; to a type checker kernels are Python functions, called in the wrong way
begin_kernel: Any = wide_half.begin_kernel
weigh_kernel: Any = wide_half.weigh_kernel
update_kernel: Any = wide_update.update_kernel
update_back_kernel: Any = wide_update.update_back_kernel
look_kernel: Any = wide_look.look_kernel
look_back_kernel: Any = wide_look.look_back_kernel
talk_kernel: Any = wide_talk.talk_kernel
talk_back_kernel: Any = wide_talk.talk_back_kernel

Launch = Callable[..., None]


def launch_begin(z: Layout) -> Launch:
    return prepared(
        begin_kernel,
        (z.steps + 1) * z.rows,
        D=z.size,
        V=z.value,
        DP=z.state,
        VP=z.read,
        DB=power_of_two(z.size),
        VB=power_of_two(z.read),
    )


def launch_weigh(rows: int, width: int) -> Launch:
    return prepared(weigh_kernel, rows, WIDTH=width, BLOCK=min(1024, power_of_two(width)))


def update_blocks(z: Layout) -> dict[str, int]:
    schemata = power_of_two(z.schemata, 1)
    return {"SP": schemata, "DB": min(power_of_two(z.size), max(16, BLOCK // schemata))}


def launch_update(z: Layout, settings: Settings, choose: bool) -> Launch:
    """Of several object files, what is given has not been added to what is hidden."""
    return prepared(
        update_kernel,
        z.rows,
        F=z.files,
        D=z.size,
        DP=z.state,
        ROW=z.kept,
        NEW=z.state if z.says else z.kept,
        FACTOR=z.state if z.says else z.row,
        S=z.schemata,
        GIVEN=z.work if z.alone else z.given,
        HIDDEN=z.work if z.alone else z.hidden,
        LSTM=settings.lstm,
        ADD=not z.alone,
        CHOOSE=choose,
        **update_blocks(z),
    )


def launch_update_back(z: Layout, settings: Settings) -> Launch:
    return prepared(
        update_back_kernel,
        z.rows,
        F=z.files,
        D=z.size,
        DP=z.state,
        ROW=z.kept,
        S=z.schemata,
        WORK=z.work,
        LSTM=settings.lstm,
        **update_blocks(z),
        **({"maxnreg": 128} if z.half else {}),  # four programs to a processor
    )


def look_constants(z: Layout, settings: Settings, asked: int) -> dict[str, Any]:
    files = power_of_two(z.files)
    block = 64 if files == 16 else 32  # a program has as many registers for more object files
    return {
        "epsilon": settings.epsilon,
        "F": z.files,
        "P": z.positions,
        "A": z.heads,
        "E": z.key,
        "V": z.value,
        "VP": z.read,
        "ASKED": asked,
        "MEAN": settings.mean,
        "FP": files,
        "PB": min(block, power_of_two(z.positions)),
        "EB": min(block, power_of_two(z.key)),
        "VB": min(block, power_of_two(z.value // z.heads)),
    }


def launch_look(z: Layout, settings: Settings, sequences: int, asked: int) -> Launch:
    constants = look_constants(z, settings, asked)
    return prepared(look_kernel, sequences, ACTIVE=settings.active, **constants)


def launch_look_back(z: Layout, settings: Settings) -> Launch:
    return prepared(look_back_kernel, z.batch, **look_constants(z, settings, z.work))


def talk_constants(z: Layout, asked: int) -> dict[str, Any]:
    files = 1 if z.alone else power_of_two(z.files)
    return {
        "F": z.files,
        "D": z.size,
        "DP": z.state,
        "H": z.comm_heads,
        "E": z.comm_key,
        "SAID": z.comm_keys,
        "ASKED": asked,
        "READ": z.told,
        "GATED": z.says == 2,
        "FP": files,
        "DB": min(BLOCK // files, power_of_two(z.size)),  # all of one that has 16-bit products
        "EB": min(64, power_of_two(max(1, z.comm_key))),
    }


def launch_talk(z: Layout) -> Launch:
    constants = talk_constants(z, z.hidden)
    return prepared(talk_kernel, z.batch, **constants, ROW=z.kept, FACTOR=z.row)


def launch_talk_back(z: Layout) -> Launch:
    return prepared(talk_back_kernel, z.batch, **talk_constants(z, z.work))
