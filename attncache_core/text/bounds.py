"""The bounds of what a request may give to the tokenizer, and the errors for texts that exceed them.

Bounds on characters are checked before the tokenizer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from attncache_core.checkpoints.template import Template, Text
from attncache_core.errors import InputTooLong, InvalidInput

# A text with more characters per allowed token is refused before tokenisation. Prose has fewer on average.
_CHARACTERS_PER_TOKEN = 16
# Limits for all labels of a request together. The text around a label is tokenised once per label, so this
# many characters take half a second. A token of a label takes 160 bytes until the request is answered.
_MAX_LABEL_CHARACTERS = 2**20
_MAX_LABEL_TOKENS = 2**16


def is_separated(template: Template, text: Text) -> bool:
    """Return whether a text is a pair that stands between the checkpoint's separators."""
    return isinstance(text, tuple) and not template.is_for_pairs


def require_short(characters: int, max_tokens: int, field: str) -> None:
    """Raise InvalidInput if a text of so many characters can leave no room for an input."""
    if characters > _CHARACTERS_PER_TOKEN * max_tokens:
        raise no_room(max_tokens, field)


def require_few_label_tokens(tokens: int) -> None:
    """Raise InputTooLong if labels have too many tokens in total."""
    if tokens > _MAX_LABEL_TOKENS:
        raise InputTooLong(
            f"labels have more than {_MAX_LABEL_TOKENS} tokens in total; send fewer or shorter labels",
            field="labels",
        )


def require_fitting(template: Template, text: Text, index: int) -> None:
    """Raise InvalidInput if text `index` must be a pair and is none, or must not be one and is."""
    if template.is_for_pairs and isinstance(text, str):
        raise InvalidInput(
            f"inputs[{index}] must be a pair, because the template holds {{query}} and {{document}}",
            field=f"inputs[{index}]",
        )
    if is_separated(template, text) and template != Template():
        raise InvalidInput(
            f"inputs[{index}] is a pair, which takes no template or prompt of one text; send one text",
            field=f"inputs[{index}]",
        )


def too_long(room: int, index: int) -> InputTooLong:
    """Return the error for text `index`, which has more than `room` tokens."""
    return InputTooLong(
        f"inputs[{index}] has more than {room} tokens; shorten the text or allow truncation",
        field=f"inputs[{index}]",
    )


def require_few_characters(template: Template, texts: int, max_total_tokens: int) -> None:
    """Raise InputTooLong if a template around this many texts must exceed `max_total_tokens` tokens."""
    most, own = _CHARACTERS_PER_TOKEN * max_total_tokens, template.characters
    if own * texts > most:
        raise InputTooLong(
            f"the template has {own} characters, and with {texts} inputs at most {most // texts} are "
            "accepted; send fewer inputs or a shorter template",
            field="template" if own > most else "inputs",
        )


def require_few_label_characters(before: int, labels: Sequence[str]) -> None:
    """Raise InputTooLong if labels have too many characters; `before` characters are added to each label."""
    repeated, own = before * len(labels), sum(map(len, labels))
    if repeated + own > _MAX_LABEL_CHARACTERS:
        raise InputTooLong(
            f"labels, each counted with the template's text before it, have {repeated + own} characters in "
            f"total, and at most {_MAX_LABEL_CHARACTERS} are accepted; shorten the template after {{}}, or "
            "send fewer or shorter labels",
            field="template" if repeated > own else "labels",
        )


def no_room(max_tokens: int, field: str) -> InvalidInput:
    """Return the error for a value that leaves no room for a text."""
    return InvalidInput(
        f"{field}: there is no room left for a text within {max_tokens} tokens; shorten this value",
        field=field,
    )


def too_many(tokens: int, most: int, field: str) -> InputTooLong:
    """Return the error for sequences with more tokens together than a request may have."""
    shorten = (
        "send fewer or shorter labels or inputs" if field == "labels" else "send fewer or shorter inputs"
    )
    return InputTooLong(
        f"{field} make sequences with {tokens} tokens or more, and a request may have {most}: {shorten}",
        field=field,
    )
