"""How many worker processes serve, and which share of the server's limits each of them gets."""

from __future__ import annotations

import logging
from typing import Any

from attncache_core.runtime.memory import available_memory
from attncache_core.runtime.threads import available_processors
from service.settings import Settings

logger = logging.getLogger(__name__)

# See workers_for.
_PROCESSORS_PER_LOOP = 8


def workers_for(processors: int) -> int:
    """Return the number of workers of `--workers auto`: one for every 8 processors, at least 1.

    One event loop answers some 3,000 requests of a single text per second, and one processor computes some
    400 such texts. So the loop becomes the limit at about 8 processors. Below, a second process would only
    hold the model twice. docs/guide.md has the figures.
    """
    return max(1, processors // _PROCESSORS_PER_LOOP)


def worker_count(settings: Settings) -> int:
    """Return the number of workers that these settings ask for."""
    return workers_for(_threads(settings)) if settings.workers == "auto" else settings.workers


def share_of(settings: Settings, count: int) -> Settings:
    """Return the settings of one of `count` workers.

    Threads, connections and bytes are divided. The limits of a request, a batch and a queue stay as
    they are: a queue bounds how long a request waits, and each worker has a queue of its own.
    """
    threads = _threads(settings)
    if max(threads, count) < (settings.threads or 0):
        warning = "--threads %d is lowered to %d, because this server may use %d processors"
        logger.warning(warning, settings.threads, max(threads, count), threads)
    shares: dict[str, Any] = {"workers": count, "threads": settings.threads and threads}
    if count > 1:
        shares |= {
            "threads": max(1, threads // count),
            "max_connections": _divided(settings.max_connections, count),
            "result_memory_bytes": settings.result_memory_bytes // count,
            # A request of the greatest size is always accepted if nothing else is answered.
            "max_inflight_bytes": max(
                _divided(settings.max_inflight_bytes, count),
                min(settings.max_inflight_bytes, settings.max_body_bytes),
            ),
        }
        if settings.reuse and settings.kv:
            shares["kv_memory_bytes"] = _key_value_bytes(settings) // count
    return settings.model_copy(update=shares)


def _threads(settings: Settings) -> int:
    """Return the threads of all workers together, see limit_threads."""
    processors = available_processors()
    return min(settings.threads or processors, processors)


def _key_value_bytes(settings: Settings) -> int:
    # As an engine chooses by itself, but before several engines take a quarter each.
    return available_memory() // 4 if settings.kv_memory_bytes is None else settings.kv_memory_bytes


def _divided(amount: int, count: int) -> int:
    return -(-amount // count)
