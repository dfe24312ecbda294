import pytest
import torch


@pytest.fixture
def tf32_flags():
    """They are put back: monkeypatch cannot, for torch makes them up when they are asked for."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
