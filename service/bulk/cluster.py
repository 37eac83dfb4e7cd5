"""Compute shards on a Ray cluster: actors with an engine each. The only module that imports ray.

    a shard waits -> an actor that is ready computes it and writes its output -> done, or why it failed
    an actor or its node dies   its shards wait again; another actor is started in its place

The driver holds only the shards that actors have, so any number of shards can be planned. What was computed
is in the output and nowhere else: if the driver dies, the next one finds it there.
"""

from __future__ import annotations

import logging
import platform
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

from attncache_core import AttnCacheError, InvalidInput
from service.bulk.shards import TRIES, Due, ShardWorker, Work
from service.errors import reason_of, stack_without_values

logger = logging.getLogger(__name__)

_AT_ONCE = 2  # shards of an actor: one is computed, one waits
# An actor also dies if its machine is taken away, which says nothing about its shard.
_MOST_DEATHS = 10
_LOOK_SECONDS = 5.0
_START_SECONDS = 600.0
# After failed starts, the wait before the next one doubles, at most so often.
_MOST_DOUBLINGS = 4
# What may be shown of a traceback in the text of a Ray error: the frames, and the classes of errors.
_OF_TRACEBACK = re.compile(
    r'^ *File "[^"\n]+", line \d+, in \S+|^[\w.]+(?:Error|Exception)(?=:|$)', re.MULTILINE
)


class _Actor:
    """What runs in a process of Ray."""

    def __init__(self, work: Work, threads: int) -> None:
        self._work, self._threads = work, threads

    def start(self) -> tuple[dict[str, Any] | None, str | None]:
        """Load the engine, and return what decides the numbers, or why it cannot be loaded."""
        try:
            self._worker = ShardWorker(self._work, self._threads)
        except (AttnCacheError, OSError) as error:
            return None, f"{platform.node()}: {type(error).__name__}: {reason_of(error)}"
        except Exception as error:
            return None, f"{platform.node()}: {stack_without_values(error)}"
        return self._worker.options(), None

    def attempt(self, shard: Any, output: str) -> str | None:
        """Compute a shard, or return why this is not possible. Raises OSError as ShardWorker.attempt does."""
        return self._worker.attempt(shard, output)


