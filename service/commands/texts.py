"""Texts that must not be where others are: evaluated ones, for one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attncache_core import PrefillEngine
from attncache_core.corpus.reading import read_texts


def places_without(engine: PrefillEngine, texts: Sequence[str], left_out: Iterable[str]) -> list[int]:
    """The places of those texts that are none of those left out, to a model: other tokens.

    left_out: files, as read_texts reads them.
    """
    gone = {tuple(ids) for source in left_out for ids in engine.tokenize(read_texts(source))}
    return [place for place, ids in enumerate(engine.tokenize(texts)) if tuple(ids) not in gone]
