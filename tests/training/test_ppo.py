"""Recurrent PPO: advantages, repeated decisions, resume, and that it learns."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import scoff
from scoff.models.agent import Decision, Noise, RecurrentAgent, TorchMemory, head, memory
from scoff.models.tiles import TileEncoder
from scoff.training import checkpoint
from scoff.training.environments import MazeEnvironment
from scoff.training.ppo import PPO
from scoff.training.ppo_config import PPOConfig
from scoff.training.ppo_graph import Replay
from scoff.training.ppo_loop import Curriculum
from scoff.training.ppo_objective import Rollout, advantages, loss, pick, sequences
from scoff.worlds.maze import NUM_ACTIONS, MazeOptions, Mazes
from tests.training.toy_environments import Bandit, Chance, Recall
from tests.worlds.test_adding import OnDevice

SHORT = PPOConfig(rollout_steps=16, sequence_steps=8, minibatches=2, repeat_choices=True)

LAYERS = {
    "scoff": lambda c: scoff.SCOFF(c, 12, num_object_files=3, num_schemata=2),
    "scoff-sparse": lambda c: scoff.SCOFF(c, 12, num_object_files=3, active_object_files=2),
    "scoff-lstm-deep": lambda c: scoff.SCOFF(c, 12, 2, cell="lstm", num_object_files=2),
    "rims": lambda c: scoff.RIMs(c, 12, num_modules=3, active_modules=2),
    "rmc": lambda c: scoff.RMC(c, 12, num_slots=2, num_heads=2),
    "gru": lambda c: nn.GRU(c, 12),
    "gru-deep": lambda c: nn.GRU(c, 12, 2),
    "lstm": lambda c: nn.LSTM(c, 12),
    "lstm-deep": lambda c: nn.LSTM(c, 12, 2),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def make_agent(layer, input_size=3, num_actions=4):
    rnn = LAYERS[layer](8)
    encoder = nn.Sequential(nn.Linear(input_size, 8), nn.Tanh())
    return RecurrentAgent(encoder, rnn, head(12, num_actions), head(12, 1))


# ---------------------------------------------------------------------------------- advantages


def slow_advantages(rollout, discount, gae_lambda):
    """From the definition, number by number."""
    steps, num_envs = rollout.reward.shape
    result = torch.zeros(steps, num_envs, dtype=torch.float64)
    for n in range(num_envs):
        for start in range(steps):
            weight = 1.0
            for t in range(start, steps):
                if rollout.terminated[t, n]:
                    following = 0.0
                elif rollout.truncated[t, n]:
                    following = rollout.end_value[t, n].item()
                elif t + 1 < steps:
                    following = rollout.value[t + 1, n].item()
                else:
                    following = rollout.last_value[n].item()
                surprise = rollout.reward[t, n].item() + discount * following
                result[start, n] += weight * (surprise - rollout.value[t, n].item())
                if rollout.terminated[t, n] or rollout.truncated[t, n]:
                    break
                weight *= discount * gae_lambda
    return result


def random_rollout(steps, num_envs, seed, ends=0.2):
    make = torch.Generator().manual_seed(seed)
    blank = torch.zeros(num_envs, 0)
    config = PPOConfig(rollout_steps=steps, sequence_steps=None)
    rollout = Rollout.empty(config, blank, blank[:, None], Noise(blank[None], blank))
    for name in ("value", "reward", "end_value", "last_value"):
        getattr(rollout, name).normal_(generator=make)
    for name in ("terminated", "truncated"):
        flags = getattr(rollout, name)
        flags.copy_(torch.rand(flags.shape, generator=make) < ends)
    return rollout


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.1, 0.6]),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_advantages_are_those_of_the_definition(steps, num_envs, seed, ends, discount, gae_lambda):
    rollout = random_rollout(steps, num_envs, seed, ends)
    expected = slow_advantages(rollout, discount, gae_lambda)
    found = advantages(rollout, discount, gae_lambda)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_follows_an_end_does_not_matter():
    rollout = random_rollout(6, 2, seed=0, ends=0.0)
    rollout.terminated[2, 0] = rollout.truncated[2, 1] = True
    before = advantages(rollout, 0.9, 0.9)
    for part in (rollout.value, rollout.reward, rollout.end_value):
        part[3:] += 100
    torch.testing.assert_close(advantages(rollout, 0.9, 0.9)[:3], before[:3])


class Guess(nn.Module):
    """An agent of its own kind, without a layer: its values are the first number it sees."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def draw_noise(self, steps, num_agents):
        return Noise(torch.zeros(steps, num_agents, 0), torch.zeros(num_agents, 0))

    def initial_state(self, noise):
        return noise.start[:, None]

    def forward(self, observation, state, reset, _noise):
        logits = self.bias.expand(*reset.shape, -1)
        return Decision(logits, observation[..., 0] + 0 * self.bias.sum(), state)


