import pytest
from fake_engine import FakeEngine

from service.app import create_app
from service.settings import Settings

OF_BOTH_ROUTES = {
    *("inputs", "truncate", "truncation_direction", "session_id", "append", "transcript", "cache_salt"),
    *("segments", "query"),
}
TEI_PATHS = {"/", "/embed_all", "/predict", "/similarity", "/rerank", "/tokenize", "/decode"}
OPENAI_PATHS = {"/v1/embeddings", "/v1/classify"}
RERANK_PATHS = {"/v1/rerank", "/v2/rerank"}


@pytest.fixture(scope="module")
def description():
    return create_app(Settings(), lambda: iter([FakeEngine()])).openapi()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/embed", {"normalize", "prompt_name", "dimensions"}),
        ("/classify", {"labels", "template", "temperature", "hypothesis_template", "multi_label"}),
    ],
)
def test_inference_routes_document_body_header_answer_and_errors(description, path, fields):
    route = description["paths"][path]["post"]
    body = route["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == fields | OF_BOTH_ROUTES
    assert body["properties"]["inputs"]["anyOf"][0] == {"type": "string", "minLength": 1}
    named = [parameter["name"] for parameter in route["parameters"]]
    assert named == [f"X-AttnCache-{name}" for name in ("Reuse", "Require-Model", "Timeout")]
    headers = [
        *("Hits", "Prototype-Hits", "Cached-Tokens", "Repeated", "Truncated", "History-Tokens", "Session"),
        *("Approximate", "Segments", "Model"),
    ]
    assert set(route["responses"]["200"]["headers"]) == {f"X-AttnCache-{name}" for name in headers}
    assert route["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    for status in ("400", "404", "409", "413", "422", "429", "500", "503"):
        schema = route["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}


def test_all_routes_are_documented(description):
    assert set(description["paths"]) == {
        *("/embed", "/classify", "/health", "/ready", "/info", "/metrics"),
        *("/v1/models", "/v1/models/{model}"),
        *TEI_PATHS,
        *OPENAI_PATHS,
        *RERANK_PATHS,
    }


@pytest.mark.parametrize(
    ("paths", "body"),
    [(TEI_PATHS, "TeiErrorBody"), (OPENAI_PATHS, "OpenAIErrorBody"), (RERANK_PATHS, "RerankErrorBody")],
    ids=["TEI", "OpenAI", "rerank"],
)
def test_routes_of_other_servers_document_the_errors_of_these_servers(description, paths, body):
    for path in paths:
        route = description["paths"][path]["post"]
        assert {"200", "400", "409", "413", "422", "429", "500", "503", "504"} <= set(route["responses"])
        for status, response in route["responses"].items():
            schema = response["content"]["application/json"]["schema"]
            assert (schema == {"$ref": f"#/components/schemas/{body}"}) is (status != "200"), (path, status)


def test_every_reference_leads_to_a_schema(description):
    def references(part):
        if isinstance(part, list):
            for each in part:
                yield from references(each)
        elif isinstance(part, dict):
            if "$ref" in part:
                yield part["$ref"]
            for each in part.values():
                yield from references(each)

    known = {f"#/components/schemas/{name}" for name in description["components"]["schemas"]}
    assert set(references(description)) <= known
