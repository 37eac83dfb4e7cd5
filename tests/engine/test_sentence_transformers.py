"""Embeddings equal those of sentence-transformers, for every setting of a model folder."""

import numpy as np
import pytest
from core_models import random_text, write_sentence_transformer
from core_reference import FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.engine.prefill import PrefillEngine

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
ASKING = {"prompts": {"ask": "query : my", "other": "the"}, "default_prompt_name": "ask"}


def texts():
    random = np.random.default_rng(3)
    return ["", *(random_text(random, int(random.integers(1, 40))) for _ in range(24))]


def assert_same_embeddings(checkpoint, sentences):
    theirs = SentenceTransformer(str(checkpoint.folder), device="cpu").encode(sentences)
    ours = PrefillEngine.load(checkpoint, dtype="float32").embed(sentences)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=FLOAT32)


@pytest.mark.parametrize(
    "pooling",
    [
        *({"pooling_mode": mode, "include_prompt": True} for mode in MODES),
        {"pooling_mode": ["max", "lasttoken", "cls"]},
        {"pooling_mode": list(MODES), "include_prompt": False},
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {f"pooling_mode_{flag}": True for flag in reversed(FLAGS)},
        {"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": False},
    ],
    ids=str,
)
def test_every_pooling_mode_several_modes_and_old_flags(tmp_path, pooling):
    folder = write_sentence_transformer(tmp_path, pooling, prompts=ASKING, normalize=False)
    assert_same_embeddings(read_checkpoint(folder), texts()[1:])


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalize": False},
        {"settings": {"max_seq_length": 12}},
        {"settings": {"max_seq_length": 12}, "prompts": ASKING},
        {"settings": {"do_lower_case": True, "cache_dir": "somewhere"}},
        {"settings": {"processing_kwargs": {"text": {"max_length": 9}, "common": {"max_length": 20}}}},
        {"settings": {"processor_kwargs": {"model_max_length": 9}, "tokenizer_args": {}}},
        {"prompts": {"prompts": {"ask": "query : my"}, "default_prompt_name": None}},
        {"prompts": {"prompts": {"query": "query : ", "doc": "the "}, "default_prompt_name": "doc"}},
        {"hidden_size": 48, "num_attention_heads": 3, "hidden_act": "gelu_new"},
    ],
    ids=str,
)
def test_every_setting_of_a_folder(tmp_path, parts):
    assert_same_embeddings(read_checkpoint(write_sentence_transformer(tmp_path, **parts)), texts())


@settings(max_examples=15)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=5))
def test_texts_of_any_lengths_in_any_order(tiny_engine, tiny_sentence_transformer, words):
    random = np.random.default_rng(len(words))
    sentences = [random_text(random, count) for count in words]
    theirs = np.stack([tiny_sentence_transformer.encode(sentence) for sentence in sentences])
    np.testing.assert_allclose(tiny_engine.embed(sentences), theirs, atol=FLOAT32)


@pytest.fixture(scope="module")
def tiny_sentence_transformer(tiny_checkpoint):
    return SentenceTransformer(str(tiny_checkpoint.folder), device="cpu")


def test_default_model(default_checkpoint):
    sentences = [sentence.text for sentence in default_corpus()[::300]]
    assert_same_embeddings(default_checkpoint, [*sentences, " ".join(sentences * 3)])