@pytest.mark.parametrize("truncation", ["final-value", "last-value", "terminal"])
def test_what_an_episode_that_was_cut_off_would_have_brought(truncation):
    environment = Chance(8)
    ppo = PPO(Guess(), environment, replace(SHORT, truncation=truncation, reward_scale=3.0))
    ppo.iterate()
    rollout, given = ppo.rollout, environment.given
    seen = torch.stack([step.observation for step in given])
    final = torch.stack([step.final_observation for step in given])
    assert rollout.truncated.any()
    torch.testing.assert_close(rollout.reward, 3 * torch.stack([step.reward for step in given]))
    torch.testing.assert_close(rollout.observation[1:], seen[:-1])
    torch.testing.assert_close(rollout.last_value, seen[-1, :, 0])
    expected = {
        "final-value": final[..., 0],
        "last-value": rollout.value,
        "terminal": torch.zeros_like(rollout.value),
    }[truncation]
    torch.testing.assert_close(rollout.end_value, expected)


def test_final_values_need_final_observations():
    agent = make_agent("gru", 3, 2)
    with pytest.raises(ValueError, match="final observations"):
        PPO(agent, Recall(4, delay=2), SHORT).iterate()


def test_the_final_observation_is_judged_from_the_memory_of_its_episode():
    """Where no episode ends, it is the next observation, and so must its value be the next."""
    environment = Chance(8)
    ppo = PPO(make_agent("scoff"), environment, replace(SHORT, sequence_steps=None))
    ppo.collect()
    goes_on = ~ppo.rollout.reset[1:]
    assert 0 < goes_on.sum() < goes_on.numel()
    found, expected = ppo.rollout.end_value[:-1][goes_on], ppo.rollout.value[1:][goes_on]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------- repeated decisions


def whole_batch(ppo):
    advantage = advantages(ppo.rollout, 0.99, 0.95)
    return sequences(ppo.rollout, advantage, ppo.config.length)


