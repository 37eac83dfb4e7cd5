"""Run servers in forks of one process, which alone imports everything: `python serve_fakes.py FOLDER`.

Each line of the standard input is a JSON list [NAME, MANNER, SETTINGS]. The log of the server is in
FOLDER/NAME.log, its process id in NAME.pid, and its exit code, once it has ended, in NAME.code. Its temporary
files are in FOLDER/NAME.

The manner "command" runs `attncache` with SETTINGS["arguments"] in SETTINGS["folder"]. It waits
SETTINGS["patience"] seconds for the shared store, if that is given. All other manners serve the fake engine.
Their SETTINGS are by field name, and by default the port is free. A batch takes 0.3 s, or 0.03 s with the
manner "quick", a batch with the text "held" takes until FOLDER/NAME.go exists, and a batch with the text
"hang" hangs. The quotas of the manner "quick" never grow again. SIGUSR1 hangs the event loop. SIGUSR2 hangs
all threads that need the interpreter.
"""

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from fake_engine import FakeEngine, texts_of

import service
from attncache_core import BuildOptions, ModelNotFound, build_database, default_corpus
from attncache_core.build import default
from service.access import quotas
from service.cli import main as attncache
from service.loading import rebuild
from service.observability.logs import configure_logging
from service.settings import Settings
from service.shared import store
from service.web.listeners import open_listeners
from service.workers.supervisor import serve_with_workers

HANG_SECONDS = 600


class SlowEngine(FakeEngine):
    def __init__(self, seconds, go):
        """go: the file whose existence ends batches with the text "held"."""
        super().__init__()
        self.seconds, self.go = seconds, go

    def run(self, requests):
        texts = texts_of(requests)
        time.sleep(HANG_SECONDS if "hang" in texts else self.seconds)
        while "held" in texts and not self.go.exists():
            time.sleep(0.01)
        return super().run(requests)


def serve(manner, options, go):
    def load_engines(*_):
        match manner:
            case "never-loads":
                time.sleep(60)
            case "refuses":
                raise ModelNotFound("there is no such model")
            case "fails":
                raise RuntimeError("a bug")
        yield SlowEngine(0.03 if manner == "quick" else 0.3, go)

    if manner == "quick":
        quotas.time = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 1e9)
    if manner == "never-cleans-up":
        atexit.register(time.sleep, HANG_SECONDS)
    signal.signal(signal.SIGUSR1, hang_loop)
    signal.signal(signal.SIGUSR2, hang_interpreter)
    settings = Settings(**({} if "unix_socket" in options else {"port": 0}) | options)
    configure_logging("info")
    failure = serve_with_workers(settings, load_engines, open_listeners(settings))
    print(failure, file=sys.stderr)
    sys.exit(f"failed with {type(failure).__name__}")


class ForkedBuilder:
    """What a server uses of its builder: a fork from before the server ran anything.

    Its imports are those of this process. It waits until it is told what to do.
    """

    def __init__(self):
        (read, write), (heard, told) = os.pipe(), os.pipe()
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os.setpgid(0, 0)
            os.dup2(read, 0)
            os.dup2(told, 1)
            for pipe in (read, write, heard, told):
                os.close(pipe)
            sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
            if job := sys.stdin.readline().strip():
                sys.argv[1:] = [job]
                rebuild.main()
            sys.stdout.flush()
            os._exit(0)
        os.close(read)
        os.close(told)
        self.stdin, self.stdout = os.fdopen(write, "w"), os.fdopen(heard)

    def begin(self, command):
        print(command[-1], file=self.stdin)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdout.close()
        self.stdin.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def hang_loop(*_):
    time.sleep(HANG_SECONDS)


def hang_interpreter(*_):
    ctypes.PyDLL(None).sleep(HANG_SECONDS)  # keeps the interpreter's lock


def run(folder, name, manner, settings):
    os.setsid()
    os.dup2(os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    (folder / name).mkdir()
    tempfile.tempdir = str(folder / name)
    if manner == "command":
        if texts := settings.get("builds"):
            # Little is built, and not at the lowest priority, because a test waits for it.
            corpus = default_corpus()[:texts]
            default.default_corpus = lambda: corpus
            options = BuildOptions(heads="all", threshold=0.0, prototypes=0, training_steps=20)
            default.build_database = partial(build_database, options=options)
            rebuild._LOWEST_PRIORITY = 0
            builder = ForkedBuilder()
            rebuild.subprocess = SimpleNamespace(
                PIPE=subprocess.PIPE, Popen=lambda *command, **_: builder.begin(*command)
            )
        store._PATIENCE_SECONDS = settings.get("patience", store._PATIENCE_SECONDS)
        os.chdir(settings["folder"])
        os.environ["PYTHONPATH"] = str(Path(service.__file__).parents[1])
        attncache(settings["arguments"])
    serve(manner, settings, folder / f"{name}.go")


def write(path, number):
    beside = path.with_suffix(".new")
    beside.write_text(str(number))
    beside.replace(path)


def main(folder):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        name, manner, settings = json.loads(line)
        if os.fork():
            continue
        # This process waits for the server.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process = os.fork()
        if process == 0:
            return run(folder, name, manner, settings)
        write(folder / f"{name}.pid", process)
        write(folder / f"{name}.code", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
