"""Describe how a text becomes token sequences, and what is read from each sequence.

    Template -> TextTokenizer.prompt -> Prompt -> for each text one sequence per SequencePlan

The prompts of sentence-transformers are templates too: they have a prefix and an empty suffix.

    Prompt -> TextTokenizer.frame -> Frame, for turns of a conversation, which are tokenised one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding

from attncache_core.checkpoints.template import Template
from attncache_core.text.pairs import Cut


class Piece(NamedTuple):
    """A token of a text."""

    id: int
    text: str  # the characters of the text; of a special token, its name
    is_special: bool  # whether the tokenizer put it around the text
    start: int | None  # index of the first character; None for a special token
    stop: int | None  # index behind the last character; None for a special token


def pieces_of(text: str, encoding: Encoding) -> list[Piece]:
    """Return the tokens of an encoded text."""
    return [
        Piece(token, name, True, None, None)
        if special
        else Piece(token, text[start:stop], False, start, stop)
        for token, name, special, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


class Target(NamedTuple):
    """A token whose log-probability is read from a sequence."""

    back: int  # the position that predicts the token, as a distance in tokens from the sequence's last token
    token: int  # token id


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How one sequence of a text is made, and what is read from the sequence besides its output."""

    prompt_tokens: int  # tokens of the template at the front of the sequence, including special tokens
    continuation: tuple[int, ...] = ()  # token ids that follow the text in its template
    targets: tuple[Target, ...] = ()
    states: bool = False  # whether the last state of every token is read, too


@dataclass(frozen=True, slots=True)
class Prompt:
    """A template that TextTokenizer.prompt has prepared for one tokenizer."""

    template: Template
    sequence_plans: tuple[SequencePlan, ...]  # each text becomes one sequence per plan
    cut: Cut = "longest"  # how a pair between the checkpoint's separators is cut

    def sequence_plan(self, index: int) -> SequencePlan:
        """Return the plan of a sequence; index: position in the sequences of all texts, text by text."""
        return self.sequence_plans[index % len(self.sequence_plans)]


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens of a prompt around tokens that are known already."""

    before: list[int]  # token ids of the template's prefix, behind the special tokens that open a sequence
    after: list[int]  # token ids of the template's suffix and special tokens, before the plan's continuation
    room: int  # most tokens that fit into the frame, at least 1
    opening: int = 0  # tokens of `before` that open every text, whatever the template

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a sequence without the plan's continuation."""
        return [*self.before, *ids, *self.after]
