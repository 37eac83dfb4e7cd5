"""Clients of the Hugging Face Hub, text-embeddings-inference and Cohere against the running server."""

import cohere
import httpx
import numpy as np
import pytest
import torch
from core_models import write_model, write_sentence_transformer
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import BadRequestError
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank
from pair_models import NLI, write_deberta_v3, write_ms_marco_minilm
from raw_http import serving_model
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import pipeline

TEXTS = ["where is my card", "the bank ?", "when is my card sent to the bank"]
LONG = " ".join(f"{word} is lost" for word in ["card", "bank", "money"] * 200)
QUERY, DOCUMENTS = "where is my parcel", ["the parcel was sent", "reset my password", "a card"]
LABELS = ["parcel", "password", "link"]
# float32 sums in another order.
FLOAT32 = 2e-5
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


def test_embedding_classes_of_langchain_and_llama_index(url, oracle):
    expected = oracle.encode(TEXTS)
    found = HuggingFaceEndpointEmbeddings(model=url).embed_documents(TEXTS)
    np.testing.assert_allclose(found, expected, atol=FLOAT32)
    for embeddings in (
        TextEmbeddingsInference(model_name="tiny-bert", base_url=url),
        HuggingFaceInferenceAPIEmbedding(model_name=url),
    ):
        found = embeddings.get_text_embedding_batch(TEXTS)
        np.testing.assert_allclose(found, expected, atol=FLOAT32)


def test_reranking_by_embedding_takes_the_prompts_for_queries_and_documents(url, oracle):
    expected = oracle.similarity(oracle.encode_query([TEXTS[1]]), oracle.encode_document(TEXTS))[0]
    found = httpx.post(f"{url}/rerank", json={"query": TEXTS[1], "texts": TEXTS}).json()
    assert [entry["index"] for entry in found] == expected.argsort(descending=True).tolist()
    np.testing.assert_allclose(
        [entry["score"] for entry in found], sorted(expected.tolist(), reverse=True), atol=FLOAT32
    )


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
                [result.score for result in found], [entry["score"] for entry in wanted], atol=FLOAT32
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
            np.testing.assert_allclose([result.score for result in found], wanted["scores"], atol=FLOAT32)


def test_rerank_clients_of_llama_index_and_cohere_get_the_scores_of_a_cross_encoder(tmp_path):
    folder = write_ms_marco_minilm(tmp_path / "reranker")
    oracle = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    expected = oracle.predict([(QUERY, document) for document in DOCUMENTS], activation_fn=torch.nn.Sigmoid())
    order = (-expected).argsort().tolist()
    with serving_model(folder) as url:
        nodes = [NodeWithScore(node=TextNode(text=document, id_=document)) for document in DOCUMENTS]
        found = TeiRerank(base_url=url).postprocess_nodes(nodes, query_str=QUERY)
        assert [result.node.text for result in found] == [DOCUMENTS[index] for index in order]
        np.testing.assert_allclose([result.score for result in found], expected[order], atol=FLOAT32)
        for client in (cohere.ClientV2("none", base_url=url), cohere.Client("none", base_url=url)):
            answer = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
            assert [result.index for result in answer.results] == order[:2]
            scores = [result.relevance_score for result in answer.results]
            np.testing.assert_allclose(scores, expected[order][:2], atol=FLOAT32)
