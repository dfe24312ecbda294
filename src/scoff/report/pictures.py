"""Pictures of pixels, still and moving, inside figures."""

import base64
import io
import struct
import zlib
from collections.abc import Sequence

from torch import Tensor

from scoff.report.figures import needs


def png(pixels: Tensor) -> str:
    """As an address that holds the whole picture  [H, W, 3] uint8"""
    height, width, _ = pixels.shape
    # each line begins with the number of its filter: none
    lines = b"".join(b"\0" + line.contiguous().numpy().tobytes() for line in pixels.cpu())

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines, 9)), chunk(b"IEND", b"")]
    return address("png", b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def gif(pictures: Tensor, milliseconds: Sequence[int]) -> str:
    """Pictures one after the other, over and over, each for its time  [T, H, W, 3] uint8"""
    with needs("PIL"):
        from PIL import Image
    if len(pictures) != len(milliseconds):
        raise ValueError(
            f"milliseconds: got {len(milliseconds)}, wants one for each of {len(pictures)} pictures"
        )
    frames = [Image.fromarray(picture.numpy()) for picture in pictures.cpu().contiguous()]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=frames[1:],
        duration=list(milliseconds),
        loop=0,
    )
    return address("gif", buffer.getvalue())


def address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image(x: float, y: float, width: float, height: float, source: str) -> str:
    """For the inside of an SVG"""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<image {place} style="image-rendering: pixelated" href="{source}"/>'