@every_layer
@pytest.mark.parametrize("sequence_steps", [None, 8, 4])
def test_decisions_of_unchanged_weights_are_repeated(layer, sequence_steps):
    """In training mode, with episodes that start within sequences, and from the second rollout on
    from states that earlier ones led to."""
    agent = make_agent(layer)
    ppo = PPO(agent, Chance(8), replace(SHORT, sequence_steps=sequence_steps))
    ppo.iterate()
    ppo.collect()
    assert agent.training
    assert ppo.rollout.reset[1:].any()
    batch = whole_batch(ppo)
    # chosen anew from the same noise, choices are the same too
    noise = Noise(batch.step_noise, batch.start_noise)
    logits, value, *_ = agent(batch.observation, batch.state, batch.reset, noise)
    ratio = (pick(logits.log_softmax(-1), batch.action) - batch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    torch.testing.assert_close(value, batch.value, rtol=1e-5, atol=1e-5)


def test_the_first_minibatch_moves_nothing_yet():
    config = replace(SHORT, epochs=1, minibatches=1)
    ppo = PPO(make_agent("scoff"), Chance(8), config)
    ppo.iterate()
    found = ppo.statistics()
    assert abs(found["approx_kl"]) < 1e-6
    assert found["clip_fraction"] == 0


def test_other_noise_would_give_other_decisions():
    """Or the test above would show nothing."""
    agent = make_agent("scoff")
    ppo = PPO(agent, Chance(8), SHORT)
    ppo.collect()
    batch = whole_batch(ppo)
    other = agent.draw_noise(*batch.reset.shape)
    for change in ({"step_noise": other.step}, {"start_noise": other.start}):
        _, found = loss(agent, batch._replace(**change), replace(SHORT, repeat_choices=False))
        assert found["approx_kl"] > 1e-6


@pytest.mark.parametrize("layer", ["scoff", "scoff-sparse", "scoff-lstm-deep"])
def test_choices_are_repeated_though_merits_have_changed(layer):
    agent = make_agent(layer)
    ppo = PPO(agent, Chance(8), SHORT)
    ppo.collect()
    assert ppo.rollout.choice.unique().tolist() == list(range(agent.memory.rnn.num_schemata))
    batch = whole_batch(ppo)
    with torch.no_grad():
        for cell in agent.memory.rnn.cells:
            cell.schema_query.mul_(-50)  # what had least merit has most
    total, found = loss(agent, batch, SHORT)
    assert found["approx_kl"].abs() < 1e-6
    _, anew = loss(agent, batch, replace(SHORT, repeat_choices=False))
    assert anew["approx_kl"] > 1e-6
    total.backward()  # merits are learned all the same
    assert all(cell.schema_query.grad.any() for cell in agent.memory.rnn.cells)


def test_sequences_are_pieces_of_the_rollout():
    ppo = PPO(make_agent("gru"), Chance(3), replace(SHORT, minibatches=1))
    ppo.collect()
    batch = whole_batch(ppo).select(torch.tensor([4]))  # of environment 1, the second half
    torch.testing.assert_close(batch.observation[:, 0], ppo.rollout.observation[8:, 1])
    torch.testing.assert_close(batch.state[0], ppo.rollout.state[1, 1])


# --------------------------------------------------------------------------------------- memory


@every_layer
def test_gradients_do_not_cross_resets(layer):
    core = memory(LAYERS[layer](5))
    noise = core.draw_noise(6, 2)
    features = torch.randn(6, 2, 5, requires_grad=True)
    reset = torch.zeros(6, 2, dtype=torch.bool)
    reset[3, 0] = True
    state = core.initial_state(noise.start).detach().requires_grad_()
    output, *_ = core(features, state, reset, noise)
    of_features, of_state = torch.autograd.grad(output[3:].sum(), (features, state))
    assert not of_features[:3, 0].any()
    assert not of_state[0].any()
    assert of_features[3:, 0].any()
    assert of_features[:3, 1].any()
    assert of_state[1].any()


@every_layer
def test_a_reset_starts_anew(layer):
    core = memory(LAYERS[layer](5))
    noise = core.draw_noise(4, 2)
    features, reset = torch.randn(4, 2, 5), torch.zeros(4, 2, dtype=torch.bool)
    reset[2] = True
    start = core.initial_state(noise.start)
    whole, after, _ = core(features, torch.randn_like(start), reset, noise)
    anew, expected, _ = core(features[2:], start, reset[:2], Noise(noise.step[2:], noise.start))
    torch.testing.assert_close(whole[2:], anew)
    torch.testing.assert_close(after, expected)


@every_layer
def test_in_evaluation_a_memory_is_its_layer(layer):
    rnn = LAYERS[layer](5).eval()
    for parameter in rnn.parameters():  # those of initial states too, which start as constants
        nn.init.normal_(parameter, std=0.3)
    core = memory(rnn).eval()
    features, reset = torch.randn(6, 2, 5), torch.zeros(6, 2, dtype=torch.bool)
    noise = core.draw_noise(6, 2)
    expected, _ = rnn(features)
    output, *_ = core(features, core.initial_state(noise.start), reset, noise)
    torch.testing.assert_close(output, expected)


def test_initial_states_are_learned_through_resets():
    ppo = PPO(make_agent("scoff"), Chance(8), SHORT)
    cell = ppo.agent.memory.rnn.cells[0]
    before = cell.initial_mean.clone(), cell.initial_std.clone()
    ppo.iterate()
    assert (cell.initial_mean != before[0]).all()
    assert (cell.initial_std != before[1]).all()


def test_layers_that_do_not_fit_are_refused():
    for rnn, name in (
        (nn.GRU(3, 4, batch_first=True), "batch_first"),
        (nn.LSTM(3, 4, bidirectional=True), "bidirectional"),
        (nn.GRU(3, 4, 2, dropout=0.1), "dropout"),
        (scoff.SCOFF(3, 4, comm_dropout=0.1), "comm_dropout"),
    ):
        with pytest.raises(ValueError, match=name):
            memory(rnn)
    with pytest.raises(TypeError, match="wants a layer"):
        memory(nn.Linear(3, 4))


# --------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollout_steps": 0},
        {"sequence_steps": 5},
        {"sequence_steps": 0},
        {"minibatches": 0},
        {"lr": 0.0},
        {"clip": -1.0},
        {"discount": 1.1},
        {"entropy_weight": -0.01},
        {"value_weight": float("inf")},
        {"reward_scale": 0.0},
        {"truncation": "never"},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SHORT, **wrong)


