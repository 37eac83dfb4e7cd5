"""Listwise reranking: a decoder reads all documents in one prompt, and names the best one by its letter.

The logits of the letters score all documents at once, from the first token that the model would write (Reddy
et al. 2024, FIRST). A letter stands in front of its document and is no part of it, so the keys and values of
a document can be reused wherever it stands in the list.
"""

from __future__ import annotations

from string import ascii_uppercase

from attncache_core.checkpoints.template import Template
from attncache_core.errors import InvalidInput

LETTERS = tuple(ascii_uppercase)
TEMPLATE = Template.parse("Query: {}\nThe letter of the document that answers the query best:")


def headings(count: int) -> list[str]:
    """Return what stands in front of each of `count` documents. Raises InvalidInput if there are too many."""
    if count > len(LETTERS):
        raise InvalidInput(
            f"there are {count} documents, and a list has at most {len(LETTERS)}; send fewer",
            field="segments",
        )
    return [f"[{letter}] " for letter in LETTERS[:count]]
