"""From views of the maze to features, as a convolution of their pictures would give them."""

import torch
from torch import Tensor, nn

from scoff.worlds.maze.cells import NUM_CODES
from scoff.worlds.maze.tiles import view_tiles


class TileEncoder(nn.Module):
    """A convolution whose kernel and stride are one tile, as BabyAI's for pixels, then one layer.

    A view has but 34 different tiles, so what each of them adds to the features, at each place, is
    computed once and looked up: the same numbers in far fewer operations, and pictures need
    neither be painted nor stored.

    Args:
        view_size: cells of a view, a side.
        channels: of the convolution.
        features: of the result.
        tile_size: pixels of a cell, a side.
    """

    tiles: Tensor
    first_row: Tensor

    def __init__(
        self, view_size: int = 5, channels: int = 32, features: int = 128, tile_size: int = 8
    ):
        super().__init__()
        places = view_size**2
        self.convolution = nn.Conv2d(3, channels, tile_size, tile_size)
        self.out = nn.Linear(places * channels, features)
        self.register_buffer("tiles", as_input(view_tiles(tile_size)), persistent=False)
        first_row = torch.arange(0, places * NUM_CODES, NUM_CODES)
        self.register_buffer("first_row", first_row, persistent=False)

    def forward(self, view: Tensor) -> Tensor:
        """[B, V, V] uint8 -> [B, features]"""
        cells = self.convolution(self.tiles).flatten(1).relu()  # [codes, channels]
        weight = self.out.weight.unflatten(1, (-1, cells.shape[1]))  # [features, places, channels]
        table = torch.einsum("fpc,kc->pkf", weight, cells).flatten(0, 1)
        rows = view.flatten(1) + self.first_row  # [B, places]
        if view.is_cuda:
            # The gradient of a lookup sorts or adds in any order there; that of a product does not.
            is_there = table.new_zeros(len(view), len(table)).scatter_(1, rows, 1.0)
            total = is_there @ table
        else:
            total = nn.functional.embedding_bag(rows, table, mode="sum")
        return (total + self.out.bias).relu()

    def of_pictures(self, pictures: Tensor) -> Tensor:
        """The same from pictures  [B, V * tile, V * tile, 3] uint8 -> [B, features]"""
        cells = self.convolution(as_input(pictures)).relu()  # [B, channels, V, V]
        return self.out(cells.flatten(2).mT.flatten(1)).relu()


def as_input(pictures: Tensor) -> Tensor:
    """[B, H, W, 3] uint8 -> [B, 3, H, W]"""
    return pictures.permute(0, 3, 1, 2).float() / 255
