import pytest
from processes import Processes


@pytest.fixture(scope="session")
def processes():
    """Processes that share their work; one that a test kills is started again."""
    started = Processes()
    yield started
    started.close()
