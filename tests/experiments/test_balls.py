"""Bouncing balls: what is measured is what is said to be measured."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scoff
from scoff.experiments import balls as experiment
from scoff.experiments import find_experiment
from scoff.experiments.balls import BallsTask, Config, describe_emerged, evaluate, predict
from scoff.experiments.balls_report import group_variants, overview, story
from scoff.experiments.base import Finished
from scoff.experiments.binding import (
    BURN_IN,
    Choices,
    choice_table,
    describe_binding,
    describe_choices,
    events,
    look_inside,
)
from scoff.experiments.evaluate import load
from scoff.experiments.reproduce import expand, sections
from scoff.experiments.reproduce import finished as find_finished
from scoff.experiments.rollouts import (
    by_horizon,
    error_curve,
    f1_curve,
    pick_baseline,
    relative_curve,
    relative_errors,
    why_not_relative,
)
from scoff.experiments.video import MODELS, make_model
from scoff.experiments.video_measures import hidden_balls
from scoff.models.video import Decoded, Predictions, VideoState, VideoTrace
from scoff.pretrained import find
from scoff.training.errors import UsageError
from scoff.training.run import Run
from scoff.worlds.balls import VARIANTS, balls

CPU = torch.device("cpu")
SMALL = Config(
    hidden_size=16,
    features=8,
    frames=10,
    context=4,
    train_clips=7,
    valid_clips=3,
    test_clips=18,  # more than are tested at a time
)


def of(variant: str, **changes) -> Config:
    return replace(SMALL, variant=variant, colour=VARIANTS[variant].has_colours, **changes)


def test_every_preset_has_every_model_and_variant():
    found = find_experiment("balls")
    for preset in found.presets:
        for variant, kind in VARIANTS.items():
            for model in MODELS:
                config = found.preset(preset, model, variant=variant)
                assert (config.model, config.variant) == (model, variant)
                assert config.colour == kind.has_colours
                assert config.object_files >= max(kind.counts)
                assert 1 <= config.active <= config.object_files


def test_a_former_option_is_left_out_and_an_unknown_one_refused():
    read = find_experiment("balls").read_config
    assert read(vars(SMALL) | {"settle": 5}) == SMALL
    with pytest.raises(UsageError, match="sattle is no option of balls"):
        read(vars(SMALL) | {"sattle": 5})


def test_the_papers_hyper_parameters():
    for variant, files in (("4balls", 4), ("curtain", 4), ("678balls", 8), ("coloured678balls", 8)):
        config = find_experiment("balls").preset("paper", "scoff", variant=variant)
        assert (config.object_files, config.hidden_size) == (files, 100 * files)
        assert (config.schemata, config.lr, config.batch_size) == (4, 1e-4, 64)
        assert config.steps * config.batch_size == pytest.approx(100 * 50_000, rel=1e-4)
        cell = make_model(config).rnn.cells[0]
        assert cell.input_query.shape[:2] == (1, 64)  # heads, keys
        assert cell.input_value.shape[0] == 100
        assert cell.comm_query.shape[:2] == cell.comm_value.shape[:2] == (4, 32)
        assert (cell.input_dropout, cell.comm_dropout) == (0.1, 0.1)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="--variant: got 'five', wants one of 4balls"):
        find_experiment("balls").preset("quick", "scoff", variant="five")
    with pytest.raises(UsageError, match="--colour: got True, but 4balls wants False"):
        replace(SMALL, colour=True)
    with pytest.raises(UsageError, match="--frame-size: got 32, but 4balls wants 64"):
        replace(SMALL, frame_size=32)
    with pytest.raises(UsageError, match="--classes: got 2, but 4balls wants 0"):
        replace(SMALL, classes=2)
    with pytest.raises(UsageError, match="--frames: got 7, wants at least 8"):
        replace(SMALL, frames=7)


def test_of_the_shortest_clips_all_is_told():
    config = replace(SMALL, frames=8, test_clips=3)
    text = json.dumps(evaluate(config, make_model(config).eval(), CPU), allow_nan=False)
    assert "switches" in text


@pytest.mark.parametrize("variant", ["4balls", "curtain", "coloured678balls"])
def test_clips_are_those_of_the_world(monkeypatch, variant):
    monkeypatch.setattr(experiment, "SIMULATED_AT_ONCE", 3)
    task = BallsTask(of(variant), CPU)
    index = torch.tensor([5, 0, 6, 5])
    (frames,) = task.batch(index)
    assert torch.equal(frames, balls(0, index, variant, SMALL.frames).frames)
    for split in ("valid", "test"):
        index = torch.tensor([2, 1])
        expected = balls(0, index, variant, SMALL.frames, split)
        assert torch.equal(task.clips(index, split).identity, expected.identity)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12))
def test_training_clips_are_cut_and_others_are_not(length):
    task = BallsTask(replace(SMALL, train_frames=length), CPU)
    index = torch.tensor([2, 0])
    (pieces,) = task.batch(index)
    whole = balls(0, index, "4balls", SMALL.frames).frames
    length = min(length, SMALL.frames)
    starts = range(0, SMALL.frames - length + 1, length)
    expected = [clip[start : start + length] for clip in whole for start in starts]
    assert torch.equal(pieces, torch.stack(expected))
    assert task.clips(index, "valid").frames.shape[1] == SMALL.frames


def test_a_piece_has_a_frame_to_predict():
    with pytest.raises(UsageError, match="--train-frames: got 3, wants at least 4"):
        replace(SMALL, train_frames=3, free_frames=2)
    with pytest.raises(UsageError, match="--cell: got lstm, wants gru with --persistence"):
        replace(SMALL, cell="lstm", information=1.0)
    with pytest.raises(UsageError, match="--persistence-lag: got 4, wants less than 4"):
        replace(SMALL, train_frames=5, persistence=1.0, persistence_lag=4)


class Oracle(torch.nn.Module):
    """Tells what it is given to tell."""

    def __init__(self, told):
        super().__init__()
        self.options, self.told = make_model(SMALL).options, told

    def forward(self, _frames, targets, free=0):  # noqa: ARG002
        told = self.told[:, 1:]
        errors = (told - targets).abs().mean((2, 3, 4))
        return Predictions(told.logit(1e-6), errors, VideoState())


@pytest.mark.parametrize("variant", ["4balls", "678balls", "curtain", "coloured4balls"])
def test_balls_are_found_where_they_are(variant):
    config = of(variant)
    clips = BallsTask(config, CPU).clips(torch.arange(12), "test")
    true = predict(config, Oracle(clips.frames), clips)
    assert true.rollout.shape == (12, 6)
    assert true.rollout.max() == 0
    assert true.squared.max() < 1e-9
    assert true.found.extra.sum() == 0
    assert true.found.missed.sum() <= 0.02 * true.found.hits.sum()
    found = true.found.distance[true.found.distance.isfinite()]
    assert found.mean() < 0.3
    # a picture that is two pixels to the right of the truth
    moved = predict(config, Oracle(clips.frames.roll(2, -1)), clips)
    differ = clips.frames.roll(2, -1) - clips.frames
    expected = differ[:, config.context :].square().mean((2, 3, 4))
    torch.testing.assert_close(moved.squared, expected, rtol=1e-4, atol=1e-7)
    off = moved.found.distance[moved.found.distance.isfinite()]
    assert off.median() == pytest.approx(2, abs=0.3)
    # what the last given frame would be is the same whatever is predicted
    assert torch.equal(moved.still.hits, true.still.hits)
    assert true.still.distance[:, -1].nan_to_num(posinf=9).mean() > 1
    stays = clips.frames.clone()
    stays[:, config.context :] = stays[:, config.context - 1 : config.context]
    for found, told in zip(predict(config, Oracle(stays), clips).found, true.still, strict=True):
        torch.testing.assert_close(found, told, rtol=0, atol=1e-3)


def test_balls_that_come_out_from_behind_the_curtain():
    config = of("curtain", frames=24, test_clips=50)
    clips = BallsTask(config, CPU).clips(torch.arange(38, 50), "test")
    told = predict(config, Oracle(clips.frames), clips)
    hidden = hidden_balls(clips.identity, clips.radius * 6.4)
    expected = torch.zeros_like(told.emerged)
    for clip, step, ball in itertools.product(*map(range, expected.shape)):
        frame = config.context + step
        was_hidden = hidden[clip, config.context - 1 : frame, ball].any()
        expected[clip, step, ball] = was_hidden & ~hidden[clip, frame, ball]
    assert torch.equal(told.emerged, expected)
    assert expected.sum() > 20
    assert expected[:, 0].any()  # hidden in the last given frame
    found = describe_emerged(told.found, told.emerged)
    assert sum(found["balls"]) == expected.sum()
    assert all(value is None or value > 0.9 for value in found["found"])
    nothing = predict(config, Oracle(torch.zeros_like(clips.frames)), clips)
    lost = describe_emerged(nothing.found, nothing.emerged)
    assert all(value in (0, None) for value in lost["found"])
    assert lost["position"] == [None] * len(lost["position"])


class Bound(torch.nn.Module):
    """Object file k + 1 has ball k in the frame that comes, and chooses its schema by its fate."""

    def __init__(self, clips, schema, shuffle=False):
        super().__init__()
        self.options = make_model(replace(SMALL, object_files=5, hidden_size=20)).options
        self.rnn = scoff.SCOFF(3, 20, num_object_files=5, num_schemata=4)
        slot = torch.arange(5)[:, None, None]
        masks = (clips.identity[:, 1:, None] == slot).double()
        if shuffle:  # at every other frame
            masks[:, ::2] = masks[:, ::2].roll(1, 2)
        attention = (clips.identity[:, :-1, None] == slot).double()  # paid to what is read
        self.trace_of = VideoTrace(Decoded(masks, masks, None), attention, self.layer(schema))

    def layer(self, schema):
        everything = torch.ones_like(schema, dtype=torch.bool)
        empty = torch.zeros(0)
        return scoff.Trace(*(empty for _ in scoff.Trace._fields))._replace(
            schema=schema, active=everything
        )

    def trace(self, _frames):
        return self.trace_of


def fates(clips):
    """The schemata of five object files, of which those of balls are numbers of events"""
    event = events(clips)[:, 1:].clamp(min=0)
    return torch.cat([torch.zeros_like(event[..., :1]), event], -1)


def test_object_files_that_bind_are_told_from_those_that_do_not():
    clips = balls(0, torch.arange(6), "4balls", frames=24)
    found, choices = look_inside(Bound(clips, fates(clips)), clips)
    told = describe_binding([found, found])
    assert told["mask_ari"] == told["mask_ari_clip"] == 1
    assert told["switches"] == 0
    assert told["owners"] == told["balls"] == 4
    assert told["attention_ari"] == told["attention_ari_clip"] == 1
    moving, _ = look_inside(Bound(clips, fates(clips), shuffle=True), clips)
    told = describe_binding([moving])
    assert told["mask_ari"] == 1
    assert told["mask_ari_clip"] < 0.7
    assert told["switches"] == 1
    counted = (24 - 1 - BURN_IN) * 6
    assert choices.overall.sum() == 5 * counted
    assert choices.by_event.sum() == 4 * counted


def test_schemata_that_tell_events_and_those_that_do_not():
    clips = balls(0, torch.arange(10), "curtain", frames=24)
    schema = torch.cat([fates(clips), torch.zeros_like(fates(clips)[..., :1])], -1)
    _, choices = look_inside(Bound(clips, schema), clips)
    told = experiment.describe_choices([choices, choices])
    assert told["event_bits"] == pytest.approx(told["event_bits_at_most"], rel=1e-6)
    assert all(sum(counts) == counts[n] for n, counts in enumerate(told["by_event"]))
    assert sum(told["by_event"][3]) > 50  # occluded
    _, one = look_inside(Bound(clips, torch.full_like(schema, 2)), clips)
    told = experiment.describe_choices([one])
    assert told["shares"] == [0, 0, 1, 0]
    assert (told["bits"], told["in_use"], told["event_bits"]) == (0, 1, 0)


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        ("scoff", "curtain"),
        ("gru-matched", "4balls"),
        ("rims", "coloured4balls"),
        ("rmc", "4balls"),
    ],
)
def test_evaluation_is_whole(model, variant):
    config = of(variant, model=model, hidden_size=32, frames=8)
    torch.manual_seed(1)
    result = evaluate(config, make_model(config).eval(), CPU)
    steps = config.frames - config.context
    measures = {"nll", "cumulative", "squared", "squared_cumulative", "f1", "position"}
    assert {key: len(told) for key, told in result["rollout"].items()} == dict.fromkeys(
        measures, steps
    )
    assert ("schemata" in result) == (model == "scoff")
    assert ("binding" in result) == (model != "gru-matched")
    assert ("emerged" in result) == ("emerged" in result["still"]) == (variant == "curtain")
    assert ("mean_picture" in result) == (variant != "coloured4balls")
    assert ("attention_ari" in result.get("binding", {})) == (model in ("scoff", "rims"))
    if "mean_picture" in result:  # not better than what knows how often each pixel is lit
        assert 0.05 < result["mean_picture"] < min(result["rollout"]["nll"])


def test_marks_over_time_are_above_the_choice_that_brings_about_what_they_mark():
    collisions, _ = story(Finished("a", of("4balls", frames=40), {}, []))
    hits = balls(0, torch.arange(1), "4balls", 40, "test").hits[0].any(-1)
    assert hits.any()
    assert [value == 0 for value in collisions.values] == [*hits[1:].tolist(), False]


def test_the_mean_picture_is_that_of_what_is_to_be_predicted():
    task = BallsTask(of("4balls", test_clips=20), CPU)
    told = experiment.measure(task, make_model(task.config).eval())
    lit = task.clips(torch.arange(20), "test").frames[:, task.config.context :].double()
    mean = lit.mean((0, 1))
    assert told["mean_picture_squared"] == pytest.approx((mean - lit).square().mean().item())
    cost = torch.nn.functional.binary_cross_entropy(mean.expand_as(lit), lit)
    assert told["mean_picture"] == pytest.approx(cost.item())


def test_schemata_in_use():
    for counts, in_use in (([995, 5], 1), ([989, 11], 2)):
        told = describe_choices([Choices(torch.tensor(counts), None)])
        assert told["in_use"] == in_use


def finished(model, seed, errors, **changes):
    config = replace(of(changes.pop("variant", "4balls")), model=model, seed=seed, **changes)
    rollout = dict.fromkeys(("nll", "cumulative", "squared", "squared_cumulative", "f1"), errors)
    return Finished(f"{model}-{seed}", config, {"rollout": rollout}, [])


def test_a_bounded_error_is_not_compared_with_an_unbounded_one():
    runs = [finished("scoff", 0, [1.0], doubt=0.01), finished("gru", 0, [1.0])]
    with pytest.raises(UsageError, match="cannot be compared: --doubt differs"):
        group_variants(runs)


def test_where_no_balls_file_is_updated_nothing_is_told_of_events():
    overall, by_event = torch.tensor([3, 1]), torch.zeros(4, 2, dtype=torch.int64)
    told = describe_choices([Choices(overall, by_event)])
    assert (told["event_bits"], told["event_bits_at_most"]) == (None, None)
    groups = {"SCOFF": [Finished("a", SMALL, {"schemata": told}, [])]}
    assert choice_table(groups).rows[0][-1] is None


def test_errors_are_divided_by_those_of_the_gru_of_the_same_seed():
    groups = {
        "SCOFF": [finished("scoff", 0, [1.0, 3.0]), finished("scoff", 5, [1.0, 3.0])],
        "GRU": [finished("gru", 1, [8.0, 8.0]), finished("gru", 0, [2.0, 4.0])],
    }
    relative = relative_errors(groups, "nll", "GRU")
    assert relative["SCOFF"] == [[0.5, 1 / 5], [0.75, 3 / 6]]
    assert relative["GRU"] == [[1, 1], [1, 1]]
    assert relative_errors({"SCOFF": groups["SCOFF"]}, "nll", "GRU") == {}


def test_without_a_gru_errors_are_divided_by_those_of_the_smaller_one():
    small = MODELS["gru-matched"]
    groups = {
        "SCOFF": [finished("scoff", 0, [1.0, 3.0])],
        small: [finished("gru-matched", 0, [2.0, 4.0])],
    }
    (figure,) = relative_curve(groups, context=4)
    assert figure.title == f"Error relative to {small}"
    assert "of the GRU with as many parameters as SCOFF" in figure.caption
    wide = {**groups, "GRU": [finished("gru", 0, [9.0, 9.0])]}
    (figure,) = relative_curve(wide, context=4)
    assert figure.title == "Error relative to GRU"
    assert "of the GRU of the same width" in figure.caption
    assert why_not_relative(groups) == why_not_relative(wide) == ""
    alone = {"SCOFF": groups["SCOFF"]}
    assert relative_curve(alone, context=4) == []
    assert why_not_relative(alone).endswith("for there is none among these runs.")
    two = {**alone, "GRU (lr 1)": wide["GRU"], "GRU (lr 2)": wide["GRU"]}
    assert why_not_relative(two).endswith("for there are several kinds of it.")
    # one for all worlds
    assert pick_baseline(wide, wide) == "GRU"
    assert pick_baseline(wide, groups) == small


def test_balls_that_were_not_looked_for_have_no_curve():
    found = {"rollout": {"f1": [1.0, 0.5]}}
    known = SimpleNamespace(evaluation=found)
    former = SimpleNamespace(evaluation={"rollout": {"f1": [None, None]}})
    figure = f1_curve({"SCOFF": [known, former], "GRU": [former]}, context=4, reach=5)
    assert "SCOFF" in figure.svg
    assert "GRU" not in figure.svg


def test_a_gru_that_does_not_match_is_refused_when_it_is_new_only():
    config = replace(SMALL, model="gru-matched", map_size=64)
    task = BallsTask(config, CPU)
    with pytest.raises(UsageError, match="--model: got gru-matched, but the nearest GRU has"):
        task.check_new()
    BallsTask(replace(SMALL, model="gru-matched"), CPU).check_new()


def test_errors_at_every_horizon():
    groups = {
        "SCOFF": [finished("scoff", 0, [1.0, 3.0]), finished("scoff", 1, [2.0, 5.0])],
        "GRU": [finished("gru", 0, [2.0, 4.0])],
    }
    scoff_line, gru_line = by_horizon(groups, "squared")
    assert (scoff_line.label, gru_line.label) == ("SCOFF", "GRU")
    assert list(scoff_line.x) == [1, 2]
    assert (scoff_line.y, scoff_line.low, scoff_line.high) == ([1.5, 4], [1, 3], [2, 5])
    assert error_curve(groups, 4).labels == ("SCOFF", "GRU")
    assert error_curve(groups, 4, mean_picture=0.3).labels == ("SCOFF", "GRU", "mean picture")


def test_what_variants_differ_in_is_named_where_they_are_side_by_side():
    def notes(**changes):
        runs = [
            finished("scoff", 0, [1.0, 3.0]),
            finished("gru", 0, [2.0, 4.0]),
            finished("scoff", 0, [1.0, 3.0], variant="curtain", **changes),
        ]
        return [table.note for table in overview(group_variants(runs)).tables]

    assert notes() == ["", "", ""]
    assert notes(object_files=8, active=5) == ["", "", ""]
    (note, *others) = notes(frames=11, context=5, test_clips=2000)
    assert note == (
        "Compare within a variant only, for not all were run alike: frames 10 (4balls), 11 "
        "(curtain); test-clips 18 (4balls), 2,000 (curtain); context 4 (4balls), 5 (curtain)."
    )
    assert others == [note, note]
    assert "steps" in notes(steps=7)[0]


@pytest.mark.gpu
def test_training_clips_from_a_cuda_graph():
    device = torch.device("cuda")
    for variant in ("678balls", "curtain", "coloured4balls"):
        task = BallsTask(of(variant), device)
        index = torch.tensor([3, 1], device=device)
        task.batch(index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (frames,) = task.batch(index)
        index.copy_(torch.tensor([0, 5]))
        graph.replay()
        expected = balls(0, torch.tensor([0, 5]), variant, SMALL.frames).frames
        assert math.isclose((frames.cpu() - expected).abs().max().item(), 0, abs_tol=1e-6)


@pytest.mark.parametrize("name", ["4balls", "4balls-further"])
def test_the_trained_models_in_the_package_have_an_object_file_for_each_ball(name):
    run = Run.open(find(name) / "4balls-scoff-0")
    _, config, model = load(run, CPU)
    found = evaluate(replace(config, test_clips=4, valid_clips=4), model, CPU)
    recorded = run.read_evaluation()  # of 200 clips
    assert found["binding"]["mask_ari_clip"] > 0.97
    assert found["binding"]["owners"] > 3.9
    assert found["next_frame"] == pytest.approx(recorded["next_frame"], rel=0.2)


def test_the_report_of_the_trained_models_compares_them_with_each_other():
    found = sections(find_finished(expand([find("4balls")])))
    titles = [figure.title for figure in found[0].figures]
    assert titles[:5] == [
        "Error of rollouts",
        "Error relative to GRU, as many parameters as SCOFF",
        "Squared error of rollouts",
        "Squared error relative to GRU, as many parameters as SCOFF",
        "Balls found in rollouts",
    ]
