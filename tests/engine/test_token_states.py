"""The states of tokens are those that sentence-transformers pools."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, write_sentence_transformer
from embedding_models import write_embedding_gemma, write_gte_modernbert, write_qwen3_embedding
from sentence_transformers import SentenceTransformer

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint

TEXTS = ["where is my parcel", "the parcel was sent two weeks ago .", "where is my", "where is my parcel"]
FAMILIES = {
    "bert": write_sentence_transformer,
    "modernbert": write_gte_modernbert,
    "qwen3": write_qwen3_embedding,
    "embedding-gemma": write_embedding_gemma,
}
# float32 sums in another order.
FLOAT32 = 3e-5


def read(engine, texts):
    """Return the states of some texts, and the result of their batch."""
    prompt = engine.tokenizer.default_prompt
    [plan] = prompt.sequence_plans
    reading = replace(prompt, sequence_plans=(replace(plan, states=True),))
    result = engine.run(engine.requests(engine.tokenize(texts, prompt=reading), reading, reuse=False))
    return result.token_states, result


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """An engine, the states of all tokens by sentence-transformers, and the side where these are padded."""
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("models") / request.param)
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    states = theirs.encode(TEXTS, output_value="token_embeddings", prompt="")
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    return engine, states, theirs.tokenizer.padding_side


@pytest.mark.parametrize("computing", COMPUTING)
def test_states_are_the_token_embeddings_of_sentence_transformers(model, computing):
    engine, expected, padding_side = model
    with attention_by(computing):
        found, result = read(engine, TEXTS)
    for states, padded in zip(found, expected, strict=True):
        tokens = padded.numpy()
        tokens = tokens[-len(states) :] if padding_side == "left" else tokens[: len(states)]
        np.testing.assert_allclose(states, tokens, atol=FLOAT32)
    outputs = engine.run(engine.requests(engine.tokenize(TEXTS))).outputs
    np.testing.assert_allclose(result.outputs, outputs, atol=FLOAT32)


def test_states_are_read_where_keys_and_values_are_stored_and_beside_requests_without_them(tmp_path):
    checkpoint = read_checkpoint(write_qwen3_embedding(tmp_path / "model"))
    plain = PrefillEngine.load(checkpoint, dtype="float32")
    storing = PrefillEngine.load(checkpoint, dtype="float32", key_values=KeyValueOptions())
    storing.embed(TEXTS)
    prompt = storing.tokenizer.default_prompt
    [plan] = prompt.sequence_plans
    sequences = storing.tokenize(TEXTS)
    reading = replace(prompt, sequence_plans=(replace(plan, states=True),))
    requests = storing.requests(sequences, reading, reuse=False)
    requests[1] = storing.requests(sequences)[1]
    result = storing.run(requests)
    expected, _ = read(plain, TEXTS)
    assert result.token_states[1].size == 0
    for index in (0, 2, 3):
        np.testing.assert_allclose(result.token_states[index], expected[index], atol=FLOAT32)
    np.testing.assert_allclose(result.outputs, plain.run(plain.requests(sequences)).outputs, atol=FLOAT32)


def test_nothing_is_read_unless_a_plan_asks_for_it(tiny_engine):
    assert tiny_engine.run(tiny_engine.requests(tiny_engine.tokenize(TEXTS))).token_states is None
