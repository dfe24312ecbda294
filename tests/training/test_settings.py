import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoff.training.errors import UsageError
from scoff.training.settings import Settings


def rates(**options):
    settings = Settings(**options)
    return [settings.lr_at(step) for step in range(settings.steps)]


def test_the_rate_grows_then_falls():
    assert rates(steps=4, lr=2.0) == [2, 2, 2, 2]
    assert rates(steps=4, lr=2.0, warmup=0.5) == [1, 2, 2, 2]
    assert rates(steps=4, lr=2.0, decay="linear") == [2, 1.5, 1, 0.5]
    assert rates(steps=6, lr=4.0, warmup=1 / 3, decay="linear") == [2, 4, 4, 3, 2, 1]
    cosine = [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert rates(steps=4, lr=1.0, decay="cosine") == pytest.approx(cosine)
    assert rates(steps=3, lr=3.0, warmup=1.0, decay="linear") == [1, 2, 3]
    assert rates(steps=1, lr=3.0, warmup=0.1, decay="cosine") == [3]


@given(
    st.integers(1, 300),
    st.floats(0, 1),
    st.sampled_from(["none", "linear", "cosine"]),
    st.floats(1e-9, 1e3),
)
def test_the_rate_stays_in_bounds(steps, warmup, decay, lr):
    values = rates(steps=steps, warmup=warmup, decay=decay, lr=lr)
    assert all(0 < value <= lr * (1 + 1e-12) for value in values)
    warm = round(warmup * steps)
    assert values[:warm] == sorted(values[:warm])
    assert values[warm:] == sorted(values[warm:], reverse=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "--steps: got 0, wants at least 1"),
        ("batch_size", 0, "--batch-size: got 0"),
        ("log_every", 0, "--log-every: got 0"),
        ("validate_every", -1, "--validate-every: got -1"),
        ("checkpoint_every", 0, "--checkpoint-every: got 0"),
        ("seed", -1, "--seed: got -1"),
        ("seed", 2**63, "--seed: got"),
        ("lr", 0.0, "--lr: got 0.0, wants a number above 0"),
        ("lr", math.nan, "--lr: got nan"),
        ("lr", math.inf, "--lr: got inf"),
        ("warmup", 1.5, "--warmup: got 1.5"),
        ("warmup", math.nan, "--warmup: got nan"),
        ("weight_decay", -0.1, "--weight-decay: got -0.1"),
        ("clip", 0.0, "--clip: got 0.0"),
        ("clip", math.nan, "--clip: got nan"),
    ],
)
def test_bad_values_are_refused(name, value, message):
    with pytest.raises(UsageError, match=message):
        Settings(**{name: value})


def test_good_values_are_not():
    Settings(seed=2**63 - 1, steps=1, clip=None, warmup=1.0, weight_decay=0.1)
