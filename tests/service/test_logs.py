"""Request ids, log lines as text and as JSON, the access log, and no text of a user in any of them."""

import io
import logging
import os
import re
import threading
import time
from contextlib import contextmanager, redirect_stderr
from datetime import datetime

import orjson
import pytest
from fake_engine import FAILING, SECRET, BrokenEngine, FakeEngine, serving, texts_of
from full_disk import largest_file
from running import ANSWERED, ONE, bearer, keys_file, until

from service.observability import finished as finished_module
from service.observability.finished import FinishedRequests
from service.observability.logs import REQUEST_ID, JsonFormatter, TextFormatter, configure_logging, log_access

ID = "X-Request-Id"


@contextmanager
def logging_to_stream(level, log_format="text", stream=None):
    """Yield what the server logs to stderr. pytest's handlers are taken away, which would be in the way."""
    root, stream = logging.getLogger(), stream or io.StringIO()
    handlers, before = root.handlers[:], root.level
    root.handlers.clear()
    try:
        with redirect_stderr(stream):
            configure_logging(level, log_format)
        yield stream
    finally:
        root.handlers[0].close()
        root.handlers[:] = handlers
        root.setLevel(before)
        logging.captureWarnings(False)


def lines(stream):
    return [orjson.loads(line) for line in stream.getvalue().splitlines()]


# Request ids.


@pytest.mark.parametrize("given", ["a", "x" * 128, 'job/7:"äß"'.encode("ascii", "ignore").decode(), "0-1_~!"])
async def test_request_id_of_the_client_comes_back_once_whatever_the_answer(given):
    asked = {
        200: ("GET", "/health"),
        400: ("POST", "/embed"),
        404: ("GET", "/nowhere"),
        405: ("GET", "/embed"),
    }
    async with serving(BrokenEngine("run")) as client:
        for status, (method, path) in asked.items():
            answer = await client.request(method, path, headers={ID: given})
            assert (answer.status_code, answer.headers.get_list(ID)) == (status, [given])
        failed = await client.post("/embed", json={"inputs": "a"}, headers={ID: given})
        assert (failed.status_code, failed.headers.get_list(ID)) == (500, [given])


