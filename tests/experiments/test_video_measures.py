"""Measures of video models, against cases made by hand and plain implementations."""

import math
from itertools import combinations, permutations

import pytest
import torch

from scoff.experiments.blobs import (
    Blobs,
    Matches,
    f1,
    find_blobs,
    match_blobs,
    position_error,
    true_centres,
)
from scoff.experiments.matching import assign
from scoff.experiments.measures import entropy, joint_counts
from scoff.experiments.video_measures import (
    COLLISION,
    FREE,
    NOTHING,
    OCCLUDED,
    WALL,
    adjusted_rand,
    agreement,
    ball_events,
    distinct_owners,
    foreground_ari,
    hidden_balls,
    horizon_errors,
    identity_switches,
    last_owners,
    owners,
    schema_by_event,
    schema_use,
    steps_since,
    switch_errors,
    to_pixels,
)
from scoff.worlds.balls import BOX, PIXELS, balls
from scoff.worlds.dynamics import switching_dynamics

# --- assignment


def best_sum(table):
    """By trying all"""
    rows, columns = len(table), len(table[0])
    if rows > columns:
        return best_sum([list(row) for row in zip(*table, strict=True)])
    return max(
        sum(table[row][column] for row, column in enumerate(choice))
        for choice in permutations(range(columns), rows)
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 6), (6, 2), (5, 5), (4, 7), (1, 4)])
def test_assignment_is_the_best_of_all(shape):
    tables = torch.randn(3, 4, *shape, dtype=torch.float64)
    match = assign(tables)
    assert match.shape == (3, 4, shape[0])
    for table, columns in zip(tables.flatten(0, 1), match.flatten(0, 1), strict=True):
        pairs = [(row, column) for row, column in enumerate(columns.tolist()) if column >= 0]
        assert len(pairs) == min(shape) == len({column for _, column in pairs})
        total = sum(table[pair].item() for pair in pairs)
        assert total == pytest.approx(best_sum(table.tolist()))


def test_assignment_is_not_greedy():
    assert assign(torch.tensor([[10, 9], [9, 0]])).tolist() == [1, 0]


def test_assignment_of_whole_numbers_and_many_columns():
    table = torch.zeros(2, 40, dtype=torch.int64)
    table[0, 33], table[1, 33], table[1, 2] = 5, 9, 3
    assert assign(table)[1] == 33  # 9 alone is more than 5 + 3
    table[0, 33] = 7
    assert assign(table).tolist() == [33, 2]
    with pytest.raises(ValueError, match="value: got 13 by 14, wants at most 12"):
        assign(torch.zeros(13, 14))


# --- schemata and dynamics


def information_by_definition(a, b):
    n = len(a)

    def share(*values):
        return sum(all(x == y for x, y in zip(values, each, strict=True)) for each in pairs) / n

    pairs = list(zip(a, b, strict=True))
    of_a, of_b = {x: a.count(x) / n for x in set(a)}, {y: b.count(y) / n for y in set(b)}
    both = {pair: share(*pair) for pair in set(pairs)}
    mutual = sum(p * math.log(p / (of_a[x] * of_b[y])) for (x, y), p in both.items())
    mean = sum(-p * math.log(p) for p in (*of_a.values(), *of_b.values())) / 2
    return mutual / mean


def test_agreement_against_its_definition():
    for seed in range(5):
        torch.manual_seed(seed)
        true = torch.randint(3, (200,))
        chosen = torch.where(torch.rand(200) < 0.6, true, torch.randint(5, (200,)))
        found = agreement(joint_counts(chosen, true, 5, 3))
        expected = information_by_definition(chosen.tolist(), true.tolist())
        assert found.information == pytest.approx(expected)
        right = max(
            sum((chosen == schema).logical_and(true == name).sum().item() for name, schema in pairs)
            for pairs in (list(enumerate(p)) for p in permutations(range(5), 3))
        )
        assert found.accuracy == pytest.approx(right / 200)


def test_agreement_by_hand():
    # schema 2 is dynamics 0, schema 0 is dynamics 1, schema 1 is never chosen
    perfect = agreement(torch.tensor([[0, 30], [0, 0], [50, 0]]))
    assert perfect == (pytest.approx(1), 1.0, (1, perfect.match[1], 0))
    assert perfect.match[1] == NOTHING
    # one schema for both: nothing is told, and half is right by chance
    collapsed = agreement(torch.tensor([[40, 40], [0, 0]]))
    assert (collapsed.information, collapsed.accuracy) == (0.0, 0.5)
    # two schemata for one dynamics are not one-to-one
    split = agreement(torch.tensor([[25, 0], [25, 0], [0, 50]]))
    assert split.accuracy == 0.75
    assert split.information == pytest.approx(1 / 1.25)
    assert agreement(torch.tensor([[7]])).information == 1
    nothing = agreement(torch.zeros(2, 3, dtype=torch.int64))
    assert all(map(math.isnan, nothing[:2]))


