import pytest
from server_process import starting_servers


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def start():
    """Return a function that starts a server as a process; one process imports everything for all of them."""
    with starting_servers() as started:
        yield started
