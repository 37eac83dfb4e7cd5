"""Token sequences that a client has made itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Template
from attncache_core.text.bounds import too_long, too_many
from attncache_core.text.prompts import Prompt, SequencePlan
from service.batching.sources import Source, Texts, Tokenized
from service.schemas import Side

# About as many tokens make a full batch.
_PART_TOKENS = 1024
_CHARACTERS_PER_TOKEN = 4  # of prose, about


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """Sequences of token ids, computed as they are: without a prompt, and without further special tokens.

    truncate: cut a sequence that is too long, at the side `cut`.
    """

    sequences: Sequence[list[int]]
    truncate: bool
    cut: Side = "right"

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    @property
    def characters(self) -> int:
        """About as many characters as the texts of the sequences have."""
        return _CHARACTERS_PER_TOKEN * sum(map(len, self.sequences))

    def tokenize(
        self,
        engine: PrefillEngine,
        prompt: Prompt,  # noqa: ARG002
        salt: bytes | None,
        most_tokens: int,
    ) -> Iterator[Tokenized]:
        """Yield the sequences; see Source.

        prompt: `bare_prompt`, which adds nothing. Raises InvalidInput if a number is no token id.
        """
        vocabulary = engine.vocabulary
        part: list[list[int]] = []
        part_tokens = tokens = 0
        for index in range(self.count):
            ids = self._cut(index, engine.max_tokens, vocabulary)
            tokens += len(ids)
            if tokens > most_tokens:
                raise too_many(tokens, most_tokens, "inputs")
            if part and part_tokens + len(ids) > _PART_TOKENS:
                yield Tokenized(part, salt)
                part, part_tokens = [], 0
            part.append(ids)
            part_tokens += len(ids)
        yield Tokenized(part, salt)

    def _cut(self, index: int, most: int, vocabulary: int) -> list[int]:
        ids = self.sequences[index]
        if max(ids) >= vocabulary:
            raise InvalidInput(
                f"inputs[{index}] has a number that is no token id of this model, whose ids are 0 to "
                f"{vocabulary - 1}; send ids as /tokenize gives them, or send text",
                field=f"inputs[{index}]",
            )
        if len(ids) <= most:
            return ids
        if not self.truncate:
            raise too_long(most, index)
        return ids[:most] if self.cut == "right" else ids[-most:]


def source_of(inputs: list[str] | list[list[int]], truncate: bool, cut: Side) -> Source:
    """Return the source of texts, or of token ids."""
    if isinstance(inputs[0], str):
        return Texts(inputs, truncate, cut)
    return TokenSequences(inputs, truncate, cut)


def prompt_of(engine: PrefillEngine, source: Source, name: str | None) -> Prompt | None:
    """Return the prompt in which a source is computed; None: the checkpoint's prompt.

    name: of one of the checkpoint's prompts. Raises InvalidInput if there is none of this name, or if the
    source is token ids.
    """
    if not isinstance(source, TokenSequences):
        return None if name is None else engine.named_prompt(name)
    if name is not None:
        raise InvalidInput(
            "prompt_name is accepted with texts only; token ids are computed as they are, so send the ids of "
            "the prompt too",
            field="prompt_name",
        )
    return bare_prompt(engine)


def bare_prompt(engine: PrefillEngine) -> Prompt:
    """Return the prompt of sequences that stand in no template."""
    if engine.default_prompt.template == Template():
        return engine.default_prompt
    return Prompt(Template(), (SequencePlan(0),))