def test_errors_after_a_switch():
    dynamics = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]])
    errors = torch.ones(2, 8)
    errors[:, 0] = 99  # before the burn-in
    errors[:, 2] = 9  # before the switch
    errors[0, 3], errors[1, 5] = 4, 6
    errors[0, 4], errors[1, 6] = 2, 3
    found = switch_errors(errors, dynamics, burn_in=1, settle=2)
    assert found.after.tolist() == [5, 2.5]
    assert found.steady == 1
    assert found.ratio == 5


def test_first_frame_after_a_switch_is_the_first_that_moves_anew():
    """In the world itself: where the ball is seen to go another way for the first time."""
    clips = switching_dynamics(0, torch.arange(6))
    moved = clips.position.diff(dim=1).abs()  # from frame t to t + 1
    is_vertical = moved[..., 1] > moved[..., 0]
    torch.testing.assert_close(is_vertical.long(), clips.dynamics[:, :-1])
    errors = torch.zeros(6, 50)  # of frames 1 to 50, by the dynamics of frames 0 to 49
    errors[:, 1:] = (is_vertical[:, 1:] != is_vertical[:, :-1]).float()
    found = switch_errors(errors, clips.dynamics[:, :-1], settle=3)
    assert found.after.tolist() == [1, 0, 0]
    assert found.steady == 0


def test_steps_since():
    happened = torch.tensor([[False, True, False, False, True]])
    since = steps_since(happened)
    assert since[0, 1:].tolist() == [0, 1, 2, 0]
    assert since[0, 0] > 1000


def test_horizon_errors():
    found = horizon_errors(torch.tensor([[1.0, 2.0, 6.0], [3.0, 4.0, 0.0]]))
    assert found.each.tolist() == [2, 3, 3]
    assert found.cumulative.tolist() == [2, 2.5, pytest.approx(8 / 3)]


# --- blobs


@pytest.mark.parametrize(
    ("variant", "radius", "most"), [("4balls", 0.8, 8), ("678balls", 0.8, 12), ("curtain", 1.2, 6)]
)
def test_balls_are_found_where_they_are(variant, radius, most):
    clips = balls(3, torch.arange(12), variant, frames=20)
    number = clips.position.shape[2]
    pixels = radius * PIXELS / BOX
    found = find_blobs(clips.frames[:, :, 0], pixels, most)
    # less than half of a ball may be too little to be told
    half = true_centres(clips.identity, number, least=int(math.pi * pixels**2 / 2))
    true = true_centres(clips.identity, number)
    matches = match_blobs(found, true, reach=pixels, optional=~half.is_there)
    assert f1(matches).mean() > 0.99
    assert position_error(matches).mean() < 0.1
    assert matches.hits.sum() > 0.6 * true.is_there.sum()


def test_touching_balls_are_two():
    picture = torch.zeros(64, 64)
    at = torch.arange(64) + 0.5
    for x, y in ((20.3, 30.1), (30.5, 31.0)):
        picture[(at[None] - x) ** 2 + (at[:, None] - y) ** 2 < 5.1**2] = 1
    found = find_blobs(picture, 5.1, 5)
    assert found.is_there.tolist() == [True, True, False, False, False]
    centres = sorted(found.centre[:2].tolist())
    assert centres == [pytest.approx([20.3, 30.1], abs=0.5), pytest.approx([30.5, 31], abs=0.5)]


def test_blobs_need_light():
    nothing = find_blobs(torch.zeros(2, 3, 32, 32), 5.0, 4)
    assert nothing.centre.shape == (2, 3, 4, 2)
    assert not nothing.is_there.any()
    assert nothing.centre.isfinite().all()
    # neither an even glow nor the mean picture of a model that gave up
    assert not find_blobs(torch.full((64, 64), 0.1), 5.0, 4).is_there.any()
    mean_picture = balls(0, torch.arange(200), frames=1).frames.mean((0, 1))[0]
    assert not find_blobs(mean_picture, 5.12, 4).is_there.any()


def test_blobs_of_a_blurred_picture():
    clips = balls(5, torch.arange(20), "4balls", frames=1)
    blurred = torch.nn.functional.avg_pool2d(clips.frames[:, 0], 3, 1, 1)[:, 0]
    matches = match_blobs(find_blobs(blurred, 5.12, 8), true_centres(clips.identity[:, 0], 4), 5.0)
    assert f1(matches) > 0.99


