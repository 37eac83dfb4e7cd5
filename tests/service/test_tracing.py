"""Traces: what they tell, which variables ask for them, and how they leave the server."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from entrance import Stub
from fake_engine import SECRET, FakeEngine, serving
from running import ANSWERED

from service.batching.pending_request import Timing
from service.observability.tracing import Tracing, tracing_of

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def exporter():
    return memory.InMemorySpanExporter()


@pytest.fixture
def tracing(exporter):
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return Tracing(provider)


TIMING = Timing(10.01, 10.02, 0.03, 10.06, 10.2, batches=1, batch_sequences=5)


def seconds_of(span, start):
    return round((span.start_time - start) / 1e9, 6), round((span.end_time - start) / 1e9, 6)


def test_request_has_spans_of_its_stages_with_their_times(tracing, exporter):
    tracing.record([ANSWERED._replace(timings=[TIMING])])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request = spans["POST /embed"]
    assert {name: seconds_of(span, request.start_time) for name, span in spans.items()} == {
        "POST /embed": (0.0, 0.25),
        "queue": (0.01, 0.02),
        "tokenize": (0.02, 0.05),
        "batch": (0.06, 0.2),
        "answer": (0.2, 0.25),
    }
    assert {span.parent.span_id for span in spans.values() if span.parent} == {request.context.span_id}
    assert request.kind.name == "SERVER"
    assert request.parent is None
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "attncache.request_id": "id-1",
        "attncache.sequences": 2,
        "attncache.tokens": 30,
        "attncache.cached_tokens": 20,
        "attncache.repeated_sequences": 1,
        "attncache.key": "one",
    }
    assert dict(spans["batch"].attributes) == {"attncache.batches": 1, "attncache.batch_sequences": 5}


def test_request_whose_results_were_kept_has_no_batch(tracing, exporter):
    tracing.record([ANSWERED._replace(timings=[Timing(10.0, 10.1, 0.01, 0.0, 10.12)])])
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue", "tokenize", "answer", "POST /embed"]


def test_tokens_of_the_client_wait_until_their_batch_and_the_answer_follows_the_last_texts(tracing, exporter):
    of_tokens = replace(TIMING, tokenized_at=0.0, batch_at=10.03, computed_at=10.05)
    tracing.record([ANSWERED._replace(timings=[of_tokens, TIMING])])
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans].count("tokenize") == 1
    seconds = [(span.name, *seconds_of(span, spans[-1].start_time)) for span in spans]
    assert seconds[0] == ("queue", 0.01, 0.03)
    assert seconds[-2] == ("answer", 0.2, 0.25)


def test_closing_does_not_wait_for_a_collector_that_does_not_answer(tracing, monkeypatch):
    monkeypatch.setattr("service.observability.tracing._MAX_CLOSING_SECONDS", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(tracing._provider, "shutdown", answers.wait)
    tracing.close()
    answers.set()


def test_span_belongs_to_the_trace_of_the_client(tracing, exporter):
    tracing.record([ANSWERED._replace(trace={"traceparent": TRACEPARENT})])
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID


def test_failed_request_is_an_error_and_probes_are_not_traced(tracing, exporter):
    probe = ANSWERED._replace(route="/health")
    tracing.record([ANSWERED._replace(route="other", status=500), probe, ANSWERED._replace(status=404)])
    failed, refused = exporter.get_finished_spans()
    assert (failed.name, failed.status.status_code.name) == ("POST", "ERROR")
    assert failed.attributes["error.type"] == "500"
    assert "http.route" not in failed.attributes
    assert refused.status.status_code.name == "UNSET"
    assert "error.type" not in refused.attributes


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "search"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_variables_ask_for_it(environment, caplog):
    assert tracing_of(environment) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "more", [{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {"OTEL_TRACES_EXPORTER": "zipkin"}]
)
def test_exporter_that_there_is_not_is_named_in_a_warning(more, caplog):
    assert tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", **more}) is None
    assert "only otlp, with the protocol http/protobuf" in caplog.text


def test_missing_packages_are_named_in_a_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is None
    assert "pip install 'attncache[otel]'" in caplog.text


# Each variable in a fork, because OpenTelemetry reads some variables when it is imported.
TRACING_OF_EACH = """
import os, sys
from service.observability.tracing import tracing_of
for variable in sys.argv[1:]:
    if os.fork():
        os.wait()
    else:
        name, _, os.environ[name] = variable.partition("=")
        print(tracing_of(os.environ), flush=True)
        os._exit(0)
"""


def test_variable_that_opentelemetry_refuses_is_told_in_a_warning():
    refused = (
        "OTEL_PROPAGATORS=nowhere",
        "OTEL_BSP_MAX_QUEUE_SIZE=100",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT=x",
    )
    done = subprocess.run(
        [sys.executable, "-c", TRACING_OF_EACH, *refused],
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n" * len(refused)
    warning = "no traces are made, because of a variable of OpenTelemetry: "
    assert done.stderr.count(warning) == len(refused)


@pytest.fixture
def collector():
    stub = Stub("127.0.0.1")
    yield stub
    stub.close()


async def test_server_sends_its_traces_to_the_collector_of_the_variables_and_logs_no_header(
    monkeypatch, collector, caplog
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    malformed = {"tracestate": f"a b {SECRET}", "baggage": f"query=Where is {SECRET}"}
    headers = {"traceparent": TRACEPARENT, **malformed}
    caplog.set_level("ERROR", logger="httpx")  # the client's own log has the text
    async with serving(FakeEngine()) as client:
        answered = await client.post(f"/embed?text={SECRET}", json={"inputs": [SECRET, "b"]}, headers=headers)
        assert answered.status_code == 200
        await client.get(f"/{SECRET}")
    ((_, _, body),) = collector.requests
    assert SECRET.encode() not in body
    assert SECRET not in caplog.text
    (resource,) = collected.ExportTraceServiceRequest.FromString(body).resource_spans
    assert {
        attribute.value.string_value
        for attribute in resource.resource.attributes
        if attribute.key == "service.name"
    } == {"attncache"}
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"POST /embed", "queue", "tokenize", "batch", "answer", "GET"}
    traces = {name: span.trace_id.hex() for name, span in spans.items()}
    assert [name for name, trace in traces.items() if trace != TRACE_ID] == ["GET"]
    begun = [
        spans[name].start_time_unix_nano for name in ("POST /embed", "queue", "tokenize", "batch", "answer")
    ]
    assert begun == sorted(begun)
    assert spans["answer"].end_time_unix_nano <= spans["POST /embed"].end_time_unix_nano


async def test_sampler_of_the_variables_decides(monkeypatch, collector):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{collector.port}/v1/traces")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with serving(FakeEngine()) as client:
        await client.post("/embed", json={"inputs": "a"})
    assert collector.requests == []
