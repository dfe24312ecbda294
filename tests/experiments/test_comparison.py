"""Runs are compared only where that means something."""

from dataclasses import replace

import pytest

from scoff.experiments.adding import MODELS, TASK, Config
from scoff.experiments.base import Finished
from scoff.experiments.comparison import group_runs
from scoff.training.errors import UsageError


def finished(name, **changes):
    return Finished(name, replace(Config(), **changes), {}, [])


def test_seeds_of_one_config_are_a_group():
    runs = [finished("a"), finished("b", seed=1), finished("c", model="gru")]
    groups = group_runs(runs, MODELS, TASK)
    assert {name: [r.name for r in group] for name, group in groups.items()} == {
        "SCOFF": ["a", "b"],
        "GRU": ["c"],
    }


def test_other_configs_are_groups_of_their_own_named_by_what_differs():
    runs = [finished("a"), finished("b", lr=0.5, seed=1), finished("c", model="gru")]
    assert list(group_runs(runs, MODELS, TASK)) == ["SCOFF (lr 0.001)", "SCOFF (lr 0.5)", "GRU"]


def test_other_tasks_cannot_be_compared():
    with pytest.raises(UsageError, match="a and b cannot be compared: --test-lengths differs"):
        group_runs([finished("a"), finished("b", test_lengths=(9000,))], MODELS, TASK)


def test_the_same_run_twice_is_no_second_seed():
    with pytest.raises(UsageError, match="a, b: two are the same run"):
        group_runs([finished("a"), finished("b")], MODELS, TASK)
