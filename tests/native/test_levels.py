"""At every level, the default model's answers are those of Hugging Face's eager float32 model."""

import numpy as np
import pytest
from core_reference import FLOAT32
from kernel_formulas import library

from attncache_core import DEFAULT_MODEL, PrefillEngine, Quantization, default_corpus, find_variant, native
from attncache_core.native import attention_kernel, products

PLAIN = "plain"  # torch's operators, without compiled code
LEVELS = [PLAIN, "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon"]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """Each level in turn: what is loaded during the test computes with it."""
    chosen = None
    if request.param != PLAIN:
        if request.param not in attention_kernel.levels():
            pytest.skip(f"this processor does not have {request.param}")
        if not library(request.param).is_file():
            pytest.skip(f"{request.param} was not built")
        chosen = native.AttentionKernel(request.param, library(request.param))
    monkeypatch.setattr(native, "kernel", lambda: chosen)
    products.library.cache_clear()
    yield request.param
    products.library.cache_clear()


@pytest.fixture(scope="module")
def texts():
    """24 texts from all topics of the shipped corpus, and a text of 512 tokens."""
    corpus = [sentence.text for sentence in default_corpus()]
    return [*corpus[:: len(corpus) // 23], " ".join(corpus[:60])]


@pytest.fixture(scope="module")
def expected(texts, default_checkpoint, default_reference):
    """The reference's embeddings, of unit length."""
    engine = PrefillEngine.load(default_checkpoint, dtype="float32")
    means = default_reference.means(engine.tokenize(texts))
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def embeddings(level, texts, dtype="float32", **variant):
    engine = PrefillEngine.load(find_variant(DEFAULT_MODEL, **variant), dtype=dtype)
    assert (engine.model.stack is not None) is (level != PLAIN)
    return engine.embed(texts)


def test_levels_are_all_that_are_compiled(libraries_of_setup):
    compiled = {name for machine in libraries_of_setup.values() for name in machine}
    assert {f"attention_{level}" for level in LEVELS if level != PLAIN} | {"sigbus"} == compiled


def test_embeddings_in_float32_are_the_reference(level, texts, expected):
    np.testing.assert_allclose(embeddings(level, texts), expected, rtol=0, atol=FLOAT32)


def test_embeddings_in_bfloat16_have_the_direction_of_the_reference(level, texts, expected):
    cosines = (embeddings(level, texts, dtype="bfloat16") * expected).sum(axis=1)
    # The largest loss seen is 5e-5.
    assert cosines.min() >= 0.9998


def test_embeddings_of_8_bit_products_have_the_direction_of_the_reference(level, texts, expected):
    if level == PLAIN:
        pytest.skip("torch's operators do not multiply 8-bit integers exactly")
    variant = {"quantization": Quantization.INT8, "quantization_texts": texts[:16]}
    cosines = (embeddings(level, texts, **variant) * expected).sum(axis=1)
    # The largest loss seen is 1.7e-3.
    assert cosines.min() >= 0.995
