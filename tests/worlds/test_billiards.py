"""The physics of rolling discs. Tolerances are a few times what rounding was seen to do."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.worlds.balls import BOX, VARIANTS, trajectories
from scoff.worlds.billiards import Motion, roll

KINDS = ("4balls", "678balls", "curtain")
LONG = {kind: trajectories(0, torch.arange(40), kind, frames=1000) for kind in KINDS}


def line(x, v, radius, mass, frames=11, box=100.0):
    """Discs on a horizontal line in the middle of the box."""
    position = torch.tensor([[[at, box / 2] for at in x]], dtype=torch.float64)
    velocity = torch.tensor([[[speed, 0.0] for speed in v]], dtype=torch.float64)
    return roll(position, velocity, torch.tensor([radius]), torch.tensor([mass]), frames, box)


def energy(motion, mass):
    return (mass[:, None] * motion.velocity.square().sum(-1)).sum(-1) / 2  # [N, T]


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-1, 1), st.floats(-1, 1))
def test_two_discs_on_a_line_as_in_the_textbook(m1, m2, v1, v2):
    motion = line([40.0, 44.0], [v1, v2], [1.0, 1.0], [m1, m2])
    meet = 2 / (v1 - v2) if v1 > v2 else math.inf  # the gap is 2
    m1, m2 = (float(torch.tensor(m)) for m in (m1, m2))
    u1 = ((m1 - m2) * v1 + 2 * m2 * v2) / (m1 + m2)
    u2 = ((m2 - m1) * v2 + 2 * m1 * v1) / (m1 + m2)
    for t in range(11):
        before, after = min(t, meet), max(t - meet, 0)
        expected = [40 + v1 * before + u1 * after, 44 + v2 * before + u2 * after]
        assert motion.position[0, t, :, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert motion.hits.sum() == (2 if meet < 10 else 0)
    assert motion.bounces.sum() == 0
    assert (motion.position[..., 1] == 50).all()


def test_a_cradle_passes_the_blow_on():
    motion = line([20.0, 30.0, 32.0, 34.0], [1.0, 0.0, 0.0, 0.0], [1.0] * 4, [2.0] * 4, frames=16)
    assert motion.velocity[0, -1, :, 0].tolist() == pytest.approx([0, 0, 0, 1])
    assert motion.position[0, -1, :, 0].tolist() == pytest.approx([28, 30, 32, 41])
    assert motion.hits.sum(1).tolist() == [[1, 2, 2, 1]]


@given(
    st.tuples(st.floats(1, 9), st.floats(1, 9)),
    st.tuples(st.floats(-30, 30), st.floats(-30, 30)),
)
def test_one_disc_alone_follows_from_mirrors(start, velocity):
    """Unfolded at the walls, its way is straight. The second disc, in the middle, is not there."""
    position = torch.tensor([[start, (5.0, 5.0)]], dtype=torch.float64)
    speed = torch.tensor([[velocity, (0.0, 0.0)]], dtype=torch.float64)
    motion = roll(position, speed, torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), 6, 10.0)
    for t in range(6):
        for axis in range(2):
            gone = (start[axis] - 1 + velocity[axis] * t) % 16
            assert motion.position[0, t, 0, axis].item() == pytest.approx(
                1 + min(gone, 16 - gone), abs=1e-10
            )
    assert motion.hits.sum() == 0
    assert (motion.position[:, :, 1] == 5).all()


def test_what_overlaps_by_an_error_collides_at_once():
    motion = line([40.0, 42.0 - 1e-6], [1.0, -1.0], [1.0, 1.0], [1.0, 1.0], frames=4)
    assert motion.position[0, :, 0, 0].tolist() == pytest.approx([40, 39, 38, 37], abs=1e-9)
    motion = line([1.0 - 1e-6, 50.0], [-1.0, 0.0], [1.0, 1.0], [1.0, 1.0], frames=4)
    assert motion.position[0, :, 0, 0].tolist() == pytest.approx([1, 2, 3, 4], abs=1.1e-6)
    assert motion.bounces.sum() == 1


def test_a_glancing_blow_turns_by_the_angle_of_contact():
    # the second is hit 45 degrees off: half the speed goes along the line of centres
    height = math.sqrt(2)
    position = torch.tensor([[[40.0, 50.0], [50.0, 50.0 + height]]], dtype=torch.float64)
    velocity = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    motion = roll(position, velocity, torch.ones(1, 2), torch.ones(1, 2), 20, 100.0)
    expected = torch.tensor([[0.5, -0.5], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(motion.velocity[0, -1], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_energy_is_conserved_over_1000_frames(kind):
    motion = LONG[kind]
    assert motion.finished.all()
    assert motion.hits.sum((1, 2)).min() > 10  # much happens
    assert motion.bounces.sum((1, 2)).min() > 10
    total = energy(motion, motion.mass)
    assert (total / total[:, :1] - 1).abs().max() < 1e-13


def crowd(clips=50, discs=8):
    """Away from walls, towards each other."""
    position = torch.rand(clips, 1, 2, dtype=torch.float64)
    ring = 2 * math.pi * torch.arange(discs, dtype=torch.float64) / discs
    ring = torch.stack([ring.cos(), ring.sin()], -1) * 20
    velocity = -ring * (0.02 + 0.002 * torch.rand(clips, discs, 1, dtype=torch.float64))
    radius = 0.8 + 0.2 * torch.rand(clips, discs, dtype=torch.float64)
    mass = 1 + 5 * torch.rand(clips, discs, dtype=torch.float64)
    middle = 4000.0
    return position + ring + middle, velocity, radius, mass, middle


def test_momentum_is_conserved_away_from_walls_over_1000_frames():
    position, velocity, radius, mass, middle = crowd()
    motion = roll(position, velocity, radius, mass, 1000, 2 * middle)
    assert motion.finished.all()
    assert motion.bounces.sum() == 0
    assert motion.hits.sum((1, 2)).min() >= 8
    momentum = (mass[:, None, :, None] * motion.velocity).sum(2)  # [N, T, 2]
    size = (mass[..., None] * velocity).norm(dim=-1).sum(1)[:, None, None]
    assert ((momentum - momentum[:, :1]) / size).abs().max() < 1e-14
    (x, y), (u, v) = (motion.position - middle).unbind(-1), motion.velocity.unbind(-1)
    angular = (mass[:, None] * (x * v - y * u)).sum(-1)
    assert ((angular - angular[:, :1]) / (size[:, 0] * 20)).abs().max() < 2e-11


def test_walls_take_momentum_of_one_axis_alone():
    motion = line([2.0, 50.0], [-1.0, 0.0], [1.0, 1.0], [1.0, 1.0], frames=4)
    assert motion.position[0, :, 0, 0].tolist() == [2.0, 1.0, 2.0, 3.0]
    assert motion.bounces[0, :, 0].tolist() == [0, 0, 1, 0]  # at the very end of frame 1, so in 2
    assert motion.velocity[0, :, 0, 0].tolist() == [-1.0, -1.0, 1.0, 1.0]


def room_left(motion, radius):
    """To the nearest wall, and between the two discs closest to each other"""
    radius = radius[:, None]
    there = radius > 0
    wall = torch.minimum(motion.position, BOX - motion.position).amin(-1) - radius
    apart = (motion.position[:, :, :, None] - motion.position[:, :, None]).norm(dim=-1)
    apart = apart - radius[..., None] - radius[..., None, :]
    pair = there[..., None] & there[..., None, :] & ~torch.eye(radius.shape[-1], dtype=torch.bool)
    return wall[there.expand_as(wall)].min().item(), apart[pair.expand_as(apart)].min().item()


@pytest.mark.parametrize("kind", KINDS)
def test_no_disc_leaves_the_box_or_sinks_into_another(kind):
    wall, pair = room_left(LONG[kind], LONG[kind].radius)
    assert wall > -1e-13
    assert pair > -1e-13
    # they do touch: it is not that they keep away from each other
    assert wall < 0.01
    assert pair < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_frames_only_look_at_the_motion(kind):
    """32 times as many frames show the same, and nothing overlaps between those of before."""
    truth = trajectories(3, torch.arange(50), kind)
    start, velocity = truth.position[:, 0], truth.velocity[:, 0]
    fine = roll(start, velocity / 32, truth.radius, truth.mass, 1601, BOX)
    assert (fine.position[:, ::32] - truth.position).abs().max() < 1e-6
    assert torch.equal(
        fine.hits[:, 1:].unflatten(1, (50, 32)).sum(2).sum((1, 2)), truth.hits.sum((1, 2))
    )
    assert min(room_left(fine, truth.radius)) > -1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_reversing_time_returns_to_the_start(kind):
    """Collisions multiply an error again and again: of 20,000 clips the worst is off by 1e-8."""
    truth = trajectories(0, torch.arange(1000), kind)
    back = roll(truth.position[:, -1], -truth.velocity[:, -1], truth.radius, truth.mass, 51, BOX)
    assert (back.position.flip(1) - truth.position).abs().max() < 1e-8
    assert (back.velocity[:, -1] + truth.velocity[:, 0]).abs().max() < 1e-8
    assert back.hits.sum() == truth.hits.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_velocities_change_when_something_is_hit_and_only_then(kind):
    motion = LONG[kind]
    changed = (motion.velocity.diff(dim=1) != 0).any(-1)
    struck = (motion.hits + motion.bounces)[:, 1:] > 0
    # one that is hit and bounces may, all but never, end as it was
    assert torch.equal(changed, struck)
    assert (motion.hits.sum(-1) % 2 == 0).all()
    assert (motion.hits[:, 0] == 0).all()


def test_a_clip_with_too_many_collisions_stands_still_and_says_so():
    truth = trajectories(0, torch.arange(50), "678balls")
    start = (truth.position[:, 0], truth.velocity[:, 0], truth.radius, truth.mass)
    count = (truth.hits.sum(-1) // 2 + truth.bounces.sum(-1)).sum(1)
    most = int(count.median())
    cut = roll(*start, 51, BOX, most_events=most)
    assert cut.finished[count <= most].all()
    assert not cut.finished[count > most + 50].any()
    assert 0 < cut.finished.sum() < 50
    done = cut.finished
    assert torch.equal(cut.position[done], truth.position[done])
    for clip in (~done).nonzero().flatten().tolist():
        same = (cut.position[clip] == truth.position[clip]).all(-1).all(-1)  # [T]
        reached = int(same.sum())
        assert same[:reached].all()
        assert (cut.position[clip, reached:] == cut.position[clip, reached - 1]).all()
    none = roll(*start, 51, BOX, most_events=51 * 100)
    assert all(torch.equal(a, b) for a, b in zip(none, Motion(*truth[:5]), strict=True))


def test_the_limit_is_far_away():
    for kind in VARIANTS:
        truth = trajectories(7, torch.arange(2000), kind)
        assert truth.finished.all()
        assert (truth.hits.sum(-1) // 2 + truth.bounces.sum(-1)).sum(1).max() < 80  # of 164
