import pytest
from processes import Processes


@pytest.fixture(scope="session")
def processes():
    """Processes in which commands run together; they are started when a test needs them."""
    started = Processes()
    yield started
    started.close()
