from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine

from service.app import create_app
from service.settings import Settings

OF_BOTH_ROUTES = {"inputs", "truncate", "session_id", "append", "transcript", "cache_salt"}


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return create_app(Settings(), lambda: iter([FakeEngine()])).openapi()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/embed", {"normalize", "prompt_name"}),
        ("/classify", {"labels", "template", "temperature"}),
    ],
)
def test_inference_routes_document_body_header_answer_and_errors(
    description: dict[str, Any], path: str, fields: set[str]
) -> None:
    route = description["paths"][path]["post"]
    body = route["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == fields | OF_BOTH_ROUTES
    assert body["properties"]["inputs"]["anyOf"][0] == {"type": "string"}
    assert [parameter["name"] for parameter in route["parameters"]] == [
        "X-AttnCache-Reuse",
        "X-AttnCache-Require-Model",
    ]
    assert set(route["responses"]["200"]["headers"]) == {
        "X-AttnCache-Hits",
        "X-AttnCache-Prototype-Hits",
        "X-AttnCache-Cached-Tokens",
        "X-AttnCache-History-Tokens",
        "X-AttnCache-Approximate",
        "X-AttnCache-Model",
    }
    assert route["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    for status in ("400", "404", "409", "413", "422", "429", "500", "503"):
        schema = route["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}


def test_all_routes_are_documented(description: dict[str, Any]) -> None:
    assert set(description["paths"]) == {"/embed", "/classify", "/health", "/ready", "/info", "/metrics"}
