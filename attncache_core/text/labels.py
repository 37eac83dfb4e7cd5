"""Prepare labels so that a language model can score them as the continuation of a text in its template.

    labels -> tokens of each label -> a tree of token prefixes -> Prompt: one sequence per longest prefix
           -> log-probabilities of the tokens that branch off a sequence -> their sum for each label

A label's prefix is all of its tokens except the last. Causal attention gives a position the same result
whatever tokens follow, so a sequence with a long prefix also answers for all shorter prefixes of that prefix.
Labels of one token are all read from the sequence of the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from attncache_core.checkpoints.template import Template
from attncache_core.errors import InvalidInput
from attncache_core.text.prompts import Prompt, SequencePlan, Target
from attncache_core.text.tokenizer import TextTokenizer

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class LabelTokens:
    """Labels to choose from, prepared for one template and one tokenizer."""

    labels: tuple[str, ...]
    tokens: tuple[TokenIds, ...]  # label -> its token ids after the template
    prompt: Prompt  # how a text's sequences are made and what is read from them
    # label -> indices of its tokens in the targets of all sequences of a text; empty if no targets are read
    target_indices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template: Template, labels: Sequence[str]) -> Self:
        """Prepare labels for a template. Time and memory grow linearly with the labels' tokens.

        Raises InvalidInput if two labels have the same tokens, if a label starts or ends with white space, if
        a label has no token of its own after the template, or if there is no room left for a text.
        """
        for index, label in enumerate(labels):
            if label != label.strip():
                raise InvalidInput(
                    f"labels[{index}] begins or ends with white space; remove the white space",
                    field=f"labels[{index}]",
                )
        tokens = tokenizer.continuations(template, labels)
        seen: set[TokenIds] = set()
        for index, ids in enumerate(tokens):
            if ids in seen:
                raise InvalidInput(
                    f"labels[{index}] has the same tokens as another label", field=f"labels[{index}]"
                )
            seen.add(ids)
        prefixes = _longest_prefixes([ids[:-1] for ids in tokens])
        prompt = tokenizer.prompt(template, continuation_tokens=max(map(len, prefixes)))
        target_indices: tuple[tuple[int, ...], ...] = ()
        if max(map(len, tokens)) > 1:
            plans, target_indices = _sequence_plans(prompt.sequence_plans[0], prefixes, tokens)
            prompt = replace(prompt, sequence_plans=plans)
        return cls(tuple(labels), tuple(tokens), prompt, target_indices)

    @property
    def one_token_each(self) -> bool:
        """Whether each label is one token; then the logits of the last position suffice, without targets."""
        return not self.target_indices

    def logits(self, log_probabilities: Sequence[np.ndarray]) -> np.ndarray:
        """Return the summed log-probability of each label's tokens, float32 [texts, labels].

        log_probabilities: for each sequence of the texts, the log-probabilities of its plan's targets.
        """
        targets = sum(len(plan.targets) for plan in self.prompt.sequence_plans)
        by_text = np.concatenate(log_probabilities).reshape(-1, targets)
        return np.stack([by_text[:, indices].sum(axis=1) for indices in self.target_indices], axis=1)


def _longest_prefixes(prefixes: Sequence[TokenIds]) -> list[TokenIds]:
    """Return the distinct prefixes that do not begin another prefix, in sorted order."""
    ordered = sorted(set(prefixes))
    # Sorting puts a sequence that continues a prefix directly after that prefix.
    following = [*ordered[1:], None]
    return [
        prefix
        for prefix, after in zip(ordered, following, strict=True)
        if after is None or after[: len(prefix)] != prefix
    ]


def _sequence_plans(
    text_alone: SequencePlan, prefixes: Sequence[TokenIds], tokens: Sequence[TokenIds]
) -> tuple[tuple[SequencePlan, ...], tuple[tuple[int, ...], ...]]:
    """Return a sequence plan for each longest prefix, and each label's indices in the targets of all plans.

    A target that several sequences could answer is read from the first of these sequences.
    """
    # Nodes of the tree are numbers (the root is 0): as tuples, the prefixes of a label with n tokens would
    # hold n² / 2 tokens.
    nodes: dict[tuple[int, int], int] = {}  # (node, token) -> child node
    paths = [_walk(nodes, ids) for ids in tokens]
    unread: dict[int, list[tuple[int, int]]] = {}  # node -> (token, child) pairs that no plan reads yet
    for (node, token), child in nodes.items():
        unread.setdefault(node, []).append((token, child))
    target_of: dict[int, int] = {}  # node -> index of the target that reads the node's token
    plans = []
    for prefix in prefixes:
        targets = []
        for depth, node in enumerate([0, *_walk(nodes, prefix)]):
            for token, child in unread.pop(node, ()):
                target_of[child] = len(target_of)
                targets.append(Target(len(prefix) - depth, token))
        plans.append(replace(text_alone, continuation=prefix, targets=tuple(targets)))
    return tuple(plans), tuple(tuple(target_of[node] for node in path) for path in paths)


def _walk(nodes: dict[tuple[int, int], int], tokens: TokenIds) -> list[int]:
    """Return the nodes on the path of `tokens`, without the root. Adds missing nodes to `nodes`."""
    path, node = [], 0
    for token in tokens:
        node = nodes.setdefault((node, token), len(nodes) + 1)
        path.append(node)
    return path
