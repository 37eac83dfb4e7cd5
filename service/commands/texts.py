"""Exclude texts, for example evaluation texts, from a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attncache_core import PrefillEngine
from attncache_core.corpus.reading import read_texts


def kept_indices(engine: PrefillEngine, texts: Sequence[str], excluded: Iterable[str]) -> list[int]:
    """Return the indices of the texts whose tokens differ from the tokens of all excluded texts.

    excluded: files with texts, as `read_texts` reads them.
    """
    excluded_ids = {tuple(ids) for source in excluded for ids in engine.tokenize(read_texts(source))}
    return [index for index, ids in enumerate(engine.tokenize(texts)) if tuple(ids) not in excluded_ids]
