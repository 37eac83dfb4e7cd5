"""The tokens of a text with the characters that they stand for."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Encoding


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
