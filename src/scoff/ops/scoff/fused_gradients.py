"""The backward pass of the `fused` backend, and the sums over steps that it leaves."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scoff.ops.scoff.fused_launch import (
    allocate_kept,
    describe,
    launch_backward,
    launch_forward,
)
from scoff.ops.scoff.fused_types import (
    Kept,
    Prepared,
    Ran,
    Settings,
    Sizes,
    exact,
    fields_of,
    sizes_of,
)

CHUNKS = 5  # of the backward pass: more take less memory and more time


def run_back(
    p: Prepared,
    settings: Settings,
    packed: Tensor,
    ran: Ran,
    d_output: Tensor,
    d_final: Tensor,
) -> dict[str, Tensor]:
    """The gradients of what is differentiable in `p`, by name."""
    z = sizes_of(p, settings)
    steps, (b, f, _) = p.keys.shape[0], p.state.shape[1:]
    chunk = -(-steps // CHUNKS)
    kept = allocate_kept(p, z, chunk * b * f)
    d_z = kept.rows.new_empty(len(kept.rows), z.value)
    d_state = d_final.to(exact(p.state), copy=True)
    d_restart = None if p.restart is None else torch.zeros_like(d_state)
    d_keys = torch.empty_like(p.keys)
    d_values = None if p.values is None else torch.empty_like(p.values)
    upright, turned = (describe(p, settings, packed, turned=x) for x in (False, True))
    sums = Sums.zeros(kept, z, p.value is None)
    for start in reversed(range(0, steps, chunk)):
        part = slice(start, min(start + chunk, steps))
        rows = (part.stop - part.start) * b * f
        here = steps_of(p, part)
        ran_here = ran._replace(
            output=ran.output[part], choice=ran.choice[part], active=ran.active[part]
        )
        kept_here = Kept._make(x[:rows] for x in kept)
        before = states_before(p, settings, ran, part)  # [Z, N, B, F, D]
        single = as_sequences(here, before, ran_here)
        launch_forward(single, settings, packed.dtype, upright, None, kept_here, ran_here.active)
        launch_backward(
            here,
            settings,
            packed.dtype,
            turned,
            before,
            ran_here,
            kept_here,
            d_output[part],
            d_state,
            d_restart,
            d_z[:rows],
        )
        sums.add(kept_here, d_z[:rows], z)
        to_input(d_keys[part], None if d_values is None else d_values[part], kept_here, z)
    found = sums.gradients(p, settings, z)
    found |= {"keys": d_keys, "values": d_values, "state": d_state, "restart": d_restart}
    return {name: x.to(getattr(p, name).dtype) for name, x in found.items() if x is not None}


def steps_of(p: Prepared, part: slice) -> Prepared:
    by_step = ("keys", "values", "reset", "valid", "noise", "comm_mask", "choice")
    return p._replace(**{n: x[part] for n in by_step if (x := getattr(p, n)) is not None})


def states_before(p: Prepared, settings: Settings, ran: Ran, part: slice) -> Tensor:
    """What each of the steps started from  [Z, N, B, F, D]"""
    history = [ran.output, ran.cells][: 1 + settings.lstm]
    earlier = slice(max(part.start - 1, 0), part.stop - 1)
    before = (
        torch.stack([x[earlier] for x in history]) if settings.lstm else ran.output[None, earlier]
    )
    if part.start == 0:
        before = torch.cat([p.state[:, None].to(before.dtype), before], 1)
    if p.reset is not None and p.restart is not None:
        anew = p.reset[part, :, None, None]
        before = torch.where(anew, p.restart[:, None].to(before.dtype), before)
    return before


def as_sequences(p: Prepared, before: Tensor, ran: Ran) -> Prepared:
    """Each step as a sequence of its own, of one step"""

    def join(x: Tensor | None) -> Any:
        return None if x is None else x.flatten(0, 1)[None]

    return p._replace(
        keys=join(p.keys),
        values=join(p.values),
        state=before.flatten(1, 2),
        restart=None,
        reset=None,
        valid=join(p.valid),
        noise=join(p.noise),
        comm_mask=join(p.comm_mask),
        choice=join(ran.choice),
    )


class Sums(NamedTuple):
    """Gradients times what they are the gradients of, summed over all object files."""

    work: Tensor  # [S * 4 * D + X, D + V + 1, aligned]
    value: Tensor | None  # [A, V / A, W]
    read: Tensor | None  # [H * E + H * U, D]
    say: Tensor | None  # [D or 2 D, H * U + 1, aligned]

    @classmethod
    def zeros(cls, kept: Kept, z: Sizes, folded: bool) -> "Sums":
        new, at = kept.rows.new_zeros, fields_of(z)
        return cls(
            new(z.schemata * 4 * z.size + z.asked, at.logits - at.right),
            None if folded else new(z.heads, z.value // z.heads, z.seen),
            new(z.read, z.size) if z.says else None,
            new(z.says, at.message - at.heard) if z.says else None,
        )

    def add(self, kept: Kept, d_z: Tensor, z: Sizes) -> None:
        at = fields_of(z)

        def rows(start: int, width: int) -> Tensor:
            return kept.rows[:, start : start + width]

        self.work.addmm_(rows(at.work, len(self.work)).T, rows(at.right, self.work.shape[1]))
        if self.value is not None:
            seen = rows(at.seen, z.heads * z.seen).unflatten(1, (z.heads, z.seen))
            by_head = d_z.unflatten(1, (z.heads, -1)).permute(1, 2, 0)
            self.value.baddbmm_(by_head, seen.transpose(0, 1))
        if self.read is not None and self.say is not None:
            self.read.addmm_(rows(at.read, z.read).T, rows(at.updated, z.size))
            self.say.addmm_(rows(at.message, z.says).T, rows(at.heard, self.say.shape[1]))

    def gradients(self, p: Prepared, settings: Settings, z: Sizes) -> dict[str, Tensor | None]:
        gates, read = z.schemata * 4 * z.size, z.size + z.value

        def by_gate(x: Tensor, hidden: bool) -> Tensor:
            parts = x[:gates].unflatten(0, (z.schemata, 4, z.size))
            if settings.lstm:
                return parts.clone(memory_format=torch.contiguous_format)
            r_u, m, n = parts[:, :2], parts[:, 2:3], parts[:, 3:]
            return torch.cat([r_u, m if hidden else n], 1)

        return {
            "from_state": self.work[gates:, : z.size].contiguous(),
            "value": None if self.value is None else self.value.flatten(0, 1),
            "weight_hh": by_gate(self.work[:, : z.size], hidden=True),
            "weight_ih": by_gate(self.work[:, z.size : read], hidden=False),
            "bias_hh": None if p.bias_hh is None else by_gate(self.work[:, read], hidden=True),
            "bias_ih": None if p.bias_ih is None else by_gate(self.work[:, read], hidden=False),
            "comm_read": self.read,
            "comm_say": None if self.say is None else self.say[:, : z.heard].contiguous(),
            "comm_bias": None
            if p.comm_bias is None or self.say is None
            else self.say[z.size :, z.heard].contiguous(),
        }


def to_input(d_keys: Tensor, d_values: Tensor | None, kept: Kept, z: Sizes) -> None:
    """What the object files ask of each position, and what they have seen of it"""
    look, what = (x.unflatten(0, (-1, z.files)) for x in (kept.look, kept.what))
    if d_values is None:  # all heads read the same
        # attention x gradient of what is seen + gradient of scores x what is asked
        out = d_keys.view(-1, z.positions, z.key)
        weights, part = look.flatten(1, 3).mT, what.flatten(1, 3)
        if out.dtype == part.dtype:
            torch.bmm(weights, part, out=out)
        else:
            out.copy_(torch.bmm(weights, part))
        return
    for out, slot, width in ((d_keys, 1, z.key), (d_values, 0, z.seen)):
        weights, part = look[:, :, slot], what[:, :, slot, :, :width]
        pattern = "nfap,nfac->npc" if out.shape[3] == width else "nfap,nfac->npac"
        out.copy_(torch.einsum(pattern, weights, part).reshape(out.shape))
