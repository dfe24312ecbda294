"""PNG files, read with every checksum compared.

Pillow skips checksums of pixels, so that a damaged file can pass as another picture.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class DataError(ValueError):
    """A file or folder of the data is missing, damaged or of another kind."""


def read_png(path: Path, kind: Literal["colour", "grey", "depth"], size: int | None) -> np.ndarray:
    """[H, W, 3] uint8, or [H, W] uint8 (masks) or uint16 (depth), at `size` pixels a side.

    Colours are means over the area of a pixel; what is not a colour is that of the nearest one.
    """
    picture = _open(path)
    wants = {"colour": ("RGB", "RGBA"), "grey": ("L",), "depth": ("I;16", "I;16B", "I")}[kind]
    if picture.mode not in wants:
        raise DataError(f"{path}: got a picture of mode {picture.mode}, wants {' or '.join(wants)}")
    if picture.width != picture.height:
        raise DataError(f"{path}: got {picture.width} by {picture.height} pixels, wants a square")
    if kind == "colour":
        picture = picture.convert("RGB")  # older frames carry an opacity that means nothing
    if size is None or size == picture.width:
        values = np.asarray(picture)
    elif kind == "colour":
        values = np.asarray(picture.resize((size, size), Image.Resampling.BOX))
    else:
        values = np.asarray(picture)[_nearest(picture.width, size)]
    return values.astype(np.uint16) if kind == "depth" else values


def write_png(values: np.ndarray) -> bytes:
    """The bytes of a file, of the same arrays as read_png gives."""
    file = io.BytesIO()
    # the fastest: these are many, and small
    Image.fromarray(values).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _nearest(width: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    line = (np.arange(size) * 2 + 1) * width // (2 * size)
    return line[:, None], line[None, :]


def _open(path: Path) -> Image.Image:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: is missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    _check(path, content)
    try:
        picture = Image.open(io.BytesIO(content), formats=["PNG"])
        picture.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: is damaged: {error}") from error
    return picture


def _check(path: Path, content: bytes) -> None:
    if not content.startswith(SIGNATURE):
        raise DataError(f"{path}: is {'no PNG file' if content else 'empty'}")
    place = len(SIGNATURE)
    while place + 12 <= len(content):
        length, name = struct.unpack(">I4s", content[place : place + 8])
        end = place + 12 + length
        if end > len(content):
            break
        (told,) = struct.unpack(">I", content[end - 4 : end])
        if zlib.crc32(content[place + 4 : end - 4]) != told:
            raise DataError(f"{path}: is damaged: the checksum of its {name!r} is wrong")
        if name == b"IEND":
            return
        place = end
    raise DataError(f"{path}: is cut off after {len(content)} bytes")
