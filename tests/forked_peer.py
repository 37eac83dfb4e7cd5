"""A peer of the benchmarks as a fork of the process that has imported everything."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from forked import fresh

from benchmarks.measuring import worker


def answer_over(questions, answers):
    os.dup2(questions.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    answers.close()
    sys.stdin = open(0)  # noqa: SIM115
    worker.main()


class ForkedPeer:
    """What a Worker uses of subprocess.Popen."""

    def __init__(self, *_, **__):
        (questions, asking), (hearing, answers) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        self._process = fresh(answer_over, questions, answers)
        questions.close()
        answers.close()
        self.stdin = os.fdopen(os.dup(asking.fileno()), "w")
        self.stdout = os.fdopen(os.dup(hearing.fileno()))
        asking.close()
        hearing.close()

    def send_signal(self, number):
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self):
        self._process.kill()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a peer", timeout)
        return self._process.exitcode


@pytest.fixture
def hide_libraries(tmp_path, monkeypatch):
    """Return a function that hides libraries from new processes, whether they are installed or not."""

    def hide(*names):
        for name in names:
            (tmp_path / f"{name}.py").write_text(
                f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')", encoding="utf-8"
            )
        monkeypatch.syspath_prepend(tmp_path)

    return hide


@pytest.fixture
def forked_peers(monkeypatch):
    """Start the processes of peers in milliseconds."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPeer})
    monkeypatch.setattr(worker, "subprocess", forking)
