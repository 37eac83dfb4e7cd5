"""Run one engine in its own process, which reads tasks from standard input and writes results.

Engines in one process would disturb each other, because their idle threads spin. Each task and each result is
one line of JSON:

    {"peer": NAME, "variant": {"model": ...}, "threads": 2, "shapes": [[32, 16]]}
                                                           ->  {"ready": true} or {"absent": WHY}
    {"tokens": [[...]], "repeat": 5} or with "texts"                  ->  {"seconds": [...]}
    {"tokens": [[...]], "repeat": 0} or with "texts"                  ->  {"embeddings": [[...]]}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.measuring.peers import Peer

# The arguments of find_variant: the model and the changes to the model, including `quantization`.
Variant = Mapping[str, Any]

_WARM_UPS = 3
_SECONDS_TO_END = 20


class Worker:
    """Owns a peer's process. The process is suspended while other peers run."""

    def __init__(self, peer: str, variant: Variant, threads: int, shapes: Sequence[tuple[int, int]]) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measuring.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.absent: str | None = None
        self._task = {"peer": peer, "variant": variant, "threads": threads, "shapes": list(shapes)}

    def load(self) -> None:
        """Load the peer. If the peer cannot be loaded, `absent` is set to the reason."""
        self._ask(self._task)

    def seconds(self, repeat: int, **work: Any) -> list[float]:
        """Return the seconds of each repetition. work: `tokens` or `texts`.

        If the peer fails, the result is empty and `absent` is set to the reason.
        """
        return list(self._ask({**work, "repeat": repeat}).get("seconds", ()))

    def embeddings(self, **work: Any) -> list[list[float]]:
        """Return embeddings. work: `tokens` or `texts`.

        If the peer fails, the result is empty and `absent` is set to the reason.
        """
        return list(self._ask({**work, "repeat": 0}).get("embeddings", ()))

    def close(self) -> None:
        """End the process: first by the end of its input, so that it can clean up, then by force."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.absent = f"the process ended with exit code {self._process.wait()}"
            return {}
        self._process.send_signal(signal.SIGSTOP)
        result = dict(json.loads(answer))
        self.absent = result.get("absent", self.absent)
        return result


def main() -> None:
    """Run one peer until standard input ends."""
    # Output of libraries is redirected to stderr, so that stdout holds only results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    task = json.loads(sys.stdin.readline())
    try:
        from attncache_core import Quantization, find_variant
        from benchmarks.measuring.peers import GPU_PEERS, PEERS
        from benchmarks.measuring.prefix_peers import PREFIX_PEERS

        shapes = [tuple(shape) for shape in task["shapes"]]
        kind = task["variant"].pop("quantization")
        checkpoint = find_variant(**task["variant"], quantization=kind and Quantization(kind))
        peer = {**PEERS, **GPU_PEERS, **PREFIX_PEERS}[task["peer"]](checkpoint, task["threads"], shapes)
    except ModuleNotFoundError as error:
        say({"absent": f"{error}; install it with: pip install -e '.[bench]'"})
        return
    except Exception as error:  # a library may raise anything, and the other peers are still measured
        say({"absent": f"{type(error).__name__}: {error}"[:300]})
        return
    say({"ready": True})
    for line in sys.stdin:
        try:
            say(_done(peer, json.loads(line)))
        except Exception as error:  # for example, torch.compile fails at its first call
            say({"absent": f"{type(error).__name__}: {error}"[:300]})


def _done(peer: Peer, work: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one task."""
    run = peer.embed_texts if "texts" in work else peer.embed_tokens
    inputs = work.get("texts") or work["tokens"]
    if not work["repeat"]:
        return {"embeddings": run(inputs).tolist()}
    for _ in range(_WARM_UPS):
        run(inputs)
    seconds = []
    for _ in range(work["repeat"]):
        started = time.perf_counter()
        run(inputs)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


if __name__ == "__main__":
    main()
