import pytest
from core_decoders import write_llama
from server_process import starting_servers


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def start():
    """Return a function that starts a server as a process; one process imports everything for all of them."""
    with starting_servers() as started:
        yield started


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a tiny decoder. Do not change it."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
