"""The three dynamics: tests of each, and what schemata have to do with them."""

from dataclasses import replace

import pytest
import torch

import scoff
from scoff.experiments import find_experiment, switching
from scoff.experiments.base import Finished
from scoff.experiments.dynamics import (
    BURN_IN,
    Config,
    DynamicsTask,
    evaluate,
    report,
    uncounted,
)
from scoff.experiments.films import schema_rows
from scoff.experiments.one_ball import (
    Use,
    agreement_table,
    count_use,
    describe_use,
    dynamics_colours,
    seeds_table,
)
from scoff.experiments.video import MODELS, make_model, video_options
from scoff.models.video import count_parameters
from scoff.training.errors import UsageError

CPU = torch.device("cpu")
SMALL = Config(hidden_size=8, features=8, frames=10, context=6, valid_clips=3, test_clips=18)


def test_every_preset_has_every_model():
    found = find_experiment("dynamics")
    for preset in found.presets:
        for model in MODELS:
            config = found.preset(preset, model)
            assert (config.object_files, config.schemata, config.frames) == (1, 3, 20)
            assert count_parameters(video_options(config)) > 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_schemata_that_stand_for_dynamics(monkeypatch, order):
    task = DynamicsTask(SMALL, CPU)
    clips = task.clips(torch.arange(6), "test")
    trace = scoff.SCOFF.trace
    chosen = torch.tensor(order)[clips.dynamics[:, :-1, None]]
    # before the burn-in is over, anything
    chosen[:, :BURN_IN] = torch.randint(3, chosen[:, :BURN_IN].shape)

    def told(self, x, hx):
        return trace(self, x, hx)._replace(schema=chosen)

    monkeypatch.setattr(scoff.SCOFF, "trace", told)
    use = describe_use([count_use(task.model.eval(), clips, 3, BURN_IN)])
    assert use["accuracy"] == 1
    assert use["information"] == pytest.approx(1)
    assert [use["match"][schema] for schema in order] == [0, 1, 2]


def test_where_nobody_that_is_updated_has_the_ball_nothing_is_told():
    counts = torch.tensor([[0, 5], [0, 0]])
    seldom = describe_use([Use(counts, counts, counts.sum(1))])
    never = describe_use([Use(0 * counts, counts, counts.sum(1))])
    assert (never["information"], never["accuracy"]) == (None, None)
    groups = {
        name: [Finished(name, SMALL, {"schemata": use}, [])]
        for name, use in (("seldom", seldom), ("never", never))
    }
    assert [row[1:3] for row in agreement_table(groups).rows][1] == [None, None]
    # a match that never occurs is none
    assert [row[1:] for row in seeds_table(groups).rows] == [
        [1.0, 1.0, "2, none"],
        [None, None, "none, none"],
    ]


@pytest.mark.parametrize(
    ("match", "counts", "colours"),
    [
        ((1, 0), [[0, 9], [9, 0]], [1, 0]),
        ((1, 2, 0), [[1, 9, 0], [0, 0, 9], [9, 0, 0]], [2, 0, 1]),
        ((1, -1, 0), [[0, 9], [1, 1], [9, 0]], [2, 0]),
        # one schema does it all, alone or among others
        ((0,), [[5, 4]], [0, 1]),
        ((0, 1), [[5, 4], [0, 0]], [0, 2]),
        # number 10 would have the colour of number 0
        ((0, 1, *[-1] * 8), [[5, 4], *[[0, 0]] * 9], [0, 11]),
    ],
)
def test_a_dynamics_has_the_number_of_its_schema_or_that_of_none(match, counts, colours):
    assert dynamics_colours(match, counts) == colours


