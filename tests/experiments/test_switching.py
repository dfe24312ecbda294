"""The switching experiment: what is measured is what is said to be measured."""

import math
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

import scoff
from scoff.cli import main
from scoff.experiments import find_experiment
from scoff.experiments import switching as experiment
from scoff.experiments.base import Finished
from scoff.experiments.evaluate import load
from scoff.experiments.one_ball import count_use, describe_use, least_errors
from scoff.experiments.switching import (
    BURN_IN,
    DYNAMICS,
    Config,
    SwitchingTask,
    added_error,
    evaluate,
    predict,
    switch_error,
    switch_table,
)
from scoff.experiments.video import MODELS, make_model, next_frame_errors, video_options
from scoff.experiments.video_measures import switch_errors
from scoff.models.video import Predictions, VideoOptions, VideoState, count_parameters
from scoff.pretrained import find
from scoff.training.errors import UsageError
from scoff.training.run import Run
from scoff.worlds.dynamics import BULBS, stack_frames, switching_dynamics

CPU = torch.device("cpu")
SMALL = Config(
    hidden_size=12,
    features=8,
    frames=14,
    stack=3,
    context=8,
    valid_clips=3,
    test_clips=18,  # more than are tested at a time
)


def test_every_preset_has_every_model():
    experiment = find_experiment("switching")
    for preset in experiment.presets:
        for model in MODELS:
            config = experiment.preset(preset, model)
            assert config.model == model
            assert count_parameters(video_options(config)) > 0
    assert experiment.default_preset == "divide"


def test_several_object_files_do_not_lead_errors_back_through_where_they_look():
    presets = find_experiment("switching").preset
    config = presets("divide-six", "scoff")
    assert all(cell.detach_input_query for cell in make_model(config).rnn.cells)
    one = presets("divide", "scoff")
    sizes = {"object_files": 1, "active": 1, "hidden_size": 100}
    assert replace(config, **sizes, detach_input_query=False, clip=one.clip) == one
    assert config.clip < one.clip


def test_the_papers_hyper_parameters():
    for preset, files in (("paper", 1), ("paper-six", 6)):
        config = find_experiment("switching").preset(preset, "scoff")
        options = video_options(config)
        assert (options.object_files, options.schemata, options.stack) == (files, 2, 5)
        assert (config.lr, config.batch_size, config.frames) == (1e-4, 50, 51)
        assert config.train_clips == 10_000
        cell = make_model(config).rnn.cells[0]
        assert cell.input_query.shape[:2] == (4, 64)  # heads, keys
        assert cell.input_value.shape[0] == 64
        assert cell.comm_query.shape[:2] == cell.comm_value.shape[:2] == (4, 32)
        assert (cell.input_dropout, cell.comm_dropout) == (0.1, 0.1)


def test_two_grus_one_as_wide_and_one_as_large():
    config = replace(SMALL, hidden_size=60, object_files=3)
    scoff_options = video_options(config)
    wide, large = (video_options(replace(config, model=m)) for m in ("gru", "gru-matched"))
    assert wide.model == large.model == "gru"
    assert wide.hidden_size == scoff_options.hidden_size == 60
    wanted = count_parameters(scoff_options)
    assert abs(count_parameters(large) / wanted - 1) < 0.1
    assert abs(count_parameters(wide) / wanted - 1) > 0.5


class Oracle(torch.nn.Module):
    """Tells the frames as they are, and errors that are large where the ball moves anew."""

    def __init__(self, clips):
        super().__init__()
        self.options = video_options(SMALL)
        change = (clips.dynamics.diff(dim=1) != 0).long().argmax(1) + 1
        number = torch.arange(SMALL.frames)
        self.errors = torch.where(number == change[:, None] + 1, 7.0, 0.5)

    def forward(self, _frames, targets, free=0):  # noqa: ARG002
        errors = self.errors[:, SMALL.stack :]
        return Predictions(targets.logit(1e-6), errors, VideoState())


def test_predictions_are_measured_against_the_frames_they_are_of():
    clips = SwitchingTask(SMALL, CPU).clips(torch.arange(20), "test")
    told = predict(SMALL, Oracle(clips), clips)
    found = switch_errors(told.errors, told.dynamics, 0, 2)
    assert found.after.tolist() == [7.0, 0.5]
    assert found.steady == 0.5
    assert told.hits.shape == (20, SMALL.frames - SMALL.context)
    assert (told.hits == 1).all()
    assert (told.missed + told.extra == 0).all()
    assert told.distance.max() < 0.5
    still = clips._replace(frames=clips.frames.roll(3, 1))
    assert (predict(SMALL, Oracle(clips), still).distance > 1.5).float().mean() > 0.9