def test_sequences_must_make_equal_minibatches():
    with pytest.raises(ValueError, match="minibatches"):
        PPO(make_agent("gru"), Chance(3), replace(SHORT, minibatches=4))


def test_the_papers_settings_are_babyais():
    config = PPOConfig.paper()
    assert config.rollout_steps * 64 // config.minibatches == 1280
    assert (config.length, config.epochs, config.clip, config.value_clip) == (20, 4, 0.2, 0.2)
    assert (config.adam_eps, config.lr, config.max_grad_norm) == (1e-5, 3e-4, 0.5)
    assert (config.discount, config.gae_lambda, config.reward_scale) == (0.99, 0.99, 20)
    assert (config.value_weight, config.entropy_weight) == (0.5, 0.01)
    assert (config.truncation, config.normalise_advantages) == ("terminal", False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [
        (1.1, 2.0, 2.2),
        (1.5, 1.0, 1.2),  # likelier already, and better: no more to gain
        (1.5, -1.0, -1.5),
        (0.5, 1.0, 0.5),
        (0.5, -1.0, -0.8),  # rarer already, and worse
    ],
)
def test_the_objective_is_clipped_where_it_has_gained(ratio, advantage, objective):
    rollout = random_rollout(4, 2, seed=1)
    rollout.log_prob.fill_(-torch.tensor(4 * ratio).log())  # of four actions, all as likely now
    rollout.value.zero_()
    batch = sequences(rollout, torch.full((4, 2), advantage), 4)
    batch = batch._replace(observation=batch.advantage[..., None] + 3)  # values are wrong by 3
    config = replace(SHORT, normalise_advantages=False, entropy_weight=0.1, value_weight=0.5)
    total, found = loss(Guess(), batch, config)
    entropy = torch.tensor(4.0).log()
    torch.testing.assert_close(found["policy_loss"], torch.tensor(-objective))
    torch.testing.assert_close(found["entropy"], entropy)
    torch.testing.assert_close(found["clip_fraction"], torch.tensor(float(ratio != 1.1)))
    torch.testing.assert_close(total, -objective + 0.5 * 9.0 - 0.1 * entropy)


def test_normalised_advantages_have_no_scale():
    rollout = random_rollout(4, 2, seed=1)
    advantage = torch.randn(4, 2)
    found = [
        loss(Guess(), sequences(rollout, a, 4)._replace(observation=torch.zeros(4, 2, 1)), SHORT)[1]
        for a in (advantage, 10 * advantage + 5)
    ]
    torch.testing.assert_close(found[0]["policy_loss"], found[1]["policy_loss"])


