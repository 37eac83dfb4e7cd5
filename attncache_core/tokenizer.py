"""Texts to token sequences, as the checkpoint's own library would make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from attncache_core.checkpoint import Checkpoint
from attncache_core.errors import InputTooLong, InvalidInput, UnsupportedModel
from attncache_core.loading import loading
from attncache_core.prompts import Prompt, Reading, Template

# A tokenizer without a limit of its own says 10^30.
_NO_LIMIT = 10**9
# Stands for whatever text a template is put round.
_ANY_TEXT = "text"
# What has more characters than this for each token that it may have is refused before it is tokenised. No
# prose has so many on average.
_CHARACTERS_PER_TOKEN = 16
# A tokenizer takes up to 430 bytes for each character while it works: so many are given to it at a time.
_CHARACTERS_AT_ONCE = 2**18
# Of all labels of a request together. The template's end is tokenised anew with each of them: half a second
# of work. What is made of a token of theirs takes 160 bytes until the request is answered.
_MOST_LABEL_CHARACTERS = 2**20
_MOST_LABEL_TOKENS = 2**16


class TextTokenizer:
    """A fast tokenizer with the checkpoint's template, case and longest sequence. Thread safe."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int | None = None) -> None:
        """max_tokens: cut texts to so many, if that is fewer than the model takes.

        Raises UnsupportedModel, and InvalidInput for a template that leaves no room for a text.
        """
        if not checkpoint.vocabularies:
            # transformers would make one that knows no word.
            raise UnsupportedModel(f"model folder {checkpoint.folder} has no tokenizer.json", field="model")
        with loading(f"the tokenizer of model {checkpoint.name}"):
            loaded = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
        if not loaded.is_fast:
            raise UnsupportedModel(
                f"model {checkpoint.name} has no fast tokenizer (tokenizer.json)", field="model"
            )
        limits = [
            checkpoint.max_tokens or loaded.model_max_length,
            checkpoint.position_limit or _NO_LIMIT,
            max_tokens or _NO_LIMIT,
        ]
        self.max_tokens = int(min(limits))
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        if checkpoint.lowercase:
            # In the tokenizer, which leaves special tokens in a text alone.
            own = [self._tokenizer.normalizer] if self._tokenizer.normalizer else []
            self._tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._tokenizer.no_padding()
        # Texts are cut here: the tokenizer would cut what stands behind them.
        self._tokenizer.no_truncation()
        self.default_prompt = self.prompt(checkpoint.template)

    def prompt(self, template: Template, *, field: str = "template", continued: int = 0) -> Prompt:
        """The template made ready, to be continued by so many tokens at most.

        Raises InvalidInput if there is no room left for a text: it names `field`, or the labels where it is
        their tokens that take it.
        """
        self._require_short(template.prefix + template.suffix, field)
        if template != Template() or continued:
            taken = len(self._tokenizer.encode(template.around("")).ids)
            if taken >= self.max_tokens:
                raise _no_room(self.max_tokens, field)
            if taken + continued >= self.max_tokens:
                raise _no_room(self.max_tokens, "labels")
        return Prompt(template, (Reading(self._front_tokens(template.prefix)),))

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        truncate: bool,
        prompt: Prompt | None = None,
        most_tokens: int | None = None,
    ) -> list[list[int]]:
        """Token ids of each text in its template, at most `max_tokens` each: one sequence for each reading.

        A text is cut at its end; the template, what continues it, and the tokens that open and close a
        sequence stay whole. Raises InputTooLong, naming the text, if one is longer and `truncate` is False,
        and if all sequences together would have more than `most_tokens`; also, before anything is tokenised,
        if the template is too long to be put round so many texts.
        """
        prompt = prompt or self.default_prompt
        template, readings = prompt.template, prompt.readings
        if most_tokens is not None:
            _require_few_characters(template, len(texts), most_tokens)
        room = self.max_tokens - max(len(reading.continuation) for reading in readings)
        continued = sum(len(reading.continuation) for reading in readings)
        sequences: list[list[int]] = []
        tokens = 0  # of all sequences: a text stands in that of every reading
        for index, ids in enumerate(self._encoded(template.around(text) for text in texts)):
            if len(ids) > room:
                if not truncate:
                    raise InputTooLong(
                        f"the text has more than {room} tokens; shorten it or allow truncation",
                        field=f"inputs[{index}]",
                    )
                ids = self._cut(texts[index], template, len(ids) - room)
            tokens += len(readings) * len(ids) + continued
            if most_tokens is not None and tokens > most_tokens:
                raise _too_many(tokens, most_tokens, "labels" if continued else "inputs")
            sequences.append(ids)
        return [[*ids, *reading.continuation] for ids in sequences for reading in readings]

    def require_open_end(self) -> None:
        """Raise UnsupportedModel if every text is closed with a token, which would stand before a label."""
        if self._tokenizer.encode(_ANY_TEXT).special_tokens_mask[-1]:
            raise UnsupportedModel(
                "the tokenizer closes every text with a token of its own, which no label can follow",
                field="model",
            )

    def continuations(self, template: Template, labels: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens with which each label continues a text in this template.

        A space stands before a label unless the template ends in white space. Raises InvalidInput, naming
        the label, if it has no token of its own, and InputTooLong if the labels have too many; also, before
        anything is tokenised, if they or the template's end are too long.
        """
        # What stands before the text does not change how the end is divided.
        before = _ANY_TEXT + template.suffix
        self._require_short(before, "template")
        for index, label in enumerate(labels):
            self._require_short(label, f"labels[{index}]")
        _require_few_label_characters(len(before), labels)
        space = "" if before[-1].isspace() else " "
        encoded = self._encoded([before, *(before + space + label for label in labels)], special=False)
        known, tokens = next(encoded), 0
        continuations: list[tuple[int, ...]] = []
        for index, ids in enumerate(encoded):
            if ids[: len(known)] != known or len(ids) == len(known):
                raise InvalidInput(
                    f"labels[{index}] has no tokens of its own behind the template; if this ends in a space, "
                    "leave the space out",
                    field=f"labels[{index}]",
                )
            continuations.append(tuple(ids[len(known) :]))
            tokens += len(continuations[-1])
            if tokens > _MOST_LABEL_TOKENS:
                raise InputTooLong(
                    f"labels have more than {_MOST_LABEL_TOKENS} tokens in all; give fewer or shorter labels",
                    field="labels",
                )
        return continuations

    @property
    def vocabulary(self) -> int:
        """Number of token ids: the highest id that a text can have, plus one."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the checkpoint's template takes at the front of a sequence."""
        return self.default_prompt.readings[0].prompt_tokens

    def _encoded(self, texts: Iterable[str], *, special: bool = True) -> Iterator[list[int]]:
        """Token ids of each text, a few texts at a time; special: with the tokens that open and close it."""
        for some in _few_at_a_time(texts):
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=special):
                yield encoding.ids

    def _require_short(self, text: str, field: str) -> None:
        """Raise InvalidInput for what is so long that no text has room beside it."""
        if len(text) > _CHARACTERS_PER_TOKEN * self.max_tokens:
            raise _no_room(self.max_tokens, field)

    def _cut(self, text: str, template: Template, surplus: int) -> list[int]:
        """The text's tokens in its template without the last `surplus` ones of the text."""
        encoding = self._tokenizer.encode(template.around(text))
        first, end = len(template.prefix), len(template.prefix) + len(text)
        # A token on the border counts to the text before it, but to the template behind it.
        own = [
            place
            for place, ((_, stop), special) in enumerate(
                zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            )
            if first < stop <= end and not special
        ]
        if surplus > len(own):
            raise _no_room(self.max_tokens, "template")
        gone = set(own[len(own) - surplus :])
        return [token for place, token in enumerate(encoding.ids) if place not in gone]

    def _front_tokens(self, prefix: str) -> int:
        """Tokens that a prefix takes at the front of a sequence, leading special tokens included."""
        if not prefix:
            return 0
        encoded = self._tokenizer.encode(prefix)
        # The token that closes every sequence is not the prefix's.
        return len(encoded.ids) - encoded.special_tokens_mask[-1]