def test_true_centres():
    clips = balls(0, torch.arange(5), "4balls", frames=3)
    true = true_centres(clips.identity, 4)
    assert true.is_there.all()
    torch.testing.assert_close(true.centre, clips.position * (PIXELS / BOX), atol=0.15, rtol=0)
    one = torch.zeros(8, 8, dtype=torch.uint8)
    one[2, 5:7] = 2
    found = true_centres(one, 3, least=2)
    assert found.is_there.tolist() == [False, True, False]
    assert found.centre[1].tolist() == [6, 2.5]


def test_matching_blobs_by_hand():
    inf = math.inf

    def spots(*places):
        return Blobs(torch.tensor(places), torch.tensor([x < 90 for x, _ in places]))

    found = spots((11.0, 10.0), (30.0, 33.0), (60.0, 60.0), (99.0, 99.0))
    true = spots((10.0, 10.0), (30.0, 30.0), (50.0, 50.0), (99.0, 99.0))
    matches = match_blobs(found, true, reach=4.0)
    assert matches.distance.tolist() == [1, 3, inf, inf]
    assert [int(x) for x in matches[1:]] == [2, 1, 1]
    together = Matches(*(part[None] for part in matches))
    assert f1(together) == pytest.approx(4 / 6)
    assert position_error(together) == 2
    # both balls get one, though the nearest pair is another
    found, true = spots((13.0, 0.0), (17.0, 0.0)), spots((10.0, 0.0), (14.0, 0.0))
    assert match_blobs(found, true, reach=4.0).distance.tolist() == [3, 3]
    assert match_blobs(found, true, reach=2.0).distance.tolist() == [inf, 1]


def test_optional_balls_are_neither_hit_nor_missed():
    true = Blobs(torch.tensor([[10.0, 0.0], [14.0, 0.0]]), torch.tensor([True, True]))
    both = Blobs(torch.tensor([[10.0, 0.0], [14.0, 0.0]]), torch.tensor([True, True]))
    one = Blobs(torch.tensor([[13.0, 0.0]]), torch.tensor([True]))
    optional = torch.tensor([False, True])
    assert [int(x) for x in match_blobs(both, true, 5.0, optional)[1:]] == [1, 0, 0]
    # a ball that counts has precedence over a nearer one that does not
    assert [int(x) for x in match_blobs(one, true, 5.0, optional)[1:]] == [1, 0, 0]
    assert [int(x) for x in match_blobs(one, true, 2.0, optional)[1:]] == [0, 1, 0]


def test_f1_of_nothing_found_is_zero():
    nobody = Blobs(torch.zeros(3, 2, 2), torch.zeros(3, 2, dtype=torch.bool))
    someone = Blobs(torch.zeros(3, 2, 2), torch.ones(3, 2, dtype=torch.bool))
    assert f1(match_blobs(nobody, someone, 5.0)) == 0


# --- binding


def rand_by_pairs(a, b):
    """Adjusted Rand index from its definition by pairs of things"""
    pairs = list(combinations(range(len(a)), 2))
    same_a, same_b = ([x[i] == x[j] for i, j in pairs] for x in (a, b))
    both = sum(p and q for p, q in zip(same_a, same_b, strict=True))
    expected = sum(same_a) * sum(same_b) / len(pairs)
    return (both - expected) / ((sum(same_a) + sum(same_b)) / 2 - expected)


def test_adjusted_rand_against_its_definition():
    a, b = torch.randint(3, (4, 30)), torch.randint(4, (4, 30))
    a[0, :20] = b[0, :20].clamp(max=2)
    where = torch.rand(4, 30) < 0.8
    found = adjusted_rand(a, b, 3, 4, where)
    for x, y, keep, value in zip(a, b, where, found, strict=True):
        assert value.item() == pytest.approx(rand_by_pairs(x[keep].tolist(), y[keep].tolist()))


def test_adjusted_rand_of_the_same_groups_by_other_names():
    a = torch.tensor([0, 0, 1, 1, 2])
    assert adjusted_rand(a, (a + 1) % 3, 3, 3, torch.ones(5, dtype=torch.bool)) == 1
    everything = torch.ones(5, dtype=torch.bool)
    assert adjusted_rand(a * 0, a * 0, 3, 3, everything) == 1
    assert adjusted_rand(a * 0, a, 3, 3, everything) == 0
    assert adjusted_rand(a, a, 3, 3, ~everything).isnan()


