"""Texts that come to NaN beside other texts in the real app, with a tiny real model with a damaged word."""

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest
from core_decoders import write_llama
from core_models import VOCABULARY, damage_weights, random_text, write_sentence_transformer
from fake_engine import serving as serving_with
from running import until_metric
from verifying import FAILURES, VERIFIED

from attncache_core import AttentionDatabase, BuildOptions, CorpusSentence, PrefillEngine, build_database
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template

WORD = "?"
SOUND = [["where is my card", "money"], ["why was the bank closed", "card"], ["my old account was late"]]
DAMAGED = [["my card", "where ? is it"], ["? card", "my ?"]]
# So many tokens that the next requests wait, and share the next batch.
LONG = "card " * 480


def serving(engine, **settings):
    """As fake_engine.serving. On a busy machine, the long texts take more than a second."""
    return serving_with(engine, max_queue_seconds=60, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "damaged"
    return damage_weights(write_sentence_transformer(folder), VOCABULARY.index(WORD))


async def ask_together(client, path, requests, **body):
    """Return the responses to requests that wait together while the engine is busy."""
    busy = [asyncio.ensure_future(client.post(path, json={"inputs": [LONG] * 16, **body})) for _ in range(2)]
    await asyncio.sleep(0.02)
    pending = [client.post(path, json={"inputs": texts, **body}) for texts in requests]
    answers = await asyncio.gather(*pending)
    assert [answer.status_code for answer in await asyncio.gather(*busy)] == [200, 200]
    return answers


def assert_refused(answer, field):
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == ("not_finite", field)
    assert field in error["message"]


@pytest.mark.parametrize("normalize", [True, False])
async def test_only_requests_with_a_damaged_text_fail(folder, normalize, caplog):
    requests = [SOUND[0], DAMAGED[0], SOUND[1], DAMAGED[1], SOUND[2]]
    async with serving(PrefillEngine.load(read_checkpoint(folder), dtype="float32")) as client:
        alone = [
            (await client.post("/embed", json={"inputs": texts, "normalize": normalize})).json()
            for texts in SOUND
        ]
        answers = await ask_together(client, "/embed", requests, normalize=normalize)
        caplog.clear()
        await client.post("/embed", json={"inputs": "my stolen card ?"})
    for answer, expected in zip(answers[::2], alone, strict=True):
        np.testing.assert_allclose(answer.json(), expected, atol=1e-5)
        assert "null" not in answer.text
        assert "NaN" not in answer.text
    assert_refused(answers[1], "inputs[1]")
    assert_refused(answers[3], "inputs[0]")
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "1 requests of a batch came to NaN or infinity" in line.getMessage()
    assert "stolen" not in line.getMessage()


async def test_damaged_label_is_named_and_no_label_is_cached(folder):
    async with serving(PrefillEngine.load(read_checkpoint(folder), dtype="float32")) as client:
        for labels, at in ((["card", "lost ?", "bank"], 1), (["card", "bank", "? late"], 2)):
            for _ in range(2):
                answer = await client.post("/classify", json={"inputs": "my card", "labels": labels})
                assert_refused(answer, f"labels[{at}]")
        sound = await client.post("/classify", json={"inputs": ["my card"], "labels": ["card", "bank"]})
        damaged = await client.post("/classify", json={"inputs": ["a", "?"], "labels": ["card", "bank"]})
    assert sum(row["score"] for row in sound.json()[0]) == pytest.approx(1)
    assert_refused(damaged, "inputs[1]")


# A decoder that scores labels by their tokens.


def scoring(folder, labels):
    adapted = read_checkpoint(folder).adapted(
        template=Template.parse("ask: {}\nanswer:"), label_logits=True, labels=labels
    )
    return PrefillEngine.load(adapted, dtype="float32")


@pytest.mark.parametrize("labels", [["bank", "card"], ["bank account lost", "bank account", "zebra"]])
async def test_damaged_text_of_several_sequences_is_named_by_its_index(tmp_path, labels):
    write_llama(tmp_path)
    (money,) = scoring(tmp_path, labels).decisions.labels_in(Template("", ""), ["money", "card"]).tokens[0]
    damage_weights(tmp_path, money)
    engine = scoring(tmp_path, labels)
    async with serving(engine, max_batch_tokens=40) as client:
        alone = (await client.post("/classify", json={"inputs": ["card", "late"]})).json()
        requests = [["card", "late"], ["card", "late", "my money", "lost money"], ["card", "late"]]
        first, damaged, last = await asyncio.gather(
            *(client.post("/classify", json={"inputs": texts}) for texts in requests)
        )
    assert_refused(damaged, "inputs[2]")
    for answer in (first, last):
        for found, expected in zip(answer.json(), alone, strict=True):
            assert [row["score"] for row in found] == pytest.approx(
                [row["score"] for row in expected], abs=1e-4
            )


async def test_label_whose_row_of_the_language_head_is_damaged_is_named(tmp_path):
    write_llama(tmp_path)
    labels = ["bank", "card", "lost"]
    (card,) = scoring(tmp_path, labels).decisions.label_tokens.tokens[1]
    damage_weights(tmp_path, card, names=("lm_head.weight",))
    async with serving(scoring(tmp_path, labels)) as client:
        damaged = await client.post("/classify", json={"inputs": "money"})
        without = await client.post("/classify", json={"inputs": "money", "labels": ["lost", "bank"]})
    assert_refused(damaged, "labels[1]")
    assert without.status_code == 200


# With a database.


async def test_damaged_texts_spoil_no_hits_of_their_batch_and_are_not_verified(folder, tmp_path):
    random = np.random.default_rng(7)
    texts = [random_text(random, words) for words in np.repeat(np.arange(2, 7), 20)]
    # Recorded texts are not used, because exact hits are not verified.
    unseen = [text for text in (random_text(random, 4) for _ in range(40)) if text not in texts][:8]
    plain = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    options = BuildOptions(heads="all", threshold=0.0, training_steps=5)
    build_database(plain, [CorpusSentence(text, text) for text in texts], tmp_path / "a.db", options)
    database = AttentionDatabase.open(tmp_path / "a.db")
    # In the second policy, the mean of the length serves every text, also the damaged text.
    groups = tuple(replace(group, searched=False) for group in database.search.policy.groups)
    policy = replace(database.search.policy, groups=groups)
    for search in (database.search, replace(database.search, policy=policy)):
        engine = PrefillEngine.load(
            plain.checkpoint, database=replace(database, search=search), dtype="float32"
        )
        async with serving(engine, verify_rate=1) as client:
            requests = [unseen[:3], ["my ? card", *unseen[3:5]], unseen[5:8]]
            first, damaged, last = await ask_together(client, "/embed", requests)
            # All hits are verified, except the damaged text, which hits if nothing is searched.
            metrics = await until_metric(client, 8, VERIFIED)
        assert_refused(damaged, "inputs[0]")
        for answer, sent in ((first, unseen[:3]), (last, unseen[5:8])):
            assert answer.headers["X-AttnCache-Hits"] == "3/3"
            expected = engine.embed(sent)
            np.testing.assert_allclose(answer.json(), expected, atol=1e-5)
        assert (metrics[VERIFIED,], metrics[FAILURES,]) == (8, 0)
