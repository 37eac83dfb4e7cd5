"""The metrics at /metrics: requests, queue, batches, reuse, and what is recorded and stored.

Every name starts with attncache_ and contains its unit. Every label value exists, with the value zero, before
the first request. Label values come from fixed lists and, for names of API keys, from the operator, so that
nothing that a client sends can become a label.
"""

from __future__ import annotations

import math
import os
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from attncache_core import Outcome, PrefillResult
from attncache_core.engine.info import EngineInfo
from attncache_core.version import __version__
from service.errors import (
    HeadersTooLarge,
    MalformedRequest,
    RequestTimeout,
    ShuttingDown,
    TooManyConnections,
)
from service.observability.engine_numbers import EngineNumbers

# By default, every counter and histogram has a second series with the time of its creation. Here that would
# always be the time when the server started.
disable_created_metrics()  # type: ignore[no-untyped-call]

_MODEL_PREFIX, _MODEL_ROUTE = "/v1/models/", "/v1/models/{model}"
ROUTES = (
    *("/embed", "/classify", "/health", "/ready", "/info", "/metrics", "/", "/explain"),
    *("/embed_all", "/predict", "/similarity", "/rerank", "/tokenize", "/decode"),
    *("/v1/embeddings", "/v1/classify", "/v1/rerank", "/v2/rerank", "/v1/models", _MODEL_ROUTE),
    *("/docs", "/openapi.json"),
    *("/cache", "/cache/stats", "/cache/warm", "/cache/pin", "/cache/lookup", "/cache/capacity"),
)
OTHER_ROUTE = "other"
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 431, 499, 500, 503, 504)

# A client that does not read its response.
SLOW_READER = "slow_reader"
# Why connections are refused or cut.
CUT_REASONS = (
    *(MalformedRequest.code, HeadersTooLarge.code, RequestTimeout.code),
    *(TooManyConnections.code, ShuttingDown.code, SLOW_READER),
)

_TOKEN_STATES = ("asked", "cached", "computed")
_SEGMENT_STATES = ("reused", "recomputed", "computed")
_REPEATED = ("kept", "in_flight")
_STORED_USES = ("sessions", "quotas")
_QUOTAS = ("requests_per_minute", "tokens_per_minute", "in_flight")

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# The buckets are narrow close to 1, because thresholds are close to 1.
_SIMILARITIES = (0.0, 0.5, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.999, 1.0)
# The buckets are narrow around 0.985, because budgets are about 0.985.
_COSINES = (0.5, 0.8, 0.9, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999, 0.9999, 1.0)


# Its multiprocess mode has files in this folder: one for each kind of metric and each worker.
_MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_GAUGES = ("gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_livemostrecent")
# By kind, the bytes that a file has from the start. All counters of one API key take 1 KiB.
_FILE_BYTES = {"counter": 2**21, **dict.fromkeys(("histogram", *_GAUGES), 2**19)}
# Each worker has a tier in memory, and all workers share the tier on disk.
_SHARED_TIERS = frozenset({"attncache_kv_bytes", "attncache_kv_max_bytes"})
# The value of a gauge whose labels are of a database that served before: less than that of any other worker.
_GONE = -math.inf
# Read from the folder of the database, which all workers share.
_RENEWALS = "attncache_renewals"