def test_foreground_ari_of_balls():
    clips = balls(0, torch.arange(2), "4balls", frames=5)
    truth = clips.identity
    own = torch.stack([truth == ball for ball in (3, 1, 4, 2)], 2).float()
    own[:, :, 0] += 0.1  # the background is anybody's
    assert (foreground_ari(own, truth, 4) == 1).all()
    assert (foreground_ari(own, truth, 4, whole_clip=True) == 1).all()
    swapped = own.clone()
    swapped[:, 2:] = own[:, 2:].roll(1, 2)  # object files change balls on the way
    assert (foreground_ari(swapped, truth, 4) == 1).all()
    assert (foreground_ari(swapped, truth, 4, whole_clip=True) < 0.6).all()
    alike = foreground_ari(torch.rand_like(own), truth, 4)
    assert alike.abs().max() < 0.05


def test_attention_in_pixels():
    attention = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert to_pixels(attention, 4).tolist() == [
        [1, 1, 2, 2],
        [1, 1, 2, 2],
        [3, 3, 4, 4],
        [3, 3, 4, 4],
    ]


def test_owners():
    identity = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    identity[..., 0, :2], identity[..., 3, :] = 1, 3
    weights = torch.zeros(1, 1, 2, 4, 4)
    weights[..., 0, :, :] = 0.4
    weights[..., 1, 0, 0], weights[..., 1, 0, 1] = 0.9, 0.1  # more than 0.4 on average
    owner = owners(weights, identity, 3)
    assert owner.tolist() == [[[1, NOTHING, 0]]]
    assert distinct_owners(owner, 2).tolist() == [[2]]
    assert distinct_owners(torch.tensor([[[1, 1, 1], [-1, -1, 0]]]), 2).tolist() == [[1, 1]]


def test_identity_switches():
    a, b, c = [0, 0, 0, 1, 1], [2, -1, -1, 2, 3], [-1, -1, 4, 4, 4]
    owner = torch.tensor([a, b, c]).T[None]
    # a: one of four; b: none of one, over the gap, then one; c: none of two
    assert identity_switches(owner).tolist() == [pytest.approx(2 / 8)]
    assert last_owners(owner)[0].T.tolist() == [a, [2, 2, 2, 2, 3], c]


# --- schemata


def test_schema_use():
    schema = torch.tensor([[[0, 1], [1, 1]]])
    active = torch.tensor([[[True, False], [True, True]]])
    counts = schema_use(schema, active, 4)
    assert counts.tolist() == [1, 2, 0, 0]
    assert entropy(counts) == pytest.approx(entropy(torch.tensor([1, 2])))


def test_events_of_balls():
    zero, one = torch.tensor(0), torch.tensor(1)
    yes, no = torch.tensor(True), torch.tensor(False)
    assert ball_events(zero, zero, no, yes) == FREE
    assert ball_events(one, zero, no, yes) == COLLISION
    assert ball_events(one, one, yes, yes) == COLLISION
    assert ball_events(zero, one, yes, yes) == WALL
    assert ball_events(zero, zero, yes, yes) == OCCLUDED
    assert ball_events(zero, zero, yes, no) == NOTHING


def test_schema_by_event():
    schema = torch.tensor([[[2, 0], [1, 1]]])  # of two object files, at two steps
    owner = torch.tensor([[[1, 0, NOTHING], [0, 0, 1]]])  # of three balls
    event = torch.tensor([[[FREE, COLLISION, FREE], [FREE, NOTHING, WALL]]])
    active = torch.ones_like(schema, dtype=torch.bool)
    counts = schema_by_event(schema, active, owner, event, 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]
    active[0, 1, 0] = False  # what it chose, it did not do
    counts = schema_by_event(schema, active, owner, event, 3)
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_events_of_the_curtain_world():
    clips = balls(0, torch.arange(30), "curtain", frames=30)
    radius = clips.radius * (PIXELS / BOX)
    hidden = hidden_balls(clips.identity, radius)
    event = ball_events(clips.hits, clips.bounces, hidden, (radius > 0)[:, None])
    assert set(event.unique().tolist()) == {FREE, COLLISION, WALL, OCCLUDED}
    # a ball whose centre is well behind the curtain is hidden, one that is well outside is not
    corner = clips.curtain[:, None, None] + 14
    inside = (clips.position * (PIXELS / BOX) - corner).abs().amax(-1)
    assert hidden[inside < 10].all()
    assert not hidden[inside > 22].any()


def test_measures_are_exact_under_autocast():
    clips = balls(0, torch.arange(3), "4balls", frames=3)
    masks = torch.rand(3, 3, 5, 64, 64, generator=torch.Generator().manual_seed(0))

    def measure():
        found = find_blobs(clips.frames[:, :, 0], 5.12, 6)
        return *found, *true_centres(clips.identity, 4), owners(masks, clips.identity, 4)

    expected = measure()
    with torch.autocast("cpu", torch.bfloat16):
        for got, wanted in zip(measure(), expected, strict=True):
            assert torch.equal(got, wanted)
