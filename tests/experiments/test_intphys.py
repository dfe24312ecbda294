"""Intuitive physics: what is learned, how movies are judged, and what is told of it."""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch

from scoff.cli import main
from scoff.experiments import find_experiment
from scoff.experiments.intphys import (
    Config,
    IntphysTask,
    as_frames,
    draw_noise,
    evaluate,
    frame_errors,
    make_tests,
    observe,
    surprise,
    training_movies,
)
from scoff.experiments.intphys_data import answer, judge_cache
from scoff.experiments.intphys_scores import (
    HIDING,
    WAYS,
    Followed,
    Judged,
    by_hiding,
    describe_following,
    direction_json,
    follow,
    plausibilities,
)
from scoff.experiments.video import MODELS, make_model, video_options
from scoff.models.likelihoods import Likelihood
from scoff.models.video import Decoded, Predictions, VideoModel, VideoState, VideoTrace
from scoff.training.errors import UsageError
from scoff.worlds.intphys import BLOCKS, MOVEMENTS, training_clips
from scoff.worlds.intphys.answers import read_answers
from scoff.worlds.intphys.cache import Cache
from scoff.worlds.intphys.scenes import FIRST_ELEMENT

CPU = torch.device("cpu")
SMALL = Config(
    classes=3,
    hidden_size=24,
    object_files=3,
    features=8,
    decoder="attention",
    frame_size=32,
    map_size=8,
    frames=25,
    skip=4,
    train_clips=4,
    valid_clips=2,
    test_clips=3,
    visible_clips=3,
)
RGB = replace(SMALL, observe="rgb", colour=True, classes=0)


def test_every_preset_has_every_model():
    found = find_experiment("intphys")
    for preset, model, seen in itertools.product(found.presets, MODELS, ("classes", "rgb")):
        config = found.preset(preset, model, observe=seen)
        assert (config.model, config.observe) == (model, seen)
        assert video_options(config).channels == 3
        assert config.length == 100


@pytest.mark.parametrize("preset", ["quick", "tuned", "paper"])
def test_models_are_trained_alike(preset):
    found = find_experiment("intphys")
    first = found.preset(preset, "scoff")
    assert all(replace(found.preset(preset, model), model="scoff") == first for model in MODELS)


