import pytest

from tests.training.helpers import outcome, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What comes of CONFIG"""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(path)
    return outcome(path)
