"""Labels as a language model would write them behind a text in its template.

    labels -> tokens of each -> a tree of their beginnings -> Prompt: a sequence for each longest beginning
           -> log-probabilities of the tokens that branch off -> their sum along each label

A sequence passes every shorter beginning on its way, and causal attention keeps these as they are alone. So
labels of one token are all read from the text's own sequence, and others share what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template: Template, labels: Sequence[str]) -> Self:
        """Raises InvalidInput for labels that cannot be told apart or continue the template badly."""
        tokens = tokenizer.continuations(template, labels)
        for index, own in enumerate(tokens):
            if own in tokens[:index]:
                raise InvalidInput(
                    f"labels[{index}] has the tokens of another label", field=f"labels[{index}]"
                )
        beginnings = _longest([own[:-1] for own in tokens])
        prompt = tokenizer.prompt(template, continued=max(map(len, beginnings)))
        if max(map(len, tokens)) > 1:
            prompt = replace(prompt, readings=_readings(prompt.readings[0], beginnings, tokens))
        return cls(tuple(labels), tuple(tokens), prompt)

    @property
    def one_token_each(self) -> bool:
        """Whether the logits of the last position tell all: nothing else is read then."""
        return max(map(len, self.tokens)) == 1

    @cached_property
    def _paths(self) -> np.ndarray:
        """[targets of a text, labels]: 1 where a target is a token of the label."""
        targets = [
            (*reading.continuation[: len(reading.continuation) - back], token)
            for reading in self.prompt.readings
            for back, token in reading.targets
        ]
        row_of = {beginning: row for row, beginning in enumerate(targets)}
        paths = np.zeros((len(targets), len(self.labels)), dtype=np.float32)
        for label, own in enumerate(self.tokens):
            paths[[row_of[own[: place + 1]] for place in range(len(own))], label] = 1
        return paths

    def logits(self, log_probabilities: Sequence[np.ndarray]) -> np.ndarray:
        """Summed log-probabilities float32 [texts, labels] from those of each sequence of the texts."""
        targets = np.concatenate(log_probabilities).reshape(-1, len(self._paths))
        summed: np.ndarray = targets @ self._paths
        return summed


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
) -> tuple[Reading, ...]:
    """A reading for each longest beginning; what several sequences pass is read in the first of them."""
    branches: dict[Beginning, dict[int, None]] = {}
    for own in tokens:
        for place, token in enumerate(own):
            branches.setdefault(own[:place], {})[token] = None
    readings = []
    for own in beginnings:
        targets = [
            Target(len(own) - place, token)
            for place in range(len(own) + 1)
            for token in branches.pop(own[:place], ())
        ]
        readings.append(replace(alone, continuation=own, targets=tuple(targets)))
    return tuple(readings)
