"""Random numbers that are a function of their address: Philox4x32-10 (Salmon et al., 2011).

A sample's numbers follow from (seed, stream, index) alone: not from the batch that it comes in, the
process that draws it or what was drawn before. They are the same bits on every device, and as
nothing here waits for the device or copies to it, a CUDA graph can capture the draw.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "valid", "test"]
# one each, so that no split sees the numbers of another
STREAMS: dict[Split, int] = {"train": 0, "valid": 1, "test": 2}

_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: Tensor, seed: int) -> Tensor:
    """Turns four 32-bit words, each in an int64, into four random ones  [4, ...] -> [4, ...]"""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: got {seed}, wants an integer of 64 bits, from 0 to 2**64 - 1")
    trailing = (1,) * (counter.dim() - 1)
    # made of scalars: copying a table to the GPU is not allowed in a CUDA graph
    first = torch.arange(2, device=counter.device) == 0
    multiplier = torch.where(first, 0xD2511F53, 0xCD9E8D57).view(2, *trailing)
    key = torch.where(first, seed & _WORD, seed >> 32)  # [2]
    key_step = torch.where(first, 0x9E3779B9, 0xBB67AE85)
    rounds = torch.arange(_ROUNDS, device=counter.device)[:, None]
    keys = ((key + rounds * key_step) & _WORD).view(_ROUNDS, 2, *trailing)

    even, odd = counter[0::2], counter[1::2]  # [2, ...]
    for key in keys.unbind():
        product = (even * multiplier).flip(0)
        # The upper half of `odd` is left as it falls, and so is what the shift copies of the sign:
        # the mask clears both.
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_WORD)
        odd = product
    return torch.stack([even, odd & _WORD], 1).flatten(0, 1)


def uniform(seed: int, stream: int, index: Tensor, count: int) -> Tensor:
    """Numbers on [0, 1), multiples of 2**-24  [N] int64 -> [N, count] float32

    The first numbers are the same whatever the count.
    """
    # the 24 highest bits: as many as a float32 holds exactly
    return (words(seed, stream, index, count) >> 8).float().mul_(2.0**-24)


def words(seed: int, stream: int, index: Tensor, count: int) -> Tensor:
    """Integers from 0 to 2**32 - 1  [N] int64 -> [N, count] int64"""
    if index.dtype != torch.int64 or index.dim() != 1:
        got = f"{index.dtype} of shape {tuple(index.shape)}"
        raise ValueError(f"index: got {got}, wants torch.int64 of shape (N,)")
    if not 0 <= stream <= _WORD:
        raise ValueError(f"stream: got {stream}, wants an integer of 32 bits, from 0 to 2**32 - 1")
    if count < 0:
        raise ValueError(f"count: got {count}, wants an integer of at least 0")
    blocks = -(-count // 4)
    counter = index.new_empty(4, len(index), blocks)
    counter[0] = torch.arange(blocks, device=index.device)
    counter[1].fill_(stream)
    counter[2] = (index & _WORD)[:, None]
    counter[3] = (index >> 32 & _WORD)[:, None]
    return (
        philox(counter, seed).movedim(0, -1).flatten(1)[:, :count]
    )  # [N, blocks, 4] -> [N, count]


def directions(chance: Tensor) -> Tensor:
    """Unit vectors, uniform on the circle where `chance` is on [0, 1)  [...] -> [..., 2] float64"""
    angle = chance.double() * (2 * math.pi)
    vector = torch.stack([angle.cos(), angle.sin()], -1)
    # The last bits of a cosine differ between devices. Rounded they do not, and what follows is
    # exact to the last bit everywhere, by IEEE 754.
    vector = (vector * 2.0**24).round() * 2.0**-24
    x, y = vector.unbind(-1)
    # 1 / sqrt(1 + e) as far as it differs from 1: not all devices round a square root correctly
    e = x * x + y * y - 1
    return vector * (1 - e * (0.5 - e * 0.375))[..., None]
