"""What a request asks the batcher to compute: a source of token sequences.

A source is made on the event loop, and makes its sequences in an engine thread, part by part. The texts of
`inputs` are a source, token ids that a client has made itself are one, and so is a conversation
(service/conversations/conversation).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Template, Text, characters_of
from attncache_core.text.limits import max_characters, too_long, too_many
from attncache_core.text.pairs import TruncatedTokens
from attncache_core.text.prompts import Prompt, SequencePlan
from attncache_core.text.segments import Segmented
from attncache_core.text.tokenizer import TextTokenizer, continued
from service.errors import rename
from service.schemas import Side

# Texts are tokenised in parts of this size, so that many texts of one client delay others by little. About
# as many characters make a full batch.
_PART_CHARACTERS = 4096
_PART_TEXTS = 64
# About as many tokens make a full batch.
_PART_TOKENS = 1024
_CHARACTERS_PER_TOKEN = 4  # of prose, about
# Of a text that is cut at its beginning, so many are tokenised per token, and more if it has fewer tokens.
_CUT_CHARACTERS_PER_TOKEN = 16
# The first characters decide how the template's prefix ends. Those behind a cut may have other tokens than in
# the whole text, because a cut changes the tokens of the word that it cuts, and perhaps of the next words.
_FIRST_CHARACTERS = 256
# Where another word begins, or stands between two different letters of a script that may have no spaces.
_BORDER = re.compile(r"\s(?=\S)|([^\W\d_a-zA-Z])(?!\1)(?=[^\W\d_a-zA-Z])")
# A digest of more texts would take the event loop too long.
_MAX_DIGEST_CHARACTERS = 16_384


class Tokenized(NamedTuple):
    """Some token sequences of a request, and how their keys and values are stored."""

    sequences: Sequence[Sequence[int]]  # text by text, one per sequence plan; PairTokens for pairs
    # Sequences of one salt share stored keys and values; None: nothing is given, and nothing is stored.
    salt: bytes | None
    passing: int = 0  # tokens before a plan's continuation whose keys and values are not worth keeping
    # The chunks of each text, whose keys and values may be blended; None: the texts have no chunks.
    chunked: Sequence[Segmented] | None = None


class Source(Protocol):
    """One or several texts that become token sequences."""

    @property
    def count(self) -> int:
        """The number of texts."""

    @property
    def characters(self) -> int:
        """The number of characters of all texts, about."""

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequences of the texts part by part: for each text, one per sequence plan of the prompt.

        salt: of the request; see Tokenized. Raises InputTooLong if a text is too long, or if all sequences
        have more than `max_total_tokens` tokens together.
        """


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts, or pairs of texts, that do not depend on each other.

    truncate: cut a text that is too long. cut: where, if the text is no pair.
    """

    texts: Sequence[Text]
    truncate: bool
    cut: Side = "right"

    @property
    def count(self) -> int:
        """The number of texts."""
        return len(self.texts)

    @property
    def characters(self) -> int:
        """The number of characters of all texts."""
        return sum(map(characters_of, self.texts))

    def digest(self, prompt: Prompt, salt: bytes) -> bytes | None:
        """Return a digest of what decides the result of the texts: equal digests have equal exact results.

        None if there are too many characters, or if the plans of the prompt read more than the output.
        """
        template, plan = prompt.template, prompt.sequence_plans[0]
        if self.characters + template.characters > _MAX_DIGEST_CHARACTERS or len(prompt.sequence_plans) > 1:
            return None
        if plan.continuation or plan.targets or plan.states:
            return None
        # The fields, because the repr of a dataclass is slow.
        around = template.prefix, template.middle, template.suffix, prompt.cut, plan.prompt_tokens
        named = repr((salt, *around, self.truncate, self.cut, list(self.texts)))
        return hashlib.blake2b(named.encode(), digest_size=16).digest()

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequences of the texts in the prompt's template; see Source."""
        left = max_total_tokens
        for start, stop in self._parts(prompt.template.characters):
            try:
                sequences = self._sequences(engine, self.texts[start:stop], prompt, left)
            except InvalidInput as error:
                if start and isinstance(error, InputTooLong) and error.field in ("inputs", "labels"):
                    # The error names what was left for this part.
                    raise too_many(max_total_tokens + 1, max_total_tokens, error.field) from error
                rename(error, moved(error.field, start))
                raise
            left -= sum(map(len, sequences))
            yield Tokenized(sequences, salt)

    def _sequences(
        self, engine: PrefillEngine, texts: Sequence[Text], prompt: Prompt, max_total_tokens: int
    ) -> Sequence[Sequence[int]]:
        if self.cut == "right" or not self.truncate:
            return engine.tokenize(texts, self.truncate, prompt, max_total_tokens)
        return cut_left(engine, texts, prompt, max_total_tokens)

    def _parts(self, around: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of texts. around: characters that the template adds to each text."""
        start = characters = 0
        for index, text in enumerate(self.texts):
            added = characters_of(text) + around
            if index > start and (characters + added > _PART_CHARACTERS or index == start + _PART_TEXTS):
                yield start, index
                start, characters = index, 0
            characters += added
        yield start, len(self.texts)


def cut_left(
    engine: PrefillEngine, texts: Sequence[Text], prompt: Prompt, max_total_tokens: int
) -> list[Sequence[int]]:
    """Return the sequences of texts in a prompt, as engine.tokenize does, cut at their beginning.

    The tokens of the text are cut, and those of the prompt never. Raises InvalidInput for a pair, and
    InputTooLong if all sequences have more than `max_total_tokens` tokens together, or if a text has many
    characters and few tokens; see TextTokenizer.turns.
    """
    sequences: list[Sequence[int]] = []
    tokens = 0
    for index, text in enumerate(texts):
        if isinstance(text, tuple):
            raise InvalidInput(
                "truncation_direction left is not accepted for pairs, which are cut at their end",
                field="truncation_direction",
            )
        of_text = _cut_sequences(engine, text, prompt, index)
        tokens += sum(map(len, of_text))
        if tokens > max_total_tokens:
            raise too_many(tokens, max_total_tokens, "inputs")
        sequences += of_text
    return sequences


def _cut_sequences(engine: PrefillEngine, text: str, prompt: Prompt, index: int) -> Sequence[Sequence[int]]:
    """Return the sequences of text `index`, one per plan of the prompt."""
    try:
        return engine.tokenize([text], False, prompt)
    except InputTooLong:
        ids = _last_tokens(engine.tokenizer, text, prompt, f"inputs[{index}]")
    except InvalidInput as error:
        rename(error, f"inputs[{index}]" if error.field == "inputs[0]" else error.field)
        raise
    return continued([TruncatedTokens(ids)], prompt.sequence_plans)


def _last_tokens(tokenizer: TextTokenizer, text: str, prompt: Prompt, field: str) -> list[int]:
    """Return the tokens of a text that is too long in its prompt, without tokenising more than needed.

    Raises InputTooLong if the text would have to be tokenised beyond `max_characters`.
    """
    size, most = _CUT_CHARACTERS_PER_TOKEN * tokenizer.max_tokens, max_characters(tokenizer.max_tokens)
    while size < min(len(text), most):
        start = len(text) - size
        # A long run, such as a number, may be divided from its own beginning on: words have borders.
        border = _BORDER.search(text, start, start + size // 4)
        if border or (4 * size >= most and len(text) > most):
            ends = text[:_FIRST_CHARACTERS] + text[border.end() if border else start :]
            ids, cut = tokenizer.cut_at_beginning(ends, prompt, field)
            if cut >= 2 * _FIRST_CHARACTERS:
                return ids
        size *= 4
    return tokenizer.cut_at_beginning(text, prompt, field)[0]


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """Sequences of token ids, computed as they are: without a prompt, and without further special tokens.

    truncate: cut a sequence that is too long, at the side `cut`, but not the special tokens at its ends: an
    embedding may be read there.
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
        prompt: Prompt,
        salt: bytes | None,
        max_total_tokens: int,
    ) -> Iterator[Tokenized]:
        """Yield the sequences; see Source.

        prompt: `bare_prompt`, which adds nothing. Raises InvalidInput if a number is no token id.
        """
        vocabulary = engine.vocabulary
        part: list[list[int]] = []
        part_tokens = tokens = 0
        for index in range(self.count):
            ids = self._cut(index, engine.tokenizer, prompt, vocabulary)
            tokens += len(ids)
            if tokens > max_total_tokens:
                raise too_many(tokens, max_total_tokens, "inputs")
            if part and part_tokens + len(ids) > _PART_TOKENS:
                yield Tokenized(part, salt)
                part, part_tokens = [], 0
            part.append(ids)
            part_tokens += len(ids)
        yield Tokenized(part, salt)

    def _cut(self, index: int, tokenizer: TextTokenizer, prompt: Prompt, vocabulary: int) -> list[int]:
        ids, maximum = self.sequences[index], tokenizer.max_tokens
        if max(ids) >= vocabulary:
            raise InvalidInput(
                f"inputs[{index}] has a number that is no token id of this model, whose ids are 0 to "
                f"{vocabulary - 1}; send ids as /tokenize gives them, or send text",
                field=f"inputs[{index}]",
            )
        if len(ids) <= maximum:
            return ids
        if not self.truncate:
            raise too_long(maximum, index)
        frame = tokenizer.frame(prompt)
        start = len(frame.before) if ids[: len(frame.before)] == frame.before else 0
        stop = len(ids) - len(frame.after)
        if ids[stop:] != frame.after:
            stop = len(ids)
        surplus = len(ids) - maximum
        first = start if self.cut == "left" else stop - surplus
        return TruncatedTokens((*ids[:first], *ids[first + surplus :]))


