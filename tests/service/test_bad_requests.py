"""A bad request gets a 4xx error that repeats no input, and the next request is served."""

import gzip
import json

import pytest
from fake_engine import FakeEngine, serving
from pydantic import RootModel

from attncache_core import InvalidInput
from service.app import INFERENCE_ROUTES
from service.routes.openai import EmbeddingsRequest
from service.routes.rerank import RerankRequest
from service.routes.tei import ZeroShotRequest
from service.schemas import _SENTENCES, ClassifyRequest, EmbedRequest, checked

SECRET = "Sesam"

NOT_JSON = [
    pytest.param(b"", id="an empty body"),
    pytest.param(b'{"inputs": Sesam', id="not JSON"),
    pytest.param(b'{"inputs": "Sesam \xff"}', id="not UTF-8"),
    pytest.param(b'{"inputs": "Sesam \xed\xa0\x80"}', id="a surrogate as bytes"),
    pytest.param(rb'{"inputs": "Sesam \ud800"}', id="a lone surrogate"),
    pytest.param(b'{"inputs": ' + b"[" * 20_000, id="nesting 20,000 deep, never closed"),
    pytest.param(b'{"inputs": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", id="nesting 20,000 deep"),
    pytest.param(b'{"inputs": "Sesam", "truncate": ' + b"1" * 5_000 + b"}", id="a number of 5,000 digits"),
]

NOT_ACCEPTED = [
    pytest.param(b'"Sesam"', None, id="a string instead of an object"),
    pytest.param(b"NaN", None, id="NaN instead of an object"),
    pytest.param(b"{}", "inputs", id="no inputs"),
    pytest.param(b'{"inputs": null}', "inputs", id="null instead of inputs"),
    pytest.param(b'{"inputs": 7}', "inputs", id="a number instead of inputs"),
    pytest.param(b'{"inputs": NaN}', "inputs", id="NaN instead of inputs"),
    pytest.param(b'{"inputs": {"Sesam": 1}}', "inputs", id="an object instead of inputs"),
    pytest.param(b'{"inputs": []}', "inputs", id="an empty list"),
    pytest.param(b'{"inputs": ""}', "inputs[0]", id="an empty string"),
    pytest.param(b'{"inputs": ["Sesam", ""]}', "inputs[1]", id="an empty string in a list"),
    pytest.param(b'{"inputs": ["Sesam", "a", 7]}', "inputs[2]", id="a number in a list"),
    pytest.param(b'{"inputs": [["Sesam"]]}', "inputs[0]", id="a list in a list"),
    pytest.param(rb'{"inputs": ["Sesam \u0000"]}', "inputs[0]", id="a null byte"),
    pytest.param(b'{"inputs": "a", "Sesam": 1}', None, id="an unknown field"),
    pytest.param(b'{"inputs": "Sesam", "truncate": "yes"}', "truncate", id="a string instead of truncate"),
    pytest.param(b'{"inputs": "Sesam", "truncate": 1}', "truncate", id="a number instead of truncate"),
    pytest.param(b'{"inputs": [' + b"7.5," * 500_000 + b"7]}", "inputs[0]", id="half a million numbers"),
    pytest.param(
        b'{"inputs": "a"' + b"".join(b', "Sesam%d": 1' % i for i in range(9_000)) + b"}",
        None,
        id="9,000 unknown fields",
    ),
]

NOT_CLASSIFIABLE = [
    (b'"labels": []', "labels"),
    (b'"labels": "Sesam"', "labels"),
    (b'"labels": ["a", ""]', "labels[1]"),
    (b'"labels": ["a", "Sesam", "b", "Sesam"]', "labels[3]"),
    (b'"labels": ["a"], "normalize": true', None),
    *(
        (b'"labels": ["a"], "temperature": ' + value, "temperature")
        for value in (b"0", b"-1.5", b'"1"', b"NaN", b"Infinity", b"1e999")
    ),
]

# pydantic's error type -> a schema, a body that provokes the error, and the message.
WORDED = {
    "missing": (EmbeddingsRequest, {}, "input is required"),
    "string_type": (EmbedRequest, {"inputs": ["a", 7]}, "inputs[1] must be a string"),
    "list_type": (ClassifyRequest, {"inputs": "a", "labels": "a"}, "labels must be a list of strings"),
    "too_short": (RerankRequest, {"query": "a", "documents": []}, "documents must not be empty"),
    "string_too_long": (
        EmbedRequest,
        {"inputs": "a", "cache_salt": "a" * 257},
        "cache_salt must have at most 256 characters",
    ),
    "bool_type": (EmbedRequest, {"inputs": "a", "truncate": 1}, "truncate must be true or false"),
    "float_type": (ClassifyRequest, {"inputs": "a", "temperature": "1"}, "temperature must be a number"),
    "int_type": (EmbedRequest, {"inputs": "a", "dimensions": 1.5}, "dimensions must be a whole number"),
    "model_type": (ZeroShotRequest, {"inputs": "a", "parameters": 1}, "parameters must be an object"),
    "greater_than": (EmbedRequest, {"inputs": "a", "dimensions": 0}, "dimensions must be greater than 0"),
    "greater_than_equal": (
        RerankRequest,
        {"query": "a", "documents": ["a"], "top_n": -1},
        "top_n must be 0 or more",
    ),
    "finite_number": (
        ClassifyRequest,
        {"inputs": "a", "temperature": float("inf")},
        "temperature must be a finite number",
    ),
}
ODD_VALUES = [
    *(None, True, 0, -1, 1.5, float("nan"), 10**30, "", "a", "a" * 300),
    *({}, {"a": 1}, {"text": 1}, {"a": "b"}, [], [1], [None], [1.5], [-1], [10**30]),
    *([[]], [["a"]], [["a"] * 3], [{}], [{"text": 1}], ["a", ""]),
]


@pytest.fixture(scope="module")
async def client():
    async with serving(FakeEngine(), max_request_inputs=8, max_queue_sequences=8) as client:
        yield client
        # Whatever was wrong with them, the bytes of all bodies were given back.
        assert client._transport.app.state.service.bodies.taken == 0


async def assert_refused(client, response, status, code, field):
    assert response.status_code == status
    assert len(response.content) < 4096
    assert SECRET not in response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert set(error) == {"code", "message", "field"}
    assert len(error["message"]) > 10
    served = await client.post("/embed", json={"inputs": "next"})
    assert served.status_code == 200


@pytest.mark.parametrize("route", ["/embed", "/classify"])
@pytest.mark.parametrize("body", NOT_JSON)
async def test_body_that_is_not_json_is_refused(client, route, body):
    response = await client.post(route, content=body)
    await assert_refused(client, response, 400, "malformed_body", None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b" ", "the body is empty; send a JSON object with the fields inputs, "),
        (b'{"inputs": secret}', "the body must be JSON in UTF-8; it is not valid at line 1, column 12"),
        (b'{"inputs": "\\ud800"}', "line 1, column 19: an escaped surrogate stands alone"),
        (b"[" * 9999, "line 1, column 202: values are nested too deeply"),
        (b'{"inputs": "a\nb"}', "at the end of line 1: a string holds a line break or another control"),
        (b'{"inputs": "a', "the body ends too early"),
    ],
    ids=["empty", "no string", "surrogate", "deep", "line break", "cut"],
)
async def test_message_says_where_json_ends_to_be_valid(client, body, message):
    response = await client.post("/embed", content=body)
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/embed", "/classify"])
@pytest.mark.parametrize(("body", "field"), NOT_ACCEPTED)
async def test_json_that_is_not_accepted_is_refused_with_the_field(client, route, body, field):
    response = await client.post(route, content=body)
    await assert_refused(client, response, 400, "invalid_input", field)


