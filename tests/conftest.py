import atexit
import gc
import importlib
import os
import signal
from contextlib import contextmanager, nullcontext

# The networks here are tiny: one thread each, and the processes of pytest-xdist side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for two, those that wait sleep: by default they spin on the cores of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from jaxtyping import config as jaxtyping_config
from processes import Processes

# A shell that runs the tests in the background hands an ignored Ctrl-C on to all their processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAULT = os.environ.get("LAPLACE_DEBIAS_FAULTY_EIGH")
if FAULT:
    import faulty_eigh  # with torch, which the process that only hands out tests does not need

    faulty_eigh.install(FAULT)

# What the package imports. A module that is first imported from an instrumented one is compiled
# anew, because jaxtyping keeps the byte code of everything below it apart.
IMPORTED_BEFORE = (
    "backpack",
    "matplotlib.figure",
    "rich.console",
    "scipy.sparse.linalg",
    "scipy.stats",
    "sklearn.datasets",
    "timm",
    "torchmetrics",
    "tqdm.auto",
)


def pytest_sessionstart(session):
    config = session.config
    only_hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(
        config, "workerinput"
    )
    if not only_hands_out_tests:
        gc.disable()  # until all tests are collected
        for name in IMPORTED_BEFORE:
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    import conformance  # not above: the package must not be imported before it is instrumented
    import torch

    if not torch.cuda.is_available():
        # torch's own writes a stack down for every kind of device that is not there.
        torch.manual_seed = torch.default_generator.manual_seed
    for item in items:
        in_float32 = "callspec" in vars(item) and item.callspec.params.get("dtype") == torch.float32
        if (
            in_float32
            and isinstance(item.cls, type)
            and issubclass(item.cls, conformance.OperatorConformance)
            and item.originalname not in conformance.DAILY_IN_FLOAT32
        ):
            item.add_marker(pytest.mark.slow)
    # First, and so in one worker: these take long, and start processes of their own.
    items.sort(key=lambda item: "processes" not in item.fixturenames)


FIRST_CASES = set()


def pytest_collection_finish(session):
    named = {}
    for item in session.items:
        named.setdefault(item.nodeid.partition("[")[0], item.nodeid)
    FIRST_CASES.update(named.values())
    # Half a million objects live as long as the process: no later collection visits them.
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config):
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # a million objects need not be taken apart
    else:
        gc.unfreeze()


# No test outlives a loss of power: files are written without waiting for the disk.
os.fsync = lambda descriptor: None


@contextmanager
def annotations_unchecked():
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.fixture
def unchecked():
    """As for a user, whose annotations nobody checks: errors are the package's own."""
    with annotations_unchecked():
        yield


@pytest.fixture(autouse=True)
def _checked_in_the_first_case(request):
    """Where annotations are checked: every test has one case in which they are."""
    with nullcontext() if request.node.nodeid in FIRST_CASES else annotations_unchecked():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def batches_apart(monkeypatch):
    """Fits run every batch by itself, even if it is small."""
    from laplace_debias.curvature.fits import chunks

    monkeypatch.setattr(chunks, "_JOINED_BYTES", 0)


@pytest.fixture(scope="session")
def processes():
    """Processes that share their work; one that a test kills is started again."""
    started = Processes()
    yield started
    started.close()