def test_the_last_frame_that_is_read_shows_the_bulb_of_the_dynamics_to_be_predicted():
    clips = SwitchingTask(SMALL, CPU).clips(torch.arange(20), "test")
    told = predict(SMALL, Oracle(clips), clips)
    newest = stack_frames(clips.frames[:, :-1], SMALL.stack)[:, :, -1]
    lights = [newest[..., int(y), int(x)] for x, y in BULBS]
    assert torch.equal(torch.stack(lights, -1).argmax(-1), told.dynamics)


@pytest.mark.parametrize("told", [True, False])
def test_agreement_of_a_choice_that_is_known(monkeypatch, told):
    task = SwitchingTask(replace(SMALL, object_files=3), CPU)
    model = task.model.eval()
    clips = task.clips(torch.arange(6), "test")
    trace = scoff.SCOFF.trace
    true = clips.dynamics[:, SMALL.stack - 1 : -1, None]

    def chosen(self, x, hx):
        real = trace(self, x, hx)
        schema = (1 - true).expand_as(real.schema) if told else torch.zeros_like(real.schema)
        return real._replace(schema=schema)

    monkeypatch.setattr(scoff.SCOFF, "trace", chosen)
    use = count_use(model, clips, 2, BURN_IN)
    off_diagonal = use.by_holder[0, 1] + use.by_holder[1, 0]
    if told:
        assert use.by_holder.sum() == off_diagonal > 0
        assert use.by_all.sum() == 3 * off_diagonal
    else:
        assert use.by_all[1].sum() == use.overall[1] == 0


def test_steady_frames_are_those_at_least_five_after_a_change(monkeypatch):
    config, true = replace(SMALL, test_clips=30), experiment.predict

    def known(config, model, clips):
        told = true(config, model, clips)
        changed = (told.dynamics.diff(dim=1, prepend=told.dynamics[:, :1]) != 0).long()
        begun = changed.cumsum(1)
        delay = begun.cumsum(1)  # 1: the first frame after the change
        errors = torch.where(begun == 0, 100.0, torch.where(delay <= 5, 10.0 - delay, 1.0))
        return told._replace(errors=errors)

    monkeypatch.setattr(experiment, "predict", known)
    result = evaluate(config, make_model(config).eval(), CPU)
    assert result["after_change"] == [9, 8, 7, 6, 5]
    assert result["settled"] == 1
    # of one object file; the first two predictions have nothing to choose by
    steps = config.frames - config.stack - 2
    assert sum(map(sum, result["schemata"]["counts"])) == 30 * steps


@pytest.mark.parametrize("model", ["scoff", "rims", "gru-matched"])
def test_evaluation_is_whole(model):
    config = replace(SMALL, model=model)
    torch.manual_seed(1)
    result = evaluate(config, make_model(config).eval(), CPU)
    steps = config.frames - config.context
    assert [len(values) for values in result["rollout"].values()] == [steps] * 4
    assert math.isfinite(result["settled"])
    assert result["rollout"]["cumulative"][0] == pytest.approx(result["rollout"]["nll"][0])
    assert ("schemata" in result) == (model == "scoff")
    if model == "scoff":
        shown = result["example"]["dynamics"]
        assert len(shown) == 8
        assert sum(a != b for a, b in pairwise(shown)) == 1


def test_known_frames_cost_what_their_grey_pixels_cost():
    frames = switching_dynamics(0, torch.arange(3), 14, "test").frames
    model = make_model(SMALL)
    known = model.likelihood(torch.special.logit(frames, 1e-7), frames)
    least = least_errors(frames, 0)
    torch.testing.assert_close(least, known, rtol=1e-3, atol=1e-6)
    assert (least > 0.005).all()
    lit = (frames > 0.5).float()
    assert least_errors(lit, 0).abs().max() == 0
    torch.testing.assert_close(
        least_errors(lit, 0.01), torch.full_like(least, -math.log(0.99)), rtol=1e-3, atol=0
    )


