"""What the backward pass of the `batched` backend gathers: sums over steps, as large products."""

from typing import NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.forward import Kept, Prepared, Settings, by_heads, gather_values, shares


class Gradients(NamedTuple):
    """Of `Prepared`, in its order; empty where there is nothing."""

    state: Tensor
    restart: Tensor
    keys: Tensor
    mix: Tensor
    weight_ih: Tensor
    bias_ih: Tensor
    weight_h: Tensor
    bias_h: Tensor
    comm_query: Tensor
    comm_out: Tensor
    comm_bias: Tensor


class Late(NamedTuple):
    """What a chunk of steps (N) leaves for the products that are gathered after it."""

    gates: Tensor  # [N, B * F, 4 * S * D + D], before their nonlinearity: n r u m q or i f o g q
    z: Tensor  # [N, B * F, V]
    scores: Tensor  # [N, B, F, R]
    comm_query: Tensor  # [N, B * F, H * D]
    updated: Tensor  # [N, B, F, D] h after Step 3
    message: Tensor  # [N, B * F, D or 2 D]
    heard: Tensor  # [N, B * F, H * D]


def allocate_late(p: Prepared, kept: Kept, chunk: int) -> Late:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(chunk, *x.shape[1:])

    rows = kept.extra.shape[1]
    says, hears = (0, 0) if p.comm_out is None else p.comm_out.shape
    return Late(
        gates=p.state.new_empty(chunk, rows, 4 * kept.extra.shape[2] + p.state.shape[3]),
        z=p.state.new_empty(chunk, rows, 0 if p.weight_ih is None else p.weight_ih.shape[1]),
        scores=like(kept.attention),
        comm_query=p.state.new_empty(chunk, rows, 0 if p.comm_query is None else len(p.comm_query)),
        updated=like(kept.before[:, 0]),
        message=p.state.new_empty(chunk, rows, says),
        heard=p.state.new_empty(chunk, rows, hears),
    )


class Slot(NamedTuple):
    """Views of one step of `Late`, in every shape that the loop wants them in."""

    hidden: Tensor  # [B * F, gates * S * D + D] what the product with the state gave
    input: Tensor  # [B * F, gates * S * D] what the input added to
    input_by_file: Tensor  # [B, F, gates * S * D]
    n: Tensor  # [B * F, S, D] n of the GRU, g of the LSTM
    squashed: Tensor  # [B * F, 2 or 4 * S * D] r u or i f o g
    m: Tensor  # [B * F, S, D] of the GRU
    query: Tensor  # [B * F, D]
    z: Tensor  # [B * F, V]
    scores: Tensor  # [B, F, R]
    comm_query: Tensor  # [B, F * H, D]
    comm_query_rows: Tensor  # [B * F, H * D]
    updated: Tensor  # [B, F, D]
    message: Tensor  # [B * F, D or 2 D]
    said: Tensor  # [B, F, D] of `message`
    heed: Tensor  # [B, F, D] of `message`