def test_values_that_moved_too_far_learn_nothing_from_being_right():
    agent = Guess()
    rollout = random_rollout(4, 2, seed=1)
    batch = sequences(rollout, torch.ones(4, 2), 4)
    batch = batch._replace(observation=batch.value[..., None] + 1)  # the targets themselves
    _, free = loss(agent, batch, replace(SHORT, value_clip=None))
    _, clipped = loss(agent, batch, replace(SHORT, value_clip=0.2))
    torch.testing.assert_close(free["value_loss"], torch.tensor(0.0))
    torch.testing.assert_close(clipped["value_loss"], torch.tensor(0.64))


def test_gradients_are_clipped(monkeypatch):
    norms = []
    step = torch.optim.Adam.step

    def spy(self):
        parameters = self.param_groups[0]["params"]
        norms.append(nn.utils.get_total_norm([p.grad for p in parameters]).item())
        return step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    for limit in (1e-3, None):
        PPO(make_agent("gru"), Chance(8), replace(SHORT, max_grad_norm=limit)).iterate()
    assert max(norms[:4]) < 1.01e-3 < min(norms[4:])


# ----------------------------------------------------------------------------------- statistics


def test_statistics_are_of_the_episodes_that_ended():
    environment = Chance(8)
    ppo = PPO(make_agent("gru"), environment, SHORT)
    for _ in range(2):
        ppo.iterate()
    returns, lengths, successes = [], [], []
    for n in range(8):
        total, length = 0.0, 0
        for step in environment.given:
            total, length = total + step.reward[n].item(), length + 1
            if step.terminated[n] or step.truncated[n]:
                returns.append(total)
                lengths.append(length)
                successes.append(bool(step.terminated[n] and step.reward[n] > 0))
                total, length = 0.0, 0
    found = ppo.statistics()
    assert found["episode_return"] == pytest.approx(sum(returns) / len(returns), rel=1e-4)
    assert found["episode_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["success"] == pytest.approx(sum(successes) / len(successes))
    assert 0 < found["entropy"] <= torch.tensor(4.0).log().item() + 1e-6
    assert found["explained_variance"] <= 1
    assert ppo.statistics() == {}
    assert ppo.frames == 2 * 16 * 8
    assert environment.prepared == 2


def test_a_glance_leaves_the_statistics_as_they_are():
    ppo = PPO(make_agent("gru"), Chance(8), SHORT)
    assert torch.tensor(ppo.glance()["success"]).isnan()  # no episode yet
    ppo.iterate()
    seen, again, found = ppo.glance(), ppo.glance(), ppo.statistics()
    assert seen == again
    assert seen["success"] == pytest.approx(found["success"])
    assert seen["return"] == pytest.approx(found["episode_return"])
    updates = SHORT.epochs * SHORT.minibatches
    assert seen["loss"] == pytest.approx(updates * found["loss"], rel=1e-4)
    assert seen["grad_norm"] == pytest.approx(updates * found["grad_norm"], rel=1e-4)


def test_elsewhere_episodes_begin_anew():
    ppo = PPO(make_agent("gru"), Chance(8), SHORT)
    ppo.iterate()
    other = Chance(8, seed=5)
    first = Chance(8, seed=5).reset()
    ppo.enter(other)
    ppo.collect()
    torch.testing.assert_close(ppo.rollout.observation[0], first)
    assert ppo.rollout.reset[0].all()
    assert not ppo.rollout.reset[1:].all()
    assert len(other.given) == SHORT.rollout_steps
    with pytest.raises(ValueError, match="environment: got 4 on cpu, wants 8 on cpu"):
        ppo.enter(Chance(4))


@given(st.lists(st.integers(1, 50), max_size=4), st.integers(0, 300))
def test_stages_follow_each_other(lengths, number):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    stage = Curriculum(tuple(starts), lambda _: Chance(1)).stage(number)
    assert starts[stage] <= number
    assert stage + 1 == len(starts) or number < starts[stage + 1]


# --------------------------------------------------------------------------------------- resume


def maze_ppo(layer="scoff", device="cpu"):
    options = MazeOptions(room_size=4, num_rows=2, num_cols=2, view_size=3)
    mazes = Mazes(16, options, device=device, final_views=True)
    environment = MazeEnvironment(mazes, observe=lambda view: view / 32)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(9, 8))
    agent = RecurrentAgent(encoder, LAYERS[layer](8), head(12, NUM_ACTIONS), head(12, 1))
    return PPO(agent.to(device), environment, SHORT)


