"""Clients of the Hub, TEI, Cohere and OpenAI, as their makers publish them, against the running server."""

import cohere
import httpx
import numpy as np
import openai
import pytest
import tiktoken
import torch
from core_models import write_model, write_sentence_transformer
from embedding_models import write_qwen3_embedding
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import BadRequestError
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank
from pair_models import NLI, write_deberta_v3, write_ms_marco_minilm
from raw_http import serving_model
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import pipeline

from attncache_core import KeyValueOptions

TEXTS = ["where is my card", "the bank ?", "when is my card sent to the bank"]
LONG = " ".join(f"{word} is lost" for word in ["card", "bank", "money"] * 200)
QUERY, DOCUMENTS = "where is my parcel", ["the parcel was sent", "reset my password", "a card"]
LABELS = ["parcel", "password", "link"]
# float32 sums in another order: of embeddings, and of scores.
FLOAT32, OF_CLASSES = 1e-5, 2e-5
PROMPTS = {"prompts": {"query": "where is ", "document": "the card "}, "default_prompt_name": None}


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    # Offline, the client of the Hub reaches no server at all, also not one on this machine.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sentence_transformer(tmp_path_factory.mktemp("models") / "tiny-bert", prompts=PROMPTS)


@pytest.fixture(scope="module")
def oracle(folder):
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def url(folder):
    with serving_model(folder) as url:
        yield url


@pytest.mark.parametrize("path", ["", "/embed"])
def test_feature_extraction_is_that_of_sentence_transformers(url, path, oracle):
    client = InferenceClient(base_url=url + path)
    np.testing.assert_allclose(client.feature_extraction(TEXTS), oracle.encode(TEXTS), atol=FLOAT32)
    raw = client.feature_extraction(
        TEXTS[0], normalize=True, prompt_name="query", dimensions=32, truncate=True
    )
    np.testing.assert_allclose(raw, oracle.encode(TEXTS[:1], prompt_name="query"), atol=FLOAT32)


@pytest.mark.parametrize("side", ["left", "right"])
def test_text_that_is_too_long_is_cut_at_the_side_of_the_request(url, side, oracle):
    words = LONG.split()
    kept = words[-510:] if side == "left" else words[:510]
    found = InferenceClient(base_url=url).feature_extraction(LONG, truncate=True, truncation_direction=side)
    np.testing.assert_allclose(found, oracle.encode([" ".join(kept)]), atol=FLOAT32)


def test_sentence_similarity_is_that_of_sentence_transformers(url, oracle):
    client = InferenceClient(base_url=url)
    found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    expected = oracle.similarity(oracle.encode(TEXTS[:1]), oracle.encode(TEXTS))
    np.testing.assert_allclose(found, expected[0], atol=FLOAT32)


def test_client_of_the_hub_shows_the_message_of_an_error(url):
    with pytest.raises(BadRequestError, match=r"inputs\[1\] must not be empty"):
        InferenceClient(base_url=url).feature_extraction(["a", ""])


def test_text_classification_is_that_of_transformers(tmp_path):
    folder = write_model(tmp_path / "classifier", labels=["transfer", "card", "help"])
    expected = pipeline("text-classification", str(folder), dtype=torch.float32, device="cpu")
    with serving_model(folder) as url:
        client = InferenceClient(base_url=url)
        for how in ({}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none", "top_k": 2}):
            found = client.text_classification(TEXTS[0], **how)
            wanted = expected(TEXTS[0], **{"top_k": None, **how})
            assert [result.label for result in found] == [entry["label"] for entry in wanted]
            np.testing.assert_allclose(
                [result.score for result in found], [entry["score"] for entry in wanted], atol=OF_CLASSES
            )


def test_zero_shot_classification_is_that_of_transformers(tmp_path):
    folder = write_deberta_v3(tmp_path / "nli", **NLI)
    expected = pipeline("zero-shot-classification", str(folder), dtype=torch.float32, device="cpu")
    with serving_model(folder) as url:
        client = InferenceClient(base_url=url)
        for how in ({}, {"multi_label": True}, {"hypothesis_template": "the text is about a {}"}):
            found = client.zero_shot_classification(QUERY, LABELS, **how)
            wanted = expected(QUERY, LABELS, **how)
            assert [result.label for result in found] == wanted["labels"]
            np.testing.assert_allclose([result.score for result in found], wanted["scores"], atol=OF_CLASSES)


def test_rerank_clients_of_llama_index_and_cohere_get_the_scores_of_a_cross_encoder(tmp_path):
    folder = write_ms_marco_minilm(tmp_path / "reranker")
    oracle = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    expected = oracle.predict([(QUERY, document) for document in DOCUMENTS], activation_fn=torch.nn.Sigmoid())
    order = (-expected).argsort().tolist()
    with serving_model(folder) as url:
        nodes = [NodeWithScore(node=TextNode(text=document, id_=document)) for document in DOCUMENTS]
        found = TeiRerank(base_url=url).postprocess_nodes(nodes, query_str=QUERY)
        assert [result.node.text for result in found] == [DOCUMENTS[index] for index in order]
        np.testing.assert_allclose([result.score for result in found], expected[order], atol=OF_CLASSES)
        for client in (cohere.ClientV2("none", base_url=url), cohere.Client("none", base_url=url)):
            answer = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
            assert [result.index for result in answer.results] == order[:2]
            scores = [result.relevance_score for result in answer.results]
            np.testing.assert_allclose(scores, expected[order][:2], atol=OF_CLASSES)


# OpenAI.


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


LANGCHAIN = {
    "Hub": lambda url, _: HuggingFaceEndpointEmbeddings(model=url),
    "OpenAI": lambda url, _: langchain(url, model="tiny-bert", check_embedding_ctx_length=False),
    # It may cut the texts, by the tokenizer of this folder.
    "OpenAI, cutting": lambda url, folder: langchain(url, model=str(folder), tiktoken_enabled=False),
}


@pytest.mark.parametrize("made", LANGCHAIN.values(), ids=LANGCHAIN)
def test_langchain_gets_the_embeddings_of_texts(made, url, folder, oracle):
    embeddings = made(url, folder)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), oracle.encode(TEXTS), atol=FLOAT32)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[0]), oracle.encode(TEXTS[0]), atol=FLOAT32)


def test_llama_index_gets_the_embeddings_of_texts(url, oracle):
    of_openai = OpenAILikeEmbedding(model_name="tiny-bert", api_base=f"{url}/v1", api_key="none")
    for embeddings in (
        TextEmbeddingsInference(model_name="tiny-bert", base_url=url),
        HuggingFaceInferenceAPIEmbedding(model_name=url),
        of_openai,
    ):
        found = embeddings.get_text_embedding_batch(TEXTS)
        np.testing.assert_allclose(found, oracle.encode(TEXTS), atol=FLOAT32)
    found_query = of_openai.get_query_embedding(TEXTS[0])
    np.testing.assert_allclose(found_query, oracle.encode(TEXTS[0]), atol=FLOAT32)