def _few_at_a_time(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in parts of few characters, or of one text."""
    part: list[str] = []
    characters = 0
    for text in texts:
        if part and characters + len(text) > _CHARACTERS_AT_ONCE:
            yield part
            part, characters = [], 0
        part.append(text)
        characters += len(text)
    if part:
        yield part


def _require_few_characters(template: Template, texts: int, most_tokens: int) -> None:
    """Raise InputTooLong if a template is too long to be put round so many texts."""
    most, own = _CHARACTERS_PER_TOKEN * most_tokens, len(template.prefix) + len(template.suffix)
    if own * texts > most:
        raise InputTooLong(
            f"the template has {own} characters, and round {texts} inputs at most {most // texts} are taken; "
            "give fewer inputs or a shorter template",
            field="template" if own > most else "inputs",
        )


def _require_few_label_characters(before: int, labels: Sequence[str]) -> None:
    """Raise InputTooLong if labels are too long, or too many for the `before` characters in front of each."""
    repeated, own = before * len(labels), sum(map(len, labels))
    if repeated + own > _MOST_LABEL_CHARACTERS:
        raise InputTooLong(
            f"labels, each with what stands before it in the template, have {repeated + own} characters in "
            f"all, and at most {_MOST_LABEL_CHARACTERS} are taken; shorten the template behind {{}}, or give "
            "fewer or shorter labels",
            field="template" if repeated > own else "labels",
        )


def _no_room(max_tokens: int, field: str) -> InvalidInput:
    return InvalidInput(
        f"{field}: there is no room left for a text within {max_tokens} tokens; shorten what is given",
        field=field,
    )


def _too_many(tokens: int, most: int, field: str) -> InputTooLong:
    shorten = (
        "give fewer or shorter labels or inputs" if field == "labels" else "give fewer or shorter inputs"
    )
    return InputTooLong(
        f"{field} make sequences of {tokens} tokens or more, and a request may have {most}: {shorten}",
        field=field,
    )