@every_layer
def test_rollouts_do_not_go_through_the_host(layer):
    """On a GPU that would be a wait in every step."""
    ppo = maze_ppo(layer)
    with OnDevice():
        ppo.collect()


def flat_tensors(state):
    tensors = {}
    rest = checkpoint.flatten(state, "", tensors)
    return rest, tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda: PPO(make_agent("scoff"), Chance(8), SHORT),
        lambda: PPO(make_agent("lstm"), Chance(8), SHORT),
        maze_ppo,
    ],
    ids=["scoff", "lstm", "maze"],
)
def test_a_resumed_run_gives_the_same_bits(make, tmp_path):
    ppo = make()
    ppo.iterate()
    path = checkpoint.save(tmp_path, ppo.frames, ppo.state_dict())
    for _ in range(2):
        ppo.iterate()
    expected = flat_tensors(ppo.state_dict())

    torch.manual_seed(1)
    other = make()
    other.iterate()
    other.load_state_dict(checkpoint.load(path)[1])
    for _ in range(2):
        other.iterate()
    rest, tensors = flat_tensors(other.state_dict())
    assert rest == expected[0]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[1][name]), name
    assert other.statistics() == ppo.statistics()


def test_the_learning_rate_can_be_changed_and_is_resumed():
    ppo = PPO(make_agent("gru"), Chance(8), SHORT)
    ppo.set_lr(1e-5)
    other = PPO(make_agent("gru"), Chance(8), SHORT)
    other.load_state_dict(ppo.state_dict())
    assert other.optimiser.param_groups[0]["lr"] == 1e-5


# --------------------------------------------------------------------------------------- learns


def test_a_bandit_is_learned():
    ppo = PPO(
        make_agent("gru", input_size=1),
        Bandit(64),
        PPOConfig(rollout_steps=8, sequence_steps=None, lr=3e-3, minibatches=2),
    )
    for _ in range(60):
        ppo.iterate()
    ppo.statistics()
    ppo.collect()
    assert (ppo.rollout.action == 3).float().mean() > 0.9  # the best arm
    assert ppo.statistics()["episode_return"] > 0.8  # of 0.9


class Forgetful(TorchMemory):
    """Every step is the first."""

    def forward(self, features, state, reset, noise):
        return super().forward(features, state, torch.ones_like(reset), noise)


RECALL = PPOConfig(
    rollout_steps=16, sequence_steps=None, minibatches=2, lr=5e-3, truncation="last-value"
)


def recall(agent, iterations):
    """How many of the last answers were right"""
    ppo = PPO(agent, Recall(64, delay=3), RECALL)
    for _ in range(iterations):
        ppo.iterate()
    ppo.statistics()
    for _ in range(4):
        ppo.collect()
    return ppo.statistics()["success"]


@pytest.mark.parametrize("layer", ["gru", "lstm", "scoff"])
def test_a_cue_is_remembered(layer):
    assert recall(make_agent(layer, 3, 2), 60) > 0.95


def test_without_memory_the_cue_is_lost():
    agent = make_agent("gru", 3, 2)
    agent.memory = Forgetful(agent.memory.rnn)
    assert 0.4 < recall(agent, 60) < 0.6


@every_layer
def test_small_mazes_are_walked(layer):
    ppo = maze_ppo(layer)
    for _ in range(5):  # longer than the time limit
        ppo.iterate()
    found = ppo.statistics()
    assert 0 <= found["success"] <= 1
    assert 1 <= found["episode_length"] <= 64
    assert found.keys() == {*ppo.episodes.names, *ppo.updates.names}
    assert all(torch.tensor(value).isfinite() for value in found.values())


