"""Traces by OpenTelemetry, set up by its standard variables (extra `otel`).

    OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 attncache serve

    POST /embed                      from the arrival to the end of the response
      queue                          from there to the first thread that took it
      tokenize
      batch                          from the first batch with a sequence of it to the end of the last one
      answer                         from there to the end of the response

The spans of a request are made when it has been answered, from the times that it carries. A server without
these variables imports nothing of OpenTelemetry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attncache_core.version import __version__
from service.observability.finished import FinishedRequest, Timing
from service.observability.metrics import OTHER_ROUTE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

# Headers by which a client hands over its trace: those of W3C, B3 and Jaeger. No span uses W3C's baggage.
TRACE_HEADERS = frozenset(
    {
        *(b"traceparent", b"tracestate", b"b3", b"uber-trace-id"),
        *(b"x-b3-traceid", b"x-b3-spanid", b"x-b3-sampled", b"x-b3-parentspanid", b"x-b3-flags"),
    }
)
_UNTRACED = frozenset({"/health", "/ready"})
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MAX_CLOSING_SECONDS = 3.0
# Spans that wait for the collector, unless a variable says otherwise. Requests are handed over in bursts.
_QUEUE, _MAX_WAITING_SPANS = "OTEL_BSP_MAX_QUEUE_SIZE", 2**14
_Stage = tuple[str, float, float, dict[str, Any]]  # name, start and end (perf_counter), attributes
_Clock = Callable[[float], int]


class Tracing:
    """Makes the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace

        # It quotes a malformed header of the client.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        self._provider = provider
        self._tracer = provider.get_tracer("attncache", __version__)
        self._extract: Callable[[Mapping[str, str]], Any] = propagate.extract
        self._trace = trace

    def record(self, requests: Sequence[FinishedRequest]) -> None:
        """Make the spans of requests."""
        clock = _clock()
        for request in requests:
            if request.route not in _UNTRACED:
                self._record(request, clock)

    def _record(self, request: FinishedRequest, clock: _Clock) -> None:
        trace = self._trace
        span = self._tracer.start_span(
            request.method if request.route == OTHER_ROUTE else f"{request.method} {request.route}",
            self._extract(request.trace),
            trace.SpanKind.SERVER,
            _attributes(request),
            start_time=clock(request.started),
        )
        if span.is_recording():
            if request.status >= 500:
                span.set_status(trace.StatusCode.ERROR)
            within = trace.set_span_in_context(span)
            for name, start, end, attributes in _stages(request):
                self._tracer.start_span(name, within, attributes=attributes, start_time=clock(start)).end(
                    clock(end)
                )
        span.end(clock(request.ended))

    def close(self) -> None:
        """Export what was not exported yet. Blocks, but not for long: there may be no collector."""
        # The provider waits for its exporter, which tries again and again.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_MAX_CLOSING_SECONDS)


def tracing_of(environment: Mapping[str, str]) -> Tracing | None:
    """Return what makes traces, or None if the variables of OpenTelemetry do not ask for traces.

    Logs a warning if the variables ask for traces that cannot be made.
    """
    if not _is_configured(environment):
        return None
    protocol = next(filter(None, map(environment.get, _PROTOCOLS)), "http/protobuf")
    exporters = environment.get(_EXPORTERS) or "otlp"
    if (exporters, protocol) != ("otlp", "http/protobuf"):
        logger.warning(
            "no traces are made: of OpenTelemetry's exporters this server has only otlp, with the protocol "
            "http/protobuf"
        )
        return None
    try:
        return Tracing(_provider(environment))
    except ImportError:
        logger.warning(
            "no traces are made, because OpenTelemetry is not installed: pip install 'attncache[otel]', or "
            "unset the variables %s",
            ", ".join(_ENDPOINTS),
        )
        return None
    except ValueError as error:
        # Such as a propagator that is not installed, or a limit that is no number.
        logger.warning("no traces are made, because of a variable of OpenTelemetry: %s", error)
        return None


def _is_configured(environment: Mapping[str, str]) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get(_EXPORTERS) == "none":
        return False
    return any(environment.get(name) for name in (*_ENDPOINTS, _EXPORTERS))


def _provider(environment: Mapping[str, str]) -> TracerProvider:
    """Return a provider. It reads its sampler, limits and endpoint from the variables itself."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": __version__}
    if not environment.get("OTEL_SERVICE_NAME") and "service.name=" not in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        attributes["service.name"] = "attncache"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    waiting = None if environment.get(_QUEUE) else _MAX_WAITING_SPANS
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=waiting))
    return provider


def _attributes(request: FinishedRequest) -> dict[str, Any]:
    """Return the attributes of the span of a request."""
    found: dict[str, Any] = {
        "http.request.method": request.method,
        "http.response.status_code": request.status,
        "attncache.request_id": request.request_id,
        "attncache.sequences": request.sequences,
        "attncache.tokens": request.tokens,
        "attncache.cached_tokens": request.cached_tokens,
        "attncache.repeated_sequences": request.repeated,
    }
    if request.route != OTHER_ROUTE:
        found["http.route"] = request.route
    if request.status >= 500:
        found["error.type"] = str(request.status)
    if request.key is not None:
        found["attncache.key"] = request.key
    return found


def _stages(request: FinishedRequest) -> Iterator[_Stage]:
    """Yield the stages of all that was computed for a request, then the response."""
    for timing in request.timings:
        yield from _computed(timing)
    if request.timings:
        yield "answer", request.timings[-1].computed_at, request.ended, {}


def _computed(timing: Timing) -> Iterator[_Stage]:
    taken_at = timing.tokenized_at or timing.batch_at or timing.computed_at
    yield "queue", timing.queued_at, taken_at, {}
    if timing.tokenized_at:
        yield "tokenize", timing.tokenized_at, timing.tokenized_at + timing.tokenize_seconds, {}
    if timing.batches:
        attributes = {
            "attncache.batches": timing.batches,
            "attncache.batch_sequences": timing.batch_sequences,
        }
        yield "batch", timing.batch_at, timing.computed_at, attributes


def _clock() -> _Clock:
    """Return what turns seconds of perf_counter into nanoseconds since 1970."""
    offset = time.time_ns() - time.perf_counter_ns()
    return lambda seconds: offset + int(seconds * 1e9)
