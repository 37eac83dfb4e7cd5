"""Test the load generator with a small server from the standard library and with the real app."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import assert_one_line, run, succeeded
from raw_http import served

from benchmarks.__main__ import main
from benchmarks.measuring.http import (
    Answer,
    Endpoint,
    Load,
    Measurement,
    NoEndpoint,
    find_endpoint,
    measure,
    summarize,
)

TEXTS = ["one", "two", "three", "four", "five"]
REFUSED = "this text is answered with 503"
CUT = "the connection is closed on this text"


class FakeServer(ThreadingHTTPServer):
    """A server that answers with embeddings on the given paths, each with its API, and keeps all requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, apis: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.apis = apis
        self.pause: Callable[[], object] = lambda: None  # before each answer
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []  # path, body, headers

    def batches(self) -> list[list[str]]:
        return [body.get("input", body.get("inputs")) for _, body, _ in self.requests]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per response
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, dict(self.headers)))
        self.server.pause()
        api = self.server.apis.get(self.path)
        texts = body.get("input" if api == "openai" else "inputs")
        if api is None:
            self.reply(404, {})
        elif texts is None:
            self.reply(422, {})
        elif CUT in texts:
            self.close_connection = True
        elif REFUSED in texts:
            self.reply(503, {})
        elif api == "page":
            self.reply(200, {"hello": "world"})
        else:
            rows = [[0.5, 1.0] for _ in texts]
            self.reply(200, rows if api == "tei" else {"data": [{"embedding": row} for row in rows]})

    def reply(self, status: int, content: object) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_server(apis: dict[str, str] | None = None) -> Iterator[FakeServer]:
    with FakeServer(apis or {"/embed": "tei"}) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server
        finally:
            server.shutdown()


def found(url: str, api: Any = None) -> Endpoint:
    return asyncio.run(find_endpoint(url, api))


def measured(
    server: FakeServer, texts: list[str], load: Load, pause: Callable[[], object] = lambda: None, warmup=0
) -> Measurement:
    endpoint = found(server.url)
    server.requests.clear()
    server.pause = pause
    rows: list[Measurement] = []
    asyncio.run(measure(endpoint, texts, load, warmup=warmup, on_measured=rows.append))
    (row,) = rows
    return row


def test_endpoint_is_found_below_the_url_or_refused_with_the_answers() -> None:
    apis = {"/v1/embeddings": "openai", "/embeddings": "openai", "/embed": "tei"}
    for path, api in apis.items():
        with fake_server({path: api}) as server:
            for url in (server.url, f"{server.url}/", f"{server.url}{path}"):
                endpoint = found(url)
                assert (str(endpoint.url), endpoint.api) == (f"{server.url}{path}", api)
    with fake_server(apis) as server:
        assert str(found(f"{server.url}/v1").url) == f"{server.url}/v1/embeddings"
        assert [found(server.url, api).api for api in (None, "openai", "tei")] == ["openai", "openai", "tei"]
    with fake_server({"/embed": "page"}) as server, pytest.raises(NoEndpoint) as refused:
        found(server.url)
    assert f"{server.url}/v1/embeddings (openai) 404" in str(refused.value)
    assert f"{server.url}/embed (tei) 200 without an embedding" in str(refused.value)


def test_texts_are_sent_in_order_repeatedly_and_all_but_the_warmup_are_counted() -> None:
    with fake_server() as server:
        row = measured(server, TEXTS, Load(clients=1, batch=2, texts=7), warmup=1)
        counted = [["one", "two"], ["three", "four"], ["five", "one"], ["two"]]
        assert server.batches() == [["one"], *counted]
    assert (row.clients, row.batch, row.texts, row.errors) == (1, 2, 7, {})
    assert row.texts_per_second > 0


def test_texts_are_drawn_by_zipfs_law() -> None:
    texts = [f"text {number}" for number in range(50)]
    with fake_server() as server:
        measured(server, texts, Load(clients=1, batch=10, texts=2000, zipf=1.0))
        counts = Counter(text for batch in server.batches() for text in batch)
    # The harmonic number of 50 is 4.5.
    assert counts["text 0"] / 2000 == pytest.approx(1 / 4.5, rel=0.2)
    assert counts["text 9"] / counts["text 0"] == pytest.approx(0.1, rel=0.6)


def test_each_client_has_one_request_under_way() -> None:
    busy: list[int] = []
    counts = []
    together = threading.Barrier(4, timeout=240)

    def answer_when_four_wait() -> None:
        busy.append(1)
        counts.append(len(busy))
        together.wait()
        busy.pop()

    with fake_server() as server:
        row = measured(server, TEXTS, Load(4, batch=1, texts=20), pause=answer_when_four_wait)
        assert max(counts) == 4
        assert Counter(text for (text,) in server.batches()) == dict.fromkeys(TEXTS, 4)
    assert row.texts == 20