def source_of(inputs: list[str] | list[list[int]], truncate: bool, cut: Side) -> Source:
    """Return the source of texts, or of token ids."""
    if isinstance(inputs[0], str):
        return Texts(inputs, truncate, cut)
    return TokenSequences(inputs, truncate, cut)


def prompt_of(engine: PrefillEngine, source: Source, name: str | None) -> Prompt:
    """Return the prompt in which a source is computed.

    name: of one of the checkpoint's prompts; None: the default prompt. Raises InvalidInput if there is none
    of this name, or if the source is token ids.
    """
    if not isinstance(source, TokenSequences):
        return engine.tokenizer.named_prompt(name)
    if name is not None:
        raise InvalidInput(
            "prompt_name is accepted with texts only; token ids are computed as they are, so send the ids of "
            "the prompt too",
            field="prompt_name",
        )
    return bare_prompt(engine)


def bare_prompt(engine: PrefillEngine) -> Prompt:
    """Return the prompt of sequences that stand in no template."""
    if engine.tokenizer.default_prompt.template == Template():
        return engine.tokenizer.default_prompt
    return Prompt(Template(), (SequencePlan(0),))


def moved(field: str | None, start: int) -> str | None:
    """Return the field of a text among all texts, from its field among texts[start:]."""
    return field and re.sub(r"(?<=^inputs\[)\d+(?=\]$)", lambda index: str(int(index[0]) + start), field)
