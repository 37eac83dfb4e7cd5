"""Requests that schemathesis makes from the OpenAPI document, valid and invalid, to the real server.

No status is 500 or above, except 504 where a request asks for little time; every status, media type, header
and body is as documented; and requests that break the schema are refused. `make fuzz` makes 25 times as
many random requests.
"""

import pytest
import requests
from fake_engine import FakeEngine
from hypothesis import settings
from pair_models import NLI, write_deberta_v3
from raw_http import served, serving_model
from schemathesis import openapi
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import negative_data_rejection

from attncache_core.reuse.kv.opening import KeyValueOptions
from service.app import create_app
from service.settings import Settings
from service.web.call import TIMEOUT_HEADER

# The page at `/` is no part of the document, and would answer GET.
SETTINGS = {"admin": True, "page": False, "max_sessions": 100}
CHECKS = {
    "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "504"]},
    # The document does not say which texts, ids and names fit the model.
    "positive_data_acceptance": {"enabled": False},
}
# A header that the document does not know breaks nothing.
UNKNOWN_HEADER = "x-schemathesis-unknown-property"
EXAMPLES = settings.default.max_examples // 40


@pytest.fixture(scope="module")
def urls(tiny_engine, folder, tmp_path_factory):
    """Servers of a decoder, of an embedder, and of a model that says what entails what."""
    nli = write_deberta_v3(tmp_path_factory.mktemp("models") / "nli", **NLI)
    key_values = KeyValueOptions(memory_bytes=2**20)
    with (
        serving_model(folder, key_values, **SETTINGS) as decoder,
        served(tiny_engine, **SETTINGS) as embedder,
        serving_model(nli, **SETTINGS) as entailing,
    ):
        yield decoder, embedder.url, entailing


@pytest.fixture(scope="module")
def session():
    with requests.Session() as session:
        yield session


def documented():
    document = create_app(Settings(**SETTINGS), lambda: iter([FakeEngine()])).openapi()
    return openapi.from_dict(document, config=SchemathesisConfig.from_dict({"checks": CHECKS}))


schema = documented()


@schema.parametrize()
@settings(max_examples=EXAMPLES)
def test_routes_answer_as_documented(case, urls, session):
    # What breaks the schema is refused before any model is asked.
    for url in urls[:1] if case.meta.generation.mode.is_negative else urls:
        excluded = [negative_data_rejection] if UNKNOWN_HEADER in case.headers else []
        response = case.call_and_validate(base_url=url, session=session, excluded_checks=excluded)
        assert response.status_code != 504 or TIMEOUT_HEADER in case.headers