def test_latency_is_the_time_that_the_client_waits() -> None:
    with fake_server() as server:
        row = measured(server, TEXTS, Load(1, 1, texts=5), pause=lambda: time.sleep(0.02))
    assert row.p50_ms is not None
    assert row.p50_ms >= 20
    assert row.texts_per_second <= 1 / 0.02


def test_failures_are_counted_by_kind_and_not_as_speed() -> None:
    with fake_server() as server:
        row = measured(server, ["good", REFUSED, CUT, CUT], Load(1, 1, texts=8))
        assert row.texts == 2
        assert row.errors == {"503": 2, "connection": 4}
        row = measured(server, [REFUSED], Load(2, 2, texts=8))
    assert (row.texts_per_second, row.p50_ms, row.p95_ms, row.p99_ms) == (0, None, None, None)
    assert row.errors == {"503": 4}


def test_percentiles_are_of_answers_with_200_and_speed_is_texts_over_time() -> None:
    seconds = np.random.default_rng(3).permutation(np.arange(1, 202)) / 1000
    answers = [Answer(4, float(second), None) for second in seconds] + [Answer(4, 9.0, "503")] * 50
    row = summarize(Load(8, 4, 1004), answers, elapsed_seconds=2.0)
    # The values are 1 ms to 201 ms, so percentile p is the value of rank p/100 * 200 + 1.
    np.testing.assert_allclose([row.p50_ms, row.p95_ms, row.p99_ms], [101, 191, 199])
    assert (row.texts, row.texts_per_second, row.errors) == (804, 402.0, {"503": 50})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A file of texts, and a file for the report."""
    (tmp_path / "texts.txt").write_text("\n".join(["one", "", "two", "   ", "three", ""]), encoding="utf-8")
    return tmp_path / "texts.txt", tmp_path / "report.json"


def http(url: str, files: tuple[Path, Path], *options: object) -> Any:
    texts, report = files
    return run("http", "--url", url, "--texts", texts, "--json", report, *options, program=main)


def test_command_gives_a_row_for_each_combination_and_keeps_them(files) -> None:
    loads = ("--clients", 1, "--clients", 2, "--batch", 1, "--batch", 3, "--total", 6, "--warmup", 0)
    with fake_server({"/embeddings": "openai"}) as server:
        shown = succeeded(http(server.url, files, *loads, "--header", "X-Key: a: b", "--model", "mini"))
        assert {text for batch in server.batches() for text in batch} == {"text", "one", "two", "three"}
        _, body, headers = server.requests[-1]
        assert (body["model"], headers["X-Key"]) == ("mini", "a: b")
    assert shown.count("none") == 4
    report = json.loads(files[1].read_text(encoding="utf-8"))
    assert (report["url"], report["api"]) == (f"{server.url}/embeddings", "openai")
    assert report["interrupted"] is False
    assert report["machine"]["python"]
    assert [(row["clients"], row["batch"]) for row in report["rows"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["texts"] == 6 and row["errors"] == {} for row in report["rows"])


def test_header_that_is_refused_is_not_repeated_nor_is_a_server_that_is_not_there_measured(files) -> None:
    for header in ("secret", ": secret", "X Y: secret", "X: secret\nY: secret"):
        refused = http("http://127.0.0.1:1", files, "--header", header)
        assert_one_line(refused, "NAME: VALUE")
        assert "secret" not in refused.stderr
    assert_one_line(http("http://127.0.0.1:1", files), "no answer from http://127.0.0.1:1")
    assert_one_line(http("localhost:8080", files), "--url")


def test_ctrl_c_ends_the_measurement_and_shows_the_rows_so_far(files) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = itertools.count(1)
    with fake_server() as server:

        def interrupt() -> None:
            number = next(numbers)
            if number == 1 + 30 + 6:  # the first one finds the endpoint
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2 if number > 30 else 0)

        server.pause = interrupt
        loads = ("--clients", 2, "--batch", 1, "--batch", 2, "--total", 30, "--warmup", 0)
        try:
            ended = http(server.url, files, *loads)
        finally:
            signal.signal(signal.SIGINT, before)
    assert ended.exit_code == 130
    assert "interrupted" in ended.stdout
    report = json.loads(files[1].read_text(encoding="utf-8"))
    assert report["interrupted"] is True
    whole, part = report["rows"]
    assert (whole["batch"], whole["texts"]) == (1, 30)
    assert part["batch"] == 2
    assert 0 < part["texts"] < 30


def test_this_server_is_measured(files) -> None:
    with served() as server:
        succeeded(http(server.url, files, "--total", 200, "--warmup", 20))
    (row,) = json.loads(files[1].read_text(encoding="utf-8"))["rows"]
    assert (row["clients"], row["batch"], row["texts"], row["errors"]) == (16, 1, 200, {})
