"""Cut a text before it is tokenised, so that its first tokens stay as they are.

A tokenizer takes microseconds for each character: seconds for a text of megabytes, whose tokens are then cut
to a few hundred.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from attncache_core.errors import InputTooLong

# Of prose. More characters are looked at if the text has fewer tokens.
_CHARACTERS_PER_TOKEN = 8
# A cut changes the tokens of the word that it cuts. Longer words have the same tokens nearly to their end.
_LAST_CHARACTERS = 256
# Of a text that still has too few tokens, no more than this is looked at.
_MAX_CHARACTERS_PER_TOKEN = 64
_ALWAYS_ACCEPTED = 2**16


def max_characters(tokens: int) -> int:
    """Return how many characters a text may have that is tokenised as a whole, in a sequence of `tokens`."""
    return max(_ALWAYS_ACCEPTED, _MAX_CHARACTERS_PER_TOKEN * tokens)


def shortened(tokenizer: Tokenizer, text: str, tokens: int, index: int) -> str:
    """Return text `index`, or a part from its beginning with the same first tokens and more than `tokens`.

    Raises InputTooLong if the text has so few tokens that it would have to be tokenised beyond
    `max_characters`.
    """
    size = _CHARACTERS_PER_TOKEN * tokens
    while size + _LAST_CHARACTERS < len(text):
        if size > max_characters(tokens):
            raise InputTooLong(
                f"inputs[{index}] has more than {max_characters(tokens)} characters, and too few tokens for "
                "its length; shorten the text, and remove what is repeated",
                field=f"inputs[{index}]",
            )
        part = text[: size + _LAST_CHARACTERS]
        offsets = tokenizer.encode(part, add_special_tokens=False).offsets
        if len(offsets) > tokens and offsets[tokens][1] <= size:
            return part
        size *= 4
    return text


def count_tokens(tokenizer: Tokenizer, text: str, tokens: int) -> int:
    """Return how many tokens a text has, for a model whose sequences have `tokens` tokens.

    Of a text with more than `max_characters`, the rest is taken to have as many tokens per character.
    """
    part = text[: max_characters(tokens)]
    count = len(tokenizer.encode(part, add_special_tokens=False))
    return round(count * len(text) / len(part)) if part else 0


def require_few_characters_of_text(text: str, tokens: int, field: str) -> None:
    """Raise InputTooLong, which names `field`, if a text must be tokenised as a whole and is too long."""
    if len(text) > max_characters(tokens):
        raise InputTooLong(
            f"a text of {field} has {len(text)} characters, and at most {max_characters(tokens)} are "
            "accepted; shorten the text",
            field=field,
        )
