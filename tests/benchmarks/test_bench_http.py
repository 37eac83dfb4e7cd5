"""Test the load generator with a small server from the standard library and with the real app."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
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
from click.testing import CliRunner, Result
from forked import fresh
from raw_http import served

from attncache_core import AttnCacheError, InvalidInput
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
        self.apis = apis
        self.pause: Callable[[], object] = lambda: None  # before each answer
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []  # path, body, headers
        self.busy = 0
        self.most_busy = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def texts(self) -> list[str]:
        return [text for _, body, _ in self.requests for text in body.get("input", body.get("inputs"))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per response
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body, dict(self.headers)))
            self.server.busy += 1
            self.server.most_busy = max(self.server.busy, self.server.most_busy)
        self.server.pause()
        with self.server.lock:
            self.server.busy -= 1
        self.answer(self.server.apis.get(self.path), body)

    def answer(self, api: str | None, body: dict[str, Any]) -> None:
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


def found(url: str, api: Any = None, **options: Any) -> Endpoint:
    return asyncio.run(find_endpoint(url, api, **options))


def measured(
    server: FakeServer,
    texts: list[str],
    load: Load,
    pause: Callable[[], object] = lambda: None,
    **options: Any,
) -> Measurement:
    endpoint = found(server.url)
    server.requests.clear()
    server.pause = pause
    rows: list[Measurement] = []
    asyncio.run(measure(endpoint, texts, load, on_measured=rows.append, **options))
    (row,) = rows
    return row


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The endpoint


@pytest.mark.parametrize(
    ("path", "api"), [("/v1/embeddings", "openai"), ("/embeddings", "openai"), ("/embed", "tei")]
)
def test_endpoint_is_found_from_the_base_url_and_from_its_own(path: str, api: str) -> None:
    with fake_server({path: api}) as server:
        for url in (server.url, f"{server.url}/", f"{server.url}{path}"):
            endpoint = found(url)
            assert (str(endpoint.url), endpoint.api) == (f"{server.url}{path}", api)


def test_base_url_may_end_with_a_path_and_an_endpoint_may_have_any() -> None:
    with fake_server({"/v1/embeddings": "openai", "/models/mine": "tei"}) as server:
        assert str(found(f"{server.url}/v1").url) == f"{server.url}/v1/embeddings"
        assert str(found(f"{server.url}/models/mine").url) == f"{server.url}/models/mine"


def test_chosen_api_is_used_if_the_server_has_both() -> None:
    with fake_server({"/v1/embeddings": "openai", "/embed": "tei"}) as server:
        assert [found(server.url, api).api for api in (None, "openai", "tei")] == ["openai", "openai", "tei"]
        assert {path for path, body, _ in server.requests if "inputs" in body} == {"/embed"}


def test_model_and_headers_are_sent() -> None:
    with fake_server({"/embeddings": "openai"}) as server:
        found(server.url, model="mini", headers={"Authorization": "Bearer secret"})
        _, body, headers = server.requests[-1]
        assert body == {"input": ["text"], "model": "mini"}
        assert headers["Authorization"] == "Bearer secret"


def test_server_without_an_api_is_refused_with_its_answers() -> None:
    with fake_server({"/embed": "page"}) as server, pytest.raises(NoEndpoint) as refused:
        found(server.url)
    assert f"{server.url}/v1/embeddings (openai) 404" in str(refused.value)
    assert f"{server.url}/embed (tei) 200 without an embedding" in str(refused.value)


@pytest.mark.parametrize(
    "url", ["localhost:8080", "127.0.0.1", "", "ftp://host", "http://", "http://host:99999"]
)
def test_text_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="--url"):
        found(url)


def test_impossible_host_is_refused() -> None:
    with pytest.raises(AttnCacheError):
        found("http://a..b:80")


# The load


def test_texts_are_sent_in_order_repeatedly_and_all_are_counted() -> None:
    with fake_server() as server:
        row = measured(server, TEXTS, Load(clients=1, batch=2, texts=7))
        assert [body["inputs"] for _, body, _ in server.requests] == [
            ["one", "two"],
            ["three", "four"],
            ["five", "one"],
            ["two"],
        ]
    assert (row.clients, row.batch, row.texts, row.errors) == (1, 2, 7, {})
    assert row.texts_per_second > 0


def test_texts_drawn_by_zipfs_law_are_the_same_in_each_run() -> None:
    texts = [f"text {number}" for number in range(50)]
    runs = []
    for _ in range(2):
        with fake_server() as server:
            measured(server, texts, Load(clients=1, batch=10, texts=2000, zipf=1.0))
            runs.append([text for _, body, _ in server.requests for text in body["inputs"]])
    assert runs[0] == runs[1]
    counts = Counter(runs[0])
    # The harmonic number of 50 is 4.5.
    assert counts["text 0"] / 2000 == pytest.approx(1 / 4.5, rel=0.2)
    assert counts["text 9"] / counts["text 0"] == pytest.approx(0.1, rel=0.6)


@pytest.mark.parametrize("clients", [1, 4])
def test_each_client_has_one_request_under_way(clients: int) -> None:
    with fake_server() as server:
        # The server answers only when this many requests are waiting.
        together = threading.Barrier(clients, timeout=30)
        row = measured(server, TEXTS, Load(clients, batch=1, texts=20), pause=together.wait)
        assert server.most_busy == clients
        assert Counter(server.texts()) == dict.fromkeys(TEXTS, 4)
    assert row.texts == 20


def test_latency_is_the_time_that_the_client_waits() -> None:
    with fake_server() as server:
        row = measured(server, TEXTS, Load(1, 1, texts=5), pause=lambda: time.sleep(0.02))
    assert row.p50_ms is not None
    assert row.p50_ms >= 20
    assert row.texts_per_second <= 1 / 0.02


def test_warmup_is_sent_and_not_counted() -> None:
    with fake_server() as server:
        steps: list[tuple[str, int, int]] = []
        row = measured(
            server, TEXTS, Load(2, 1, texts=3), warmup=4, progress=lambda *step: steps.append(step)
        )
        assert len(server.texts()) == 7
    assert row.texts == 3
    assert steps == [("2 clients, batch 1", done, 3) for done in (1, 2, 3)]


def test_failures_are_counted_by_kind_and_not_as_speed() -> None:
    with fake_server() as server:
        row = measured(server, ["good", REFUSED, CUT, CUT], Load(1, 1, texts=8))
    assert row.texts == 2
    assert row.errors == {"503": 2, "connection": 4}


def test_server_that_refuses_everything_has_no_percentiles() -> None:
    with fake_server() as server:
        row = measured(server, [REFUSED], Load(2, 2, texts=8))
    assert (row.texts_per_second, row.p50_ms, row.p95_ms, row.p99_ms) == (0, None, None, None)
    assert row.errors == {"503": 4}


def test_percentiles_are_of_answers_with_200_and_speed_is_texts_over_time() -> None:
    seconds = np.random.default_rng(3).permutation(np.arange(1, 202)) / 1000
    answers = [Answer(4, float(second), None) for second in seconds] + [Answer(4, 9.0, "503")] * 50
    row = summarize(Load(8, 4, 1004), answers, elapsed_seconds=2.0)
    # The values are 1 ms to 201 ms, so percentile p is the value of rank p/100 * 200 + 1.
    np.testing.assert_allclose([row.p50_ms, row.p95_ms, row.p99_ms], [101, 191, 199])
    np.testing.assert_allclose(
        [row.p50_ms, row.p95_ms, row.p99_ms], np.percentile(seconds * 1e3, [50, 95, 99])
    )
    assert (row.texts, row.texts_per_second, row.errors) == (804, 402.0, {"503": 50})


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["http", *arguments], terminal_width=200)


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(["one", "", "two", "   ", "three", ""]), encoding="utf-8")
    return path


def one_line(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("attncache: ")
    return line


def test_command_gives_a_row_for_each_combination_and_keeps_them(texts_file: Path, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    loads = ["--clients", "1", "--clients", "2", "--batch", "1", "--batch", "3"]
    with fake_server({"/embeddings": "openai"}) as server:
        arguments = ["--url", server.url, "--texts", str(texts_file), "--total", "6", "--warmup", "0", *loads]
        result = run(*arguments, "--header", "X-Key: a: b", "--model", "mini", "--json", str(report_file))
        assert set(server.texts()) == {"text", "one", "two", "three"}
        _, body, headers = server.requests[-1]
        assert (body["model"], headers["X-Key"]) == ("mini", "a: b")
    assert result.exit_code == 0
    for shown in (f"{server.url}/embeddings (openai)", "texts/s", "p50 ms", "p95 ms", "p99 ms", "processor"):
        assert shown in result.stdout
    assert result.stdout.count("none") == 4
    assert "2 clients, batch 3: 6/6" in result.stderr
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert (report["url"], report["api"]) == (f"{server.url}/embeddings", "openai")
    assert report["interrupted"] is False
    assert report["machine"]["python"]
    assert [(row["clients"], row["batch"]) for row in report["rows"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["texts"] == 6 and row["errors"] == {} for row in report["rows"])


def test_command_shows_failures_and_ends_with_0(tmp_path: Path) -> None:
    texts_file = tmp_path / "texts.txt"
    texts_file.write_text(REFUSED, encoding="utf-8")
    with fake_server() as server:
        result = run("--url", server.url, "--texts", str(texts_file), "--total", "3")
    assert result.exit_code == 0
    assert "503: 3" in result.stdout
    assert re.search(r"0\.0 +│ +- +│ +- +│ +- +│", result.stdout)


def test_file_without_texts_is_one_line_that_names_the_option(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n", encoding="utf-8")
    line = one_line(run("--url", "http://127.0.0.1:1", "--texts", str(empty)))
    assert "--texts" in line
    assert str(empty) in line


def test_server_that_is_not_there_is_one_line(texts_file: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    line = one_line(run("--url", url, "--texts", str(texts_file)))
    assert "no answer from http" in line
    assert url in line


@pytest.mark.parametrize("header", ["secret", ": secret", "X Y: secret", "X: secret\nY: secret"])
def test_malformed_header_is_one_line_that_does_not_repeat_the_header(header: str, texts_file: Path) -> None:
    line = one_line(run("--url", "http://127.0.0.1:1", "--texts", str(texts_file), "--header", header))
    assert "NAME: VALUE" in line
    assert "secret" not in line


def test_error_without_aiohttp_names_the_remedy(texts_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "benchmarks.measuring.http")
    line = one_line(run("--url", "http://127.0.0.1:1", "--texts", str(texts_file)))
    assert "pip install -e '.[bench]'" in line


def run_in_the_foreground(arguments: list[str], shown: Path, logged: Path) -> None:
    """Run the command with its output in files. A process of a test may ignore the signal of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, shown), (2, logged)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    main(arguments)


