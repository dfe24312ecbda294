"""Views through a convolution of their tiles."""

import pytest
import torch

from scoff.models.tiles import TileEncoder
from scoff.worlds.maze import ViewPainter
from scoff.worlds.maze.cells import NUM_CODES


def views(count, size, device="cpu"):
    return torch.randint(0, NUM_CODES, (count, size, size), dtype=torch.uint8, device=device)


def gradients(encoder, output):
    encoder.zero_grad()
    like = {"dtype": output.dtype, "device": output.device}
    (output * torch.linspace(-1, 1, output.numel(), **like).view_as(output)).sum().backward()
    return [p.grad.clone() for p in encoder.parameters()]


@pytest.mark.parametrize(("view_size", "tile_size"), [(5, 8), (3, 4)])
def test_it_is_the_convolution_of_the_pictures(view_size, tile_size):
    encoder = TileEncoder(view_size, 6, 10, tile_size)
    seen = views(40, view_size)
    pictures = ViewPainter(tile_size)(seen)
    looked_up, convolved = encoder(seen), encoder.of_pictures(pictures)
    assert looked_up.shape == (40, 10)
    assert looked_up.std() > 1e-3
    torch.testing.assert_close(looked_up, convolved)
    torch.testing.assert_close(gradients(encoder, looked_up), gradients(encoder, convolved))


@pytest.mark.gpu
def test_it_is_the_same_on_a_gpu_and_the_same_bits_each_time():
    # in double precision: with less, some ReLU is open on one and closed on the other
    encoder, seen = TileEncoder().double(), views(2000, 5)
    expected = encoder(seen), gradients(encoder, encoder(seen))
    encoder.cuda()
    found = encoder(seen.cuda()), gradients(encoder, encoder(seen.cuda()))
    torch.testing.assert_close(found[0].cpu(), expected[0])
    for grad, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(grad.cpu(), other)
    encoder.float()
    first, again = (gradients(encoder, encoder(seen.cuda())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
