"""Bytes that Hypothesis makes, sent over raw sockets to the real server.

Requests have odd methods, targets, headers, bodies, framings and encodings. They are damaged, cut into parts
and sent one behind the other. Whatever arrives: no status is 500 or above, except 504 where a request asks
for little time; every connection ends; the server logs no error; and the next request is answered as always.
`make fuzz` sends thousands of connections.
"""

import gzip
import json
import logging
import re
import socket
import zlib
from itertools import chain, pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from raw_http import post, read_to_end, served

from service.web import connection
from service.web.call import TIMEOUT_HEADER

# Examples are not shrunk, because each one waits for connections that never end.
FUZZED = settings(max_examples=settings.default.max_examples // 10, phases=[Phase.generate])
# Long enough for what is sent at once, and short enough to wait for what never ends.
SECONDS = 0.3
LIMITS = {f"{what}_seconds": SECONDS for what in ("header", "body", "write", "keep_alive")}
EMBED = post(b'{"inputs": "Is the next request served?"}', b"X-AttnCache-Reuse: off")
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

BODIES = [
    {"inputs": "a text"},
    {"inputs": ["a text", "another text"], "truncate": True, "normalize": False},
    {"inputs": [[101, 7, 102]]},
    {"inputs": "a text", "labels": ["one", "two"]},
    {"inputs": {"source_sentence": "one", "sentences": ["two"]}},
    {"input": "a text", "model": "tiny-bert", "encoding_format": "base64"},
    {"query": "one", "texts": ["two", "three"], "raw_scores": True},
    {"inputs": "a text", "session": "s"},
]
FIELDS = [
    *("inputs", "input", "query", "texts", "labels", "truncate", "normalize", "dimensions", "temperature"),
    *("prompt_name", "model", "encoding_format", "cache_salt", "session", "x"),
]
INFERENCE = [
    *("/embed", "/v1/embeddings", "/classify", "/predict", "/rerank", "/similarity", "/tokenize", "/decode"),
    *("/embed_all", "/explain", "/", "/cache/lookup", "/cache/warm"),
]
PATHS = [
    *("/info", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/cache/stats", "/page/a"),
    *("/nothing", "//embed", "/embed/", "/embed?a=%00", "/embed#a", "/%65mbed", "/../embed", "*", "embed"),
    *("http://test/embed", "/\xff"),
]
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "post", ""]
NAMES = [
    *("X-AttnCache-Reuse", TIMEOUT_HEADER, "X-AttnCache-Require-Model", "X-AttnCache-Session"),
    *("X-Request-Id", "Authorization", "Content-Type", "Content-Encoding", "Accept", "Accept-Encoding"),
    *("Origin", "traceparent", "Expect", "Connection", "Upgrade", "Sec-WebSocket-Key", "Content-Length"),
    *("Transfer-Encoding", "Host", "Cookie", "Range", "Forwarded", "X-Forwarded-For", "If-None-Match"),
    *("Trailer", "TE", "tracestate", "Keep-Alive"),
]
VALUES = [
    *("on", "off", "0", "-1", "1e-9", "1e999", "nan", "inf", "0123456789abcdef", "application/json"),
    *("gzip", "deflate", "chunked", "100-continue", "close", "Upgrade", "websocket", "h2c"),
    *("99999999999999999999", "+5", "null", "*", "bytes=0-", "Bearer ", "Bearer a b", "Basic ="),
    *("text/plain; charset=utf-99", "br, gzip", "gzip, chunked", "keep-alive, Upgrade"),
    *("00-" + 32 * "a" + "-" + 16 * "b" + "-01", " ", "", "\t", "a\xffb", "a" * 5000),
]

odd_bytes = st.binary(max_size=24)
tokens = st.text("abcXYZ019-_!#$%&'*+.^`|~:/ ", max_size=12).map(str.encode)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw, contents):
    """Cut, replace, insert and repeat parts."""
    content = draw(contents)
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, len(content)))
        last = min(len(content), first + draw(st.integers(0, 8)))
        middle = draw(
            odd_bytes | st.just(content[first:last] * 3) | st.sampled_from([b"\r\n", b"\0", b" ", b"\r"])
        )
        content = content[:first] + middle + content[last:]
    return content


def bodies():
    known = st.sampled_from(BODIES)
    changed = st.builds(
        lambda body, name, value: body | {name: value}, known, st.sampled_from(FIELDS), json_values
    )
    plain = (known | changed | json_values).map(lambda body: json.dumps(body).encode())
    deep, controls = b"[" * 5000, b'{"inputs": "' + b"\\u0000" * 500 + b'"}'
    return plain | damaged(plain) | st.binary(max_size=64) | st.sampled_from([b"", deep, controls])


def mostly(usual, odd):
    """Seldom odd, because a request with several odd parts is refused for the first of them."""
    return st.integers(0, 7).flatmap(lambda number: odd if number == 7 else usual)


def one_of(*known):
    return st.sampled_from(known).map(lambda text: text.encode("latin-1"))


