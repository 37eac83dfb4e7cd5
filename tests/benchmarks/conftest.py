import subprocess
from types import SimpleNamespace

import pytest
from forked_peer import ForkedPeer

from benchmarks.measuring import worker


@pytest.fixture
def forked_peers(monkeypatch):
    """Start the processes of peers in milliseconds."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPeer})
    monkeypatch.setattr(worker, "subprocess", forking)
