"""The routes under /cache, `--warm` and the metrics of keys and values, with a tiny real decoder."""

import logging

import numpy as np
import pytest
from core_models import write_sentence_transformer
from fake_engine import FakeEngine, serving
from running import samples

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from service.errors import InvalidSettings
from service.loading.engines import load_engine
from service.loading.warm_file import read_warm_file
from service.observability.metrics import ROUTES
from service.settings import read_settings

PREFIX = "the bank was closed today. " * 4
TEXT = PREFIX + "where is my card"
OTHER = PREFIX + "my account is lost"
CACHED = "X-AttnCache-Cached-Tokens"


def load(folder, memory_bytes=2**24, disk=None, **use):
    checkpoint, options = read_checkpoint(folder).adapted(**use), KeyValueOptions(memory_bytes, folder=disk)
    return PrefillEngine.load(checkpoint, dtype="float32", key_values=options)


def cached(response):
    """Return the cached tokens of a response, and all tokens."""
    assert response.status_code == 200, response.text
    first, all_tokens = response.headers[CACHED].split("/")
    return int(first), int(all_tokens)


async def succeeded(response):
    answered = await response
    assert answered.status_code == 200, answered.text
    return answered.json()


def tokens_of(engine, text):
    return len(engine.tokenize([text])[0])


