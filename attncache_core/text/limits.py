"""The limits of what a request may give to the tokenizer: what is cut before, what is refused, the errors.

A tokenizer takes microseconds for each character: seconds for a text of megabytes, whose tokens are then cut
to a few hundred. A text is cut before it is tokenised, and its first tokens stay as they are. What must not
be cut is refused if it has too many characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from attncache_core.checkpoints.template import Template, Text
from attncache_core.errors import InputTooLong, InvalidInput

_T = TypeVar("_T")

# Of prose. More characters are looked at if the text has fewer tokens.
_USUAL_CHARACTERS_PER_TOKEN = 8
# A cut changes the tokens of the word that it cuts. Longer words have the same tokens nearly to their end.
_LAST_CHARACTERS = 256
# Of a text that still has too few tokens, no more than this is looked at.
_MAX_CHARACTERS_PER_TOKEN = 64
_ALWAYS_ACCEPTED = 2**16
# Of a template, a prompt or a label, which are never cut. Prose has fewer on average.
_MAX_UNCUT_CHARACTERS_PER_TOKEN = 16
# Limits for all labels of a request together. The text around a label is tokenised once per label, so this
# many characters take half a second. A token of a label takes 160 bytes until the request is answered.
_MAX_LABEL_CHARACTERS = 2**20
_MAX_LABEL_TOKENS = 2**16


def max_characters(tokens: int) -> int:
    """Return how many characters a text may have that is tokenised as a whole, in a sequence of `tokens`."""
    return max(_ALWAYS_ACCEPTED, _MAX_CHARACTERS_PER_TOKEN * tokens)


def shortened(tokenizer: Tokenizer, text: str, tokens: int, index: int) -> str:
    """Return text `index`, or a part from its beginning with the same first tokens and more than `tokens`.

    A Unigram tokenizer may divide a word that repeats a few characters thousands of times at other places.
    Raises InputTooLong if the text has so few tokens that it would have to be tokenised beyond
    `max_characters`.
    """
    size, most = _USUAL_CHARACTERS_PER_TOKEN * tokens, max_characters(tokens)
    while min(size + _LAST_CHARACTERS, most) < len(text):
        part = text[: size + _LAST_CHARACTERS]
        offsets = encoded(tokenizer, part, f"inputs[{index}]").offsets
        if len(offsets) > tokens and offsets[tokens][1] <= size:
            return part
        if size == most:
            raise InputTooLong(
                f"inputs[{index}] has more than {most} characters, and too few tokens for its length; "
                "shorten the text, and remove what is repeated",
                field=f"inputs[{index}]",
            )
        size = min(4 * size, most)
    return text


def count_tokens(tokenizer: Tokenizer, text: str, tokens: int) -> int:
    """Return how many tokens a text has, for a model whose sequences have `tokens` tokens.

    Of a text with more than `max_characters`, the rest is taken to have as many tokens per character.
    """
    part = text[: max_characters(tokens)]
    count = len(encoded(tokenizer, part, "inputs"))
    return round(count * len(text) / len(part)) if part else 0


def encoded(tokenizer: Tokenizer, text: str, field: str, *, special: bool = False) -> Encoding:
    """Return the tokens of a text. special: add the special tokens that open and close a sequence.

    Raises InvalidInput, which names `field`, if the tokenizer cannot read the text.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except TypeError as error:
        raise InvalidInput(
            f"{field} must be text of Unicode characters, without halves of surrogate pairs", field=field
        ) from error
    # A tokenizer without a token for unknown text raises Exception itself, and no class of its own.
    except Exception as error:
        raise InvalidInput(
            f"{field} has characters that the model's tokenizer has no token for; remove them", field=field
        ) from error


def require_some_tokens(sequences: Sequence[Sequence[int]], first: int = 0, plans: int = 1) -> None:
    """Raise InvalidInput if a sequence has no token.

    first: the number of the first sequence, and plans: how many sequences a text has, for errors.
    """
    for number, ids in enumerate(sequences, first):
        if not len(ids):
            text = f"inputs[{number // plans}]"
            raise InvalidInput(f"{text} has no token that the model knows; change this text", field=text)


def require_few_characters_of_text(text: str, tokens: int, field: str) -> None:
    """Raise InputTooLong, which names `field`, if a text must be tokenised as a whole and is too long."""
    if len(text) > max_characters(tokens):
        raise InputTooLong(
            f"{field} has a text of {len(text)} characters, and at most {max_characters(tokens)} are "
            "accepted; shorten the text",
            field=field,
        )


def require_short(characters: int, max_tokens: int, field: str) -> None:
    """Raise InvalidInput if a text of so many characters can leave no room for an input."""
    if characters > _MAX_UNCUT_CHARACTERS_PER_TOKEN * max_tokens:
        raise no_room(max_tokens, field)