def headers():
    names = one_of(*NAMES[:4]) | one_of(*NAMES)
    values = one_of(*VALUES) | tokens | odd_bytes
    return st.lists(st.builds(b"%s: %s".__mod__, st.tuples(mostly(names, tokens), values)), max_size=4)


@st.composite
def chunked(draw, body):
    """Return the body in chunks; their sizes, extensions, trailers and end may be wrong."""
    sizes = mostly(one_of("%x", "%X", "0%x", "%x;a=b"), one_of("%x ", "-%x", "%xg", "ffffffff%x"))
    ends = mostly(st.just(b"\r\n"), one_of("\n", "", "\r\n\r\n"))
    framed = b""
    while body:
        size = draw(st.integers(1, len(body)))
        framed += draw(sizes) % size + b"\r\n" + body[:size] + draw(ends)
        body = body[size:]
    return framed + draw(mostly(one_of("0\r\n\r\n", "0\r\nA: b\r\n\r\n"), one_of("0\r\n", "", "0\r\n\0")))


@st.composite
def http_requests(draw):
    """Return one request, of which anything may be wrong."""
    method = draw(mostly(st.just(b"POST"), one_of(*METHODS) | tokens))
    target = draw(mostly(one_of(*INFERENCE), one_of(*PATHS) | odd_bytes))
    version = draw(
        mostly(st.just(b"HTTP/1.1"), one_of("HTTP/1.0", "HTTP/2.0", "HTTP/1.1 ", "HTTQ/1.1", "") | odd_bytes)
    )
    body, lines = draw(bodies()), draw(headers())
    encoding = draw(st.sampled_from(["", "", "", "", "", "", "gzip", "deflate"]))
    if encoding:
        body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        lines.append(b"Content-Encoding: " + encoding.encode())
    framing = draw(
        st.sampled_from(["length", "length", "length", "chunks", "chunks", "both", "wrong", "none"])
    )
    if framing in ("length", "both"):
        lines.append(b"Content-Length: %d" % len(body))
    if framing == "wrong":
        lines.append(b"Content-Length: %d" % draw(st.integers(-2, 2 * len(body) + 2)))
    if framing in ("chunks", "both"):
        lines.append(b"Transfer-Encoding: chunked")
        body = draw(chunked(body))
    return b"\r\n".join([method + b" " + target + b" " + version, b"Host: test", *lines, b"", body])


class Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.logged = []

    def emit(self, record):
        self.logged.append(self.format(record))


@pytest.fixture(scope="module")
def errors():
    handler = Errors()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="module")
def server(tiny_engine):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_LINGER_SECONDS", SECONDS)
        with served(tiny_engine, admin=True, result_memory_bytes=0, **LIMITS) as running:
            yield running


@pytest.fixture(scope="module")
def embedding(server):
    response = server.ask(EMBED)
    assert response.status == 200
    return response.body


def assert_survives(server, sent, embedding, errors):
    """Send each sequence of parts over its own connection, all at once, and read all answers."""
    errors.logged.clear()
    clients = [server.connect() for _ in sent]
    for client, parts in zip(clients, sent, strict=True):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            try:
                client.sendall(part)
            except ConnectionError:
                break  # the server refused the first parts
    for client, parts in zip(clients, sent, strict=True):
        with client:
            received = read_to_end(client)  # raises TimeoutError if the connection never ends
        statuses = {int(status) for status in STATUS.findall(received)}
        assert not received or STATUS.match(received), (parts, received)
        allowed = {504} if TIMEOUT_HEADER.lower().encode() in b"".join(parts).lower() else set()
        assert all(status < 500 for status in statuses - allowed), (parts, received)
    assert server.ask(EMBED).body == embedding
    assert not errors.logged


def streams(requests):
    """Up to three requests that do not wait for a response."""
    return st.lists(requests, min_size=1, max_size=3).map(b"".join)


def in_parts(streams):
    """What several connections send, each in up to three parts."""

    def split(stream, places):
        cuts = [0, *sorted(int(place * len(stream)) for place in places), len(stream)]
        return [stream[first:last] for first, last in pairwise(cuts)]

    places = st.lists(st.floats(0, 1), max_size=2)
    return st.lists(st.builds(split, streams, places), min_size=4, max_size=16)


def examples(strategy):
    """Return what Hypothesis makes, joined: connections that never end are waited for together."""
    made = []

    @given(strategy)
    @FUZZED
    def keep(sent):
        made.append(sent)

    keep()
    return [list(chain(*some)) for some in (made[first : first + 5] for first in range(0, len(made), 5))]


def test_odd_requests(server, embedding, errors):
    for sent in examples(in_parts(streams(http_requests()))):
        assert_survives(server, sent, embedding, errors)


def test_damaged_requests_and_noise(server, embedding, errors):
    odd = damaged(streams(st.just(EMBED) | http_requests())) | st.binary(max_size=200)
    for sent in examples(in_parts(odd)):
        assert_survives(server, sent, embedding, errors)