@pytest.mark.parametrize("given", [b"", b"two words", b"x" * 129, "ö".encode(), b"\x7f", b"tab\tbed"])
async def test_other_ids_are_replaced(given):
    async with serving() as client:
        answered = [await client.get("/health", headers=[(ID.encode(), given)]) for _ in range(2)]
    ids = {id for response in answered for id in response.headers.get_list(ID)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{16,64}", ids) for ids in ids)


async def test_lines_about_a_request_have_its_id():
    with logging_to_stream("info", "json") as stream:
        async with serving(BrokenEngine("class_logits")) as client:
            await client.post("/classify", json={"inputs": SECRET}, headers={ID: "job-7"})
    (line,) = [line for line in lines(stream) if line["message"].startswith("a request failed")]
    assert (line["request_id"], line["level"]) == ("job-7", "error")
    assert SECRET not in stream.getvalue()


# Formats.


def test_json_lines_are_objects_with_time_level_logger_message_and_stack():
    logger = logging.getLogger("service.test")
    with logging_to_stream("info", "json") as stream:
        logger.info("%d segments of\n%s", 3, "\udcff")
        logger.debug("not logged")
        try:
            raise ValueError("broken\nfile")
        except ValueError:
            logger.exception("loading failed")
        logging.getLogger("py.warnings").warning("deprecated")
        logging.getLogger("uvicorn.error").error("careful")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")  # once for each
        logging.getLogger("uvicorn.error").info("a step of the start")
    said, failed, *others = lines(stream)
    assert datetime.fromisoformat(said.pop("time")).utcoffset() is not None
    assert said == {"level": "info", "logger": "service.test", "message": "3 segments of\n\\udcff"}
    assert "ValueError: broken\nfile" in failed["exception"]
    assert [(line["logger"], line["level"], line["message"]) for line in others] == [
        ("py.warnings", "warning", "deprecated"),
        ("uvicorn.error", "error", "careful"),
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nobody_waits_for_whoever_does_not_read_the_log(log_format):
    """Lines are dropped while a pipe is full, and counted once it is read again."""
    logger, (reading, writing) = logging.getLogger("service.test"), os.pipe()
    with open(reading, "rb") as read, open(writing, "w") as written:
        with logging_to_stream("info", log_format, written):
            for number in range(2000):  # more than a pipe holds
                logger.info("message %d %s", number, "x" * 100)
            log_access([ANSWERED] * 1000)
            before = read.read1(2**20)
            logger.info("y" * 10_000)
        os.set_blocking(reading, False)
        after = read.read1(2**20)
    kept = before.count(b"message ")
    assert 0 < kept < 2000
    assert before.endswith(b"\n")
    missing, last = after.decode().splitlines()
    assert f"{2000 - kept + 1000} lines are missing: they could not be written" in missing
    assert "y" * 10_000 in last


def test_first_line_after_a_full_disk_is_a_line_of_its_own(tmp_path):
    """The last line before may be torn."""
    logger, path = logging.getLogger("service.test"), tmp_path / "log"
    with path.open("w") as written, logging_to_stream("info", "json", written):
        with largest_file(1000):
            for number in range(20):
                logger.info("message %d", number)
        logger.info("last")
    *kept, torn, missing, last = path.read_bytes().splitlines()
    assert not torn.endswith(b"}")
    told = f"{20 - len(kept)} lines are missing: they could not be written"
    assert [orjson.loads(line)["message"] for line in (missing, last)] == [told, "last"]


def test_slow_reader_gets_every_line_of_the_access_log():
    reading, writing = os.pipe()
    found = []
    with open(reading, "rb") as read:

        def follow():
            while part := read.read1(4096):
                time.sleep(0.001)
                found.append(part)

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        with open(writing, "w") as written, logging_to_stream("info", "json", written):
            log_access([ANSWERED] * 2000)
        reader.join(240)
    assert len([orjson.loads(line) for line in b"".join(found).splitlines()]) == 2000


def test_text_lines_end_with_the_request_id():
    record = logging.LogRecord("service.test", logging.INFO, "", 0, "said %s", ("this",), None)
    assert TextFormatter().format(record).endswith("INFO service.test: said this")
    token = REQUEST_ID.set("job-7")
    try:
        assert TextFormatter().format(record).endswith("service.test: said this request_id=job-7")
        assert orjson.loads(JsonFormatter().format(record))["request_id"] == "job-7"
    finally:
        REQUEST_ID.reset(token)


# The access log.


def test_access_line_tells_route_status_time_tokens_and_key():
    with logging_to_stream("error", "json") as stream:
        log_access([ANSWERED])
    (line,) = lines(stream)
    assert line == {
        "time": "2001-09-09T01:46:40.000+00:00",
        "level": "info",
        "logger": "service.access",
        "message": "POST /embed 200",
        "request_id": "id-1",
        "method": "POST",
        "route": "/embed",
        "status": 200,
        "seconds": 0.25,
        "sequences": 2,
        "tokens": 30,
        "cached_tokens": 20,
        "repeated": 1,
        "key": "one",
    }


def test_access_line_as_text_has_its_fields_behind_the_message():
    with logging_to_stream("warning") as stream:
        log_access([ANSWERED, ANSWERED._replace(key=None)])
    assert stream.getvalue().endswith(
        "INFO service.access: POST /embed 200 request_id=id-1 method=POST route=/embed status=200 "
        "seconds=0.25 sequences=2 tokens=30 cached_tokens=20 repeated=1\n"
    )


async def test_access_log_has_a_line_for_each_request_and_no_text_no_path_no_query(tmp_path, caplog):
    settings = {"api_keys": keys_file(tmp_path), "access_log": True, "result_memory_bytes": 2**20}
    caplog.set_level("ERROR", logger="httpx")  # the client's own log has the texts
    with logging_to_stream("info", "json") as stream:
        async with serving(**settings) as client:
            for body in ({"inputs": [SECRET, "b"]}, {"inputs": [SECRET, "b"]}, {"inputs": FAILING}):
                await client.post(f"/embed?text={SECRET}", json=body, headers=bearer(ONE))
            await client.get(f"/{SECRET}", headers={ID: "job-7"})
    told = [line for line in lines(stream) if line["logger"] == "service.access"]
    told_of = [
        (line["route"], line["status"], line["tokens"], line["repeated"], line.get("key")) for line in told
    ]
    assert told_of == [
        ("/embed", 200, 6, 0, "one"),
        ("/embed", 200, 6, 2, "one"),
        ("/embed", 500, len(FAILING), 0, "one"),
        ("other", 401, 0, 0, None),
    ]
    assert told[-1]["request_id"] == "job-7"
    assert SECRET not in stream.getvalue()
    assert FAILING not in stream.getvalue()


async def test_without_the_access_log_nothing_is_collected():
    async with serving(FakeEngine()) as client:
        assert client._transport.app.state.service.finished is None


def test_consumer_that_fails_is_logged_and_the_others_are_told(caplog):
    def fail(_):
        raise OSError(SECRET)

    told = []
    finished = FinishedRequests([fail, told.extend])
    finished.start()
    finished.add(ANSWERED)
    finished.close()
    assert told == [ANSWERED]
    assert "builtins.OSError" in caplog.text
    assert SECRET not in caplog.text


def test_requests_beyond_the_bound_are_dropped_and_told_once(caplog, monkeypatch):
    monkeypatch.setattr(finished_module, "_MAX_WAITING", 2)
    told = []
    finished = FinishedRequests([told.extend])
    for _ in range(2):
        for _ in range(3):
            finished.add(ANSWERED)
        finished._hand_over()
    finished._hand_over()
    assert told == [ANSWERED] * 4
    assert caplog.text.count("1 requests are missing in the access log and the traces") == 2


# No text of a user reaches a log line or a metric, even when the text causes a failure.


def watch_the_server_s_log(caplog):
    """Capture all levels of the server's log, but not the log of the test client, which contains texts."""
    # The order matters, because each call also sets the least level that is captured at all.
    caplog.set_level("ERROR", logger="httpx")
    caplog.set_level("DEBUG")


@pytest.mark.parametrize("breaks", ["tokenize", "run", "class_logits"])
async def test_exception_is_logged_with_its_stack_and_without_its_message(breaks, caplog):
    caplog.set_level("DEBUG")
    async with serving(BrokenEngine(breaks)) as client:
        response = await client.post("/classify", json={"inputs": f"{SECRET}, open"})
        metrics = (await client.get("/metrics")).text
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert caplog.text.index("builtins.KeyError") < caplog.text.index("builtins.RuntimeError")
    assert "in _break" in caplog.text
    for visible in (response.text, caplog.text, metrics):
        assert SECRET not in visible


async def test_texts_labels_and_queries_are_not_logged_at_any_level(caplog):
    watch_the_server_s_log(caplog)
    async with serving() as client:
        await client.post("/classify", json={"inputs": SECRET, "labels": [SECRET, "other"]})
        await client.post(f"/embed?text={SECRET}", json={"inputs": [SECRET, FAILING]})
        await client.post("/embed", json={"inputs": "a", SECRET: SECRET})
        await client.get(f"/{SECRET}")
        metrics = (await client.get("/metrics")).text
    assert SECRET not in caplog.text
    assert SECRET not in metrics


class EmbarrassedEngine(FakeEngine):
    """The secret text hits with damage. The first verifications fail and quote the text."""

    def __init__(self, failures):
        super().__init__(stored={SECRET}, damage=0.5)
        self.failures = failures

    def run(self, requests):
        if not any(request.reuse for request in requests) and self.failures:
            self.failures -= 1
            raise RuntimeError(f"cannot compute {texts_of(requests)}")
        return super().run(requests)


async def test_verification_logs_no_text_and_keeps_no_text(caplog):
    watch_the_server_s_log(caplog)
    async with serving(EmbarrassedEngine(failures=2), verify_rate=1) as client:
        metrics = ""
        while "attncache_verify_budget_failures_total 1.0" not in metrics:
            await client.post("/embed", json={"inputs": [SECRET] * 20})
            metrics = (await client.get("/metrics")).text
        verifier = client._transport.app.state.service.serving().batcher.verifier
        await until(lambda: not verifier._pending)
    # The failures and the tightening were logged without a text.
    assert caplog.text.count("verifying hits failed") == 2
    assert "is below the budget" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in metrics


@pytest.mark.parametrize(
    ("path", "body"), [("/embed", {}), ("/classify", {"labels": ["a", "b"]})], ids=["embed", "classify"]
)
async def test_headers_about_reuse_are_sent_unless_the_server_withholds_them(path, body):
    hits = {"x-attncache-hits": "1/2", "x-attncache-prototype-hits": "0/2"}
    names = {}
    for sent in (True, False):
        async with serving(FakeEngine(stored={SECRET}), reuse_headers=sent) as client:
            answer = await client.post(path, json={"inputs": [SECRET, "new"], **body})
        assert answer.status_code == 200
        names[sent] = {name: value for name, value in answer.headers.items() if "hits" in name}
    assert names == {True: hits, False: {}}
