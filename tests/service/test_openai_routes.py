"""The routes under /v1 answer in the shapes of OpenAI and vLLM, errors included."""

import numpy as np
import pytest
from core_models import write_sentence_transformer
from fake_engine import FAILING, NOT_FINITE, FakeEngine, embedding_of, serving, starting
from queueing import full_queue

from attncache_core import PrefillEngine, class_scores
from attncache_core.checkpoints.description import read_checkpoint

PATHS = {
    "/v1/embeddings": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
}


def is_openai_error(response):
    error = response.json()["error"]
    return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)


async def test_embeddings_have_unit_length_also_if_the_model_s_have_not(tmp_path):
    folder = write_sentence_transformer(tmp_path / "model", normalize=False)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine, model=str(folder)) as client:
        vector = (await client.post("/embed", json={"inputs": "where"})).json()[0]
        [found] = (await client.post("/v1/embeddings", json={"input": "where"})).json()["data"]
    assert abs(np.linalg.norm(vector) - 1) > 0.01
    np.testing.assert_allclose(found["embedding"], np.array(vector) / np.linalg.norm(vector), atol=1e-6)


async def test_check_of_token_ids_can_be_switched_off(tiny_engine):
    async with serving(tiny_engine) as client, serving(tiny_engine, check_token_ids=False) as unchecked:
        for ids in ([2, 5], [5, 3], [5], [3, 2]):
            body = {"input": [[2, 5, 3], ids]}
            refused = await client.post("/v1/embeddings", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, "input[1]", "invalid_input")
            assert "/tokenize" in error["message"]
            assert (await unchecked.post("/v1/embeddings", json=body)).status_code == 200


async def test_usage_says_nothing_about_reuse_without_the_headers_of_reuse():
    async with serving(reuse_headers=False) as client:
        response = await client.post("/v1/embeddings", json={"input": "abc"})
    assert response.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize(
    ("served", "asked", "status"),
    [
        (None, "org/model", 200),
        (None, None, 200),
        (None, "default", 200),
        (None, "model", 404),
        ("small,large", "default", 404),
        (None, "", 400),
        ("small,large", "small", 200),
        ("small, large", "large", 200),
        ("small,large", "org/model", 404),
        ("small,*", "gpt-4", 200),
        ("*", "gpt-4", 200),
    ],
    ids=str,
)
async def test_names_by_which_a_model_may_be_called(served, asked, status):
    async with serving(model="org/model", served_model_name=served) as client:
        response = await client.post("/v1/embeddings", json={"input": "a", "model": asked})
        listed = (await client.get("/v1/models")).json()["data"]
        retrieved = await client.get(f"/v1/models/{asked or 'org/model'}")
    name = "org/model" if served in (None, "*") else "small"
    assert response.status_code == status
    assert [model["id"] for model in listed] == [name]
    if status == 200:
        assert response.json()["model"] == name
    if asked:
        assert retrieved.status_code == status
        assert status == 200 or is_openai_error(retrieved)


async def test_classes_are_shaped_as_by_vllm():
    engine = FakeEngine(labels=("x", "y", "z"))
    async with serving(engine, model="fake") as client:
        answer = (await client.post("/v1/classify", json={"input": ["a", "ab"], "model": "fake"})).json()
        body = {"input": ["a", "ab"], "use_activation": False}
        raw = (await client.post("/v1/classify", json=body)).json()
    logits = engine.decisions.class_logits(np.stack([embedding_of([1]), embedding_of([1, 2])]))
    assert (answer["object"], answer["model"], answer["usage"]["prompt_tokens"]) == ("list", "fake", 3)
    assert answer["id"].startswith("classify-")
    for index, entry in enumerate(answer["data"]):
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        assert entry["label"] == "xyz"[int(logits[index].argmax())]
        np.testing.assert_allclose(entry["probs"], class_scores(logits)[index], rtol=1e-6)
    np.testing.assert_allclose([entry["probs"] for entry in raw["data"]], logits, rtol=1e-6)