@pytest.mark.parametrize("object_files", [1, 6])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_schema_that_agrees_looks_as_its_dynamics(monkeypatch, object_files, swapped):
    config = switching.Config(
        object_files=object_files, hidden_size=8 * object_files, features=8, frames=14, context=8
    )
    model = make_model(config).eval()
    clips = switching.example_clip(config)
    trace = scoff.SCOFF.trace
    true = clips.dynamics[:, config.stack - 1 : -1, None]

    def told(self, x, hx):
        real = trace(self, x, hx)
        return real._replace(schema=(1 - true if swapped else true).expand_as(real.schema))

    monkeypatch.setattr(scoff.SCOFF, "trace", told)
    use = describe_use([count_use(model, clips, 2, switching.BURN_IN)])
    (lane,) = switching.story(Finished("a", config, {"schemata": use}, []))
    assert lane.words == dict(
        enumerate(("vertical", "horizontal") if swapped else switching.DYNAMICS)
    )
    assert ("horizontal orange, vertical blue" in lane.legend) == swapped
    rows = schema_rows(model.trace(clips.frames[:, :-1]).layer, config.stack)
    assert len(rows) == object_files
    for row in rows:
        shown = [pair for pair in zip(row.values, lane.values, strict=True) if pair[0] is not None]
        assert {b for _, b in shown} == {0, 1}
        assert all(a == b for a, b in shown)


@pytest.mark.parametrize("sparse", [False, True])
def test_who_paints_the_ball_has_it_and_who_is_not_updated_does_nothing(monkeypatch, sparse):
    config = replace(SMALL, object_files=2, hidden_size=16)
    model = make_model(config).eval()
    clips = DynamicsTask(config, CPU).clips(torch.arange(6), "test")
    before, here = clips.identity[:, :-1, None] == 1, clips.identity[:, 1:, None] == 1
    # of each next frame the second paints the ball, and the first where the ball was before
    masks = torch.cat([before & ~here, here], 2).float()
    active = torch.ones(*masks.shape[:3], dtype=torch.bool)
    active[:3, :, 1] = not sparse
    true = clips.dynamics[:, :-1]
    schema = torch.stack([torch.zeros_like(true), true], -1)
    trace = model.trace(clips.frames[:, :-1])
    trace = trace._replace(
        decoded=trace.decoded._replace(masks=masks),
        layer=trace.layer._replace(schema=schema, active=active),
    )
    monkeypatch.setattr(model, "trace", lambda _: trace)
    counts = count_use(model, clips, 3, burn_in=0).by_holder
    told = true[3:] if sparse else true
    assert torch.equal(counts, torch.diag(torch.bincount(told.flatten(), minlength=3)))


@pytest.mark.parametrize("change", [{"frames": 6, "context": 3}, {"frames": 7, "stack": 7}])
def test_clips_of_which_nothing_counts_are_refused(change):
    with pytest.raises(UsageError, match="--frames: got"):
        replace(SMALL, **change)


def test_the_ball_is_grey():
    with pytest.raises(UsageError, match="--colour: got True, but one ball wants False"):
        replace(SMALL, colour=True)


@pytest.mark.parametrize(("stack", "expected"), [(1, 5), (3, 3), (6, 0), (9, 0)])
def test_the_same_frames_count_whatever_the_stack(stack, expected):
    assert uncounted(stack) == expected


@pytest.mark.parametrize("stack", [1, 3])
def test_only_frames_after_the_burn_in_are_counted(stack):
    config = replace(SMALL, stack=stack, test_clips=3)
    result = evaluate(config, make_model(config).eval(), CPU)
    steps = config.frames - (BURN_IN + 1)  # frames 6 to the last are predicted
    assert sum(map(sum, result["schemata"]["counts"])) == 3 * steps


@pytest.mark.parametrize("model", ["scoff", "gru"])
def test_evaluation_and_report_are_whole(model):
    config = replace(SMALL, model=model)
    torch.manual_seed(0)
    result = evaluate(config, make_model(config).eval(), CPU)
    own = [part["rollout"] for part in result["by_dynamics"]]
    assert len(own) == 3
    # all three are as many, so that the whole is the mean of them
    for key in ("nll", "cumulative"):
        mean = [sum(values) / 3 for values in zip(*(part[key] for part in own), strict=True)]
        assert mean == pytest.approx(result["rollout"][key])
    result |= {"parameters": 1, "steps": 1, "seconds": {"training": 1.0}}
    sections = report([Finished("a", config, result, [{"step": 1, "valid/nll": 0.5}])])
    titles = [section.title for section in sections]
    assert ("Schemata and dynamics" in titles) == (model == "scoff")
    curves = [f.title for f in next(s for s in sections if s.title == "Rollouts").figures]
    assert curves[0] == "Error of rollouts"
    table = next(s for s in sections if s.title == "Each dynamics").tables[0]
    assert [row[0] for row in table.rows][::2] == [
        "accelerates",
        "constant velocity",
        "random walk",
    ]
