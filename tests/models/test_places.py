"""Where object files start: at what stands out, in any kind of picture, without names."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import grid_sample, one_hot

from scoff.models.pictures import position_code
from scoff.models.places import find_places
from scoff.models.video import VideoModel, VideoOptions, VideoState
from scoff.worlds.balls import balls
from tests.models.capturing import captured

SMALL = VideoOptions(
    hidden_size=24,
    object_files=3,
    active=2,
    schemata=2,
    frame_size=16,
    map_size=4,
    features=8,
    start="places",
)
READERS = ("scoff", "scoff-sparse", "rims")
WAYS = {
    "plain": {},
    "stack": {"stack": 3},
    "repeats": {"first_frame_steps": 3},
    "colour": {"colour": True, "stack": 2},
    "classes": {"classes": 3, "cell": "lstm"},
    "attention": {"decoder": "attention", "cell": "lstm"},
}


def make(**changes):
    return VideoModel(replace(SMALL, **changes)).double()


def clips(options, n=2, frames=8):
    shape = (n, frames, options.channels, options.frame_size, options.frame_size)
    return torch.rand(shape, dtype=torch.float64)


def begin(model, frames):
    """The state that a clip begins with"""
    return model._read(frames, None)[1]


def by_file(h, files=3):
    return h.unflatten(-1, (files, -1))


# --- places


@pytest.mark.parametrize("variant", ["4balls", "678balls", "coloured4balls", "coloured678balls"])
def test_places_are_the_balls(variant):
    """All that are there; places that are left over are far from any."""
    world = balls(0, torch.arange(60), variant, frames=1)
    found = find_places(world.frames[:, 0], 8) + 0.5
    balls_at = (world.position[:, 0] * 6.4).flip(-1)  # rows first
    distance = torch.cdist(found.to(balls_at), balls_at)  # [N, F, K]
    is_there = world.radius > 0
    assert distance.amin(1)[is_there].max() < 3.5
    nearest = distance.masked_fill(~is_there[:, None], torch.inf).amin(2)
    many = is_there.sum(1)
    for clip, number in enumerate(many.tolist()):
        # each ball once, and before whatever is no ball
        assert (nearest[clip, :number] < 3.5).all()
        assert (nearest[clip, number:] > 7).all()


def kinds_of_pictures(rows, columns, dark):
    """Small squares on a plain ground: grey, colour and classes"""
    where = torch.zeros(1, 1, 32, 32)
    for row, column in zip(rows, columns, strict=True):
        where[0, 0, row - 1 : row + 2, column - 1 : column + 2] = 1
    grey = 1 - where if dark else where
    ground, square = torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0.7, 0.1, 0.4])
    colour = torch.lerp(ground[:, None, None], square[:, None, None], where)
    classes = one_hot(where[:, 0].long() * 2, 4).movedim(-1, 1).float()
    return grey, colour, classes


@settings(max_examples=25, deadline=None)
@given(
    cells=st.lists(st.integers(0, 8), min_size=3, max_size=3, unique=True),
    shift=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dark=st.booleans(),
)
def test_what_stands_out_is_found_in_all_kinds_of_pictures(cells, shift, dark):
    rows = [5 + 9 * (cell // 3) + shift[0] for cell in cells]
    columns = [5 + 9 * (cell % 3) + shift[1] for cell in cells]
    for picture in kinds_of_pictures(rows, columns, dark):
        found = find_places(picture, 3)[0].tolist()
        assert sorted(map(tuple, found)) == sorted(zip(rows, columns, strict=True))


def test_the_most_prominent_comes_first():
    frame = torch.zeros(1, 1, 32, 32)
    for place, light in ((6, 0.5), (16, 1.0), (26, 0.8)):
        frame[0, 0, place - 1 : place + 2, place - 1 : place + 2] = light
    assert find_places(frame, 3)[0].tolist() == [[16, 16], [26, 26], [6, 6]]


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("brightness", [0.0, 0.3, 1.0])
def test_places_of_an_empty_frame_are_distinct(size, brightness):
    found = find_places(torch.full((2, 1, size, size), brightness), 8)
    for places in found.tolist():
        assert len({tuple(place) for place in places}) == 8
    assert found.min() >= 0
    assert found.max() < size


# --- states


@pytest.mark.parametrize("layer", READERS)
@pytest.mark.parametrize("way", WAYS)
def test_every_layer_learns_from_places_and_goes_on(layer, way):
    model = make(model=layer, **WAYS[way])
    frames = clips(model.options)
    model.loss(frames).backward()
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in learned.items() if p.grad is None] == []
    assert learned["start.widen.weight"].grad.abs().max() > 0

    model.eval()
    whole = model(frames)
    first = model(frames[:, :4])
    second = model(frames[:, 4:], first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits)
    torch.testing.assert_close(model.trace(frames).decoded.logits, whole.logits)
    stack = model.options.stack
    future = model.rollout(frames[:, :5], 3)
    torch.testing.assert_close(future[:, 0], whole.frames[:, 5 - stack])
    # a given state is where it goes on from, whatever there is to see
    given = begin(model, frames)
    torch.testing.assert_close(model(frames, VideoState(given)).logits, whole.logits)
    other = model(frames.flip(-1), VideoState(given)).state.hidden
    model.start = None
    torch.testing.assert_close(model(frames.flip(-1), VideoState(given)).state.hidden, other)


def test_choices_start_from_places():
    model = make(first_frame_steps=2)
    frames = clips(model.options)
    told = model(frames, tell_choices=True)
    assert told.choices.shape == (2, 8, 3, 2)
    model.eval()
    given = VideoState(begin(model, frames))
    torch.testing.assert_close(
        model(frames, given, tell_choices=True).choices, model(frames, tell_choices=True).choices
    )


def test_a_state_is_what_is_seen_at_the_place():
    """As F.grid_sample has it; and of no other place, which shows in gradients."""
    model = make(stack=2, colour=True)
    frames = clips(model.options)
    seen = model.encoder(frames[:, :2].flatten(1, 2)).requires_grad_()
    at = model.start.where(frames[:, 1], seen.dtype)
    found = model.start.look(seen, at)
    grid = (2 * at - 1).flip(-1)[:, :, None]  # x first
    picture = seen.mT.unflatten(-1, (4, 4))
    expected = grid_sample(picture, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(found, expected[..., 0].mT)
    h = by_file(model.start(frames[:, 1], seen)[0])
    torch.testing.assert_close(by_file(begin(model, frames)[0]), h)
    (gradient,) = torch.autograd.grad(h[:, 0].sum(), seen)
    assert 1 <= (gradient[0].abs().amax(-1) > 0).sum() <= 4


def test_states_are_neither_tiny_nor_saturated():
    for size in (8, 16):
        model = VideoModel(VideoOptions(start="places", map_size=size))
        h = by_file(begin(model, balls(0, torch.arange(32), frames=1).frames), 4)
        assert 0.3 < h.std() < 0.7
        assert h.std(2).mean() > 0.25  # between object files


@pytest.mark.parametrize("layer", ["scoff", "scoff-sparse"])
def test_object_files_that_start_from_places_are_exchangeable(layer):
    model = make(model=layer).eval()
    frames = clips(model.options)
    order = torch.tensor([2, 0, 1])
    expected = model.trace(frames)
    swapped = by_file(begin(model, frames))[..., order, :].flatten(-2)
    found = model.trace(frames, VideoState(swapped))
    torch.testing.assert_close(found.decoded.logits, expected.decoded.logits)
    torch.testing.assert_close(found.decoded.masks, expected.decoded.masks[:, :, order])
    torch.testing.assert_close(found.attention, expected.attention[:, :, order])


def test_weights_fit_another_number_of_object_files():
    few, many = make(), make(object_files=6, hidden_size=48)
    many.load_state_dict(few.state_dict())
    frames = clips(few.options)
    torch.testing.assert_close(
        by_file(begin(many, frames), 6)[:, :, :3], by_file(begin(few, frames))
    )


def test_half_precision_starts_from_the_same_places():
    model = VideoModel(SMALL).eval()
    frames = balls(0, torch.arange(2), frames=4).frames[..., 24:40, 24:40]
    exact = begin(model, frames)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(frames, tell_choices=True).logits.isfinite().all()
        torch.testing.assert_close(begin(model, frames).float(), exact, atol=0.05, rtol=0)
    rounded = begin(model.bfloat16(), frames.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.05, rtol=0)


# --- nothing else changes


@pytest.mark.parametrize("layer", [*READERS, "gru"])
def test_other_weights_are_those_of_object_files_that_start_alike(layer):
    drawn = []
    for start in ("alike", "places"):
        torch.manual_seed(0)
        drawn.append(VideoModel(replace(SMALL, model=layer, start=start)).state_dict())
    alike, places = drawn
    more = {"start.widen.weight", "start.widen.bias"} if layer in READERS else set()
    assert places.keys() - alike.keys() == more
    for name, weight in alike.items():
        assert torch.equal(places[name], weight)


def test_the_code_of_positions_is_what_it_was():
    frequency = torch.logspace(-2, 1, 4, 2)
    angle = 2 * torch.pi * frequency[:, None] * ((torch.arange(8) + 0.5) / 8)
    wave = torch.cat([angle.sin(), angle.cos()])
    code = position_code(16, 8)
    assert torch.equal(code[:8], wave[:, None].expand(-1, 8, -1))
    assert torch.equal(code[8:], wave[:, :, None].expand(-1, -1, 8))


def test_a_start_that_there_is_not():
    with pytest.raises(ValueError, match="start: got 'place', wants one of 'alike', 'places'"):
        replace(SMALL, start="place")


# --- GPU


@pytest.mark.gpu
def test_a_gpu_finds_the_places_that_a_cpu_does():
    frames = balls(0, torch.arange(64), frames=1).frames[:, 0]
    one, other = (find_places(x, 4).cpu().double() for x in (frames.cuda(), frames))
    # balls of one size stand out alike but for rounding, and may be found in another order
    distance = torch.cdist(one, other)
    assert distance.amin(1).max() < 2
    assert distance.amin(2).max() < 2


@pytest.mark.gpu
@pytest.mark.parametrize("layer", READERS)
def test_places_inside_a_cuda_graph(layer):
    model = VideoModel(VideoOptions(model=layer, start="places")).cuda().eval()
    frames = balls(0, torch.arange(4), frames=4).frames.cuda()
    given = frames.clone()

    def work():
        model.zero_grad()
        loss = model.loss(given)
        loss.backward()
        return loss.detach(), begin(model, given).detach()

    graph, (loss, state) = captured(work)
    given.copy_(frames.flip(-1))  # other places than those that were there when it was captured
    graph.replay()
    torch.testing.assert_close(state, begin(model, frames.flip(-1)), atol=1e-3, rtol=1e-3)
    assert loss.isfinite()
