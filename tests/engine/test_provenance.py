"""An engine's fingerprint changes if the full model's answers change, and only then."""

from dataclasses import replace

import numpy as np
import pytest

from attncache_core import AttentionDatabase, LinearClassifier, Quantization, find_variant, fit_classifier
from attncache_core.checkpoints.template import Template
from attncache_core.engine.prefill import PrefillEngine


def fingerprint(checkpoint, **options) -> str:
    return PrefillEngine.load(checkpoint, **{"dtype": "float32", **options}).fingerprint


@pytest.fixture(scope="module")
def usual(tiny_checkpoint):
    return fingerprint(tiny_checkpoint)


def fitted(checkpoint, labels, seed: int = 0) -> LinearClassifier:
    embeddings = np.random.default_rng(seed).normal(size=(len(labels), 32))
    return fit_classifier(
        embeddings, labels, fingerprint=checkpoint.embedding_fingerprint(), model=checkpoint.name
    )


def test_every_way_of_use_variant_and_limit_has_its_own_fingerprint(tiny_checkpoint):
    ways = [
        tiny_checkpoint.adapted(pooling=pooling, template=template, labels=labels)
        for pooling in (None, "cls")
        for template in (None, Template("query: "), Template("", " :"))
        for labels in ((), ("card", "bank"), ("bank", "card"))
    ]
    variants = [
        *({"quantization": Quantization.INT8_WEIGHT_ONLY}, {"drop_attention": "1"}, {"drop_block": "1"})
    ]
    ways += [find_variant(str(tiny_checkpoint.folder), **variant) for variant in variants]
    prints = {fingerprint(way) for way in ways} | {fingerprint(tiny_checkpoint, max_tokens=20)}
    assert len(prints) == len(ways) + 1


def test_fingerprint_changes_with_the_classifier(tiny_checkpoint, tmp_path, usual):
    classifiers = [
        fitted(tiny_checkpoint, ["a", "b"]),
        fitted(tiny_checkpoint, ["a", "c"]),
        fitted(tiny_checkpoint, ["a", "b"], seed=1),
    ]
    prints = [fingerprint(tiny_checkpoint, classifier=classifier) for classifier in classifiers]
    assert len({usual, *prints}) == 4
    classifiers[0].save(tmp_path)
    assert fingerprint(tiny_checkpoint, classifier=LinearClassifier.load(tmp_path)) == prints[0]


def test_fingerprint_does_not_depend_on_name_rounding_threads_or_reuse(tiny_checkpoint, tiny_database, usual):
    elsewhere = replace(tiny_checkpoint, name="another name", source="elsewhere")
    assert fingerprint(elsewhere) == usual
    assert fingerprint(tiny_checkpoint, max_tokens=10_000) == usual  # above the model's maximum
    labelled = tiny_checkpoint.adapted(labels=["card", "bank"])  # which are compared by embedding
    assert fingerprint(labelled, dtype="bfloat16") == fingerprint(labelled)
    assert fingerprint(tiny_checkpoint, dtype="bfloat16") == usual
    assert fingerprint(tiny_checkpoint, threads=1) == usual
    assert fingerprint(tiny_checkpoint, database=AttentionDatabase.open(tiny_database)) == usual