class RayWorkers:
    """Owns the actors of a run. `ray_workers` makes one."""

    def __init__(self, ray: ModuleType, work: Work, threads: int | None) -> None:
        """threads: of each actor; None: as many as the smallest node has processors."""
        self._ray, self._work = ray, work
        self._threads = threads or int(min(self._processors()))
        self._starting: dict[Any, Any] = {}  # what an actor's start returns -> actor
        # actor -> what will be the outcome, and the shard, in the order in which the actor computes them
        self._ready: dict[Any, deque[tuple[Any, Due]]] = {}
        self._options: dict[str, Any] | None = None
        self._failed_starts = 0  # since an actor has started
        self._fill_after = 0.0
        self._reasons: dict[str, None] = {}  # why actors did not start

    def options(self) -> Mapping[str, Any]:
        """Return what decides the numbers. Waits for the first actor.

        Raises InvalidInput if no actor can start.
        """
        self._fill()
        self._await_an_actor()
        assert self._options is not None
        return self._options

    def computed(self, due: Iterator[Due]) -> Iterator[tuple[Due, str | None]]:
        """Yield each shard, in the order of their ends, with None or why it failed."""
        again: deque[Due] = deque()
        tries, deaths = Counter[str](), Counter[str]()
        looked = time.monotonic()
        while True:
            self._hand_out(again, due)
            running = {calls[0][0]: actor for actor, calls in self._ready.items() if calls}
            if not running:
                again.extend(islice(due, 1))
                if not again:
                    return
                self._fill()
                self._await_an_actor()
                continue
            ended, _ = self._ray.wait([*running, *self._starting], timeout=_LOOK_SECONDS)
            for outcome in ended:
                if outcome in self._starting:
                    self._note_start(outcome)
                    continue
                actor = running[outcome]
                _, (shard, output) = self._ready[actor].popleft()
                try:
                    reason = self._ray.get(outcome)
                except self._ray.exceptions.RayError as error:
                    if isinstance(cause := getattr(error, "cause", None), OSError):
                        raise cause from None
                    again.extend(waited for _, waited in self._ready.pop(actor))
                    deaths[output] += 1
                    reason = f"its process died: {_shown(error)}"
                    is_last = deaths[output] == _MOST_DEATHS
                else:
                    tries[output] += 1
                    is_last = reason is None or tries[output] == TRIES
                if is_last:
                    del tries[output], deaths[output]
                    yield (shard, output), reason
                else:
                    again.append((shard, output))
            if time.monotonic() - looked > _LOOK_SECONDS or not self._ready:
                self._fill()
                looked = time.monotonic()

    def _hand_out(self, again: deque[Due], due: Iterator[Due]) -> None:
        """Give shards to actors that have less than they may have."""
        for shards in range(_AT_ONCE):
            for actor, calls in self._ready.items():
                if len(calls) == shards:
                    next_due = again.popleft() if again else next(due, None)
                    if next_due is None:
                        return
                    calls.append((actor.attempt.remote(*next_due), next_due))

    def _fill(self) -> None:
        """Start as many actors as the nodes of now have room for, unless actors have failed just now."""
        if (self._ready or self._starting) and time.monotonic() < self._fill_after:
            return
        room = sum(int(count) // self._threads for count in self._processors())
        for _ in range(max(1, room) - len(self._starting) - len(self._ready)):
            kind = self._ray.remote(_Actor).options(num_cpus=self._threads, max_restarts=0)
            actor = kind.remote(self._work, self._threads)
            self._starting[actor.start.remote()] = actor

    def _await_an_actor(self) -> None:
        last = time.monotonic() + _START_SECONDS
        while not self._ready:
            if time.monotonic() > last:
                needs = f"an actor needs {self._threads} free processors of one node; give --threads"
                raise InvalidInput(
                    f"ray: no actor has started within {_START_SECONDS:.0f} s; "
                    f"{next(reversed(self._reasons), needs)}",
                    field="ray",
                )
            ended, _ = self._ray.wait([*self._starting], timeout=_LOOK_SECONDS)
            for start in ended:
                self._note_start(start)
            self._fill()

    def _note_start(self, start: Any) -> None:
        """Take an actor that has started. Raises InvalidInput if no actor starts, or if they differ."""
        actor, most = self._starting.pop(start), TRIES
        try:
            options, reason = self._ray.get(start)
        except self._ray.exceptions.RayError as error:
            options, reason = None, _shown(error)
            if not _OF_TRACEBACK.search(str(error)):
                most = _MOST_DEATHS  # its process was killed
        if options is None:
            self._note_failed_start(reason, most)
            return
        self._failed_starts = 0
        self._options = self._options or options
        if options != self._options:
            name = next(name for name in options if options[name] != self._options.get(name))
            raise InvalidInput(
                f"ray: the nodes compute with different {name}; give all nodes the same model and packages",
                field="ray",
            )
        self._ready[actor] = deque()

    def _note_failed_start(self, reason: str, most: int) -> None:
        """Log a new reason. Raises InvalidInput after `most` failed starts if no other actor is there."""
        self._failed_starts += 1
        if self._failed_starts >= most and not (self._ready or self._starting):
            raise InvalidInput(f"ray: no actor can start: {reason}", field="ray")
        doublings = min(self._failed_starts, _MOST_DOUBLINGS)
        self._fill_after = time.monotonic() + _LOOK_SECONDS * 2**doublings
        if reason not in self._reasons:
            logger.warning("ray: an actor did not start, and is tried again: %s", reason)
        self._reasons[reason] = None

    def _processors(self) -> list[float]:
        counts = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        return [count for count in counts if count >= 1] or [1.0]


def _shown(error: Exception) -> str:
    """Return the class of an error of Ray, and what may be shown of a traceback in its text."""
    return "\n".join([type(error).__name__, *_OF_TRACEBACK.findall(str(error))])


@contextmanager
def ray_workers(address: str, work: Work, threads: int | None) -> Iterator[RayWorkers]:
    """Connect to a Ray cluster, or start one on this machine ("local"), and yield workers.

    Raises InvalidInput if ray is missing or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise InvalidInput("--ray needs ray: pip install 'attncache[ray]'", field="ray") from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise InvalidInput(
            f"--ray {address}: no Ray cluster can be reached ({type(error).__name__}); start one by "
            "`ray start --head`, or give --ray local",
            field="ray",
        ) from error
    try:
        yield RayWorkers(ray, work, threads)
    finally:
        ray.shutdown()