def test_ctrl_c_ends_the_measurement_and_shows_the_rows_so_far(texts_file: Path, tmp_path: Path) -> None:
    report_file, shown, logged = (tmp_path / name for name in ("report.json", "shown", "logged"))
    loads = ["--clients", "2", "--batch", "1", "--batch", "2", "--total", "30", "--warmup", "0"]
    with fake_server() as server:
        # The second load is slow, so that the interrupt arrives before the load ends.
        server.pause = lambda: time.sleep(0.2 if len(server.requests) > 30 else 0)
        arguments = ["http", "--url", server.url, "--texts", str(texts_file), "--json", str(report_file)]
        started = fresh(run_in_the_foreground, [*arguments, *loads], shown, logged)
        try:
            while sum(len(body.get("inputs", ())) == 2 for _, body, _ in server.requests) < 6:
                assert started.exitcode is None
                time.sleep(0.005)
            os.kill(started.pid, signal.SIGINT)
            started.join(30)
        finally:
            started.kill()
    assert started.exitcode == 130
    assert "Traceback" not in logged.read_text()
    assert "interrupted" in shown.read_text()
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert report["interrupted"] is True
    whole, part = report["rows"]
    assert (whole["batch"], whole["texts"]) == (1, 30)
    assert part["batch"] == 2
    assert 0 < part["texts"] < 30


def test_this_server_is_measured(texts_file: Path, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    with served() as server:
        url = "http://{}:{}".format(*server.addresses[0][:2])
        arguments = ("--url", url, "--texts", str(texts_file), "--total", "200", "--warmup", "20")
        assert run(*arguments, "--json", str(report_file)).exit_code == 0
    (row,) = json.loads(report_file.read_text(encoding="utf-8"))["rows"]
    assert (row["clients"], row["batch"], row["texts"], row["errors"]) == (16, 1, 200, {})
