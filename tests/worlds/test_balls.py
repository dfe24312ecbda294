import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scoff.worlds import balls as worlds
from scoff.worlds.balls import (
    BOX,
    COLOURS,
    CURTAIN,
    PIXELS,
    SWEEPS,
    VARIANTS,
    Clips,
    arrange,
    balls,
    render,
    trajectories,
)

from .test_adding import SPLITS, OnDevice
from .test_random import deviation

UNIT = PIXELS / BOX  # pixels
INDEX = torch.arange(60)
GOLDEN_PLACES = [5.411556403169245, 3.7091568429715585, 6.318545238459577, 2.3125870502842343]
GOLDEN_PICTURES = {
    "4balls": "293d90a2d8644393",
    "678balls": "44f62da8dce56424",
    "curtain": "bf8a13fae14159e8",
    "coloured4balls": "370d526e1e29500b",
    "coloured678balls": "84143b8819a689b2",
}
CLIPS = {variant: balls(0, INDEX, variant) for variant in VARIANTS}
TRUTH = {variant: trajectories(5, torch.arange(3000), variant, frames=1) for variant in VARIANTS}


def same(a, b) -> bool:
    return all(
        left is right or (left.dtype == right.dtype and torch.equal(left, right))
        for left, right in zip(a, b, strict=True)
    )


def pick(clips, chosen):
    return [part if part is None else part[chosen] for part in clips]


# --- a clip is a function of its seed, split and number


