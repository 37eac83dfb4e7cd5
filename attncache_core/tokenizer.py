"""Texts to token sequences, as the checkpoint's own library would make them."""

from __future__ import annotations

from collections.abc import Sequence

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


class TextTokenizer:
    """A fast tokenizer with the checkpoint's template, case and longest sequence. Thread safe."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int | None = None) -> None:
        """max_tokens: cut texts to so many, if that is fewer than the model takes.

        Raises UnsupportedModel, and InvalidInput for a template that leaves no room for a text.
        """
        if not checkpoint.tokenizer_files:
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
        and if all sequences together would have more than `most_tokens`.
        """
        prompt = prompt or self.default_prompt
        template, readings = prompt.template, prompt.readings
        room = self.max_tokens - max(len(reading.continuation) for reading in readings)
        encodings = self._tokenizer.encode_batch_fast([template.around(text) for text in texts])
        sequences: list[list[int]] = [encoding.ids for encoding in encodings]
        for index, ids in enumerate(sequences):
            if len(ids) > room:
                if not truncate:
                    raise InputTooLong(
                        f"the text has more than {room} tokens; shorten it or allow truncation",
                        field=f"inputs[{index}]",
                    )
                sequences[index] = self._cut(texts[index], template, len(ids) - room)
        # Before they are made: a text stands in the sequence of every reading.
        continued = sum(len(reading.continuation) for reading in readings)
        tokens = len(readings) * sum(map(len, sequences)) + len(texts) * continued
        if most_tokens is not None and tokens > most_tokens:
            raise _too_many(tokens, most_tokens, "labels" if continued else "inputs")
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
        the label, if it has no token of its own.
        """
        # What stands before the text does not change how the end is divided.
        before = _ANY_TEXT + template.suffix
        space = "" if before[-1].isspace() else " "
        known, *continued = (
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(
                [before, *(before + space + label for label in labels)], add_special_tokens=False
            )
        )
        for index, ids in enumerate(continued):
            if ids[: len(known)] != known or len(ids) == len(known):
                raise InvalidInput(
                    f"labels[{index}] has no tokens of its own behind the template; if this ends in a space, "
                    "leave the space out",
                    field=f"labels[{index}]",
                )
        return [tuple(ids[len(known) :]) for ids in continued]

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the checkpoint's template takes at the front of a sequence."""
        return self.default_prompt.readings[0].prompt_tokens

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
        f"{field} make sequences of {tokens} tokens in all, and a request may have {most}: {shorten}",
        field=field,
    )
