from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_models import write_sentence_transformer
from fake_engine import FakeEngine, embedding_of, serving

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint

pytestmark = pytest.mark.anyio


def expected(texts: list[str]) -> np.ndarray:
    rows = np.stack([embedding_of([ord(character) for character in text]) for text in texts])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def test_each_text_gets_its_own_embedding_of_unit_length() -> None:
    texts = ["where is my parcel", "hello", "Grüße 🎉"]
    async with serving() as client:
        response = await client.post("/embed", json={"inputs": texts})
    assert response.status_code == 200
    np.testing.assert_allclose(response.json(), expected(texts), rtol=1e-6)


async def test_one_string_gets_a_list_of_one_embedding() -> None:
    async with serving() as client:
        response = await client.post("/embed", json={"inputs": "hello"})
    assert np.shape(response.json()) == (1, 128)


async def test_normalize_off_answers_the_model_s_own_vectors() -> None:
    async with serving() as client:
        response = await client.post("/embed", json={"inputs": "aab", "normalize": False})
    assert (response.json()[0][ord("a")], response.json()[0][ord("b")]) == (2.0, 1.0)


async def test_whitespace_is_a_text() -> None:
    async with serving() as client:
        assert (await client.post("/embed", json={"inputs": [" ", "\n\t"]})).status_code == 200


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("requested", [True, False, None])
async def test_truncate_of_a_request_overrides_the_server(server: bool, requested: bool | None) -> None:
    truncates = server if requested is None else requested
    async with serving(truncate=server) as client:
        response = await client.post("/embed", json={"inputs": "long " * 50, "truncate": requested})
    assert response.status_code == (200 if truncates else 422)


async def test_header_counts_hits_of_all_sequences() -> None:
    engine = FakeEngine(stored={"a", "b", "c"})
    async with serving(engine) as client:
        response = await client.post("/embed", json={"inputs": ["a", "new", "b", "c"]})
    assert response.headers["X-AttnCache-Hits"] == "3/4"
    assert response.headers["X-AttnCache-Prototype-Hits"] == "0/4"


async def test_header_counts_hits_from_prototypes() -> None:
    engine = FakeEngine(stored={"a"}, prototypes={"b", "c"})
    async with serving(engine) as client:
        response = await client.post("/embed", json={"inputs": ["a", "new", "b", "c"]})
    assert response.headers["X-AttnCache-Hits"] == "3/4"
    assert response.headers["X-AttnCache-Prototype-Hits"] == "2/4"


async def test_reuse_off_searches_nothing() -> None:
    body = {"inputs": ["a", "b"]}
    async with serving(FakeEngine(stored={"a", "b"})) as client:
        off = await client.post("/embed", json=body, headers={"X-AttnCache-Reuse": "off"})
        on = await client.post("/embed", json=body, headers={"X-AttnCache-Reuse": "On"})
    assert (off.headers["X-AttnCache-Hits"], on.headers["X-AttnCache-Hits"]) == ("0/2", "2/2")


async def test_classifying_model_has_no_embeddings() -> None:
    async with serving(FakeEngine(task="classify", labels=("no", "yes"))) as client:
        response = await client.post("/embed", json={"inputs": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_embedding")


async def test_many_concurrent_clients_get_their_own_embeddings() -> None:
    async def ask(client: Any, number: int) -> None:
        texts = [f"client {number} text {i}" for i in range(number % 7 + 1)]
        response = await client.post("/embed", json={"inputs": texts})
        np.testing.assert_allclose(response.json(), expected(texts), rtol=1e-6)

    engine = FakeEngine()
    async with serving(engine) as client:
        engine.may_run.clear()
        clients = asyncio.gather(*(ask(client, number) for number in range(60)))
        await asyncio.to_thread(engine.runs.acquire)
        engine.may_run.set()
        await clients
    assert len(engine.batches) < 60


async def test_named_prompt_is_put_before_each_text() -> None:
    texts = ["card", "where"]
    async with serving() as client:
        prompted = await client.post("/embed", json={"inputs": texts, "prompt_name": "query"})
        plain = await client.post("/embed", json={"inputs": texts, "prompt_name": None})
    np.testing.assert_allclose(prompted.json(), expected([f"query: {text}" for text in texts]), rtol=1e-6)
    np.testing.assert_allclose(plain.json(), expected(texts), rtol=1e-6)


async def test_texts_in_another_prompt_than_the_default_reuse_nothing() -> None:
    engine = FakeEngine(stored={"card", "query: card"})
    async with serving(engine) as client:
        headers = {}
        for name in (None, "query"):
            answer = await client.post("/embed", json={"inputs": "card", "prompt_name": name})
            headers[name] = answer.headers["X-AttnCache-Hits"]
    assert headers == {None: "1/1", "query": "0/1"}


async def test_unknown_prompt_is_refused_with_the_known_prompts(tmp_path: Path) -> None:
    folder = write_sentence_transformer(tmp_path, prompts={"prompts": {"ask": "my "}})
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine) as client:
        response = await client.post("/embed", json={"inputs": "card", "prompt_name": "Sesam"})
        info = (await client.get("/info")).json()
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (400, "prompt_name")
    assert error["message"] == "prompt_name is none of the model's prompts; known are: ask"
    assert (info["prompts"], info["template"], info["pooling"]) == ({"ask": "my "}, "{}", ["mean"])
