import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from core_models import write_json, write_sentence_transformer
from fake_engine import FakeEngine, embedding_of, serving
from tokenizers import Tokenizer, models

from attncache_core import AttentionDatabase, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.routes.common import json_list


def expected(texts):
    rows = np.stack([embedding_of([ord(character) for character in text]) for text in texts])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def test_each_text_gets_its_own_embedding_of_unit_length():
    texts = ["where is my parcel", "hello", "Grüße 🎉", " ", "\n\t"]
    async with serving() as client:
        response = await client.post("/embed", json={"inputs": texts})
        one = await client.post("/embed", json={"inputs": "hello"})
        exact = await client.post("/embed", json={"inputs": "aab", "normalize": False})
    np.testing.assert_allclose(response.json(), expected(texts), rtol=1e-6)
    np.testing.assert_allclose(one.json(), expected(["hello"]), rtol=1e-6)
    assert exact.json() == [embedding_of(list(map(ord, "aab"))).tolist()]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
async def test_rows_are_written_in_parts_between_which_others_are_served(count):
    rows = np.random.default_rng(0).standard_normal((count, 3), dtype=np.float32)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving_others = asyncio.ensure_future(others())
    call = SimpleNamespace(turn_to_write=lambda _: nullcontext())
    written = await json_list((row for row in rows), call)
    serving_others.cancel()
    np.testing.assert_array_equal(
        np.array(json.loads(orjson.dumps(written)), np.float32).reshape(count, 3), rows
    )
    assert turns == max(0, count - 1) // 64


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("requested", [True, False, None])
async def test_truncate_of_a_request_overrides_the_server(server, requested):
    truncates = server if requested is None else requested
    async with serving(truncate=server) as client:
        response = await client.post("/embed", json={"inputs": "long " * 50, "truncate": requested})
    assert response.status_code == (200 if truncates else 422)


@pytest.mark.parametrize("side", ["left", "right"])
async def test_header_and_metric_count_what_was_cut_also_of_results_that_are_kept(tiny_checkpoint, side):
    engine = PrefillEngine.load(tiny_checkpoint, dtype="float32", max_tokens=8)
    fits, long = "my card is lost where is", "my card is lost where is it now "
    ids = [list(engine.tokenize([text])[0]) for text in (fits, long)]
    cases = [
        ([fits, "card"], None),
        ([fits, long, "card", long * 60], "2/4"),
        (long * 70, "1/1"),
        ([ids[0], ids[1] + ids[1]], "1/2"),
    ]
    async with serving(engine, result_memory_bytes=2**20) as client:
        for _ in range(3):
            for inputs, expected_header in cases:
                body = {"inputs": inputs, "truncation_direction": side}
                response = await client.post("/embed", json=body)
                assert response.headers.get("X-AttnCache-Truncated") == expected_header
        assert response.headers["X-AttnCache-Repeated"] == "2/2"
        metrics = (await client.get("/metrics")).text
    assert "attncache_truncated_sequences_total 12.0" in metrics


async def test_headers_count_hits_and_reuse_off_searches_nothing():
    body = {"inputs": ["a", "new", "b", "c"]}
    async with serving(FakeEngine(stored={"a"}, prototypes={"b", "c"})) as client:
        for header, hits in (
            ({}, "3/4"),
            ({"X-AttnCache-Reuse": "off"}, "0/4"),
            ({"X-AttnCache-Reuse": "On"}, "3/4"),
        ):
            headers = (await client.post("/embed", json=body, headers=header)).headers
            assert headers["X-AttnCache-Hits"] == hits
            assert headers["X-AttnCache-Prototype-Hits"] == ("0/4" if hits == "0/4" else "2/4")


async def test_named_prompt_is_put_before_each_text_and_such_texts_reuse_nothing():
    texts = ["card", "where"]
    async with serving(FakeEngine(stored={"card", "query: card"})) as client:
        prompted = await client.post("/embed", json={"inputs": texts, "prompt_name": "query"})
        plain = await client.post("/embed", json={"inputs": texts, "prompt_name": None})
    np.testing.assert_allclose(prompted.json(), expected([f"query: {text}" for text in texts]), rtol=1e-6)
    np.testing.assert_allclose(plain.json(), expected(texts), rtol=1e-6)
    assert [answer.headers["X-AttnCache-Hits"] for answer in (prompted, plain)] == ["0/2", "1/2"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/embed", {"inputs": ["card", "zzz", "card"]}, "inputs[1]"),
        ("/embed", {"inputs": ["card"] * 70 + ["zzz"]}, "inputs[70]"),
        ("/explain", {"input": "zzz"}, "input"),
    ],
)
async def test_text_that_the_tokenizer_cannot_read_is_refused_by_its_name(tmp_path, side, route, body, field):
    words = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "card": 2, "text": 3}))
    folder = write_sentence_transformer(tmp_path)
    words.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine, admin=True) as client:
        if "inputs" in body:
            body = body | {"truncation_direction": side}
        response = await client.post(route, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["field"] == field


async def test_unknown_prompt_is_refused_with_the_known_prompts(tmp_path):
    folder = write_sentence_transformer(tmp_path, prompts={"prompts": {"ask": "my "}})
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine) as client:
        response = await client.post("/embed", json={"inputs": "card", "prompt_name": "Sesam"})
        info = (await client.get("/info")).json()
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (400, "prompt_name")
    assert error["message"] == "prompt_name names no prompt of the model; its prompts are ask"
    assert (info["prompts"], info["template"], info["pooling"]) == ({"ask": "my "}, "{}", ["mean"])


async def test_fewer_dimensions_take_no_maps_because_budgets_are_about_all(
    tiny_checkpoint, tiny_database, tiny_corpus
):
    database = AttentionDatabase.open(tiny_database)
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    texts = [sentence.text for sentence in tiny_corpus[:20]]
    async with serving(engine, result_memory_bytes=0) as client:
        for path, name in (("/embed", "inputs"), ("/v1/embeddings", "input")):
            for dimensions in (None, engine.dimensions, 4):
                answer = await client.post(path, json={name: texts, "dimensions": dimensions})
                assert (answer.headers["X-AttnCache-Hits"] == "0/20") == (dimensions == 4)