def require_few_label_tokens(tokens: int) -> None:
    """Raise InputTooLong if labels have too many tokens in total."""
    if tokens > _MAX_LABEL_TOKENS:
        raise InputTooLong(
            f"labels have more than {_MAX_LABEL_TOKENS} tokens in total; send fewer or shorter labels",
            field="labels",
        )


def list_of(texts: Iterable[_T], field: str = "texts") -> list[_T]:
    """Return texts as a list.

    Raises InvalidInput for a string, each of whose characters would be a text, and for a mapping or a table,
    each of whose names would be one.
    """
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):
        raise InvalidInput(f"{field} must be a list of texts; of a table, give one column", field=field)
    if not isinstance(texts, Iterable) or isinstance(texts, str | bytes):
        raise InvalidInput(f"{field} must be a list of texts; for one text, give [text]", field=field)
    return list(texts)


def require_distinct(labels: Sequence[str]) -> None:
    """Raise InvalidInput, which names the label, if a label repeats an earlier one."""
    seen: set[str] = set()
    for index, label in enumerate(labels):
        if label in seen:
            raise InvalidInput(f"labels[{index}] repeats an earlier label", field=f"labels[{index}]")
        seen.add(label)


def require_fitting(template: Template, texts: Sequence[Text]) -> None:
    """Raise InvalidInput, which names the text, if a text must be a pair and is none, or must not be one.

    Also if a text is neither a string nor a pair of strings.
    """
    refused = str if template.is_for_pairs else tuple
    for index, text in enumerate(texts):
        if not (isinstance(text, str) or _is_pair(text)):
            raise InvalidInput(
                f"inputs[{index}] must be a string, or a pair: a tuple of two strings",
                field=f"inputs[{index}]",
            )
        if isinstance(text, refused) and template != Template():
            why = (
                "must be a pair, because the template holds {query} and {document}"
                if template.is_for_pairs
                else "is a pair, which takes no template or prompt of one text; send one text"
            )
            raise InvalidInput(f"inputs[{index}] {why}", field=f"inputs[{index}]")


def _is_pair(text: object) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


def too_long(room: int, index: int) -> InputTooLong:
    """Return the error for text `index`, which has more than `room` tokens."""
    return InputTooLong(
        f"inputs[{index}] has more than {room} tokens; shorten the text or allow truncation",
        field=f"inputs[{index}]",
    )


def require_few_characters(template: Template, texts: int, max_total_tokens: int) -> None:
    """Raise InputTooLong if a template around this many texts must exceed `max_total_tokens` tokens."""
    maximum, around = _MAX_UNCUT_CHARACTERS_PER_TOKEN * max_total_tokens, template.characters
    if around * texts > maximum:
        raise InputTooLong(
            f"the template has {around} characters, and with {texts} inputs at most {maximum // texts} are "
            "accepted; send fewer inputs or a shorter template",
            field="template" if around > maximum else "inputs",
        )


def require_few_label_characters(before: int, labels: Sequence[str]) -> None:
    """Raise InputTooLong if labels have too many characters; `before` characters are added to each label."""
    repeated, single = before * len(labels), sum(map(len, labels))
    if repeated + single > _MAX_LABEL_CHARACTERS:
        raise InputTooLong(
            f"labels, each counted with the template's text before it, have {repeated + single} characters "
            f"in total, and at most {_MAX_LABEL_CHARACTERS} are accepted; shorten the template after {{}}, "
            "or send fewer or shorter labels",
            field="template" if repeated > single else "labels",
        )


def no_room(max_tokens: int, field: str) -> InvalidInput:
    """Return the error for a value that leaves no room for a text."""
    return InvalidInput(
        f"{field}: there is no room left for a text within {max_tokens} tokens; shorten this value",
        field=field,
    )


class NoRoomBesideQuery(InvalidInput):
    """A query in a template of pairs leaves no room for its document."""


def no_room_beside_query(max_tokens: int, field: str) -> NoRoomBesideQuery:
    """Return the error for a pair whose query leaves no room for its document; `field` is the pair's."""
    return NoRoomBesideQuery(
        f"{field}: the query leaves no room for a document within {max_tokens} tokens; shorten the query",
        field=field,
    )


def too_many(tokens: int, maximum: int, field: str) -> InputTooLong:
    """Return the error for sequences with more tokens together than a request may have."""
    shorten = f"send fewer or shorter {'labels or inputs' if field == 'labels' else 'ones'}"
    return InputTooLong(
        f"{field} make sequences with {tokens} tokens or more, and a request may have {maximum}: {shorten}",
        field=field,
    )
