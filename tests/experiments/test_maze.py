"""The maze as an experiment: options, agents, the engine, tests, the report."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoff.experiments import Finished, find_experiment
from scoff.experiments.maze import Config, MazeTask, evaluate, maze_options, paper, quick, tuned
from scoff.experiments.maze_agents import MODELS, make_agent
from scoff.experiments.maze_pictures import moments, retrace
from scoff.experiments.maze_policies import AgentPolicy, Memoryless, at_random, reactive
from scoff.experiments.maze_walks import (
    CONTENTS,
    Walk,
    Watcher,
    contents,
    describe_use,
    first_levels,
    walk,
)
from scoff.report import write_page
from scoff.training.engine import Runtime, fit
from scoff.training.errors import DivergedError, StoppedError, UsageError
from scoff.training.loop import Loop
from scoff.training.ppo import PPO
from scoff.training.run import Run
from scoff.worlds.maze import Mazes, ViewPainter
from scoff.worlds.maze.cells import AGENT, CLOSED_DOOR, EMPTY, OBJECT, OPEN_DOOR, UNSEEN, WALL
from tests.training.helpers import QUIET, outcome, records, signalled

SMALL = Config(
    steps=9,
    batch_size=8,
    rollout_steps=8,
    sequence_steps=4,
    minibatches=2,
    rooms=(5, 4),
    shares=(0.5, 0.5),
    warmup=0.2,
    decay="linear",
    hidden_size=12,
    features=8,
    channels=4,
    modules=3,
    active=2,
    valid_mazes=4,
    test_rooms=(4,),
    test_mazes=32,
    log_every=2,
    validate_every=7,
    checkpoint_every=4,
)
CPU = torch.device("cpu")


def train(path, config=SMALL, runtime=QUIET):
    run = Run.open(path) if path.exists() else Run.create(path, "maze", "quick", config)
    fit(lambda device: MazeTask(config, device), config, run, runtime)
    return run


# --- options


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"rooms": (3, 4)}, "--rooms: room_size: got 3, wants an integer of at least 4"),
        ({"rooms": (4, 60)}, "--rooms: .* so many rooms of 60 take 178 cells; wants at most 128"),
        ({"rooms": ()}, "--rooms: got none, wants at least one"),
        ({"test_rooms": ()}, "--test-rooms: got none, wants at least one"),
        ({"channels": 0}, "--channels: got 0, wants at least 1"),
        ({"features": 0}, "--features: got 0, wants at least 1"),
        ({"schema_noise": -1.0}, "--schema-noise: got -1.0, wants 0 or more"),
        ({"schema_noise": float("nan")}, "--schema-noise: got nan, wants 0 or more"),
        ({"shares": (1.0,)}, "--shares: got 1, wants one for each of 2 --rooms"),
        ({"shares": (0.5, 0.6)}, "--shares: got .* that add up to 1"),
        ({"shares": (1.5, -0.5)}, "--shares: got .*, wants numbers above 0"),
        ({"steps": 1}, "--steps: got 1, wants at least one for each of --rooms"),
        ({"test_rooms": (5,)}, "--test-rooms: got 5, wants some of 4, 6, 8, 10, 12"),
        ({"test_mazes": 1025}, "--test-mazes: got 1025, wants from 1 to 1,024"),
        ({"sequence_steps": 3}, "--sequence-steps: got 3, wants a divisor of rollout_steps = 8"),
        ({"weight_decay": 0.1}, "--weight-decay: got 0.1, wants 0"),
        ({"entropy_weight": -0.1}, "--entropy-weight: got -0.1, wants 0 or more"),
        ({"value_weight": -1.0}, "--value-weight: got -1.0, wants 0 or more"),
        ({"value_weight": float("nan")}, "--value-weight: got nan, wants 0 or more"),
        ({"reward_scale": 0.0}, "--reward-scale: got 0.0, wants a number above 0"),
        ({"ratio_clip": -0.2}, "--ratio-clip: got -0.2, wants a number above 0"),
        ({"value_clip": 0.0}, "--value-clip: got 0.0, wants a number above 0"),
        ({"initial_std": -1.0}, "--initial-std: got -1.0, wants 0 or more"),
        ({"input_gain": -1.0}, "--input-gain: got -1.0, wants 0 or more"),
        ({"schema_scale": float("inf")}, "--schema-scale: got inf, wants 0 or more"),
        ({"discount": 1.5}, "--discount: got 1.5, wants a number from 0 to 1"),
        ({"batch_size": 0}, "--batch-size: got 0, wants at least 1"),
        ({"minibatches": 3}, "--minibatches: got 3, wants a divisor of the 16 sequences"),
    ],
)
def test_bad_options_are_refused(given_options, message):
    with pytest.raises(UsageError, match=message):
        replace(SMALL, **given_options)


def test_the_papers_preset_has_20_million_frames():
    config = paper("scoff")
    assert 20e6 <= config.frames < 20.01e6
    assert config.hidden_size == 510
    assert config.rooms == (8,)


@pytest.mark.parametrize("preset", [quick, tuned, paper])
@pytest.mark.parametrize("model", MODELS)
def test_presets(preset, model):
    config = preset(model)
    assert config.model == model
    experiment = find_experiment("maze")
    assert experiment.read_config(json.loads(json.dumps(vars(config)))) == config


# --- agents


@pytest.mark.parametrize("preset", [quick, tuned])
def test_the_matched_gru_has_as_many_parameters(preset):
    def size(model):
        return sum(p.numel() for p in make_agent(preset(model)).parameters())

    assert 0.99 * size("scoff") < size("gru-matched") <= size("scoff")
    assert size("gru") < 0.7 * size("scoff")


# --- the engine


@pytest.mark.parametrize("model", ["scoff-sparse", "lstm"])
def test_a_resumed_run_gives_the_same_bits(tmp_path, monkeypatch, model):
    config = replace(SMALL, model=model)
    train(tmp_path / "undisturbed", config)
    path = tmp_path / "run"
    # the last step in the first rooms, the first in the next, and one between two records
    for step in (3, 4, 6):
        with pytest.raises(StoppedError) as stopped, signalled(step, monkeypatch):
            train(path, config)
        assert stopped.value.exit_code == 75
        assert Run(path).step() == step + 1
    train(path, config)
    assert outcome(path) == outcome(tmp_path / "undisturbed")


def test_rooms_change(tmp_path, monkeypatch):
    sizes = []
    original = PPO.collect

    def collect(self):
        sizes.append(self.environment.mazes.options.room_size)
        return original(self)

    monkeypatch.setattr(PPO, "collect", collect)
    train(tmp_path / "run")
    assert sizes == [5] * 4 + [4] * 5
    assert SMALL.starts == (0, 4)
    stages = {r["step"]: r["train/stage"] for r in records(tmp_path / "run") if "train/stage" in r}
    assert stages == {2: 0, 4: 0, 6: 1, 8: 1, 9: 1}


def test_what_is_logged(tmp_path):
    run = train(tmp_path / "run")
    found = records(run.path)
    lrs = [r["train/lr"] for r in found if "train/lr" in r]
    assert lrs == [SMALL.lr_at(step - 1) for step in (2, 4, 6, 8, 9)]
    last = [r for r in found if "train/frames" in r][-1]
    assert last["train/frames"] == SMALL.frames
    assert [r["step"] for r in found if "valid/success" in r] == [7, 9]


def test_the_progress_tells_frames_and_success(tmp_path, capsys):
    config = replace(SMALL, steps=20, rooms=(4,), shares=(1.0,))
    train(tmp_path / "run", config, replace(QUIET, progress="lines"))
    first, *_, last = capsys.readouterr().err.splitlines()
    assert re.search(r": [\d,]+ parameters$", first)
    assert "step 20/20" in last
    assert "success" in last
    assert "return" in last
    assert "frames/s" in last


def test_what_is_not_finite_is_neither_saved_nor_passed_over(tmp_path, monkeypatch):
    original = Loop.one_step

    def one_step(self, number):
        if number == 6:
            with torch.no_grad():
                next(self.weights.parameters()).fill_(torch.nan)
        return original(self, number)

    monkeypatch.setattr(Loop, "one_step", one_step)
    with pytest.raises(DivergedError, match=r"step 7: .* not finite: weight .*step-00000004"):
        train(tmp_path / "run")
    assert Run(tmp_path / "run").step() == 4


def test_another_models_checkpoint_is_refused(tmp_path):
    run = train(tmp_path / "run")
    run.weights_path.unlink()
    with pytest.raises(Exception, match=r"is not of the run in config\.json"):
        train(run.path, replace(SMALL, hidden_size=24))


# --- policies and walks


def test_references():
    options = maze_options(6)
    start = first_levels(options, 200, CPU)
    chance = walk(Memoryless(at_random), start, options).summary()
    rules = walk(Memoryless(reactive), start, options).summary()
    assert 0.03 < chance["success"] < 0.25
    assert 0.6 < rules["success"] < 0.9
    assert rules["steps"] < options.max_steps / 2


def test_walks_count_what_mazes_tell():
    """Against one maze at a time."""
    options = maze_options(4)
    start = first_levels(options, 12, CPU)
    actions = []
    found = walk(Memoryless(reactive), start, options, actions=actions)
    for agent in range(12):
        mazes = Mazes(1, options, autoreset="disabled")
        mazes.reset(start=start.select(torch.tensor([agent])))
        steps = [mazes.step(action[agent : agent + 1]) for action in actions]
        ended = [bool(step.terminated or step.truncated) for step in steps].index(True)
        assert found.success[agent] == steps[ended].terminated[0]
        assert found.steps[agent] == ended + 1
    assert 0 < found.success.sum() < 12


def test_without_success_there_are_no_steps():
    nothing = Walk(torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.int64))
    assert nothing.summary() == {"success": 0.0, "steps": None, "steps_spread": None}


@given(st.lists(st.integers(0, AGENT), min_size=25, max_size=25))
def test_contents_of_a_view(codes):
    view = torch.tensor(codes, dtype=torch.uint8).view(1, 5, 5)
    kinds = {
        "target": range(OBJECT, CLOSED_DOOR),
        "closed door": range(CLOSED_DOOR, WALL),
        "open door": range(OPEN_DOOR, OBJECT),
        "wall": [WALL],
        "nothing": [EMPTY, UNSEEN, AGENT],
    }
    expected = next(name for name, known in kinds.items() if set(known) & set(codes))
    assert CONTENTS[contents(view).item()] == expected


def test_drawn_actions_can_be_repeated_and_likely_ones_are_taken_more_often():
    torch.manual_seed(3)
    agent = make_agent(SMALL)
    with torch.no_grad():
        agent.policy[-1].bias.copy_(torch.tensor([0.0, 0, 2, 0, 0, 0, 0]))
    options = maze_options(4)
    start = first_levels(options, 30, CPU)
    kept = []
    for greedy in (False, False, True):
        actions = []
        walk(AgentPolicy(agent, greedy), start, options, actions=actions)
        kept.append(torch.stack(actions))
    assert torch.equal(kept[0], kept[1])
    shares = torch.bincount(kept[0].flatten(), minlength=7) / kept[0].numel()
    assert shares.argmax() == 2
    assert 0.2 < shares[2] < 0.95
    assert (kept[2] == 2).float().mean() > shares[2]


def test_schemata_are_counted_while_agents_walk():
    torch.manual_seed(0)
    agent = make_agent(replace(SMALL, model="scoff-sparse", schema_scale=8.0)).eval()
    policy = AgentPolicy(agent, greedy=False)
    watcher = Watcher(agent, policy)
    options = maze_options(4)
    found = walk(policy, first_levels(options, 16, CPU), options, watcher)
    table = watcher.table()
    assert table.sum() == found.steps.sum() * SMALL.active
    use = describe_use(table)
    assert 0 <= use["bits"] <= min(use["bits_at_most"], use["bits_in_use"]) + 1e-9
    # the choices that are told are those that were made
    assert torch.stack(watcher.schemata).shape[1:] == (16, SMALL.modules)


# --- tests of trained agents, and the report


def finished(config):
    torch.manual_seed(config.seed)
    agent = make_agent(config).eval()
    evaluation = evaluate(config, agent, CPU)
    evaluation |= {"steps": config.steps, "parameters": 1, "seconds": {"training": 2.0}}
    told = [
        {"step": step, "train/success": 0.1 * step, "valid/success": float("nan")}
        for step in range(1, 10)
    ]
    stored = json.loads(json.dumps(evaluation))
    return Finished(f"{config.model}-{config.seed}", config, stored, told)


@pytest.fixture(scope="module")
def runs():
    small = replace(SMALL, rooms=(4,), shares=(1.0,), test_rooms=(4,))
    return [finished(replace(small, model=m, seed=s)) for m in ("scoff", "gru") for s in (0, 1)]


def test_an_example_is_an_episode_that_ended_as_told(runs):
    seen = runs[0].evaluation["example"]
    assert seen["success"]
    assert len(seen["schemata"]) == len(seen["actions"])
    mazes, views = retrace(seen, 4, 8)
    assert len(mazes) == len(views) == len(seen["actions"]) + 1
    # at the end, and not before, the target is right before the agent
    painted = ViewPainter(8)(torch.arange(AGENT + 1, dtype=torch.uint8).view(-1, 1, 1))
    objects = painted[OBJECT:CLOSED_DOOR]
    before_it = views[:, 24:32, 16:24]
    is_target = (before_it[:, None] == objects).flatten(2).all(2).any(1)
    assert is_target.tolist() == [False] * len(seen["actions"]) + [True]


@given(st.integers(1, 600))
def test_moments_are_in_order_with_both_ends(count):
    shown = moments(count)
    assert shown[0] == 0
    assert shown[-1] == count - 1
    assert shown == sorted(set(shown))
    assert len(shown) == min(count, 10)


def test_the_report(runs, tmp_path):
    sections = find_experiment("maze").report(runs)
    write_page(
        tmp_path / "report.html", title="t", lead="l", sections=sections, runs=[], rerun=["x"]
    )
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/gif") == 2
    assert page.count('<figure class="wide">') == 1  # the episode with schemata, of SCOFF alone
    assert "data:image/png" in page
    tables = {table.title: table for section in sections for table in section.tables}
    success = tables["Episodes that reached the object, in percent"]
    rows = [row[0] for row in success.rows]
    assert rows.count("SCOFF") == rows.count("GRU") == 2  # drawn and likeliest; not the paper's
    mean = sum(r.evaluation["agent"]["drawn"]["4"]["success"] for r in runs[:2]) / 2
    assert success.rows[1][1].mean == pytest.approx(100 * mean)
    assert "Information of the chosen schema about what is in view" in tables


def test_runs_of_other_tasks_are_not_compared(runs):
    other = replace(runs[0], config=replace(runs[0].config, test_mazes=4))
    with pytest.raises(UsageError, match="--test-mazes differs"):
        find_experiment("maze").report([runs[1], other])


# --- on a GPU

GPU = Runtime(device="cuda", progress="off", tensorboard=False)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_graphs_learn_what_eager_steps_learn(tmp_path, model):
    for acceleration in ("graph", "none"):
        config = replace(SMALL, model=model, acceleration=acceleration, validate_every=100)
        train(tmp_path / acceleration, config, GPU)
    graph, eager = (Run(tmp_path / name).read_weights() for name in ("graph", "none"))
    for name, weight in graph.items():
        torch.testing.assert_close(weight, eager[name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("acceleration", ["graph", "none"])
def test_a_gpu_resumes_exactly(tmp_path, monkeypatch, acceleration):
    config = replace(SMALL, acceleration=acceleration)
    train(tmp_path / "undisturbed", config, GPU)
    path = tmp_path / "run"
    for step in (3, 6):
        with pytest.raises(StoppedError), signalled(step, monkeypatch):
            train(path, config, GPU)
    train(path, config, GPU)
    assert outcome(path) == outcome(tmp_path / "undisturbed")


@pytest.mark.gpu
def test_walks_on_a_gpu():
    options, device = maze_options(8), torch.device("cuda")
    agent = make_agent(SMALL).to(device)
    found = evaluate(replace(SMALL, rooms=(8,), shares=(1.0,)), agent, device)
    assert found["references"]["reactive, without memory"][8]["success"] > 0.3
    assert walk(AgentPolicy(agent, True), first_levels(options, 4, device), options).steps.max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["scoff", "gru", "lstm", "reactive"])
def test_walks_replayed_from_a_graph_are_the_same(kind):
    options, device = maze_options(4), torch.device("cuda")
    if kind == "reactive":
        policies = [Memoryless(reactive)]
    else:
        agent = make_agent(replace(SMALL, model=kind)).to(device)
        policies = [AgentPolicy(agent, greedy) for greedy in (False, True)]
    start = first_levels(options, 100, device)
    for policy in policies:
        eager, replayed = (walk(policy, start, options, replay=replay) for replay in (False, True))
        assert torch.equal(eager.success, replayed.success)
        assert torch.equal(eager.steps, replayed.steps)
        assert len(set(eager.steps.tolist())) > 1 or kind != "reactive"
