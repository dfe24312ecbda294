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
    gate_sums: Tensor  # [4 * S * D + D] of `gates`, over all chunks


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
        gate_sums=p.state.new_zeros(4 * kept.extra.shape[2] + p.state.shape[3]),
    )


class Slot(NamedTuple):
    """Views of one step of `Late`, in every shape that the loop wants them in."""

    hidden_columns: Tensor  # [gates * S * D + D, B * F] what the product with the state gave
    input: Tensor  # [B * F, gates * S * D] what the input added to
    input_by_file: Tensor  # [B, F, gates * S * D]
    n: Tensor  # [B * F, S, D] n of the GRU, g of the LSTM
    squashed: Tensor  # [B * F, 2 or 4 * S * D] r u or i f o g
    r: Tensor  # [B * F, S, D] of the GRU
    u: Tensor  # [B * F, S, D] of the GRU
    m: Tensor  # [B * F, S, D] of the GRU
    query: Tensor  # [B * F, D]
    z: Tensor  # [B * F, V]
    scores: Tensor  # [B, F, R]
    comm_query: Tensor  # [B, F * H, D]
    comm_query_columns: Tensor  # [H * D, B * F]
    updated: Tensor  # [B, F, D]
    updated_rows: Tensor  # [B * F, D]
    message: Tensor  # [B * F, D or 2 D]
    said: Tensor  # [B, F, D] of `message`
    heed: Tensor  # [B, F, D] of `message`


def late_slots(p: Prepared, late: Late) -> list[Slot]:
    (b, f, d), hidden = p.state.shape[1:], len(p.weight_h)
    inner = late.gates.shape[2] - hidden  # where the state's columns start: at 0 for the LSTM
    signed = late.gates[..., :inner] if inner else late.gates[..., 3 * (hidden - d) // 4 : -d]
    squashed = late.gates[..., inner : hidden - d]
    r, u = squashed.unflatten(2, (2, -1, d)).unbind(2)
    message = late.message.unflatten(1, (b, f))
    views = Slot(
        hidden_columns=late.gates[..., inner:].mT,
        input=late.gates[..., : hidden - d],
        input_by_file=late.gates[..., : hidden - d].unflatten(1, (b, f)),
        n=signed.unflatten(2, (-1, d)),
        squashed=squashed,
        r=r,
        u=u,
        m=late.gates[..., hidden - d : -d].unflatten(2, (-1, d)),
        query=late.gates[..., -d:],
        z=late.z,
        scores=late.scores,
        comm_query=late.comm_query.view(len(late.gates), b, -1, d)
        if late.comm_query.numel()
        else late.comm_query,
        comm_query_columns=late.comm_query.mT,
        updated=late.updated,
        updated_rows=late.updated.flatten(1, 2),
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


class Left(NamedTuple):
    """`Late` of a chunk of steps (N), in the shapes of the products that are gathered after it."""

    gates: Tensor  # [4 * S * D + D, N * B * F]
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
    ones: Tensor  # [N * B * F]


def what_is_left(p: Prepared, late: Late, steps: int) -> Left:
    (b, f, d), hidden, heads = p.state.shape[1:], len(p.weight_h), p.mix.shape[2]

    def rows(x: Tensor) -> Tensor:
        return x[:steps].flatten(0, 1)

    gates, heard = rows(late.gates), rows(late.heard)
    d_input = gates[:, : hidden - d]
    return Left(
        gates=gates.T,
        hidden=gates[:, gates.shape[1] - hidden :],
        input=d_input,
        input_by_file=d_input.unflatten(0, (steps * b, f)),
        z=rows(late.z)
        if p.weight_ih is None
        else rows(late.z).view(steps * b, f, heads, -1).transpose(1, 2),
        scores=rows(late.scores),
        comm_query=rows(late.comm_query),
        updated=rows(late.updated),
        message=rows(late.message),
        heard=heard,
        heard_by_reader=heard if p.comm_out is None else heard.view(steps * b, -1, d),
        ones=gates.new_ones(len(gates)),
    )


class Chunk(NamedTuple):
    """What the products that are gathered after a chunk of steps (N) read and write, as views."""

    left: Left
    h: Tensor  # [N * B, F, D]
    h_rows: Tensor  # [N * B * F, D]
    talk: Tensor  # [N * B, F * H, F], reader before read
    share: Tensor  # [N * B, F, R]
    mix: Tensor  # [N * B, heads, P, V]
    d_mix: Tensor  # as `mix`
    d_keys: Tensor  # [N * B, R, D]


def chunks(
    p: Prepared, settings: Settings, kept: Kept, late: Late, total: Gradients
) -> list[Chunk]:
    size, steps = len(late.gates), len(p.mix)
    lefts = [what_is_left(p, late, size)] * (steps // size)
    if steps % size:
        lefts.append(what_is_left(p, late, steps % size))

    def cut(x: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in x.split(size)]

    h = cut(kept.before[:, 0])
    share = cut(shares(kept.attention, p.mix.shape[2], settings.mean))
    d_keys = [total.keys] * len(h) if p.keys is None else cut(total.keys)
    parts = (cut(kept.talk.mT), share, cut(p.mix), cut(total.mix), d_keys)
    return [
        Chunk(left, h, h.flatten(0, 1), *others)
        for left, h, *others in zip(lefts, h, *parts, strict=True)
    ]


def gather_gradients(p: Prepared, total: Gradients, late: Late, at: Chunk) -> None:
    """Adds what the steps ask of the weights and the input, each as one large product."""
    left = at.left
    add_product(total.weight_h, left.hidden, at.h_rows)
    if p.bias_h is not None:
        late.gate_sums.addmv_(left.gates, left.ones)  # faster on a CPU than the sum
    if p.weight_ih is not None:
        add_product(total.weight_ih, left.input, gather_values(at.share, at.mix))
        torch.matmul(by_heads(at.share, p.mix.shape[2]).mT, left.z, out=at.d_mix)
    else:
        torch.bmm(at.share.mT, left.input_by_file, out=at.d_mix.squeeze(2))
    if p.comm_out is not None:
        torch.bmm(at.talk, left.updated, out=left.heard_by_reader)
        add_product(total.comm_out, left.message, left.heard)
        if p.comm_bias is not None:
            total.comm_bias.addmv_(left.message.T, left.ones)
        if p.comm_query is not None:
            add_product(total.comm_query, left.comm_query, at.h_rows)
    if p.keys is not None:
        if p.keys.shape[2] == 1:  # torch's product of so little is slow on a CPU
            torch.sum(left.scores * at.h, 1, keepdim=True, out=at.d_keys)
        else:
            torch.bmm(left.scores.mT, at.h, out=at.d_keys)


def finish_gradients(p: Prepared, total: Gradients, late: Late) -> Gradients:
    """With those of the biases, after the last chunk."""
    if p.bias_h is None or p.bias_ih is None:
        return total
    sums = late.gate_sums
    return total._replace(
        bias_h=sums[-len(p.bias_h) :].clone(), bias_ih=sums[: len(p.bias_ih)].clone()
    )
