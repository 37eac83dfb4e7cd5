"""What is loaded, as plain data for people and for /info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attncache_core.reuse.kv.info import KeyValueInfo
from attncache_core.reuse.maps.info import DatabaseInfo


@dataclass(frozen=True)
class EngineInfo:
    """An engine: its model, how it runs, and what it reuses."""

    model: str
    model_source: str
    revision: str | None  # requested branch, tag or commit on the Hub
    commit: str | None  # commit that was loaded
    fingerprint: str
    variant: Mapping[str, Any]  # quantisation and dropped layers
    task: str
    labels: list[str]
    template: str
    prompts: Mapping[str, str]  # name -> what the prompt puts in front of a text
    pooling: tuple[str, ...] | None  # None if the model does not embed
    dimensions: int | None  # of an embedding; None if the model does not embed
    matryoshka_dimensions: tuple[int, ...]  # fewer dimensions that may be requested; empty: any number
    max_tokens: int
    dtype: str
    device: str
    threads: int
    attention: str  # level of the compiled kernel, or "torch"
    compiled_off: str | None  # why nothing compiled computes on this CPU, and what helps; None: it does
    reuse_off: list[str]  # reasons why reuse is off although a database is set
    gain: Mapping[str, Any] | None  # see MeasuredGain.info; None: not measured
    database: DatabaseInfo | None
    key_values: KeyValueInfo | None  # None: no keys and values are stored
    key_values_off: str | None  # why, if `key_values` is None
    # See Blending.info; None: no gate was given, so chunks are computed exactly.
    blending: Mapping[str, Any] | None = None
