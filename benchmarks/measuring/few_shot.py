"""Few-shot prompts as token sequences: many texts behind few long prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise, takewhile

import numpy as np

from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from benchmarks.papers.mmlu import Prompts, Question

# Tokens below are special tokens in most vocabularies.
_FIRST_TOKEN = 3


def synthetic_prompts(
    count: int, prefixes: int, prefix_tokens: int, text_tokens: int, vocabulary: int, seed: int = 0
) -> list[list[int]]:
    """Return `count` sequences of random tokens, the texts behind each of the prefixes in turn."""
    random = np.random.default_rng(seed)
    shared = random.integers(_FIRST_TOKEN, vocabulary, (prefixes, prefix_tokens))
    texts = random.integers(_FIRST_TOKEN, vocabulary, (count, text_tokens))
    return [[*shared[number % prefixes].tolist(), *text.tolist()] for number, text in enumerate(texts)]


def distinct_prompts(like: Sequence[Sequence[int]], vocabulary: int, seed: int) -> list[list[int]]:
    """Return sequences of random tokens, as long as the given ones, that share nothing but by chance."""
    random = np.random.default_rng(seed)
    return [random.integers(_FIRST_TOKEN, vocabulary, len(ids)).tolist() for ids in like]


def mmlu_prompts(
    examples: Sequence[Question], questions: Sequence[Question], subjects: int, shots: int
) -> list[str]:
    """Return the prompts of the first subjects' questions, the subjects in turn.

    Raises InvalidInput if a subject has fewer examples than shots.
    """
    of_subjects: dict[str, list[Question]] = {}
    for question in questions:
        of_subjects.setdefault(question.subject, []).append(question)
    chosen = list(islice(of_subjects.values(), subjects))
    prompts = Prompts(examples)
    return [
        prompts.of(examples[number], shots)
        for number in range(max(map(len, chosen), default=0))
        for examples in chosen
        if number < len(examples)
    ]


def shared_prefixes(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the distinct prefixes that sequences have in common with another sequence, in whole blocks.

    These are the tokens that a store has of a sequence after it has seen all the others.
    """
    ordered = sorted(map(list, sequences))
    common = [0, *(_common(left, right) for left, right in pairwise(ordered)), 0]
    found = {
        tuple(ids[: max(before, after) // BLOCK_TOKENS * BLOCK_TOKENS])
        for ids, (before, after) in zip(ordered, pairwise(common), strict=True)
    }
    return [list(ids) for ids in sorted(found) if ids]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at the front."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
