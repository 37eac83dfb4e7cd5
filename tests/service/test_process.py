"""A process of the real server listens, gets ready, answers and stops."""

import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from raw_http import wait_until
from server_process import get

from service.workers.server import allow_files

# Runs the command line, and hangs in the import of torch.
SLOW_IMPORTS = """
import sys, time

class Hanging:
    def find_spec(self, name, *_):
        if name == "torch":
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Hanging())
from service.cli import main
main()
"""


def test_server_notices_who_leaves_and_finishes_its_requests_after_sigterm(start):
    server = start("loads").wait_until_ready()
    with httpx.Client(base_url=server.url(), timeout=30) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/embed").status_code == 405
        large = {f"X-{number}": "x" * 50_000 for number in range(20)}
        assert client.get("/health", headers=large).status_code == 431
        assert client.get("/health", headers={"X-1": "x" * 50_000}).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post("/embed", json={"inputs": "gone"}, timeout=0.1)
        wait_until(lambda: server.metric('requests_total{route="/embed",status="499"}') == 1)
        with ThreadPoolExecutor() as clients:
            pending = clients.submit(client.post, "/embed", json={"inputs": ["a", "b"]})
            wait_until(lambda: server.metric("tokenize_seconds_count") == 2)
            server.send(signal.SIGTERM)
            response = pending.result()
    assert (response.status_code, response.headers["X-AttnCache-Hits"]) == (200, "0/2")
    assert server.number("code") == 0
    assert "Traceback" not in server.log


def test_server_that_gets_sigterm_while_loading_ends_with_0(start):
    server = start("never-loads")
    assert server.ask(get("/ready")).status == 503
    server.send(signal.SIGTERM)
    assert server.number("code") == 0
    assert "Traceback" not in server.log


# Imports what the command line imports first, and prints what SIGHUP has done until a line arrives.
FIRST_IMPORT = """
import os, sys
sys.argv[1:] = ["serve"]
from service import ending
print("imported", flush=True)
sys.stdin.readline()
print(len(ending.early_hangups), ending.IGNORES_HANGUP)
"""


@pytest.mark.parametrize(("ignored", "found"), [(False, b"1 False"), (True, b"0 True")])
def test_hangup_before_the_server_has_its_handlers_is_kept_and_nohup_is_noticed(ignored, found):
    handling = signal.SIG_IGN if ignored else signal.SIG_DFL
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_IMPORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, handling),
    ) as started:
        assert started.stdout.readline() == b"imported\n"
        started.send_signal(signal.SIGHUP)
        assert started.communicate(b"\n", timeout=60)[0].strip() == found


def test_standard_streams_that_are_closed_become_dev_null(tmp_path):
    """A connection that got one of their descriptors could not be closed by libuv."""
    script = (
        "import os, sys\nfrom service import ending\nprint(1)\nprint(1, file=sys.stderr)\nsys.stdin.read()\n"
    )
    script += f"open({str(tmp_path / 'done')!r}, 'w').write(str([os.fstat(n).st_rdev for n in range(3)]))"
    closed = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: [os.close(n) for n in range(3)],
        timeout=60,
        check=False,
    )
    assert closed.returncode == 0
    assert (tmp_path / "done").read_text() == str([os.stat(os.devnull).st_rdev] * 3)


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("serve", signal.SIGTERM, 0), ("serve", signal.SIGINT, 0), ("embed", signal.SIGTERM, -signal.SIGTERM)],
)
def test_signal_during_the_imports_ends_the_server_with_0_and_others_as_usual(command, number, code):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORTS, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout.readline() == b"importing\n"
        started.send_signal(number)
        _, logged = started.communicate(timeout=60)
    assert (started.returncode, logged) == (code, b"")


def test_database_that_is_refused_after_the_start_is_one_line_and_exit_code_2(start, tmp_path):
    absent = str(tmp_path / "absent")
    arguments = ["serve", "--port", "0", "--log-level", "error", "--database", absent]
    server = start("command", arguments=arguments, folder=str(tmp_path))
    assert server.number("code") == 2
    (line,) = server.log.splitlines()
    assert line.startswith("attncache: ")
    assert absent in line


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "useful", "allowed", "warns"),
    [
        (1024, 4096, 500, 1000, None, False),
        (1024, 4096, 500, 2000, 2000, False),
        (1024, 4096, 3000, 9000, 4096, False),
        (1024, 4096, 5000, 9000, 4096, True),
        (1024, INFINITE, 5000, 9000, 9000, False),
        (INFINITE, INFINITE, 5000, 9000, None, False),
    ],
)
def test_process_may_open_as_many_files_as_are_useful(
    soft, hard, needed, useful, allowed, warns, monkeypatch, caplog
):
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    allow_files(needed, useful)
    assert changed == ([] if allowed is None else [(allowed, hard)])
    assert ("raise ulimit -n, or lower --max-connections" in caplog.text) == warns