# path -> bodies, and the code and the field of the refusal
BAD = {
    "/v1/embeddings": [
        (b"{", "malformed_body", None),
        (b"[]", "invalid_input", None),
        (b'{"input": 7}', "invalid_input", "input"),
        (b'{"input": [null]}', "invalid_input", "input[0]"),
        (b'{"input": ["a", 7]}', "invalid_input", "input[1]"),
        (b'{"input": ""}', "invalid_input", "input[0]"),
        (b'{"input": []}', "invalid_input", "input"),
        (b'{"input": [[1], "a"]}', "invalid_input", "input[1]"),
        (b'{"input": [[1], []]}', "invalid_input", "input[1]"),
        (b'{"input": [[1, -1]]}', "invalid_input", "input[0]"),
        (b'{"input": [1, 2.5]}', "invalid_input", "input[0]"),
        (b'{"input": [1, true]}', "invalid_input", "input[0]"),
        (b'{"input": [[1114112]]}', "invalid_input", "input[0]"),
        (b'{"input": [[123456789012345678901234567890]]}', "invalid_input", "input[0]"),
        (b'{"input": "a", "model": 7}', "invalid_input", "model"),
        (b'{"input": "a", "dimensions": "7"}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 7.5}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 129}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 0}', "invalid_input", "dimensions"),
        (b'{"input": "a", "encoding_format": 7}', "invalid_input", "encoding_format"),
        (b'{"input": "a", "encoding_format": "hex"}', "invalid_input", "encoding_format"),
        (b'{"input": "a", "user": 7}', "invalid_input", "user"),
        (b'{"input": "a", "Sesam": 7}', "invalid_input", None),
        (b"{}", "invalid_input", "input"),
    ],
    "/v1/classify": [
        (b'{"input": [1]}', "invalid_input", "input[0]"),
        (b'{"input": []}', "invalid_input", "input"),
        (b'{"input": "a", "use_activation": "no"}', "invalid_input", "use_activation"),
        (b'{"input": "a", "model": "another"}', "model_not_found", "model"),
    ],
}


@pytest.mark.parametrize("path", BAD)
async def test_bad_body_is_refused_with_the_field(path):
    async with serving(FakeEngine(labels=("a", "b"))) as client:
        for content, code, param in BAD[path]:
            response = await client.post(path, content=content)
            status = 404 if code == "model_not_found" else 400
            assert (response.status_code, is_openai_error(response)) == (status, True), content
            error = response.json()["error"]
            assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
            assert "Sesam" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_clients_of_jina_find_the_message_of_an_error_in_its_detail(path):
    async with serving() as client:
        for response in (await client.post(path, json={"documents": ["a"]}), await client.get(path)):
            assert is_openai_error(response)
            assert response.json()["detail"] == response.json()["error"]["message"]
        others = await client.post("/v1/embeddings", json={})
        assert "detail" not in others.json()


@pytest.mark.parametrize(
    ("texts", "status", "code", "param"),
    [
        (["a", NOT_FINITE], 500, "not_finite", "input[1]"),
        (["a", FAILING], 500, "internal_error", None),
        (["a", "long" * 20], 422, "context_length_exceeded", "input[1]"),
        (["a"] * 1025, 422, "too_many_inputs", "input"),
    ],
    ids=["not finite", "failing", "too long", "too many"],
)
async def test_failures_name_the_field_of_the_request(texts, status, code, param):
    async with serving(truncate=False) as client:
        response = await client.post("/v1/embeddings", json={"input": texts})
    assert response.status_code == status
    assert is_openai_error(response)
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert "inputs" not in error["message"].replace("--max-request-inputs", "")
    assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")


async def test_unknown_paths_and_methods_have_the_shape_of_openai():
    async with serving() as client:
        for method, path, status in (
            ("GET", "/v1/embeddings", 405),
            ("GET", "/v1", 404),
            ("POST", "/v1/chat/completions", 404),
            ("DELETE", "/v1/models/fake", 405),
            ("GET", "/v1/models/", 404),
            ("GET", "/v2/nothing", 404),
        ):
            response = await client.request(method, path)
            assert (response.status_code, is_openai_error(response)) == (status, True)
            code = "not_found" if status == 404 else "method_not_allowed"
            assert response.json()["error"]["code"] == code


async def test_every_refusal_has_the_shape_of_openai():
    key = {"Authorization": "Bearer " + "k" * 20}
    async with (
        serving(FakeEngine(labels=("a", "b")), max_body_bytes=1000, api_key="k" * 20) as client,
        full_queue(FakeEngine(labels=("a", "b"))) as full,
        starting(lambda: iter([])) as loading,
    ):
        for path, body in PATHS.items():
            answers = {
                401: await client.post(path, json=body),
                413: await client.post(path, content=b"[" * 1001, headers=key),
                409: await client.post(path, json=body, headers=key | {"X-AttnCache-Require-Model": "f" * 8}),
                400: await client.post(path, json=body, headers=key | {"X-AttnCache-Reuse": "maybe"}),
                429: await full.post(path, json=body),
                503: await loading.post(path, json=body),
            }
            assert [answer.status_code for answer in answers.values()] == list(answers)
            assert all(map(is_openai_error, answers.values()))
            assert answers[401].json()["error"]["code"] == "invalid_api_key"
            assert answers[401].headers["WWW-Authenticate"].startswith("Bearer")
            error = answers[429].json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert int(answers[429].headers["Retry-After"]) >= 1
            assert answers[503].json()["error"]["type"] == "server_error"
        models = await loading.get("/v1/models")
        assert (models.status_code, is_openai_error(models)) == (503, True)
