"""The keys that docker/affinity.lua gives to requests, by the interpreter that Envoy has."""

import json

import pytest
from entrance import DOCKER
from hypothesis import given
from hypothesis import strategies as st

lua = pytest.importorskip("lupa.luajit21", reason="the package lupa is not installed")

# Calls the filter as Envoy does.
HANDLE = b"""
function key_of_request(method, affinity, api_key, content)
  local fields = { [":method"] = method, ["x-attncache-affinity"] = affinity, ["x-api-key"] = api_key }
  local age = 0
  local function headers_of_age(made)
    local function current() assert(made == age, "the body has arrived since") return fields end
    return {
      get = function(_, name) return current()[name] end,
      replace = function(_, name, value) current()[name] = value end,
      remove = function(_, name) current()[name] = nil end,
    }
  end
  local body = {
    length = function() return #content end,
    getBytes = function(_, start, count) return content:sub(start + 1, start + count) end,
  }
  envoy_on_request({
    headers = function() return headers_of_age(age) end,
    body = function() age = age + 1 return content and body end,
  })
  return fields["x-attncache-affinity"]
end
"""


def filter_of(affinity=None):
    runtime = lua.LuaRuntime(encoding=None)
    if affinity is not None:
        runtime.execute(f'os.getenv = function() return "{affinity}" end'.encode())
    runtime.execute((DOCKER / "affinity.lua").read_bytes())
    runtime.execute(HANDLE)
    called = runtime.globals()[b"key_of_request"]

    def key(body, given=None, api_key=None, method="POST"):
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = (name if name is None else name.encode() for name in (method, given, api_key))
        found = called(*names, content)
        return found if found is None else found.decode()

    return key


key = filter_of()
LONG = "The same few examples. " * 40


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"inputs": LONG + "a"}, {"inputs": LONG + "b"}),
        ({"inputs": [LONG + "a"]}, {"inputs": [LONG + "b", "c"], "truncate": True}),
        ({"input": LONG + "a", "model": "m"}, {"model": "m", "input": [LONG + "b"]}),  # OpenAI's
        ({"inputs": [["a", "b"]]}, {"inputs": ["a"]}),  # TEI's pairs
        ({"query": "q", "texts": ["a"]}, {"query": "q", "texts": ["b"], "raw_scores": True}),
        ({"inputs": {"source_sentence": "s", "sentences": ["a"]}}, {"inputs": {"source_sentence": "s"}}),
        ({"inputs": [1, 2, 3]}, {"inputs": [[1, 2, 3], [4]]}),
        ({"segments": ["a", "b"], "query": "c"}, {"query": "d", "segments": ["a"]}),
        ({"session_id": "s", "append": "a"}, {"transcript": ["b", "c"], "session_id": "s"}),
        ({"session_id": "s", "append": "a", "cache_salt": "x"}, {"session_id": "s", "append": "a"}),
        ({"inputs": "a"}, b' {\n "inputs"\t: [ "a" ]}'),
        ({"inputs": "Straße 東京 🚀"}, {"inputs": ["Straße 東京 🚀"]}),
        # A text that looks like fields.
        ({"inputs": 'a "session_id": "s"'}, {"inputs": 'a "session_id": "s"', "dimensions": 3}),
        ({"inputs": "session_id", "model": "s"}, {"inputs": "session_id"}),
    ],
)
def test_requests_that_can_share_work_have_the_same_key(one, other):
    assert key(one) == key(other)
    assert len(key(one)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"inputs": "a"}, {"inputs": "b"}),
        ({"inputs": "ab"}, {"inputs": "ba"}),
        ({"inputs": "a\\"}, {"inputs": 'a\\"b'}),
        ({"inputs": "a"}, {"inputs": "a", "cache_salt": "x"}),
        ({"inputs": "a", "cache_salt": "x"}, {"inputs": "a", "cache_salt": "y"}),
        ({"session_id": "s", "append": "a"}, {"session_id": "t", "append": "a"}),
        ({"session_id": "s", "append": "a"}, {"inputs": "s"}),
        ({"inputs": [1, 2]}, {"inputs": [1, 3]}),
    ],
)
def test_requests_that_share_no_work_have_different_keys(one, other):
    assert key(one) != key(other)


def test_keys_of_clients_differ_and_do_not_show_the_api_key_or_the_text():
    keys = {key({"inputs": "sesame"}, api_key=name) for name in (None, "first-secret", "second-secret")}
    assert len(keys) == 3
    assert not any("secret" in shown or "sesame" in shown for shown in keys)


def test_header_of_the_client_comes_first_and_its_body_is_not_read():
    assert key(None, given="mine") == "mine"
    assert key({"session_id": "s"}, given="mine") == "mine"
    assert key({"session_id": "s"}, given="") == key({"session_id": "s"})


@pytest.mark.parametrize(
    "body", [None, b"", b"{}", b"[]", b"null", b'{"inputs": null}', b'{"inputs": []}', b'{"inputs": ""}']
)
def test_request_without_a_text_has_no_key(body):
    assert key(body) is None
    assert key({"inputs": "a"}, method="GET") is None


def test_servers_that_store_no_prefixes_get_keys_of_the_header_alone():
    off = filter_of(affinity="off")
    assert off({"inputs": "a", "session_id": "s"}) is None
    assert off({"inputs": "a"}, given="mine") == "mine"
    assert filter_of(affinity="on")({"inputs": "a"}) == key({"inputs": "a"})


@given(st.binary(max_size=300) | st.text('{}[]":,\\ \nae\0é').map(str.encode) | st.text().map(str.encode))
def test_no_body_makes_the_filter_fail(body):
    for content in (body, b'{"inputs":' + body, b'{"inputs":"' + body, b'{"session_id"' + body):
        found = key(content)
        assert found is None or len(found) == 16


@pytest.mark.parametrize(
    "body",
    [
        b'"inputs"' * 250_000,
        b'{"inputs":' + b" " * 2_000_000,
        b'{"inputs":' + b"[" * 2_000_000,
        b'{"inputs":"' + b"\\" * 2_000_000,
        b'{"inputs":"' + b"a" * 2_000_000 + b'","session_id":"s"}',
    ],
)
def test_large_bodies_get_a_key_or_none(body):
    assert key(body) in (None, key(body[:1000]), key({"session_id": "s"}))