async def test_memory_is_emptied_and_a_disk_that_cannot_be_is_a_503(folder, tmp_path):
    async with serving(load(folder, disk=tmp_path / "kv"), admin=True) as client:
        await succeeded(client.post("/cache/warm", json={"texts": TEXT}))
        (tmp_path / "kv").rename(tmp_path / "away")
        (tmp_path / "kv").touch()
        refused = await client.delete("/cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert "from --kv-dir" in refused.json()["error"]["message"]
        (found,) = await succeeded(client.post("/cache/lookup", json={"texts": TEXT}))
        assert found["cached_tokens"] == 0
        (tmp_path / "kv").unlink()
        (tmp_path / "away").rename(tmp_path / "kv")
        assert await succeeded(client.delete("/cache")) == {"blocks": 0}


async def test_warmed_text_is_computed_before_its_first_request_and_has_the_same_embedding(folder):
    engine = load(folder)
    tokens, computed = tokens_of(engine, TEXT), load(folder).embed([TEXT])
    async with serving(engine, admin=True) as client:
        warmed = await succeeded(client.post("/cache/warm", json={"texts": TEXT}))
        again = await succeeded(client.post("/cache/warm", json={"texts": [TEXT]}))
        response = await client.post("/embed", json={"inputs": TEXT})
    assert warmed == {"tokens": tokens, "cached_tokens": 0, "stored_tokens": tokens}
    assert again == {"tokens": tokens, "cached_tokens": tokens, "stored_tokens": tokens}
    assert cached(response) == (tokens, tokens)
    assert np.array(response.json()) == pytest.approx(computed, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("template", [PREFIX + "{}", PREFIX + "ask:{}\nanswer:", "ask: {}"])
async def test_warmed_template_gives_its_prefix_to_the_first_request(folder, template):
    use = {"label_logits": True, "template": Template.parse("{} is a")}
    engine, body = load(folder, **use), {"inputs": "card", "template": template, "labels": ["bank", "lost"]}
    async with serving(load(folder, **use)) as client:
        computed = (await succeeded(client.post("/classify", json=body)))[0]
    async with serving(engine, admin=True) as client:
        warmed = await succeeded(client.post("/cache/warm", json={"template": template}))
        looked_up = await succeeded(client.post("/cache/lookup", json={"template": template}))
        response = await client.post("/classify", json=body)
    stored = warmed["stored_tokens"]
    assert warmed == {"tokens": stored, "cached_tokens": 0, "stored_tokens": stored}
    assert looked_up == [{"tokens": stored, "cached_tokens": stored, "tiers": {"memory": stored, "disk": 0}}]
    # All of the prefix's tokens but the one that may be joined with the text.
    assert tokens_of(load(folder), template.split("{}")[0]) - 1 <= stored == cached(response)[0]
    assert [each["label"] for each in response.json()[0]] == [each["label"] for each in computed]
    assert [each["score"] for each in response.json()[0]] == pytest.approx(
        [each["score"] for each in computed], rel=1e-4
    )


async def test_texts_of_a_server_of_pairs_are_refused_and_its_template_is_taken(folder):
    template = Template.parse(PREFIX + "{query} {document}")
    engine = load(folder, template=template, label_logits=True, labels=("card", "link"))
    async with serving(engine, admin=True) as client:
        refused = await client.post("/cache/warm", json={"texts": TEXT})
        warmed = await succeeded(client.post("/cache/warm", json={"template": PREFIX + "{query} {document}"}))
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "texts")
    assert "give template" in refused.json()["error"]["message"]
    assert warmed["stored_tokens"] >= tokens_of(load(folder), PREFIX) - 1


async def test_lookup_tells_stored_tokens_of_each_text_and_stores_nothing(folder):
    engine = load(folder)
    async with serving(engine, admin=True) as client:
        await client.post("/cache/warm", json={"texts": TEXT})
        found = await succeeded(client.post("/cache/lookup", json={"texts": [TEXT, OTHER, "card"]}))
        again = await succeeded(client.post("/cache/lookup", json={"texts": [TEXT, OTHER, "card"]}))
        response = await client.post("/embed", json={"inputs": OTHER})
    tokens = [tokens_of(engine, text) for text in (TEXT, OTHER, "card")]
    assert found == again
    assert [each["tokens"] for each in found] == tokens
    assert [each["cached_tokens"] for each in found] == [tokens[0], cached(response)[0], 0]
    assert 0 < cached(response)[0] < tokens[1]
    assert all(each["tiers"] == {"memory": each["cached_tokens"], "disk": 0} for each in found)


async def test_pinned_text_stays_under_pressure_until_it_is_unpinned(folder):
    block_bytes = load(folder).info().key_values.block_bytes
    engine = load(folder, memory_bytes=12 * block_bytes)
    tokens = tokens_of(engine, TEXT)
    asked = {"texts": [TEXT]}

    async def still_stored(client):
        for number in range(20):
            await client.post("/embed", json={"inputs": f"{number} zebra " * 8})
        found = await succeeded(client.post("/cache/lookup", json=asked))
        return int(found[0]["cached_tokens"])

    async with serving(engine, admin=True) as client:
        # What is not stored is neither computed nor pinned.
        assert await succeeded(client.post("/cache/pin", json=asked)) == {"tokens": 0}
        await client.post("/cache/warm", json=asked)
        kept = await succeeded(client.post("/cache/pin", json={"texts": [TEXT, "zebra"]}))
        assert kept == {"tokens": tokens}
        await client.post("/cache/pin", json={**asked, "pinned": False})
        assert await still_stored(client) < tokens
        warmed = await succeeded(client.post("/cache/warm", json={**asked, "pin": True}))
        assert warmed["stored_tokens"] == tokens
        assert await still_stored(client) == tokens
        stats = await succeeded(client.get("/cache/stats"))
        unpinned = await succeeded(client.post("/cache/pin", json={**asked, "pinned": False}))
        assert unpinned == {"tokens": tokens}
        assert await still_stored(client) < tokens
        left = await succeeded(client.get("/cache/stats"))
    assert stats["memory"]["pinned_blocks"] == -(-tokens // 16)
    assert left["memory"]["pinned_blocks"] == 0
    assert left["memory"]["bytes"] <= left["memory"]["most_bytes"] == 12 * block_bytes
    assert left["evicted_blocks"]["memory"]["full"] > 0


async def test_tiers_are_told_apart(folder, tmp_path):
    first = load(folder, disk=tmp_path)
    async with serving(first, admin=True) as client:
        warmed = await succeeded(client.post("/cache/warm", json={"texts": TEXT}))
    first.key_values.store.transfers.flush()
    whole_blocks = warmed["tokens"] // 16 * 16
    async with serving(load(folder, disk=tmp_path), admin=True) as client:
        saved = await succeeded(client.post("/cache/lookup", json={"texts": TEXT}))
        values = samples((await client.get("/metrics")).text)
        pinned = await succeeded(client.post("/cache/pin", json={"texts": TEXT}))
        stats = await succeeded(client.get("/cache/stats"))
        loaded = await succeeded(client.post("/cache/lookup", json={"texts": TEXT}))
        capacity = await succeeded(client.get("/cache/capacity?memory_price=1&disk_price=0.1"))
    assert saved[0]["tiers"]["memory"] == 0
    assert whole_blocks <= saved[0]["tiers"]["disk"] <= warmed["tokens"]
    assert values["attncache_kv_bytes", "disk"] > 0
    assert values["attncache_kv_max_bytes", "disk"] == KeyValueOptions().disk_bytes == capacity["disk_bytes"]
    assert pinned["tokens"] == warmed["tokens"] == loaded[0]["tiers"]["memory"]
    assert loaded[0]["tiers"]["disk"] == 0
    assert stats["loaded_blocks"] == stats["memory"]["pinned_blocks"] == -(-warmed["tokens"] // 16)
    assert stats["disk"]["prefill_tokens_per_second"] > 0
    assert capacity["cost"] == pytest.approx((capacity["memory_bytes"] + 0.1 * capacity["disk_bytes"]) / 1e9)


async def test_salts_do_not_see_what_other_salts_have_stored(folder):
    async with serving(load(folder), admin=True) as client:
        await client.post("/cache/warm", json={"texts": TEXT, "cache_salt": "a"})
        found = {
            salt: await succeeded(client.post("/cache/lookup", json={"texts": TEXT, "cache_salt": salt}))
            for salt in ("a", "b", None)
        }
        served = {
            salt: cached(await client.post("/embed", json={"inputs": TEXT, "cache_salt": salt}))
            for salt in ("b", None, "a")
        }
    stored = {salt: each[0]["cached_tokens"] for salt, each in found.items()}
    assert stored == {"a": found["a"][0]["tokens"], "b": 0, None: 0}
    assert {salt: first for salt, (first, _) in served.items()} == stored


async def test_capacity_is_that_of_the_paper(folder):
    engine = load(folder)
    info = engine.info().key_values
    async with serving(engine, admin=True) as client:
        plain = await succeeded(client.get("/cache/capacity"))
        planned = await succeeded(
            client.get("/cache/capacity?memory_price=0.5&disk_price=0.01&distinct_sessions=20")
        )
    per_token = -(-info.block_bytes // 16)
    window = engine.tokenizer.max_tokens * per_token
    # K and V of 3 layers, 2 heads of 8 numbers of 4 bytes; the pooled state of a block has 5 rows of 32.
    assert info.token_bytes == 2 * 3 * 2 * 8 * 4
    assert per_token == info.token_bytes + 5 * 32 * 4 // 16
    most = info.memory.most_bytes
    assert plain == {
        "bytes_per_token": per_token,
        "context_window": engine.tokenizer.max_tokens,
        "memory_bytes": most,
        "disk_bytes": 0,
        "distinct_sessions": 0,
        "memory_price": None,
        "disk_price": 0.0,
        "session_bytes": window,
        "memory_sessions": most // window,
        "disk_sessions": 0,
        "sessions": most // window,
        "full_bytes": 0,
        "capacity_ratio": None,
        "memory_cost": None,
        "disk_cost": 0.0,
        "cost": None,
    }
    assert planned["full_bytes"] == 20 * window
    assert planned["capacity_ratio"] == pytest.approx(most / (20 * window))
    assert planned["memory_cost"] == planned["cost"] == pytest.approx(0.5 * most / 1e9)


async def test_capacity_counts_the_sessions_that_were_used(folder):
    async with serving(load(folder), admin=True) as client:
        for name in ("one", "two", "one"):
            body = {"session_id": name, "transcript": [TEXT]}
            await succeeded(client.post("/embed", json=body))
        capacity = await succeeded(client.get("/cache/capacity"))
        stats = await succeeded(client.get("/cache/stats"))
        metrics = samples((await client.get("/metrics")).text)
    assert capacity["distinct_sessions"] == stats["distinct_sessions"] == stats["sessions"] == 2
    assert metrics["attncache_sessions",] == 2


async def test_bad_query_of_capacity_is_refused(folder):
    async with serving(load(folder), admin=True) as client:
        for query, field in (
            ("memory_price=cheap", "memory_price"),
            ("memory_price=-1", "memory_price"),
            ("disk_price=nan", "disk_price"),
            ("disk_price=1_0", "disk_price"),
            ("prefill_tokens_per_second=9&devices=disk,1_0,1", "devices"),
            ("disk_price=inf", "disk_price"),
            ("secret=1", None),
        ):
            response = await client.get(f"/cache/capacity?{query}")
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["field"]) == (400, "invalid_input", field)
            assert "secret" not in error["message"]


BAD = [
    ({}, 400, "texts"),
    ({"texts": ["a"], "template": "b {}"}, 400, "texts"),
    ({"texts": []}, 400, "texts"),
    ({"texts": [""]}, 400, "texts[0]"),
    ({"texts": ["secret", 1]}, 400, "texts[1]"),
    ({"texts": ["secret"], "cache_salt": 5}, 400, "cache_salt"),
    ({"texts": ["secret"], "surprise": 5}, 400, None),
    ({"texts": ["a"] * 9}, 422, "texts"),
    ({"texts": ["secret " * 400]}, 422, "texts[0]"),
    ({"texts": ["secret " * 60] * 8}, 422, "texts"),
    ({"template": "secret"}, 400, "template"),
    ({"template": "{} means: secret"}, 400, "template"),
    ({"template": "secret " * 600 + "{}"}, 400, "template"),
    ({"texts": "a" * 10_000}, 413, None),
]


@pytest.mark.parametrize("path", ["/cache/warm", "/cache/pin", "/cache/lookup"])
async def test_bad_body_is_refused_by_the_name_of_its_field(folder, path):
    limits = {"max_request_inputs": 8, "max_request_tokens": 600, "max_body_bytes": 9000, "truncate": False}
    async with serving(load(folder), admin=True, **limits) as client:
        for body, status, field in BAD:
            response = await client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["field"]) == (status, field), body
            assert "secret" not in error["message"]
            assert "inputs" not in error["message"].replace("--max-request-inputs", "")


ASKED = {
    "stats": lambda client: client.get("/cache/stats"),
    "capacity": lambda client: client.get("/cache/capacity"),
    "warm": lambda client: client.post("/cache/warm", json={"texts": "a"}),
    "pin": lambda client: client.post("/cache/pin", json={"texts": "a"}),
    "lookup": lambda client: client.post("/cache/lookup", json={"texts": "a"}),
    "drop": lambda client: client.delete("/cache"),
}


async def test_without_admin_the_routes_do_not_exist():
    async with serving(FakeEngine()) as client:
        for ask in ASKED.values():
            response = await ask(client)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        described = (await client.get("/openapi.json")).json()
    assert not [path for path in described["paths"] if path.startswith("/cache")]


async def test_with_admin_the_routes_are_described_and_counted_by_their_paths():
    async with serving(FakeEngine(), admin=True) as client:
        described = (await client.get("/openapi.json")).json()
        await client.get("/cache/stats")
        values = samples((await client.get("/metrics")).text)
    paths = {path for path in described["paths"] if path.startswith("/cache")}
    assert paths == {"/cache", *(f"/cache/{name}" for name in ASKED if name != "drop")}
    assert paths <= set(ROUTES)
    assert set(described["paths"]["/cache/warm"]["post"]["responses"]) == {
        *("200", "400", "401", "403", "409", "413", "422", "429", "500", "503", "504")
    }
    assert values["attncache_requests_total", "/cache/stats", "409"] == 1


async def test_bidirectional_model_says_why_it_stores_nothing(tmp_path):
    async with serving(load(write_sentence_transformer(tmp_path)), admin=True) as client:
        for ask in ASKED.values():
            response = await ask(client)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (409, "no_key_values")
            assert "attention is bidirectional" in error["message"]
        info = (await client.get("/info")).json()
    assert info["key_values"] is None
    assert "attention is bidirectional" in info["key_values_off"]


NEW_METRICS = [
    *(("attncache_tokens_total", state) for state in ("asked", "cached", "computed")),
    *((f"attncache_kv_{name}", tier) for name in ("bytes", "max_bytes") for tier in ("memory", "disk")),
    *(("attncache_kv_blocks_given_total", tier) for tier in ("memory", "disk")),
    ("attncache_kv_evictions_total", "full", "memory"),
    ("attncache_kv_evictions_total", "cleared", "memory"),
    ("attncache_kv_evictions_total", "full", "disk"),
    ("attncache_kv_recomputed_tokens_total",),
    ("attncache_kv_load_stall_seconds_total",),
    ("attncache_kv_dropped_writes_total",),
    ("attncache_kv_damaged_blocks_total",),
    ("attncache_sessions",),
]


async def test_metrics_and_info_follow_a_scripted_trace(folder):
    engine = load(folder)
    first, second = engine.tokenize([TEXT, OTHER])
    shared = next(index for index, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)
    async with serving(engine, admin=True) as client:
        before = samples((await client.get("/metrics")).text)
        # Computes the shared prefix once, then gives all of it, then computes all of it.
        await client.post("/embed", json={"inputs": [TEXT, OTHER]})
        again = cached(await client.post("/embed", json={"inputs": [TEXT, OTHER]}))
        await client.post("/embed", json={"inputs": TEXT}, headers={"X-AttnCache-Reuse": "off"})
        after = samples((await client.get("/metrics")).text)
        stats = await succeeded(client.get("/cache/stats"))
        info = await succeeded(client.get("/info"))
        dropped = await succeeded(client.delete("/cache"))
        cleared = samples((await client.get("/metrics")).text)
    assert [name for name in NEW_METRICS if before[name] and name[0] != "attncache_kv_max_bytes"] == []
    tokens = len(first) + len(second)
    assert again == (tokens, tokens)
    asked, reused, computed = (after["attncache_tokens_total", s] for s in ("asked", "cached", "computed"))
    assert asked == 2 * tokens + len(first)
    assert reused == tokens
    assert computed == tokens - shared + len(first)
    assert asked == reused + shared + computed
    assert info["key_values_off"] is None
    shown = info["key_values"]
    assert stats["lookups"] == shown["lookups"] == 4
    assert stats["stored_blocks"] == shown["stored_blocks"] == shown["memory"]["blocks"]
    assert shown["disk"] is None
    assert (stats["asked_tokens"], stats["given_tokens"]) == (2 * tokens, tokens)
    # Each block was given once: the blocks of the shared prefix are the same for both texts.
    assert after["attncache_kv_blocks_given_total", "memory"] == stats["stored_blocks"]
    assert after["attncache_kv_blocks_given_total", "disk"] == 0
    assert after["attncache_kv_bytes", "memory"] == stats["memory"]["bytes"]
    assert after["attncache_kv_max_bytes", "memory"] == stats["memory"]["most_bytes"] > 0
    assert dropped == {"blocks": stats["memory"]["blocks"]}
    assert cleared["attncache_kv_evictions_total", "cleared", "memory"] == stats["memory"]["blocks"]
    assert cleared["attncache_kv_evictions_total", "full", "memory"] == 0
    assert cleared["attncache_kv_bytes", "memory"] == 0


def warmed(folder, file, **more):
    values = {"dtype": "float32", "kv_memory_bytes": 2**24, "warm": str(file), **more}
    return load_engine(read_settings(values), read_checkpoint(folder))


async def test_texts_of_the_warm_file_are_stored_when_the_server_gets_ready(folder, tmp_path, caplog):
    other = "my\u2028card"  # one line
    (tmp_path / "texts.txt").write_text(f"{TEXT}\r\n\n{other}\n", encoding="utf-8")
    assert [line.text for _, line in read_warm_file(tmp_path / "texts.txt")] == [TEXT, other]
    with caplog.at_level(logging.INFO):
        engine = warmed(folder, tmp_path / "texts.txt")
    tokens = tokens_of(engine, TEXT) + tokens_of(engine, other)
    assert f"{tokens} of {tokens} tokens of {tmp_path}/texts.txt are stored" in caplog.text
    assert "bank" not in caplog.text
    async with serving(engine) as client:
        response = await client.post("/embed", json={"inputs": [TEXT, other]})
    assert cached(response) == (tokens, tokens)
    assert engine.key_values.store.pinned_blocks == 0


async def test_lines_of_a_jsonl_file_have_salts_templates_and_pins(folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text(
        f'{{"template": "{OTHER} {{}}"}}\n{{"text": "{TEXT}", "salt": "a", "pin": true}}\n', encoding="utf-8"
    )
    engine = warmed(folder, file, max_batch_tokens=1)
    tokens = tokens_of(engine, TEXT)
    assert engine.key_values.store.pinned_blocks == -(-tokens // 16)
    async with serving(engine) as client:
        salted = await client.post("/embed", json={"inputs": TEXT, "cache_salt": "a"})
        plain = await client.post("/embed", json={"inputs": f"{OTHER} card"})
    assert cached(salted) == (tokens, tokens)
    assert cached(plain)[0] >= tokens_of(engine, OTHER) - 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "none.txt cannot be read: No such file"),
        ("a.csv", b"a", "a.csv must end in .txt or .jsonl"),
        ("a.txt", b"\xff", "a.txt is not UTF-8 (at byte 0)"),
        ("a.txt", b"a\n\0", "a.txt, line 2: a text must not hold null bytes"),
        ("a.jsonl", b'{"text": "a"}\nsecret\n', 'a.jsonl, line 2: a line is an object with one of "text"'),
        ("a.jsonl", b'\n{"text": "secret", "template": "{}"}', "a.jsonl, line 2: a line is"),
        ("a.jsonl", b'{"salt": "secret"}', "a.jsonl, line 1: a line is"),
        ("a.jsonl", b'{"text": "secret", "pin": "yes"}', "a.jsonl, line 1: a line is"),
        ("a.jsonl", b'{"text": "secret", "pinned": true}', "a.jsonl, line 1: a line is"),
    ],
)
def test_bad_warm_file_is_refused_by_file_and_line(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidSettings) as refused:
        read_warm_file(tmp_path / name)
    assert str(refused.value).startswith("--warm ")
    assert sentence in str(refused.value)
    assert "secret" not in str(refused.value)


def test_template_of_the_warm_file_that_does_not_fit_is_refused_by_its_line(folder, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"template": "secret"}\n', encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"a\.jsonl, line 2: template must hold \{\}") as refused:
        warmed(folder, file)
    assert "secret" not in str(refused.value)


def test_warm_file_for_a_model_that_stores_nothing_is_refused(tmp_path):
    model = write_sentence_transformer(tmp_path / "model")
    (tmp_path / "a.txt").write_text("a\n", encoding="utf-8")
    with pytest.raises(InvalidSettings, match=r"--warm has no effect: .* attention is bidirectional"):
        warmed(model, tmp_path / "a.txt", maps=False)
