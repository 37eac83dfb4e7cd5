"""Requests that schemathesis makes from the OpenAPI document, valid and invalid, to the real server.

No status is 500 or above, except 504 where a request asks for little time; every status, media type, header
and body is as documented; and requests that break the schema are refused. `make fuzz` sends twenty times as
many requests.
"""

import pytest
import requests
from core_decoders import write_llama
from fake_engine import FakeEngine
from hypothesis import settings
from pair_models import NLI, write_deberta_v3
from raw_http import served
from schemathesis import openapi
from schemathesis.config import SchemathesisConfig

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
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
EXAMPLES = settings.default.max_examples // 40


def embedder(request):
    return request.getfixturevalue("tiny_engine")


def decoder(request):
    folder = request.getfixturevalue("tmp_path_factory").mktemp("models") / "llama"
    checkpoint = read_checkpoint(write_llama(folder))
    return PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions(memory_bytes=2**20))


def entailing(request):
    folder = request.getfixturevalue("tmp_path_factory").mktemp("models") / "nli"
    return PrefillEngine.load(read_checkpoint(write_deberta_v3(folder, **NLI)), dtype="float32")


@pytest.fixture(
    scope="module", params=[embedder, decoder, entailing], ids=lambda checkpoint: checkpoint.__name__
)
def url(request):
    make = request.param
    with served(make(request), **SETTINGS) as server:
        yield server.url


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
def test_routes_answer_as_documented(case, url, session):
    response = case.call_and_validate(base_url=url, session=session)
    assert response.status_code != 504 or TIMEOUT_HEADER in case.headers
