import os
from pathlib import Path

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


def _path_from(variable):
    value = os.environ.get(variable)
    if value is None:
        pytest.skip(f"needs {variable}: a path to the CIFAR-10 images or the All-CNN-C checkpoint")
    return Path(value)


@pytest.fixture(scope="session")
def cifar10_path():
    """The CIFAR-10 images: a folder, or a tar file of one."""
    return _path_from("LAPLACE_DEBIAS_DATA")


@pytest.fixture(scope="session")
def checkpoint_path():
    """The trained All-CNN-C."""
    return _path_from("LAPLACE_DEBIAS_CHECKPOINT")