def test_what_a_model_adds_to_that_is_told_beside_it():
    (path,) = find("switching").iterdir()
    run = Finished("SCOFF", SMALL, Run.open(path).read_evaluation(), [], path)
    (first, steady), added = switch_error(run), added_error(run)
    least = run.evaluation["least"]
    assert added == (first - least["after_change"][0], steady - least["settled"])
    assert 0 < added[0] < first
    (row,) = switch_table({"SCOFF": [run]}).rows
    assert [cell.mean for cell in row[1:]] == pytest.approx(
        [first, steady, first / steady, *added, added[0] / added[1]]
    )
    old = replace(run, evaluation={k: v for k, v in run.evaluation.items() if k != "least"})
    (row,) = switch_table({"SCOFF": [run, old]}).rows
    assert [row[3].mean, *row[4:]] == [pytest.approx(first / steady), None, None, None]
    older = {k: v for k, v in old.evaluation.items() if k != "settled"}
    with pytest.raises(UsageError, match="steady frames were others; again: scoff eval"):
        switch_error(replace(run, evaluation=older))


def test_validation_is_the_mean_over_clips():
    task = SwitchingTask(replace(SMALL, valid_clips=18), CPU)
    model = task.model.eval()
    with torch.no_grad():
        frames = task.clips(torch.arange(18), "valid").frames
        expected = model.loss(frames)
        assert task.validate(model)["nll"] == pytest.approx(expected.item(), rel=1e-5)


def test_training_on_free_frames():
    task = SwitchingTask(replace(SMALL, free_frames=4), CPU)
    model = task.model.eval()
    batch = task.batch(torch.arange(3))
    loss, _ = task.loss(model, batch)
    torch.testing.assert_close(loss, model.loss(batch[0], free=4))


@pytest.mark.parametrize("model", ["scoff", "gru"])
def test_what_surprises_counts_once_more(model):
    task = SwitchingTask(replace(SMALL, model=model, surprise=0.5), CPU)
    watched = task.model.eval()
    batch = task.batch(torch.arange(5))
    errors = next_frame_errors(watched, batch[0])  # 55 of them
    loss, parts = task.loss(watched, batch)
    worst = errors.flatten().sort().values[-3:].mean()
    torch.testing.assert_close(parts["nll"], errors.mean())
    torch.testing.assert_close(parts["surprise"], worst)
    torch.testing.assert_close(loss, errors.mean() + 0.5 * worst)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"surprise": -1.0}, "--surprise: got -1.0, wants at least 0"),
        ({"context": 14}, "--context: got 14, wants less than --frames = 14"),
        ({"frames": 13}, "--frames: got 13, wants at least 14, so that there are steady ones"),
        ({"context": 2}, "--context: got 2, wants at least 3"),
        ({"free_frames": 11}, "--frames: got 14, wants at least 15"),
        ({"map_size": 5}, "map_size: got 5"),
        ({"test_clips": 0}, "--test-clips: got 0"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(SMALL, **changes)


def test_a_config_has_all_options_of_the_model():
    config = asdict(SMALL)
    assert set(asdict(VideoOptions())) <= set(config)


def test_train_eval_and_report_from_the_command_line(tmp_path, capsys):
    sizes = {
        "steps": 2,
        "batch-size": 2,
        "frames": 14,
        "context": 8,
        "valid-clips": 2,
        "test-clips": 2,
        "hidden-size": 8,
        "features": 8,
    }
    small = ["--preset", "quick", "--no-tensorboard"]
    small += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    for model in ("scoff", "gru"):
        out = ["--out", str(tmp_path / "runs" / model)]
        with pytest.raises(SystemExit) as end:
            main(["train", "switching", "--model", model, *small, *out, "--evaluate"])
        assert end.value.code == 0
    page = tmp_path / "report.html"
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path / "runs"), "--out", str(page)])
    assert end.value.code == 0, capsys.readouterr().err
    text = page.read_text()
    for word in ("Just after a change", "Agreement of the chosen schema", "Rollouts", "change"):
        assert word in text


def test_the_trained_model_in_the_package_predicts_as_it_did():
    (path,) = find("switching").iterdir()
    run = Run.open(path)
    _, config, model = load(run, CPU)
    clips = switching_dynamics(config.data_seed, torch.arange(8), config.frames, "valid")
    with torch.no_grad():
        error = model.loss(clips.frames).item()
    recorded = run.read_evaluation()["valid"]["nll"]  # of 500 clips
    assert error == pytest.approx(recorded, rel=0.1)


def test_the_trained_model_in_the_package_tells_the_dynamics():
    (path,) = find("switching").iterdir()
    _, config, model = load(Run.open(path), CPU)
    clips = switching_dynamics(config.data_seed, torch.arange(8), config.frames, "test")
    with torch.no_grad():
        use = count_use(model, clips, len(DYNAMICS), BURN_IN)
    steps = config.frames - config.stack - BURN_IN
    assert use.by_holder.sum() > 0.9 * 8 * steps  # the ball is somebody's
    assert describe_use([use])["accuracy"] >= 0.95
