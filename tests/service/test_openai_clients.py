"""Clients of OpenAI's API, as their makers publish them, against the running server."""

import httpx
import numpy as np
import openai
import pytest
import tiktoken
from core_models import write_sentence_transformer
from embedding_models import write_qwen3_embedding
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from raw_http import serving_model
from sentence_transformers import SentenceTransformer

from attncache_core import KeyValueOptions

TEXTS = ["where is my card", "the bank ?", "when is my card sent to the bank"]
# float32 sums in another order.
FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sentence_transformer(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def oracle(folder):
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def url(folder):
    with serving_model(folder) as url:
        yield url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def rows(response):
    assert [entry.index for entry in response.data] == list(range(len(response.data)))
    return np.array([entry.embedding for entry in response.data])


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}], ids=["base64", "float"])
def test_openai_client_gets_the_embeddings_of_sentence_transformers(client, oracle, encoding):
    response = client.embeddings.create(model="tiny-bert", input=TEXTS, **encoding)
    np.testing.assert_allclose(rows(response), oracle.encode(TEXTS), atol=FLOAT32)
    single = client.embeddings.create(model="tiny-bert", input=TEXTS[0], **encoding)
    np.testing.assert_allclose(rows(single), oracle.encode(TEXTS[:1]), atol=FLOAT32)


def test_openai_client_gets_fewer_dimensions_at_unit_length(client, folder):
    expected = SentenceTransformer(str(folder), device="cpu", truncate_dim=8)
    response = client.embeddings.create(model="tiny-bert", input=TEXTS, dimensions=8)
    np.testing.assert_allclose(
        rows(response), expected.encode(TEXTS, normalize_embeddings=True), atol=FLOAT32
    )


def test_token_ids_of_the_model_are_the_text(client, url, oracle):
    tokenized = httpx.post(f"{url}/tokenize", json={"inputs": TEXTS}).json()
    ids = [[token["id"] for token in tokens] for tokens in tokenized]
    response = client.embeddings.create(model="tiny-bert", input=ids, user="somebody")
    np.testing.assert_allclose(rows(response), oracle.encode(TEXTS), atol=FLOAT32)
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, ids))
    single = client.embeddings.create(model="tiny-bert", input=ids[0])
    np.testing.assert_allclose(rows(single), oracle.encode(TEXTS[:1]), atol=FLOAT32)


def test_openai_client_lists_the_model(client):
    [listed] = client.models.list().data
    assert (listed.id, listed.object) == ("tiny-bert", "model")
    assert client.models.retrieve("tiny-bert") == listed
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("changes", "kind", "code", "param"),
    [
        ({"input": ["a", ""]}, openai.BadRequestError, "invalid_input", "input[1]"),
        ({"model": "text-embedding-3-small"}, openai.NotFoundError, "model_not_found", "model"),
        ({"extra_body": {"inputs": "a"}}, openai.BadRequestError, "invalid_input", None),
        ({"input": ["a"] * 1025}, openai.UnprocessableEntityError, "too_many_inputs", "input"),
    ],
    ids=str,
)
def test_errors_are_the_exceptions_of_the_openai_client(client, changes, kind, code, param):
    with pytest.raises(kind) as caught:
        client.embeddings.create(**{"model": "tiny-bert", "input": "a", **changes})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


def test_openai_client_does_not_repeat_what_a_repetition_cannot_mend(client):
    sent = []
    counting = httpx.Client(event_hooks={"request": [sent.append]})
    repeating = client.with_options(max_retries=2, http_client=counting)
    headers = {"X-AttnCache-Require-Model": "00000000"}
    with counting, pytest.raises(openai.ConflictError) as caught:
        repeating.embeddings.create(model="tiny-bert", input="a", extra_headers=headers)
    assert (caught.value.code, len(sent)) == ("model_mismatch", 1)


def test_usage_counts_the_tokens_whose_keys_and_values_were_stored(tmp_path):
    folder = write_qwen3_embedding(tmp_path / "qwen3")
    front = "where is my parcel ? " * 40
    with (
        serving_model(folder, key_values=KeyValueOptions()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        first = client.embeddings.create(model="qwen3", input=f"{front} a").usage
        second = client.embeddings.create(model="qwen3", input=f"{front} b").usage
    assert first.prompt_tokens_details["cached_tokens"] == 0
    cached = second.prompt_tokens_details["cached_tokens"]
    assert 0 < cached < second.prompt_tokens


def langchain(url, **how):
    return OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", max_retries=0, **how)


def test_langchain_gets_the_embeddings_of_texts_also_if_it_may_cut_them(url, folder, oracle):
    for embeddings in (
        langchain(url, model="tiny-bert", check_embedding_ctx_length=False),
        langchain(url, model=str(folder), tiktoken_enabled=False),
    ):
        np.testing.assert_allclose(embeddings.embed_documents(TEXTS), oracle.encode(TEXTS), atol=FLOAT32)
        np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), oracle.encode(TEXTS[0]), atol=FLOAT32)


def test_token_ids_of_openai_s_tokenizer_are_refused_with_the_remedy(url, monkeypatch):
    # The vocabulary of cl100k_base is not part of tiktoken.
    bytewise = tiktoken.Encoding(
        "bytewise",
        pat_str=".+",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: bytewise)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        langchain(url, model="tiny-bert").embed_documents(TEXTS)
    assert caught.value.param == "input[0]"


def test_llama_index_gets_the_embeddings_of_texts(url, oracle):
    embeddings = OpenAILikeEmbedding(model_name="tiny-bert", api_base=f"{url}/v1", api_key="none")
    found = embeddings.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(found, oracle.encode(TEXTS), atol=FLOAT32)
    found_query = embeddings.get_query_embedding(TEXTS[0])
    np.testing.assert_allclose(found_query, oracle.encode(TEXTS[0]), atol=FLOAT32)