def test_a_small_maze_is_learned():
    """Two rooms of 2 by 2 cells, an open door between them, from the pixels of views"""
    torch.manual_seed(0)
    encoder = TileEncoder(5, 16, 32)
    agent = RecurrentAgent(encoder, nn.GRU(32, 32), head(32, NUM_ACTIONS), head(32, 1))
    options = MazeOptions(room_size=4, num_rows=1, num_cols=2, doors_open=True)
    config = PPOConfig(
        rollout_steps=32, sequence_steps=16, minibatches=2, lr=3e-3, truncation="last-value"
    )
    ppo = PPO(agent, MazeEnvironment(Mazes(64, options)), config)
    for _ in range(4):
        ppo.iterate()
    first = ppo.statistics()["success"]
    for _ in range(44):
        ppo.iterate()
    ppo.statistics()
    for _ in range(4):
        ppo.collect()
    found = ppo.statistics()
    assert first < 0.6
    assert found["success"] > 0.9
    assert found["episode_length"] < options.max_steps / 2


def test_mazes_that_were_used_up_are_replaced():
    mazes = Mazes(16, MazeOptions(room_size=4), spares=48)
    environment = MazeEnvironment(mazes)
    for _ in range(3):
        environment.reset()
    environment.prepare()
    assert mazes.supply.taken == 48
    assert mazes.supply.drawn == 48 + 48


def test_mazes_have_to_begin_anew_at_once():
    with pytest.raises(ValueError, match="same-step"):
        MazeEnvironment(Mazes(4, autoreset="next-step"))


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_run_goes_on_on_another_device(source, target, tmp_path):
    ppo = maze_ppo("scoff", source)
    ppo.iterate()
    path = checkpoint.save(tmp_path, ppo.frames, ppo.state_dict())
    other = maze_ppo("scoff", target)
    other.load_state_dict(checkpoint.load(path)[1])
    other.iterate()
    assert other.frames == 2 * ppo.frames


@pytest.mark.gpu
@every_layer
def test_nothing_waits_for_the_device(layer):
    ppo = maze_ppo(layer, "cuda")
    for _ in range(2):  # libraries set themselves up
        ppo.iterate()
    with warnings.catch_warnings(action="ignore"):  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        ppo.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_capturing_leaves_no_trace():
    ppo = maze_ppo("scoff", "cuda")
    before, random = [tensor.clone() for tensor in ppo.tensors()], torch.cuda.get_rng_state()
    Replay(ppo)
    moments = ppo.optimiser.state.values()
    assert len(moments) > 0
    assert not any(moment.any() for state in moments for moment in state.values())
    ppo.optimiser.state.clear()
    assert all(map(torch.equal, ppo.tensors(), before))
    assert torch.equal(torch.cuda.get_rng_state(), random)


def iterated(layer, count, replays):
    torch.manual_seed(0)
    ppo = maze_ppo(layer, "cuda")
    work = Replay(ppo) if replays else ppo
    for _ in range(count):
        work.iterate()
    return ppo


@pytest.mark.gpu
@every_layer
def test_replays_do_what_iterations_do(layer):
    eager, replayed = (iterated(layer, 2, replays) for replays in (False, True))
    assert replayed.frames == eager.frames
    torch.testing.assert_close(replayed.rollout.observation, eager.rollout.observation)
    torch.testing.assert_close(replayed.agent.state_dict(), eager.agent.state_dict())
    assert replayed.statistics() == pytest.approx(eager.statistics(), rel=1e-3, abs=1e-5)


@pytest.mark.gpu
def test_replays_follow_the_learning_rate():
    ppo = maze_ppo("gru", "cuda")
    replay = Replay(ppo)
    ppo.set_lr(0.0)
    before = {name: weight.clone() for name, weight in ppo.agent.state_dict().items()}
    replay.iterate()
    assert all(torch.equal(w, before[name]) for name, w in ppo.agent.state_dict().items())
    ppo.set_lr(1e-2)
    replay.iterate()
    assert not any(torch.equal(w, before[name]) for name, w in ppo.agent.named_parameters())
