"""The ray caster: against points inside bodies, and each way of running it against the others."""

import numpy as np
import pytest
import torch

from scoff.worlds.intphys import render, training_clips, training_scenes
from scoff.worlds.intphys.motion import KNOCK, roll, swing
from scoff.worlds.intphys.scenes import (
    BACKGROUND,
    ELEMENTS,
    FIRST_ELEMENT,
    FLOOR,
    HALF_VIEW,
    OBJECT,
    OBJECTS,
    OCCLUDER,
    SKY,
)
from scoff.worlds.intphys.shapes import BOX, CONE, NONE, SPHERE
from scoff.worlds.intphys.stages import GRAVITY


def some_scenes(numbers, frames=100, every=1):
    scenes = training_scenes(5, torch.as_tensor(numbers), frames=frames)
    return scenes._replace(centre=scenes.centre[:, ::every], tilt=scenes.tilt[:, ::every])


def same(one, other):
    return bool(one.equal(other).all()) and (one.depth is None) == (other.depth is None)


# --- one picture, however it is made


def test_numpy_and_torch_give_the_same_bits():
    scenes = some_scenes(range(12), every=9)
    assert same(render(scenes, 40, True, "numpy"), render(scenes, 40, True, "torch"))


def test_where_nothing_can_be_nothing_is_missed():
    scenes = some_scenes(range(8), every=9)
    assert same(render(scenes, 20, True), render(scenes, 20, True, cull=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_bits():
    index = torch.arange(40)
    here = training_clips(5, index, depth=True)
    there = training_clips(5, index.cuda(), depth=True)
    assert torch.equal(here.frames, there.frames.cpu())
    assert torch.equal(here.identity, there.identity.cpu())
    assert torch.equal(here.depth, there.depth.cpu())


def test_a_clip_follows_from_its_number_alone():
    many = training_clips(2, torch.tensor([7, 3, 40, 3]), pixels=16)
    for place, number in enumerate([7, 3, 40, 3]):
        alone = training_clips(2, torch.tensor([number]), pixels=16)
        assert torch.equal(alone.frames[0], many.frames[place])
        assert torch.equal(alone.identity[0], many.identity[place])
    other = training_clips(3, torch.tensor([7]), pixels=16)
    assert not torch.equal(other.frames[0], many.frames[0])
    other = training_clips(2, torch.tensor([7]), split="test", pixels=16)
    assert not torch.equal(other.frames[0], many.frames[0])


def test_what_cannot_be_done_is_refused():
    scenes = some_scenes([0], every=50)
    with pytest.raises(ValueError, match="backend: got 'jax'"):
        render(scenes, backend="jax")
    with pytest.raises(ValueError, match="pixels: got 0"):
        render(scenes, 0)
    with pytest.raises(ValueError, match="split: got 'dev'"):
        training_scenes(0, torch.arange(1), split="dev")


# --- what is seen


def is_inside(kind, half, p):
    """Bodies by their definition, in float64  p [..., 3]"""
    x, y, z = np.moveaxis(p, -1, 0)
    if kind == SPHERE:
        return x**2 + y**2 + z**2 < half[0] ** 2
    if kind == BOX:
        return (abs(x) < half[0]) & (abs(y) < half[1]) & (abs(z) < half[2])
    wide = half[0] * (half[1] - y) / (2 * half[1])
    return (abs(y) < half[1]) & (np.hypot(x, z) < wide)


def test_depth_and_identity_are_those_of_the_first_body_on_the_way():
    pixels = 24
    scenes = some_scenes(range(1, 15, 2), every=45)
    clips = render(scenes, pixels, depth=True)
    step = 0.02
    far = np.arange(2.0, 16.0, step)
    # the first of the four samples of each pixel tells identity and depth
    line = (np.arange(pixels) + 0.25 - pixels / 2) * (2 * HALF_VIEW / pixels)
    right, down = np.meshgrid(line, line)
    compared = kinds = 0
    agreed = []
    for n in range(len(scenes.kind)):
        look = [part[n].double().numpy() for part in scenes.look[:2]]
        ray = right[..., None] * look[1][0] - down[..., None] * look[1][1] + look[1][2]
        points = look[0] + ray[:, :, None] * far[:, None]  # [H, W, D, 3]
        for t in range(scenes.frames):
            who = np.where(ray[..., 1] < -1e-3, FLOOR, SKY)
            first = np.where(who == FLOOR, (-look[0][1] / ray[..., 1] - far[0]) / step, np.inf)
            for k in range(ELEMENTS):
                kind = int(scenes.kind[n, k])
                if kind == NONE:
                    continue
                p = points - scenes.centre[n, t, k].double().numpy()
                c, s = scenes.tilt[n, t, k].double().tolist()
                p = np.stack(
                    [p[..., 0], c * p[..., 1] + s * p[..., 2], c * p[..., 2] - s * p[..., 1]], -1
                )
                c, s = scenes.yaw[n, k].double().tolist()
                p = np.stack(
                    [c * p[..., 0] - s * p[..., 2], p[..., 1], s * p[..., 0] + c * p[..., 2]], -1
                )
                inside = is_inside(kind, scenes.half[n, k].double().numpy(), p)
                enters = np.where(inside.any(-1), inside.argmax(-1), np.inf)
                who = np.where(enters < first, FIRST_ELEMENT + k, who)
                first = np.minimum(enters, first)
                kinds |= 1 << kind
            agree = clips.identity[n, t].numpy() == who
            agreed.append(agree.mean())
            shown = agree & (who != SKY) & (first < len(far))
            error = clips.depth[n, t].numpy()[shown] / 1000 - (far[0] + first[shown] * step)
            assert (abs(error) < 2 * step).mean() > 0.995
            compared += int((who >= FIRST_ELEMENT).sum())
    # but for grazing rays, that pass less than a step inside
    assert np.mean(agreed) > 0.995
    assert min(agreed) > 0.985
    assert compared > 500
    assert kinds == (1 << SPHERE) | (1 << BOX) | (1 << CONE)


def test_pixels_are_of_the_class_of_what_they_show():
    clips = render(some_scenes(range(6), every=30), 24)
    for shown in range(FIRST_ELEMENT + ELEMENTS):
        wants = BACKGROUND if shown < FIRST_ELEMENT else OBJECT
        wants = OCCLUDER if shown >= FIRST_ELEMENT + OBJECTS else wants
        assert (clips.classes[clips.identity == shown] == wants).all()
    assert set(clips.classes.flatten().tolist()) == {BACKGROUND, OBJECT, OCCLUDER}


def test_things_cast_shadows_and_nothing_else_changes_the_floor():
    scenes = some_scenes(range(1, 41, 2), every=20)
    bare = scenes._replace(kind=scenes.kind * 0)
    with_things, without = render(scenes), render(bare)
    floor = with_things.identity == FLOOR
    change = (with_things.frames.int() - without.frames.int()).amax(-1)
    # pixels at a rim show a thing in some of their samples, so those next to one do not count
    thing = (with_things.identity >= FIRST_ELEMENT).flatten(0, 1).float()[:, None]
    near = torch.nn.functional.max_pool2d(thing, 3, 1, 1)[:, 0].view_as(floor) > 0
    changed = floor & ~near & (change != 0)
    assert changed.sum() > 200
    assert (change[changed] < 0).all()
    assert (change[floor & ~near] <= 0).all()


def test_objects_are_one_to_two_per_cent_of_the_picture():
    clips = render(some_scenes(range(1, 61, 2), every=10))
    areas = []
    for k in range(OBJECTS):
        area = (clips.identity == FIRST_ELEMENT + k).flatten(2).float().mean(2)
        areas.append(area.amax(1))
    largest = torch.stack(areas).flatten()
    largest = largest[largest > 0.005]
    assert 0.01 < largest.median() < 0.02
    assert largest.max() < 0.035


def test_some_scenes_are_empty_and_all_colours_are_used():
    scenes = training_scenes(0, torch.arange(400))
    objects = (scenes.kind[:, :OBJECTS] != NONE).sum(1)
    walls = (scenes.kind[:, OBJECTS:] != NONE).sum(1)
    assert 0.05 < (objects == 0).float().mean() < 0.2
    assert set(objects.tolist()) == {0, 1, 2, 3}
    assert set(walls.tolist()) == {0, 1, 2, 3}
    assert len({tuple(c) for c in scenes.look.colour[:, :OBJECTS].flatten(0, 1).tolist()}) == 8


# --- motion


def test_what_is_in_the_air_falls_as_a_parabola():
    x, y = torch.zeros(1, 3).double(), torch.full((1, 3), 5.0).double()
    speed = torch.tensor([[0.1, 0.0, -0.2]]).double()
    tracks = roll(x, y, speed, 0 * x, x + 0.7, torch.tensor([False]), 12)
    time = torch.arange(12).double()[:, None]
    assert torch.allclose(tracks.x[0], speed * time)
    # steps of a quarter of a frame, at the speed of their end
    assert torch.allclose(tracks.y[0], (5 - GRAVITY * time * (time + 0.25) / 2).expand(-1, 3))


def test_nothing_gains_energy_or_leaves_the_floor_downwards():
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(5, 200, 3, generator=generator).double()
    x, y = 8 * draw[0] - 4, 4 * draw[1]
    speed, rise = 0.5 * draw[2] - 0.25, 0.5 * draw[3] - 0.25
    tracks = roll(x, y, speed, rise, 0.5 + 0.3 * draw[4], torch.ones(200, dtype=torch.bool), 100)
    assert (tracks.y >= 0).all()
    assert tracks.knocks.any(1).float().mean() > 0.3
    pace = (tracks.x[:, 1:, 2] - tracks.x[:, :-1, 2]).abs()  # the third meets nobody
    assert (pace[:, 1:] - pace[:, :-1] < 1e-9).all()
    highest = tracks.y[:, 60:].amax(1)
    assert (highest <= y + rise.clamp(min=0) ** 2 / (2 * GRAVITY) + 1e-6)[:, 2].all()


def test_balls_that_meet_exchange_speed():
    x = torch.tensor([[-3.0, 0.0, 9.0]]).double()
    speed = torch.tensor([[0.2, 0.0, 0.0]]).double()
    tracks = roll(x, 0 * x, speed, 0 * x, 0 * x + 0.5, torch.tensor([True]), 30)
    after = tracks.x[0, -1] - tracks.x[0, -2]
    assert tracks.knocks.sum() == 1
    total, closing = after[0] + after[1], after[1] - after[0]
    before = tracks.x[0, 1, 0] - tracks.x[0, 0, 0]
    assert 0.8 * before < total < before  # rolling slows down
    assert 0.8 * KNOCK * before < closing < KNOCK * before


def test_walls_turn_at_their_pace_and_stay_between_lying_and_standing():
    stands = torch.tensor([[True, False]])
    turns = torch.tensor([[[10.0, 50.0, 500.0], [20.0, 500.0, 500.0]]])
    lean = swing(stands, turns, torch.tensor([[0.1, 0.05]]).double(), 100)[0]
    assert lean[10].tolist() == [0, 1]
    assert lean[40].tolist() == [1, 0]
    assert lean[99].tolist() == [0, 0]
    steps = (lean[1:] - lean[:-1]).abs().amax(0)
    assert torch.allclose(steps, torch.tensor([0.1, 0.05]).double())