@pytest.mark.parametrize(("fields", "field"), NOT_CLASSIFIABLE)
async def test_classify_refuses(client, fields, field):
    response = await client.post("/classify", content=b'{"inputs": "Sesam", ' + fields + b"}")
    await assert_refused(client, response, 400, "invalid_input", field)


def test_every_sentence_about_a_field_says_what_is_required():
    assert WORDED.keys() == _SENTENCES.keys()
    for schema, body, message in WORDED.values():
        assert refusal(schema, body) == message


def test_every_message_about_a_field_says_what_is_required():
    schemas = {route.body for route in INFERENCE_ROUTES} | {ZeroShotRequest}
    for schema in [schema for schema in schemas if not issubclass(schema, RootModel)]:
        required = {name: "a" for name, field in schema.model_fields.items() if field.is_required()}
        for name in schema.model_fields:
            messages = [refusal(schema, {**required, name: value}) for value in ODD_VALUES]
            assert not [message for message in messages if "is not accepted here" in message]


def refusal(schema, body):
    """Return the message for a body; nothing if it is accepted."""
    try:
        checked(json.dumps(body).encode(), schema)
    except InvalidInput as error:
        return str(error)
    return ""


async def test_compressed_body_is_refused_by_name(client):
    headers = {"Content-Encoding": "gzip"}
    response = await client.post("/embed", content=gzip.compress(b'{"inputs": "Sesam"}'), headers=headers)
    await assert_refused(client, response, 400, "malformed_body", None)
    assert "Content-Encoding" in response.text
    plain = await client.post("/embed", json={"inputs": "a"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("value", ["Sesam", "", "true", "on,off"])
async def test_reuse_header_is_on_or_off(client, value):
    response = await client.post("/embed", json={"inputs": "a"}, headers={"X-AttnCache-Reuse": value})
    await assert_refused(client, response, 400, "invalid_input", "X-AttnCache-Reuse")


async def test_text_or_label_that_is_too_long_is_refused_by_its_name_without_truncation(client):
    long = ["a", SECRET * 50]
    for path, body, field in (
        ("/embed", {"inputs": long}, "inputs[1]"),
        ("/classify", {"inputs": "a", "labels": long}, "labels[1]"),
    ):
        response = await client.post(path, json={"truncate": False, **body})
        await assert_refused(client, response, 422, "input_too_long", field)


@pytest.mark.parametrize(
    ("route", "field"), [("/embed", "inputs"), ("/classify", "inputs"), ("/classify", "labels")]
)
async def test_too_many_texts_are_refused_with_the_limit(client, route, field):
    texts = [f"{SECRET} {i}" for i in range(9)]
    body = {"inputs": "a", field: texts} if route == "/classify" else {field: texts}
    if route == "/classify":
        body.setdefault("labels", ["a"])
    response = await client.post(route, json=body)
    await assert_refused(client, response, 422, "too_many_inputs", field)
    kind = "labels" if field == "labels" else "texts"
    assert response.json()["error"]["message"] == (
        f"{field} must have at most 8 {kind} per request; send fewer {kind} per request, or raise "
        "--max-request-inputs"
    )


async def test_body_of_exactly_the_limit_is_read(client):
    start, end = b'{"inputs": "', b'"}'
    body = start + b"a" * (2 * 1024 * 1024 - len(start) - len(end)) + end
    assert (await client.post("/embed", content=body)).status_code == 200
    response = await client.post("/embed", content=body + b" ")
    await assert_refused(client, response, 413, "body_too_large", None)
    assert "a larger --max-body-bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "announced", [None, "5"], ids=["without a content-length", "with a content-length that lies"]
)
async def test_body_is_read_no_further_than_the_limit(announced):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b"a" * 1000

    headers = {"content-length": announced} if announced else {}
    async with serving(max_body_bytes=10_000) as client:
        response = await client.post("/embed", content=endless(), headers=headers)
        await assert_refused(client, response, 413, "body_too_large", None)
    assert sent == 11


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/embed", 405, "method_not_allowed"),
        ("DELETE", "/classify", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/Sesam", 404, "not_found"),
        ("POST", "/embed/", 404, "not_found"),
        ("POST", "/embed/../Sesam?Sesam", 404, "not_found"),
    ],
)
async def test_unknown_path_or_method_is_refused(client, method, path, status, code):
    response = await client.request(method, path)
    await assert_refused(client, response, status, code, None)
    assert ("allow" in response.headers) == (status == 405)