def late_slots(p: Prepared, late: Late) -> list[Slot]:
    (b, f, d), hidden = p.state.shape[1:], len(p.weight_h)
    inner = late.gates.shape[2] - hidden  # where the state's columns start: at 0 for the LSTM
    signed = late.gates[..., :inner] if inner else late.gates[..., 3 * (hidden - d) // 4 : -d]
    message = late.message.unflatten(1, (b, f))
    views = Slot(
        hidden=late.gates[..., inner:],
        input=late.gates[..., : hidden - d],
        input_by_file=late.gates[..., : hidden - d].unflatten(1, (b, f)),
        n=signed.unflatten(2, (-1, d)),
        squashed=late.gates[..., inner : hidden - d],
        m=late.gates[..., hidden - d : -d].unflatten(2, (-1, d)),
        query=late.gates[..., -d:],
        z=late.z,
        scores=late.scores,
        comm_query=late.comm_query.view(len(late.gates), b, -1, d)
        if late.comm_query.numel()
        else late.comm_query,
        comm_query_rows=late.comm_query,
        updated=late.updated,
        message=late.message,
        said=message[..., :d],
        heed=message[..., d:],
    )
    return [Slot(*row) for row in zip(*(x.unbind(0) for x in views), strict=True)]


def start_gradients(p: Prepared) -> Gradients:
    """Zeros for what is summed, space for what is written once, nothing for what is not there."""

    def start(name: str) -> Tensor:
        x = getattr(p, name)
        if x is None or name == "state":
            return p.state.new_empty(0)
        if name in ("keys", "mix"):
            return torch.empty_like(x)
        if x.ndim == 2 and len(x) > x.shape[1]:
            return x.new_zeros(x.shape[::-1]).T  # as `add_product` fills it
        return torch.zeros_like(x)

    return Gradients(*(start(name) for name in Gradients._fields))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, the larger factor on the right, which is faster on a CPU"""
    if left.shape[1] > right.shape[1]:
        total.T.addmm_(right.T, left)
    else:
        total.addmm_(left.T, right)


class Chunk(NamedTuple):
    """What the products that are gathered after a chunk of steps (N) read and write, as views."""

    gates: Tensor  # [N * B * F, 4 * S * D + D]
    hidden: Tensor  # [N * B * F, gates * S * D + D] of `gates`
    input: Tensor  # [N * B * F, gates * S * D] of `gates`
    input_by_file: Tensor  # [N * B, F, gates * S * D]
    z: Tensor  # [N * B, heads, F, V / heads]
    scores: Tensor  # [N * B, F, R]
    comm_query: Tensor  # [N * B * F, H * D]
    updated: Tensor  # [N * B, F, D]
    message: Tensor  # [N * B * F, D or 2 D]
    heard: Tensor  # [N * B * F, H * D]
    heard_by_reader: Tensor  # [N * B, F * H, D]
    h: Tensor  # [N * B, F, D]
    h_rows: Tensor  # [N * B * F, D]
    talk: Tensor  # [N * B, F * H, F], reader before read
    share: Tensor  # [N * B, F, R]
    mix: Tensor  # [N * B, heads, P, V]
    d_mix: Tensor  # as `mix`
    d_keys: Tensor  # [N * B, R, D]
    ones: Tensor  # [N * B * F]


def chunks(
    p: Prepared, settings: Settings, kept: Kept, late: Late, total: Gradients
) -> list[Chunk]:
    (b, f, d), hidden, heads = p.state.shape[1:], len(p.weight_h), p.mix.shape[2]
    size, steps = len(late.gates), p.mix.shape[0]
    share = shares(kept.attention, heads, settings.mean)
    ones = p.state.new_ones(size * b * f)

    def make(start: int) -> Chunk:
        here = slice(start, min(start + size, steps))
        n = here.stop - start
        left = Late(*(x[:n] for x in late))
        gates, h = left.gates.flatten(0, 1), kept.before[here, 0].flatten(0, 1)
        d_input = gates[:, : hidden - d]
        heard = left.heard.flatten(0, 1)
        return Chunk(
            gates=gates,
            hidden=gates[:, gates.shape[1] - hidden :],
            input=d_input,
            input_by_file=d_input.unflatten(0, (n * b, f)),
            z=left.z.view(n * b, f, heads, -1).transpose(1, 2)
            if p.weight_ih is not None
            else left.z,
            scores=left.scores.flatten(0, 1),
            comm_query=left.comm_query.flatten(0, 1),
            updated=left.updated.flatten(0, 1),
            message=left.message.flatten(0, 1),
            heard=heard,
            heard_by_reader=heard.view(n * b, -1, d) if p.comm_out is not None else heard,
            h=h,
            h_rows=h.flatten(0, 1),
            talk=kept.talk[here].flatten(0, 1).mT,
            share=share[here].flatten(0, 1),
            mix=p.mix[here].flatten(0, 1),
            d_mix=total.mix[here].flatten(0, 1),
            d_keys=total.keys[here].flatten(0, 1) if p.keys is not None else total.keys,
            ones=ones[: n * b * f],
        )

    return [make(start) for start in range(0, steps, size)]


def gather_gradients(p: Prepared, total: Gradients, at: Chunk) -> None:
    """Adds what the steps ask of the weights and the input, each as one large product."""
    add_product(total.weight_h, at.hidden, at.h_rows)
    if p.bias_h is not None and p.bias_ih is not None:
        sums = torch.mv(at.gates.T, at.ones)  # faster on a CPU than the sum
        total.bias_h.add_(sums[-len(p.bias_h) :])
        total.bias_ih.add_(sums[: len(p.bias_ih)])
    if p.comm_out is not None:
        torch.bmm(at.talk, at.updated, out=at.heard_by_reader)
        add_product(total.comm_out, at.message, at.heard)
        if p.comm_bias is not None:
            total.comm_bias.add_(torch.mv(at.message.T, at.ones))
        if p.comm_query is not None:
            add_product(total.comm_query, at.comm_query, at.h_rows)
    if p.keys is not None:
        if p.keys.shape[2] == 1:  # torch's product of so little is slow on a CPU
            torch.sum(at.scores * at.h, 1, keepdim=True, out=at.d_keys)
        else:
            torch.bmm(at.scores.mT, at.h, out=at.d_keys)
    if p.weight_ih is not None:
        add_product(total.weight_ih, at.input, gather_values(at.share, at.mix))
        torch.matmul(by_heads(at.share, p.mix.shape[2]).mT, at.z, out=at.d_mix)
    else:
        torch.bmm(at.share.mT, at.input_by_file, out=at.d_mix.squeeze(2))