@settings(max_examples=15)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=9), st.sampled_from(list(VARIANTS)))
def test_a_clip_depends_on_its_index_alone(chosen, variant):
    assert same(balls(0, torch.tensor(chosen), variant), pick(CLIPS[variant], chosen))


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_make_up_the_set(variant):
    parts = [balls(0, batch, variant) for batch in INDEX.split(17)]
    whole = [None if p[0] is None else torch.cat(p) for p in zip(*parts, strict=True)]
    assert same(whole, CLIPS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_longer_clip_starts_with_the_shorter(variant):
    longer = balls(0, INDEX[:9], variant, frames=70)
    assert torch.equal(longer.identity[:, :51], CLIPS[variant].identity[:9])


def test_splits_and_seeds_share_no_clip():
    starts = [trajectories(0, torch.arange(2000), frames=1, split=split) for split in SPLITS]
    starts.append(trajectories(1, torch.arange(2000), frames=1))
    first = torch.cat([truth.position[:, 0, 0] for truth in starts])
    assert first.unique(dim=0).shape[0] == 8000


def test_chosen_trajectories_make_the_same_pictures():
    for variant in ("678balls", "curtain", "coloured4balls"):
        truth = trajectories(0, INDEX, variant)
        chosen = torch.tensor([5, 3, 3, 59])
        assert same(render(truth.select(chosen)), pick(CLIPS[variant], chosen))


def test_clips_stay_what_they_are():
    # runs of an earlier version must stay comparable
    truth = trajectories(0, torch.tensor([0, 1 << 33]), "678balls", split="test")
    assert truth.position[:, 50, 0].flatten().tolist() == pytest.approx(GOLDEN_PLACES, abs=1e-6)
    for variant, expected in GOLDEN_PICTURES.items():
        pictures = balls(0, torch.arange(3), variant).frames.mul(255).round().byte()
        assert hashlib.sha256(pictures.numpy().tobytes()).hexdigest()[:16] == expected, variant


# --- how clips start


@pytest.mark.parametrize("variant", VARIANTS)
def test_balls_are_those_of_the_original(variant):
    truth = TRUTH[variant]
    kinds = set(zip(truth.radius.flatten().tolist(), truth.mass.flatten().tolist(), strict=True))
    curtain = variant == "curtain"
    many = "678" in variant
    original = {(1.2, 1.0)} if curtain else {(0.8, 1.0), (1.0, 6.0)}
    assert kinds == original | ({(0.0, 0.0)} if many else set())
    count = (truth.radius > 0).sum(1)
    expected = {6: 1000, 7: 1000, 8: 1000} if many else {3 if curtain else 4: 3000}
    assert {n: int((count == n).sum()) for n in expected} == expected
    if not curtain:
        heavy = (truth.mass == 6).sum().item()
        total = count.sum().item()
        assert abs(heavy - total / 2) < 4 * math.sqrt(total / 4)
    speed = truth.velocity[:, 0].square().sum((1, 2)).sqrt()
    torch.testing.assert_close(speed, torch.full_like(speed, 1 / 2 if curtain else 1 / 3))
    absent = truth.radius == 0
    assert (truth.position[:, 0][absent] == 0).all()
    assert (truth.velocity[:, 0][absent] == 0).all()


def kolmogorov(sample: torch.Tensor, cumulative: torch.Tensor) -> float:
    """Of a sorted sample, in units of its standard deviation; 1.95 is p = 0.001"""
    n = len(sample)
    rank = torch.arange(n) / n
    distance = torch.maximum(cumulative - rank, rank + 1 / n - cumulative).max()
    return distance.item() * math.sqrt(n)


@pytest.mark.parametrize("variant", ["4balls", "678balls", "curtain"])
def test_velocities_are_uniform_on_the_sphere(variant):
    """As normal numbers divided by their norm: each squared speed's share is Beta(1, n - 1)."""
    truth = TRUTH[variant]
    velocity = truth.velocity[:, 0]
    share = velocity.square().sum(-1) / VARIANTS[variant].speed ** 2
    count = (truth.radius > 0).sum(1)
    for n in count.unique().tolist():
        for ball in range(n):
            sample = share[count == n, ball].sort().values
            assert kolmogorov(sample, 1 - (1 - sample) ** (n - 1)) < 1.95
    there = truth.radius > 0
    angle = torch.atan2(velocity[..., 1], velocity[..., 0])[there].sort().values
    assert kolmogorov(angle, (angle / math.pi + 1) / 2) < 1.95


def rejected(radius: torch.Tensor, tries: int) -> torch.Tensor:
    """The usual way: all places anew until no two overlap"""
    place = radius[:, None] + (BOX - 2 * radius[:, None]) * torch.rand(tries, len(radius), 2)
    apart = (place[:, :, None] - place[:, None]).norm(dim=-1)
    apart += torch.eye(len(radius)) * BOX
    return place[(apart > radius + radius[:, None]).flatten(1).all(1)].double()


def two_samples(a: torch.Tensor, b: torch.Tensor) -> float:
    """Kolmogorov and Smirnov's distance; 1.95 is p = 0.001"""
    both = torch.cat([a, b]).sort().values
    below = [torch.searchsorted(s.sort().values, both, right=True) / len(s) for s in (a, b)]
    distance = (below[0] - below[1]).abs().max().item()
    return distance * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


@pytest.mark.parametrize("radius", [(0.8, 1.0, 0.8, 1.0), (1.2,) * 3, (1.0,) * 8])
def test_places_are_those_that_rejection_would_give(radius):
    radius = torch.tensor(radius)
    expected = rejected(radius, 6000 if len(radius) < 8 else 400_000)
    assert len(expected) > 1000
    places = torch.rand(3000, SWEEPS, len(radius), 2).double()
    got = arrange(radius.double().expand(3000, -1), places)
    pairs = torch.triu_indices(len(radius), len(radius), 1)
    for ball in range(len(radius)):
        assert two_samples(got[:, ball, 0], expected[:, ball, 0]) < 1.95
        assert two_samples(got[:, ball, 1], expected[:, ball, 1]) < 1.95
    for measure in (
        lambda place: (place[:, pairs[0]] - place[:, pairs[1]]).norm(dim=-1).amin(1),
        lambda place: (place[:, 0] - place[:, 1]).norm(dim=-1),
        lambda place: place.std(1).norm(dim=-1),
    ):
        assert two_samples(measure(got), measure(expected)) < 1.95


def test_the_curtain_is_anywhere_in_the_picture():
    curtain = TRUTH["curtain"].curtain
    assert curtain is not None
    assert curtain.min() == 0
    assert curtain.max() == PIXELS - CURTAIN
    for axis in curtain.T:
        assert abs(deviation(axis.bincount(minlength=PIXELS - CURTAIN + 1))) < 4


@pytest.mark.parametrize("variant", ["coloured4balls", "coloured678balls"])
def test_colours_are_drawn_for_each_ball_alone(variant):
    colour = TRUTH[variant].colour
    assert colour is not None
    assert abs(deviation(colour.flatten().bincount(minlength=4))) < 4
    assert abs(deviation((colour[:, 0] * 4 + colour[:, 1]).bincount(minlength=16))) < 4


# --- pictures


@pytest.mark.parametrize("variant", ["4balls", "678balls", "curtain"])
def test_a_pixel_belongs_to_the_ball_its_centre_is_in(variant):
    truth = trajectories(0, INDEX[:9], variant)._replace(curtain=None)
    identity = render(truth).identity
    assert identity.shape == (9, 51, 64, 64)
    centre = (torch.arange(PIXELS).double() + 0.5) / UNIT
    x, y = truth.position.unbind(-1)
    across = (centre - x[..., None]).square()[..., None, :]
    down = (centre - y[..., None]).square()[..., :, None]
    radius = truth.radius[:, None, :, None, None]
    depth = radius - (across + down).sqrt()  # [N, T, K, H, W]
    inside = depth > 0
    number = torch.arange(1, inside.shape[2] + 1)[:, None, None]
    expected = (inside * number).sum(2)
    clear = (depth.abs() > 1e-5).all(2)  # elsewhere single precision decides
    assert clear.float().mean() > 0.999
    assert torch.equal(identity[clear].long(), expected[clear])


@pytest.mark.parametrize(
    ("variant", "areas"), [("4balls", {0.8: 82, 1.0: 129}), ("curtain", {1.2: 185})]
)
def test_areas_and_centroids_are_those_of_the_balls(variant, areas):
    """The areas were measured in the original videos."""
    truth = trajectories(0, INDEX, variant)._replace(curtain=None)
    identity = render(truth).identity
    axis = torch.arange(PIXELS) + 0.5
    for ball in range(truth.radius.shape[1]):
        mask = (identity == ball + 1).float()
        area = mask.sum((2, 3))  # [N, T]
        centroid = torch.stack([(mask * axis).sum((2, 3)), (mask * axis[:, None]).sum((2, 3))], -1)
        off = centroid / area[..., None] - truth.position[:, :, ball].float() * UNIT
        assert off.abs().max() < 0.3
        assert off.mean().abs() < 0.01  # half a pixel more would be a picture that is shifted
        assert off.square().mean().sqrt() < 0.08
        for radius, expected in areas.items():
            chosen = area[(truth.radius[:, ball] - radius).abs() < 1e-9]
            assert chosen.mean().item() == pytest.approx(math.pi * (radius * UNIT) ** 2, rel=3e-3)
            assert chosen.mean().item() == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clip_tells_what_it_shows(variant):
    clips, truth = CLIPS[variant], trajectories(0, INDEX, variant)
    assert torch.equal(clips.position, truth.position.float())
    assert torch.equal(clips.velocity, truth.velocity.float())
    assert torch.equal(clips.events, truth.hits.sum(-1) // 2)
    assert clips.events.sum() > 100
    hit = torch.cat([torch.zeros_like(truth.hits[..., :1]), truth.hits], -1) > 0
    expected = hit.flatten(0, 1).gather(1, clips.identity.long().flatten(0, 1).flatten(1))
    assert torch.equal(clips.collisions, expected.view_as(clips.collisions))


def test_what_is_behind_the_curtain_is_not_seen():
    truth = trajectories(0, INDEX, "curtain")
    curtain = truth.curtain
    assert curtain is not None
    shown, bare = render(truth), render(truth._replace(curtain=None))
    for clip in range(len(INDEX)):
        column, row = curtain[clip].tolist()
        behind = torch.zeros(PIXELS, PIXELS, dtype=torch.bool)
        behind[row : row + CURTAIN, column : column + CURTAIN] = True
        for picture, full in ((shown[0], bare[0]), (shown[1], bare[1])):
            assert (picture[clip, :, behind] == 0).all()
            assert torch.equal(picture[clip, :, ~behind], full[clip, :, ~behind])
    seen = (shown.identity > 0).sum() / (bare.identity > 0).sum()
    assert 0.65 < seen < 0.85  # 17 to 35 % are hidden in the original videos


def test_plain_frames_are_black_and_white():
    clips = CLIPS["4balls"]
    assert clips.frames.shape == (60, 51, 1, 64, 64)
    assert clips.frames.dtype == torch.float32
    assert torch.equal(clips.frames[:, :, 0], (clips.identity > 0).float())


@pytest.mark.parametrize("variant", ["4balls", "678balls"])
def test_colours_are_all_that_colours_change(variant):
    plain, painted = CLIPS[variant], CLIPS["coloured" + variant]
    assert painted.colour is not None
    assert same(plain, painted._replace(colour=None))
    frames = painted.frames
    assert frames.shape == (60, 51, 3, 64, 64)
    palette = torch.tensor(COLOURS) / 255
    for clip, frame in ((0, 0), (7, 50), (59, 20)):
        identity = plain.identity[clip, frame].long()
        expected = torch.cat([torch.zeros(1, 3), palette[painted.colour[clip]]])[identity]
        torch.testing.assert_close(frames[clip, frame].movedim(0, -1), expected)


@pytest.mark.parametrize("variant", ["678balls", "curtain", "coloured678balls"])
@pytest.mark.parametrize("at_once", [1, 51 * 60])
def test_pictures_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch, variant, at_once):
    """A GPU draws all at once, a CPU a few."""
    truth, frames = trajectories(0, INDEX, variant), CLIPS[variant].frames
    monkeypatch.setattr(worlds, "PICTURES_AT_ONCE", at_once)
    clips = render(truth)
    assert same(clips, CLIPS[variant])
    assert torch.equal(clips.frames, frames)


def test_of_balls_that_overlap_the_last_is_seen_and_a_hit_of_any():
    truth = trajectories(0, INDEX[:1], "4balls", frames=1)
    hits = torch.tensor([0, 1, 0, 0]).view(1, 1, 4)
    clips = render(truth._replace(position=torch.full((1, 1, 4, 2), 5.0).double(), hits=hits))
    middle = (0, 0, PIXELS // 2, PIXELS // 2)
    assert clips.identity[middle] == 4
    assert clips.collisions[middle]


# --- fit for a CUDA graph


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_goes_through_the_host(variant):
    """Tensors on `meta` have no values: to look at one would be an error."""
    index = torch.arange(6, device="meta")
    with OnDevice():
        clips = balls(0, index, variant, frames=4)
        assert clips.frames.shape[:2] == (6, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "5balls"}, "variant: got '5balls', wants one of '4balls', '678balls', 'cur"),
        ({"frames": 0}, "frames: got 0, wants an integer of at least 1"),
        ({"split": "dev"}, "split: got 'dev', wants one of 'train', 'valid', 'test'"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        balls(0, torch.arange(2), **arguments)


def test_one_frame_and_no_clips():
    assert balls(0, torch.arange(3), frames=1).identity.shape == (3, 1, 64, 64)
    assert balls(0, torch.arange(0)).identity.shape == (0, 51, 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gpu_makes_the_same_clips(variant):
    index = torch.arange(500)
    expected, got = balls(9, index, variant), balls(9, index.cuda(), variant)
    assert got.identity.is_cuda
    torch.testing.assert_close(got.position.cpu(), expected.position, rtol=0, atol=1e-5)
    assert (got.identity.cpu() != expected.identity).float().mean() < 1e-6
    assert torch.equal(got.events.cpu(), expected.events)


@pytest.mark.gpu
def test_a_cuda_graph_makes_the_same_clips():
    index = torch.arange(16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert balls(9, index, "coloured678balls").frames.is_cuda
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clips = balls(9, index, "coloured678balls")
        frames = clips.frames
    for first in (0, 1000):
        index.copy_(torch.arange(first, first + 16))
        graph.replay()
        expected = balls(9, index.clone(), "coloured678balls")
        assert same(clips, Clips(*expected))
        assert torch.equal(frames, expected.frames)
