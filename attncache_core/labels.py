"""Labels as a language model would write them behind a text in its template.

    labels -> tokens of each -> a tree of their beginnings -> Prompt: a sequence for each longest beginning
           -> log-probabilities of the tokens that branch off -> their sum along each label

A sequence passes every shorter beginning on its way, and causal attention keeps these as they are alone. So
labels of one token are all read from the text's own sequence, and others share what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from attncache_core.errors import InvalidInput
from attncache_core.prompts import Prompt, Reading, Target, Template
from attncache_core.tokenizer import TextTokenizer

Beginning = tuple[int, ...]


@dataclass(frozen=True)
class LabelTokens:
    """Labels to choose from, in one template, for one tokenizer."""

    labels: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]  # of each label, behind the template
    prompt: Prompt  # how a text's sequences are made and what is read from them
    places: tuple[tuple[int, ...], ...]  # of each label's tokens among a text's targets; none, none are read

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template: Template, labels: Sequence[str]) -> Self:
        """In time and memory as the labels' tokens.

        Raises InvalidInput for labels that cannot be told apart, that have white space at their ends, that
        continue the template badly or that leave no room for a text.
        """
        for index, label in enumerate(labels):
            if label != label.strip():
                raise InvalidInput(
                    f"labels[{index}] begins or ends with white space; leave it out", field=f"labels[{index}]"
                )
        tokens = tokenizer.continuations(template, labels)
        seen: set[Beginning] = set()
        for index, own in enumerate(tokens):
            if own in seen:
                raise InvalidInput(
                    f"labels[{index}] has the tokens of another label", field=f"labels[{index}]"
                )
            seen.add(own)
        beginnings = _longest([own[:-1] for own in tokens])
        prompt = tokenizer.prompt(template, continued=max(map(len, beginnings)))
        places: tuple[tuple[int, ...], ...] = ()
        if max(map(len, tokens)) > 1:
            readings, places = _readings(prompt.readings[0], beginnings, tokens)
            prompt = replace(prompt, readings=readings)
        return cls(tuple(labels), tuple(tokens), prompt, places)

    @property
    def one_token_each(self) -> bool:
        """Whether the logits of the last position tell all: nothing else is read then."""
        return not self.places

    def logits(self, log_probabilities: Sequence[np.ndarray]) -> np.ndarray:
        """Summed log-probabilities float32 [texts, labels] from those of each sequence of the texts."""
        targets = sum(len(reading.targets) for reading in self.prompt.readings)
        of_texts = np.concatenate(log_probabilities).reshape(-1, targets)
        return np.stack([of_texts[:, own].sum(axis=1) for own in self.places], axis=1)


def _longest(beginnings: Sequence[Beginning]) -> list[Beginning]:
    """Those that no other one goes on from; each other one is the beginning of one of these."""
    ordered = sorted(set(beginnings))
    # In this order, what goes on from a beginning stands right behind it.
    following = [*ordered[1:], None]
    return [
        own
        for own, after in zip(ordered, following, strict=True)
        if after is None or after[: len(own)] != own
    ]


def _readings(
    alone: Reading, beginnings: Sequence[Beginning], tokens: Sequence[Beginning]
) -> tuple[tuple[Reading, ...], tuple[tuple[int, ...], ...]]:
    """A reading for each longest beginning; what several sequences pass is read in the first of them.

    Beside them, of each label, the places of its tokens among the targets of all readings.
    """
    # Nodes have numbers, the root 0: kept as tuples, the beginnings of a label of n tokens would hold n² / 2.
    nodes: dict[tuple[int, int], int] = {}  # (node, token) -> the node that the token leads to
    paths = [_walked(nodes, own) for own in tokens]
    branches: dict[int, list[tuple[int, int]]] = {}  # node -> (token, where it leads), until they are read
    for (node, token), child in nodes.items():
        branches.setdefault(node, []).append((token, child))
    place_of: dict[int, int] = {}
    readings = []
    for own in beginnings:
        targets = []
        for passed, node in enumerate([0, *_walked(nodes, own)]):
            for token, child in branches.pop(node, ()):
                place_of[child] = len(place_of)
                targets.append(Target(len(own) - passed, token))
        readings.append(replace(alone, continuation=own, targets=tuple(targets)))
    return tuple(readings), tuple(tuple(place_of[node] for node in path) for path in paths)


def _walked(nodes: dict[tuple[int, int], int], tokens: Beginning) -> list[int]:
    """The nodes that these tokens lead to from the root, one after the other; new ones are added."""
    path, node = [], 0
    for token in tokens:
        node = nodes.setdefault((node, token), len(nodes) + 1)
        path.append(node)
    return path