class Metrics:
    """Owns all metrics of one app, in their own registry. Thread safe.

    Whoever counts one thing changes its metric itself; what concerns several metrics is a method here.

    In prometheus_client's multiprocess mode they are the metrics of all workers: counts are added, and each
    gauge has a multiprocess mode.
    """

    def __init__(self) -> None:
        self._folder = os.environ.get(_MULTIPROCESS_FOLDER)
        # In multiprocess mode: what `publish` reads, and where it writes.
        self._functions: dict[Gauge, Callable[[], float]] = {}
        # By name and labels: the value of this worker, and what the worker before it had counted.
        self._published: dict[tuple[str, ...], tuple[Any, float]] = {}
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered", ("route", "status"))
        self._request_seconds = self._histogram(
            "request_seconds", "Seconds from the arrival of a request to its response", _SECONDS, ("route",)
        )
        self._queue_seconds = self._histogram(
            "queue_seconds",
            "Seconds that a tokenised request waits for its first batch",
            _SECONDS,
        )
        self._batch_sequences = self._histogram("batch_sequences", "Sequences in a batch", _SEQUENCES)
        self._batch_tokens = self._histogram("batch_tokens", "Tokens in a batch", _TOKENS)
        self._sequences = self._counter(
            "sequences", "Sequences by the outcome of the search for a record", ("outcome",)
        )
        self._similarity = self._histogram(
            "similarity", "Similarity of the nearest record of a sequence that was searched", _SIMILARITIES
        )
        self._tokens = self._counter(
            "tokens",
            "Tokens of the sequences of all batches (asked), of them those whose keys and values were "
            "stored (cached), and those that were computed; what sequences of a batch share is computed "
            "once. Tokens of sequences that were in no batch, because their results were known (repeated)",
            ("state",),
        )
        self._segment_tokens = self._counter(
            "segment_tokens",
            "Tokens of chunks that were blended: used as they were stored (reused), computed again "
            "(recomputed), or not stored yet (computed)",
            ("state",),
        )
        self._repeated = self._counter(
            "repeated_sequences",
            "Sequences in no batch: their results were kept, or computed for another request (in_flight)",
            ("source",),
        )
        self.truncated_sequences = self._counter(
            "truncated_sequences", "Sequences whose texts were too long and were cut"
        )
        self.tokenize_seconds = self._histogram("tokenize_seconds", "Seconds to tokenise a request", _SECONDS)
        self._search_seconds = self._histogram("search_seconds", "Seconds to search for one batch", _SECONDS)
        self._forward_seconds = self._histogram(
            "forward_seconds", "Seconds of the model's pass over one batch", _SECONDS
        )
        self._queue_sequences = self._gauge("queue_sequences", "Sequences that wait for the engine")
        self._queue_tokens = self._gauge(
            "queue_tokens", "Tokens that wait for the engine; of texts that are not tokenised yet, a guess"
        )
        self._results_bytes = self._gauge("results_bytes", "Bytes of the results that are kept")
        self._keys: set[str] = set()  # whose names are shown
        self._key_requests = self._counter("key_requests", "Requests by the name of their API key", ("key",))
        self._key_tokens = self._counter(
            "key_tokens", "Tokens of all sequences that were requested, by the name of the API key", ("key",)
        )
        self._quota_refusals = self._counter(
            "quota_refusals", "Requests that were refused because a quota was used up", ("key", "quota")
        )
        self.sessions = self._gauge("sessions", "Sessions whose history is kept", mode="livemostrecent")
        self._ready = self._gauge("ready", "1 if model and database are loaded, else 0", mode="livemin")
        build = self._gauge("build_info", "The version of the server", ("version",), mode="livemax")
        build.labels(__version__).set(1)
        self._gauge("workers", "Worker processes that answered, 1 without --workers").set(1)
        self.connections = self._gauge("connections", "Open connections", ("listener",))
        self.cuts = self._counter(
            "connections_cut",
            "Connections that were refused or cut: by error code, or because the client did not read",
            ("reason",),
        )
        self.overdue_seconds = self._gauge(
            "overdue_seconds",
            "Seconds by which a batch, or the event loop, exceeds --stuck-seconds",
            mode="livemax",
        )
        self.corrupt_records = self._counter(
            "database_corrupt_records", "Records that were damaged and not used"
        )
        self._lost_segments = self._counter(
            "database_lost_segments",
            "Lengths that lost their records because the file was cut short or unreadable",
        )
        self.fetch_failures = self._counter(
            "database_fetch_failures",
            "Looks at the database in an object store that failed; the present database serves on",
        )
        self._verify_cosine = self._histogram(
            "verify_cosine", "Cosine of a verified hit's output to the full model's output", _COSINES
        )
        self.budget_failures = self._counter(
            "verify_budget_failures",
            "Times that the verified hits of a length group failed the budget",
        )
        self.unverified = self._counter(
            "verify_dropped",
            "Hits chosen for verification but not verified: too many waited, or it failed",
        )
        self.sample_texts = self._gauge("sample_texts", "Texts in the sample from which to renew")
        self.unsampled = self._counter(
            "sample_dropped_texts",
            "Texts that could not take part in the sample: too many waited, or the disk failed",
        )
        self.shared_failures = self._counter(
            "shared_failures",
            "Questions to the shared store, for histories of sessions and quotas, that were not answered in "
            "time, or not asked after a failure",
            ("use",),
        )
        self.shared_away = self._gauge(
            "shared_away",
            "1 from a failure of the shared store until its next answer, else 0",
            mode="livemax",
        )
        self._engine = EngineNumbers()
        self.registry.register(self._engine)
        self._touch_labels()

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count one request that was answered, or given up (status 499). route: see route_of."""
        counter = self._of_request.get((route, status))
        (counter or self._requests.labels(route, str(status))).inc()
        self._of_route[route].observe(seconds)

    def watch_keys(self, names: Collection[str]) -> None:
        """Show these names of API keys from now on, and no others. They are the operator's, not a client's.

        With several workers, the files of their numbers keep other names until the server ends.
        """
        removed = () if _MULTIPROCESS_FOLDER in os.environ else self._keys.difference(names)
        for name in removed:
            self._key_requests.remove(name)
            self._key_tokens.remove(name)
            for quota in _QUOTAS:
                self._quota_refusals.remove(name, quota)
        self._keys = set(names)
        for name in names:
            self._key_requests.labels(name)
            self._key_tokens.labels(name)
            for quota in _QUOTAS:
                self._quota_refusals.labels(name, quota)

    def observe_key(self, name: str, tokens: int) -> None:
        """Count one request of an API key. tokens: of all its sequences."""
        if name not in self._keys:
            return  # its key was removed meanwhile
        self._key_requests.labels(name).inc()
        if tokens:
            self._key_tokens.labels(name).inc(tokens)

    def observe_refusal(self, name: str, quota: str) -> None:
        """Count one request that a quota of an API key has refused."""
        if name in self._keys:
            self._quota_refusals.labels(name, quota).inc()

    def observe_queue(self, seconds: Iterable[float]) -> None:
        """Count requests that were taken from the queue. seconds: how long each request waited."""
        for waited in seconds:
            self._queue_seconds.observe(waited)

    def observe_batch(self, result: PrefillResult) -> None:
        """Count a batch that the engine has run."""
        self._batch_sequences.observe(len(result))
        self._batch_tokens.observe(result.report.tokens)
        counts = (result.all_asked_tokens, result.all_cached_tokens, result.report.tokens)
        for state, count in zip(_TOKEN_STATES, counts, strict=True):
            self._of_state[state].inc(count)
        for report in filter(None, result.blends or ()):
            for state, count in zip(_SEGMENT_STATES, report.tokens_by_state(), strict=True):
                self._segment_tokens.labels(state).inc(count)
        self._search_seconds.observe(result.report.search_seconds)
        self._forward_seconds.observe(result.report.forward_seconds)
        if result.report.corrupt_records:
            self.corrupt_records.inc(result.report.corrupt_records)
        if result.report.lost_lengths:
            self._lost_segments.inc(len(result.report.lost_lengths))
        for similarity in result.compared.similarities.tolist() if result.compared else ():
            if similarity == similarity:  # not nan: the sequence was searched
                self._similarity.observe(similarity)

    def observe_repeated(self, source: str, tokens: int, sequences: int = 1) -> None:
        """Count sequences whose results were kept, or are being computed for another request (in_flight)."""
        self._repeated.labels(source).inc(sequences)
        self._of_state["repeated"].inc(tokens)

    def observe_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of sequences of clients' texts."""
        for outcome, count in Tally(outcomes).items():
            self._of_outcome[outcome].inc(count)

    def observe_verified(self, cosines: np.ndarray) -> None:
        """Count verified hits. cosines: [n], of each hit's output to the full model's output."""
        for cosine in cosines.tolist():
            # Rounding can make a cosine larger than 1.
            self._verify_cosine.observe(min(cosine, 1.0))

    def watch(
        self,
        engine_info: Callable[[], EngineInfo],
        queue_sequences: Callable[[], int],
        queue_tokens: Callable[[], int],
        results_bytes: Callable[[], int],
    ) -> None:
        """Set the server ready, and read engine, queue and kept results from now on with the metrics."""
        self.follow(self._queue_sequences, queue_sequences)
        self.follow(self._queue_tokens, queue_tokens)
        self.follow(self._results_bytes, results_bytes)
        self._engine.engine_info = engine_info
        self._ready.set(1)

    def publish(self, *, first: bool) -> None:
        """Write down for the other workers what this one reads from its engine, its queue and its
        connections.

        first: whether this is the first worker, which alone tells what all of them share. Does nothing
        without multiprocess mode.
        """
        if self._folder is None:
            return
        for gauge, function in list(self._functions.items()):
            gauge.set(function())
        gone = dict(self._published)
        for family in self._engine.collect():
            for name, labels, value, *_ in family.samples:
                gone.pop((name, *labels.values()), None)
                is_shared = family.name in _SHARED_TIERS and labels["tier"] == "disk"
                is_shared |= family.name == _RENEWALS
                published, before = self._value(family, name, labels)
                published.set(0 if is_shared and not first else before + value)
        for published, _ in gone.values():
            published.set(_GONE)

    def render(self, names: Iterable[str] = ()) -> bytes:
        """Return metrics in Prometheus' text format. names: of time series; none: all metrics."""
        of_all: Collector = self.registry
        if self._folder is not None:
            of_all = MultiProcessCollector(None, self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(_Chosen(of_all, set(names)))

    def _value(self, family: Metric, name: str, labels: dict[str, str]) -> tuple[Any, float]:
        """Return the value of this worker for a sample that prometheus_client does not count by itself.

        And what the worker before it had counted, for a counter: the engine counts from 0.
        """
        key = (name, *labels.values())
        if key not in self._published:
            mode = "livesum" if family.name in _SHARED_TIERS else "livemax"
            text = family.documentation
            value = values.ValueClass(
                family.type, family.name, name, [*labels], [*labels.values()], text, multiprocess_mode=mode
            )
            goes_on = family.type == "counter" and family.name != _RENEWALS
            self._published[key] = value, value.get() if goes_on else 0.0
        return self._published[key]

    def _touch_labels(self) -> None:
        """Let all labels be shown from the start."""
        # What is counted for each request or batch is looked up here, because `labels` takes longer than to
        # count.
        routes = (*ROUTES, OTHER_ROUTE)
        self._of_route = {route: self._request_seconds.labels(route) for route in routes}
        self._of_request = {
            (route, status): self._requests.labels(route, str(status))
            for route in routes
            for status in STATUSES
        }
        self._of_outcome = {outcome: self._sequences.labels(outcome) for outcome in Outcome}
        self._of_state = {state: self._tokens.labels(state) for state in (*_TOKEN_STATES, "repeated")}
        for reason in CUT_REASONS:
            self.cuts.labels(reason)
        for listener in ("public", "admin"):
            self.connections.labels(listener)
        for state in _SEGMENT_STATES:
            self._segment_tokens.labels(state)
        for source in _REPEATED:
            self._repeated.labels(source)
        for use in _STORED_USES:
            self.shared_failures.labels(use)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, namespace="attncache", registry=self.registry)

    def _gauge(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        mode: Literal["livesum", "livemin", "livemax", "livemostrecent"] = "livesum",
    ) -> Gauge:
        """mode: makes one value of the values of all workers."""
        return Gauge(
            name, text, labels, namespace="attncache", registry=self.registry, multiprocess_mode=mode
        )

    def follow(self, gauge: Gauge, function: Callable[[], float]) -> None:
        """Read a gauge from a function, whenever metrics are read or published."""
        if self._folder is None:
            gauge.set_function(function)
        else:
            self._functions[gauge] = function

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, text, labels, namespace="attncache", registry=self.registry, buckets=buckets)


