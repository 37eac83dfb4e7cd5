"""The texts of a soak, of all lengths, and what the idle server answers to each of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import numpy as np

from attncache_core.corpus import default_corpus

LABELS = ("a payment", "a card", "an account", "something else")
REUSE = "X-AttnCache-Reuse"


@dataclass(frozen=True)
class Idle:
    """Texts and their answers by a server that did nothing else."""

    texts: list[str]
    embeddings: np.ndarray  # float32 [texts, dimensions], unit length
    scores: np.ndarray  # float32 [texts, labels]
    ids: list[list[int]]  # token ids, with the special ones
    max_total_tokens: int  # of a text; the rest is cut

    def similarities(self, one: int, others: list[int]) -> np.ndarray:
        """Return the cosines of a text and others, float32 [others]."""
        return self.embeddings[others] @ self.embeddings[one]


def make_texts(count: int, longest: int, seed: int) -> list[str]:
    """Return distinct texts of 1 to `longest` words, with as many short as long ones.

    A third of them are sentences of the default corpus, which the default database has records of.
    """
    random = Random(seed)
    sentences = [sentence.text for sentence in default_corpus()]
    words = sorted({word for sentence in sentences for word in sentence.split()})
    texts = dict.fromkeys(random.sample(sentences, count // 3))
    while len(texts) < count:
        length = round(longest ** random.random())
        texts[" ".join(random.choices(words, k=length))] = None
    return list(texts)


async def ask_idle(client: aiohttp.ClientSession, texts: list[str]) -> Idle:
    """Ask for the answers to each text alone, one after the other."""
    embeddings, scores, ids = [], [], []
    for text in texts:
        embeddings += await _answer(client, "/embed", {"inputs": text})
        (found,) = await _answer(client, "/classify", {"inputs": text, "labels": LABELS})
        scores.append(in_order_of_labels(found))
        (tokens,) = await _answer(client, "/tokenize", {"inputs": text})
        ids.append([token["id"] for token in tokens])
    async with client.get("/info") as response:
        max_total_tokens = (await response.json())["max_tokens"]
    return Idle(texts, np.array(embeddings, np.float32), np.array(scores, np.float32), ids, max_total_tokens)


def in_order_of_labels(classes: list[dict[str, Any]]) -> list[float]:
    """Return the scores of LABELS from the classes of one text, which come best first."""
    scores = {entry["label"]: entry["score"] for entry in classes}
    return [scores[label] for label in LABELS]


async def _answer(client: aiohttp.ClientSession, path: str, content: object) -> list:  # type: ignore[type-arg]
    async with client.post(path, json=content, headers={REUSE: "off"}) as response:
        if response.status != 200:
            raise RuntimeError(f"the idle server answered {path} with status {response.status}")
        return await response.json()
