"""From a set of object files to one vector that does not depend on their order."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from scoff.nn.checks import check_choice, check_divides, check_size, check_tensor


class Readout(nn.Module):
    """A siamese network on each object file, then attention over them.

    Works after any layer whose output is a concatenation of slots: SCOFF, RIMs, RMC, and with
    num_object_files=1 nn.GRU.

    Args:
        hidden_size: size of the whole state.
        output_size: size of the result.
        num_object_files: slots that the state consists of.
        features: width of the siamese network. Default: that of an object file.
        num_heads: heads of the attention, each of which weighs the object files anew.
        pool: "attention" over the object files, or their "sum", which grows with their number.
    """

    def __init__(
        self,
        hidden_size: int,
        output_size: int,
        num_object_files: int,
        *,
        features: int | None = None,
        num_heads: int = 1,
        pool: Literal["attention", "sum"] = "attention",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_size("output_size", output_size)
        check_size("num_object_files", num_object_files)
        check_divides("hidden_size", hidden_size, "num_object_files", num_object_files)
        size = hidden_size // num_object_files
        features = size if features is None else features
        check_size("features", features)
        check_size("num_heads", num_heads)
        check_divides("features", features, "num_heads", num_heads)
        check_choice("pool", pool, ["attention", "sum"])
        self.hidden_size = hidden_size
        self.num_object_files = num_object_files
        self.num_heads = num_heads
        kind = {"device": device, "dtype": dtype}
        self.siamese = nn.Sequential(
            nn.Linear(size, features, **kind), nn.ReLU(), nn.Linear(features, features, **kind)
        )
        # the product of a learned query and the keys of each head
        self.score = nn.Linear(features, num_heads, **kind) if pool == "attention" else None
        self.out = nn.Linear(features, output_size, **kind)

    def forward(self, output: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., output_size)"""
        check_tensor("output", output, self.out.weight)
        if output.ndim == 0 or output.shape[-1] != self.hidden_size:
            raise ValueError(
                f"output: got shape {tuple(output.shape)}, wants (..., hidden_size = "
                f"{self.hidden_size})"
            )
        files = self.siamese(output.unflatten(-1, (self.num_object_files, -1)))  # [..., F, E]
        if self.score is None:
            return self.out(files).sum(-2)
        weights = self.score(files).softmax(-2)  # over the object files  [..., F, heads]
        values = files.unflatten(-1, (self.num_heads, -1))  # [..., F, heads, E / heads]
        return self.out((weights[..., None] * values).sum(-3).flatten(-2))