def count_for_all_workers(folder: Path, number: int) -> None:
    """Let the metrics of this process be those of worker `number`, from the next `Metrics` on.

    A worker that is started again goes on with the counts of the one before it. Raises OSError if the files
    do not fit on the disk: a write to a page of a file that has no place on the disk ends a process.
    """
    for kind, size in _FILE_BYTES.items():
        path = folder / f"{kind}_{number}.db"
        if not path.exists():
            # Under another name, because /metrics reads every file .db, and cannot read an empty one.
            with path.with_suffix(".new").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            path.with_suffix(".new").rename(path)
    os.environ[_MULTIPROCESS_FOLDER] = str(folder)
    # prometheus_client chooses the class when it is imported. How many workers serve is known later.
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


class _Chosen(Collector):
    """Time series of a collector by name; no names: all."""

    def __init__(self, collector: Collector, names: Collection[str]) -> None:
        self._collector, self._names = collector, names

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if sample.value != _GONE and (not self._names or sample.name in self._names)
            ]
            if metric.samples:
                yield metric


def route_of(method: str, path: str) -> str:
    """Return the path of a request, or its template, if the server has it, else OTHER_ROUTE.

    The page has no route of its own: its path is also that of a route for inference.
    """
    if path.startswith(_MODEL_PREFIX):
        # The name of a model is a client's input.
        return _MODEL_ROUTE
    return path if path in ROUTES and (path != "/" or method == "POST") else OTHER_ROUTE
