import os

# The networks here are tiny: one thread each, and the processes of pytest-xdist side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import config


@pytest.fixture
def unchecked():
    """As for a user, whose annotations nobody checks: errors are the package's own."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
