"""The files of the page, the route that explains a text, and the numbers that the page reads."""

import base64
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_engine import serving

from attncache_core import AttentionDatabase, PrefillEngine
from attncache_core.engine.explain import explain

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "service" / "page"
FILES = sorted(FOLDER.iterdir())
TEXT = "where is my lost card today"


async def test_each_file_is_served_with_headers_that_let_nothing_else_run():
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    async with serving() as client:
        for file in FILES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            response = await client.get(path)
            assert (response.status_code, response.content) == (200, file.read_bytes()), path
            assert (await client.head(path)).status_code == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-store"
            assert response.headers["content-type"].startswith(types[file.suffix[1:]])
        metrics = (await client.get("/metrics")).text
    # Also of "/", where POST computes.
    assert f'attncache_requests_total{{route="other",status="200"}} {2 * len(FILES)}.0' in metrics


@pytest.mark.parametrize("page", [True, False])
async def test_page_to_try_the_routes_and_its_files_come_from_this_server(page):
    async with serving(page=page) as client:
        response = await client.get("/docs")
        names = re.findall(r'(?:href|src)="([^"]+)"', response.text)
        assert sorted(names) == [
            *("docs/docs.js", "docs/icon.svg", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css"),
            "openapi.json",
        ]
        for name in names:
            assert (await client.get(f"/{name}")).status_code == 200
        assert (await client.get("/redoc")).status_code == 404
        assert (await client.get("/docs/unknown.js")).status_code == 404
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    # Nothing may come from another host, and no script may stand in the page.
    sources = {source for directive in policy for source in directive.split()[1:]}
    assert sources == {"'self'", "'none'", "data:", "'unsafe-inline'"}
    assert [directive for directive in policy if "'unsafe-inline'" in directive] == [
        "style-src 'self' 'unsafe-inline'"
    ]


async def test_other_files_are_not_served():
    async with serving() as client:
        for path in ("/page/", "/page/unknown.js", "/page/..%2Fapp.py", "/page/%2e%2e/app.py"):
            assert (await client.get(path)).status_code == 404, path


def test_files_name_no_other_server_and_no_missing_file():
    names = {file.name for file in FILES}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        addresses = re.findall(r"https?://[^\s\"')]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # the name of SVG, which is no address
        named = re.findall(r'"/page/([\w.]+)"|from "\./([\w.]+)"', text)
        assert {name for found in named for name in found if name} <= names, file


def test_the_page_has_no_inline_script_style_or_handler():
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html) == []


async def test_route_explains_what_the_library_explains(exact_engine):
    async with serving(exact_engine, admin=True) as client:
        explained = (await client.post("/explain", json={"input": TEXT})).json()
    (ids,) = exact_engine.tokenize([TEXT])
    expected = explain(exact_engine, ids)
    assert explained["outcome"] == expected.outcome == "miss"
    assert explained["tokens"] == list(expected.tokens)
    assert explained["chosen"]["similarity"] == pytest.approx(expected.chosen.similarity)
    assert explained["cosine"] == pytest.approx(expected.cosine)
    assert "ids" not in explained
    for layer, maps in zip(explained["layers"], expected.layers, strict=True):
        assert layer["reused_heads"] == list(maps.reused_heads)
        for name, expected_maps in (("own", maps.full), ("given", maps.given)):
            levels = np.frombuffer(base64.b64decode(layer[name]), "<u2")
            np.testing.assert_allclose(levels / 65535, expected_maps.ravel(), atol=1e-5)


async def test_second_explanation_finds_the_result_of_the_first_and_a_longer_text_has_no_maps(
    exact_engine,
):
    async with serving(exact_engine, admin=True, result_memory_bytes=2**20) as client:
        texts = TEXT, TEXT, "card " * 100
        first, again, longer = [
            (await client.post("/explain", json={"input": text})).json() for text in texts
        ]
    assert [explained["was_kept"] for explained in (first, again)] == [False, True]
    assert len(longer["tokens"]) > longer["most_tokens_with_maps"]
    assert longer["layers"] is None


async def test_wrong_bodies_and_texts_that_are_too_long_are_refused(exact_engine, monkeypatch):
    async with serving(exact_engine, admin=True) as client:
        for body in ({"input": ""}, {"input": 7}, {"inputs": "a"}, {}, {"input": "a", "query": "b"}):
            assert (await client.post("/explain", json=body)).status_code == 400, body
        monkeypatch.setattr(exact_engine.tokenizer, "max_tokens", 600)
        long = await client.post("/explain", json={"input": "card " * 600})
    assert (long.status_code, long.json()["error"]["field"]) == (422, "input")


async def test_a_model_without_a_database_is_explained_too(tiny_engine):
    async with serving(tiny_engine, admin=True) as client:
        explained = (await client.post("/explain", json={"input": TEXT})).json()
    assert (explained["outcome"], explained["length_group"]) == ("not_searched", None)
    assert explained["layers"][0]["given"] is None


async def test_thresholds_of_a_group_that_is_switched_off_are_numbers(
    tiny_checkpoint, tiny_prototypes_database
):
    database = AttentionDatabase.open(tiny_prototypes_database)
    database = replace(
        database, search=replace(database.search, policy=database.search.policy.switched_off())
    )
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    async with serving(engine, admin=True) as client:
        explained = (await client.post("/explain", json={"input": TEXT})).json()
        (group,) = (await client.get("/info")).json()["database"]["policy"]["groups"]
    assert explained["outcome"] == "not_searched"
    assert {candidate["threshold"] for candidate in explained["candidates"]} == {2.0}
    assert set(group["threshold"].values()) == {2.0}
