"""What is loaded, as plain data for people and for /info."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncache_core import native
from attncache_core.engine.blending import BlendInfo
from attncache_core.reuse.kv.info import KeyValueInfo, key_value_info
from attncache_core.reuse.maps.info import DatabaseInfo, GainInfo

if TYPE_CHECKING:
    from attncache_core.engine.prefill import PrefillEngine


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
    gain: GainInfo | None  # None: not measured
    database: DatabaseInfo | None
    key_values: KeyValueInfo | None  # None: no keys and values are stored
    key_values_off: str | None  # why, if `key_values` is None
    blending: BlendInfo | None = None  # None: no gate was given, so chunks are computed exactly


def engine_info(engine: PrefillEngine) -> EngineInfo:
    """Return what is loaded, for people and /info."""
    reuse = engine.map_reuse
    return EngineInfo(
        model=engine.checkpoint.name,
        model_source=engine.checkpoint.source,
        revision=engine.checkpoint.revision,
        commit=engine.checkpoint.commit,
        fingerprint=engine.fingerprint,
        variant=engine.checkpoint.variant,
        task=engine.task,
        labels=list(engine.labels or engine.checkpoint.labels),
        template=str(engine.checkpoint.template),
        prompts=dict(engine.checkpoint.prompts),
        pooling=engine.checkpoint.pooling.modes if engine.task == "embed" else None,
        dimensions=engine.dimensions,
        matryoshka_dimensions=engine.checkpoint.matryoshka_dimensions,
        max_tokens=engine.max_tokens,
        dtype=str(engine.dtype).removeprefix("torch."),
        device=str(engine.model.device),
        threads=engine.threads,
        attention=native.level() or "torch",
        compiled_off=native.compiled_off() if engine.model.device.type == "cpu" else None,
        reuse_off=list(engine.reuse_off),
        gain=reuse.gain.info(reuse.policy.names()) if reuse and reuse.gain else None,
        database=reuse.info() if reuse else None,
        key_values=key_value_info(engine.key_values.store) if engine.key_values else None,
        key_values_off=None if engine.key_values else engine.key_values_off,
        blending=engine.blending.info(),
    )