def test_the_papers_hyper_parameters():
    config = find_experiment("intphys").preset("paper", "scoff")
    assert (config.object_files, config.schemata, config.lr, config.batch_size) == (6, 6, 3e-4, 64)
    cell = make_model(config).rnn.cells[0]
    assert cell.input_query.shape[:2] == (4, 64)  # heads, keys
    assert cell.input_value.shape[0] == 84
    assert cell.comm_query.shape[:2] == cell.comm_value.shape[:2] == (4, 32)
    assert (cell.input_dropout, cell.comm_dropout) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": True, "classes": 0}, "--colour, --classes: got True and 0"),
        ({"observe": "rgb"}, "--observe rgb wants True and 0"),
        ({"skip": 1}, "--frames: got 25 with --skip 1, wants at least 40"),
        ({"skip": 0}, "--skip: got 0"),
        ({"window": 22}, "--window: got 22, wants from 1 to 21"),
        ({"min_hidden": 3}, "--min-hidden: got 3"),
        ({"visible_clips": -1}, "--visible-clips: got -1"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(SMALL, **changes)


# --- what is learned


@pytest.mark.parametrize("config", [SMALL, RGB], ids=["classes", "rgb"])
def test_training_movies_are_frames_of_the_worlds(config):
    index = torch.tensor([3, 0, 1])
    whole = training_clips(0, index, "train", pixels=32, frames=100)
    kept = training_movies(config, index, "train")
    assert torch.equal(kept, observe(config, whole)[:, ::4])
    (frames,) = IntphysTask(config, CPU).batch(index)
    assert torch.equal(frames, as_frames(config, kept))
    if config.observe == "rgb":
        assert torch.equal((frames * 255).round().to(torch.uint8).movedim(2, -1), kept)
    else:
        assert torch.equal(frames.argmax(2), kept.long())
        assert torch.equal(frames.sum(2), torch.ones_like(frames[:, :, 0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_movies_are_the_same_on_a_gpu():
    index = torch.arange(4)
    made = training_movies(SMALL, index.cuda(), "train")
    assert torch.equal(made.cpu(), training_movies(SMALL, index, "train"))


# --- plausibility


def test_plausibilities():
    errors = torch.rand(5, 4, 12, dtype=torch.float64)
    for window in (1, 3, 12):
        mean, worst, windowed = plausibilities(errors, window).unbind(-1)
        torch.testing.assert_close(mean, -errors.mean(-1))
        assert torch.equal(worst, -errors.amax(-1))
        every = [errors[..., t : t + window].mean(-1) for t in range(12 - window + 1)]
        torch.testing.assert_close(windowed, -torch.stack(every).amax(0))
        # a window may not hide a mean, nor show more than the worst frame
        assert (windowed <= mean + 1e-12).all()
        assert (windowed >= worst - 1e-12).all()


class Told(Likelihood):
    def __init__(self, errors):
        super().__init__()
        self.pixels = errors


class Judge(VideoModel):
    """Errors are those of `errors(frames given, frames to be told)` [N, T, C, H, W], by pixel."""

    def __init__(self, config, errors):
        super().__init__(video_options(config))
        self.likelihood = Told(errors)

    def forward(self, frames, targets=None, **_):
        errors = None if targets is None else self.likelihood(frames, targets)
        return Predictions(frames, errors, VideoState())


def changed(frames, targets):
    """A judge that compares each frame with the one before, in whole numbers"""
    return (frames != targets).any(2).double()


def objects_return(frames, targets):
    """A judge with a memory: what object pixels there ever were may come back"""
    ever = frames[:, :, 1].cummax(1).values
    return (targets[:, :, 1] > ever).double()


def test_only_memory_tells_occluded_movies_apart():
    result = evaluate(SMALL, Judge(SMALL, changed), CPU)
    for block in BLOCKS:
        found = result["tests"][f"occluded/{block}"]
        assert list(found) == list(WAYS)
        # sums over the two possible and the two impossible ones are the same; maxima need not be
        assert found["mean"]["relative"] == [0.5, 0.5, 0.5, 3]
        assert found["objects"]["relative"] == [0.5, 0.5, 0.5, 3]
        assert set(result["errors"][f"occluded/{block}"]) == {0.5}
        assert set(result["movements"][f"occluded/{block}"]) == set(MOVEMENTS)
        assert result["references"]["state oracle"][f"occluded/{block}"]["relative"][0] == 0
        assert result["references"]["single frames"][f"occluded/{block}"]["relative"][0] == 0.5
        copy = result["references"]["copy, 4 frames before"]
        assert copy[f"occluded/{block}"]["relative"][0] == 0.5
        assert copy[f"visible/{block}"]["relative"][0] < 0.5
    json.dumps(result, allow_nan=False)
    # where nothing hides the change, a memory is not needed
    assert result["tests"]["visible/O1"]["mean"]["relative"][0] < 0.5


def test_a_judge_with_a_memory_is_no_longer_at_chance():
    config = replace(SMALL, visible_clips=0, model="gru")
    result = evaluate(config, Judge(config, objects_return), CPU)
    assert result["errors"]["occluded/O1"] != [0.5, 0.5, 0.5]
    # all of its errors are at objects
    for test in result["tests"].values():
        assert test["objects"]["relative"] == test["mean"]["relative"]
    assert list(result["tests"]) == [f"occluded/{block}" for block in BLOCKS]
    assert "following" not in result


@pytest.mark.parametrize("config", [SMALL, RGB], ids=["classes", "rgb"])
@pytest.mark.parametrize("layer", ["scoff", "gru"])
def test_surprise_is_that_of_each_movie_alone(config, layer):
    config = replace(config, model=layer, stack=2)
    model = make_model(config).eval()
    tests = make_tests(config, torch.tensor([1, 2]), "O2", "occluded")
    seen = observe(config, tests.movies())[:, :, ::4]
    errors = surprise(config, model, seen)
    assert errors.shape == (2, 4, config.frames - config.context)
    alone = surprise(config, model, seen[1, 2])
    torch.testing.assert_close(alone, errors[1, 2])
    # what comes later changes nothing before, and movies that start alike are told alike
    (one, other) = (tests.start[0] == 0).nonzero()[:, 0]
    first = int(tests.cuts[0, 0]) // 4
    torch.testing.assert_close(
        errors[0, one, : first - config.context], errors[0, other, : first - config.context]
    )


@pytest.mark.parametrize("config", [SMALL, RGB], ids=["classes", "rgb"])
def test_a_pixel_is_as_likely_as_over_draws_of_schemata(config):
    model = make_model(config).eval()
    frames = torch.rand(2, 6, 3, 32, 32).softmax(2)
    channels = 1 if config.classes else 3  # whose errors are told as their mean
    drawn = []
    for noise in draw_noise(model, (2, 5), 3):
        torch.testing.assert_close(noise[0], noise[1])
        logits = model(frames[:, :-1], noise=noise).logits
        drawn.append(channels * model.likelihood.pixels(logits, frames[:, 1:]).double())
    assert not torch.equal(drawn[0], drawn[1])
    mean = torch.stack(drawn).neg().exp().mean(0)
    expected = (-mean.log() / channels).float()
    torch.testing.assert_close(frame_errors(model, frames, 3), expected)
    # drawn alike the next time
    assert torch.equal(frame_errors(model, frames, 3), frame_errors(model, frames, 3))


@pytest.mark.parametrize(
    ("changes", "draws"),
    [({}, 0), ({"schemata": 1}, 5), ({"model": "gru"}, 5), ({"model": "rims"}, 5)],
)
def test_where_nothing_is_drawn_there_is_one_prediction(changes, draws):
    model = make_model(replace(SMALL, **changes)).eval()
    assert list(draw_noise(model, (2, 5), draws)) == [None]
    frames = torch.rand(2, 6, 3, 32, 32).softmax(2)
    plain = model.likelihood.pixels(model(frames[:, :-1]).logits, frames[:, 1:])
    torch.testing.assert_close(frame_errors(model, frames, draws), plain)


def test_what_vanishes_and_what_appears():
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(40, 4, generator=generator, dtype=torch.float64)
    order = torch.rand(40, 4, generator=generator).argsort(1)
    possible, start = order < 2, order % 2
    nothing = torch.zeros(40)
    judged = Judged(scores, scores, possible, start, nothing, nothing)
    told = direction_json(scores, judged)
    for run, name in enumerate(("vanishes", "appears")):
        wins = [
            scores[n][possible[n] & (start[n] == run)] > scores[n][~possible[n] & (start[n] == run)]
            for n in range(40)
        ]
        assert told[name][0] == pytest.approx(torch.cat(wins).double().mean().item())


def test_every_occlusion_is_of_one_length():
    hidden = torch.arange(1, 70)
    groups = by_hiding(hidden)
    assert list(groups) == list(HIDING)
    assert torch.stack([*groups.values()]).sum(0).eq(1).all()
    assert [int(hidden[flags].max()) for flags in groups.values()] == [8, 16, 69]


# --- who follows the hidden


class Follower(VideoModel):
    """Object file 1 has the object; after it was hidden another has, if it is told to `lose` it."""

    def __init__(self, config, shown, lose):
        super().__init__(video_options(config))
        self.shown, self.lose = shown, lose

    def trace(self, frames):
        shown = self.shown[:, 1:].double()  # masks are of the next frame
        is_seen = shown.flatten(2).any(2)
        was_hidden = ~is_seen & (is_seen.cumsum(1) > 0)
        late = (was_hidden.cumsum(1) > 0) & self.lose
        masks = torch.zeros(*frames.shape[:2], 3, 32, 32, dtype=torch.float64)
        masks[:, :, 0] = 0.5
        masks[:, :, 1] = shown * ~late[..., None, None]
        masks[:, :, 2] = shown * late[..., None, None]
        return VideoTrace(Decoded(masks, masks, None), None, None)


@pytest.mark.parametrize("lose", [False, True])
def test_who_follows(lose):
    config = replace(SMALL, model="rmc", decoder="masks")
    tests = make_tests(config, torch.arange(6), "O1", "occluded")
    movies = tests.movies()
    seen = observe(config, movies)[:, :, ::4]
    first = tests.possible.long().argmax(1)
    identity = movies.identity[torch.arange(6), first, ::4]
    shown = identity == (FIRST_ELEMENT + tests.magic)[:, None, None, None]
    told = follow(config, Follower(config, shown, lose), tests, movies.identity, seen)
    is_seen = shown.flatten(2).any(2)
    back = is_seen[:, 2:] & ~is_seen[:, 1:-1] & (is_seen[:, 1:].cumsum(1)[:, :-1] > 0)
    assert told.all == back.sum() > 0
    # those that it lost it keeps, however often they hide again
    assert told.same == (int(back.sum() - back.any(1).sum()) if lose else told.all)
    assert told.behind is None


def test_shares_of_schemata_sum_to_one():
    assert describe_following([]) is None
    counts = torch.tensor([[3, 1, 0], [0, 0, 5]])
    told = describe_following([Followed(3, 4, counts), Followed(1, 4, counts)])
    assert (told["same"], told["times"]) == (0.5, 8)
    assert told["schemata"] == {"seen": [0.75, 0.25, 0.0], "hidden": [0.0, 0.0, 1.0]}


# --- from the command line to a page and to answer.txt


def call(*args) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return end.value.code


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intphys")
    small = {
        "steps": 2,
        "batch-size": 2,
        "train-clips": 4,
        "valid-clips": 2,
        "test-clips": 3,
        "hidden-size": 24,
        "object-files": 3,
        "active": 2,
        "features": 8,
        "decoder": "masks",
    }
    options = [word for key, value in small.items() for word in (f"--{key}", value)]
    options += ["--preset", "quick", "--no-tensorboard", "--progress", "off", "--evaluate"]
    for model in ("scoff", "gru"):
        own = ["--model", model, "--visible-clips", 0, "--out", folder / model]
        assert call("train", "intphys", *options, *own) == 0
    return folder


def test_a_page(runs, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert call("report", runs, "--out", page) == 0, capsys.readouterr().err
    text = page.read_text()
    assert len(text) < 3_000_000
    for words in (
        "Relative error, occluded",
        "with 95 % intervals over quadruplets",
        "SCOFF, less others",
        "state oracle",
        "people",
        "Occluded, by frames hidden",
        "Pairs told apart in O1",
        "Surprise at a quadruplet of O1",
        "error of each frame (SCOFF; GRU), in nats a pixel",
        "SCOFF: where the surprise is",
        "SCOFF: who follows the hidden object",
        "Share of schemata",
    ):
        assert words in text, words


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    options = ["--train", 0, "--dev", 1, "--test", 1, "--pixels", 32, "--visibilities", "occluded"]
    assert call("data", "intphys", "--out", folder, *options, "--device", "cpu") == 0
    return folder


def test_answers_about_a_folder(runs, written, capsys):
    run = runs / "gru"
    assert call("eval", run, "--data", written / "dev") == 0, capsys.readouterr().err
    told, progress = capsys.readouterr()
    assert "judging: movie 12/12" in progress
    assert "model, relative" in told
    assert "copy, 1 frame before, relative" in told
    answers = read_answers(run / "answer.txt")
    assert len(answers) == 3 * 4
    assert (min(answers.values()), max(answers.values())) == (0, 1)
    measures = json.loads((run / "data.json").read_text())["measures"]
    assert measures["copy, 1 frame before"]["occluded/O1"]["relative"] == [0.5, 0.5, 0.5, 1]
    # the same again, from the cache
    first = (run / "answer.txt").read_bytes()
    assert call("eval", run, "--data", written / "dev") == 0
    assert (run / "answer.txt").read_bytes() == first


def test_how_far_it_is_without_a_terminal(tmp_path, capsys):
    options = ["--train", 2, "--dev", 0, "--test", 0, "--pixels", 32, "--device", "cpu"]
    assert call("data", "intphys", "--out", tmp_path / "set", *options) == 0
    assert "intphys: movie 2/2" in capsys.readouterr().err
    assert call("data", "intphys-cache", tmp_path / "set", "--out", tmp_path / "cache") == 0
    assert "cache: movie 2/2" in capsys.readouterr().err


def test_folders_that_cannot_be_judged(runs, written, tmp_path, capsys):
    run = runs / "gru"
    # as the original's test set is: pictures, and not what they are
    shutil.rmtree(written / "test_metadata")
    test = ["--data", written / "test", "--cache", tmp_path / "cache"]
    assert call("eval", run, *test) == 2
    assert "--observe rgb does without" in capsys.readouterr().err
    cache = Cache.open(tmp_path / "cache")
    scores = judge_cache(RGB, make_model(RGB).eval(), CPU, cache)
    assert answer(tmp_path / "answer.txt", cache, scores) is None  # nobody knows what is possible
    told = read_answers(tmp_path / "answer.txt")
    assert sorted(told, key=told.__getitem__) == sorted(scores, key=scores.__getitem__)
    assert len(told) == 3 * 4
    assert call("eval", run, "--data", tmp_path / "nowhere", "--cache", tmp_path / "c") == 1
    assert "nowhere: is no folder" in capsys.readouterr().err
    assert call("eval", run, "--cache", tmp_path / "cache") == 2
    assert "--cache: wants --data too" in capsys.readouterr().err
