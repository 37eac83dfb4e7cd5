"""The numbers at /metrics: requests, queue, batches, reuse, and what the database holds.

Every name starts with attncache_ and says its unit; every label value exists, at zero, before the first
request. Labels come from fixed lists, so nothing that a client sends can become one.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attncache_core import Outcome, PrefillResult
from service import __version__

# A second series beside every counter and histogram, of when it was made: for us, when the server started.
disable_created_metrics()  # type: ignore[no-untyped-call]

ROUTES = ("/embed", "/classify", "/health", "/ready", "/info", "/metrics")
OTHER_ROUTE = "other"
STATUSES = (200, 400, 404, 405, 409, 413, 422, 429, 499, 500, 503)

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Close to 1, where thresholds lie, every step counts.
_SIMILARITIES = (0.0, 0.5, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.999, 1.0)
# Budgets lie about 0.985.
_COSINES = (0.5, 0.8, 0.9, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999, 0.9999, 1.0)


class Metrics:
    """All metrics of one app, in a registry of their own. Thread safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered", ("route", "status"))
        self._request_seconds = self._histogram(
            "request_seconds", "From request to answer", _SECONDS, ("route",)
        )
        self._queue_seconds = self._histogram(
            "queue_seconds", "From tokenised to taken into a batch", _SECONDS
        )
        self._batch_sequences = self._histogram("batch_sequences", "Sequences in a batch", _SEQUENCES)
        self._batch_tokens = self._histogram("batch_tokens", "Tokens in a batch", _TOKENS)
        self._sequences = self._counter("sequences", "Sequences by what the search decided", ("outcome",))
        self._similarity = self._histogram(
            "similarity", "Similarity of the nearest record found", _SIMILARITIES
        )
        self._tokenize_seconds = self._histogram("tokenize_seconds", "Tokenising one request", _SECONDS)
        self._search_seconds = self._histogram("search_seconds", "Searching records for one batch", _SECONDS)
        self._forward_seconds = self._histogram(
            "forward_seconds", "The model's pass over one batch", _SECONDS
        )
        self._queue_sequences = self._gauge("queue_sequences", "Sequences that wait")
        self._ready = self._gauge("ready", "1 when model and database are loaded")
        self._gauge("build_info", "The version that runs", ("version",)).labels(__version__).set(1)
        self._corrupt = self._counter("database_corrupt_records", "Records found damaged and not used")
        self._lost_segments = self._counter(
            "database_lost_segments",
            "Lengths without records since their file was cut short or unreadable",
        )
        self._verify_cosine = self._histogram(
            "verify_cosine", "Cosine of a verified hit's output to the full model's", _COSINES
        )
        self._budget_failures = self._counter(
            "verify_budget_failures", "Times that verified hits of a length group failed the budget"
        )
        self._unverified = self._counter(
            "verify_dropped", "Hits chosen to be verified that were not: too many waited, or it failed"
        )
        self._database = _DatabaseNumbers()
        self.registry.register(self._database)
        self._touch_labels()

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        """One request has been answered, or given up (status 499)."""
        route = path if path in ROUTES else OTHER_ROUTE
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def observe_tokenize(self, seconds: float) -> None:
        """One request's texts have become tokens."""
        self._tokenize_seconds.observe(seconds)

    def observe_queue(self, seconds: Iterable[float]) -> None:
        """Requests have been taken from the queue, after waiting so long."""
        for waited in seconds:
            self._queue_seconds.observe(waited)

    def observe_batch(self, result: PrefillResult) -> None:
        """The engine has run a batch."""
        self._batch_sequences.observe(len(result.outcomes))
        self._batch_tokens.observe(result.tokens)
        self._search_seconds.observe(result.search_seconds)
        self._forward_seconds.observe(result.forward_seconds)
        self._corrupt.inc(result.corrupt_records)
        self._lost_segments.inc(len(result.lost_lengths))
        for similarity in result.similarities.tolist():
            if similarity == similarity:  # nan: not searched
                self._similarity.observe(similarity)

    def observe_changed_records(self, count: int) -> None:
        """So many records that were in use have been found changed."""
        self._corrupt.inc(count)

    def observe_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """These sequences, which clients asked for, have been computed."""
        for outcome, count in Tally(outcomes).items():
            self._sequences.labels(outcome).inc(count)

    def observe_verified(self, cosines: np.ndarray) -> None:
        """Hits have been computed in full too; their cosines [n] to the full model's outputs."""
        for cosine in cosines.tolist():
            # Rounding alone can take it beyond.
            self._verify_cosine.observe(min(cosine, 1.0))

    def observe_unverified(self, count: int) -> None:
        """So many hits had been chosen to be verified and will not be."""
        self._unverified.inc(count)

    def observe_budget_failure(self) -> None:
        """Verified hits of a length group, of usual or of unusual texts, were found to fail the budget."""
        self._budget_failures.inc()

    def watch(self, queue_sequences: Callable[[], int], engine_info: Callable[[], Mapping[str, Any]]) -> None:
        """The engine is loaded: say so, and read queue and database from now on whenever metrics are read."""
        self._queue_sequences.set_function(queue_sequences)
        self._database.engine_info = engine_info
        self._ready.set(1)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _touch_labels(self) -> None:
        for route in (*ROUTES, OTHER_ROUTE):
            self._request_seconds.labels(route)
            for status in STATUSES:
                self._requests.labels(route, str(status))
        for outcome in Outcome:
            self._sequences.labels(outcome)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, namespace="attncache", registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, labels, namespace="attncache", registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(name, text, labels, namespace="attncache", registry=self.registry, buckets=buckets)


class _DatabaseNumbers(Collector):
    """What the database holds, and when it may serve, asked of the engine when metrics are read.

    While there is none its size is zero, and there are no length groups.
    """

    def __init__(self) -> None:
        self.engine_info: Callable[[], Mapping[str, Any]] = dict

    def collect(self) -> Iterator[Metric]:
        info = self.engine_info()
        yield GaugeMetricFamily(
            "attncache_reuse_off_reasons",
            "Reasons why no text reuses anything; /info lists them",
            value=len(info.get("reuse_off", ())),
        )
        database = info.get("database") or {}
        yield GaugeMetricFamily(
            "attncache_database_records", "Records in the database", value=database.get("records", 0)
        )
        yield GaugeMetricFamily(
            "attncache_database_bytes", "Bytes of the database", value=database.get("bytes", 0)
        )
        yield from _of_length_groups(database["policy"]["groups"] if database else ())


def _of_length_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    threshold = GaugeMetricFamily(
        "attncache_threshold", "Least similarity of a hit; above 1 for none", labels=("lengths", "kind")
    )
    off = GaugeMetricFamily(
        "attncache_reuse_off", "1 where sequences of these lengths reuse nothing", labels=("lengths",)
    )
    for group in groups:
        for kind, least in group["threshold"].items():
            threshold.add_metric((group["lengths"], kind), least)
        off.add_metric((group["lengths"],), not group["reuses"])
    yield threshold
    yield off
