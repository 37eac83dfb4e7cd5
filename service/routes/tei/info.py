"""What clients of text-embeddings-inference read in GET /info."""

from __future__ import annotations

from typing import Any

from attncache_core import PrefillEngine
from attncache_core.engine.info import EngineInfo
from service.routes.served_names import served_name
from service.settings import Settings


def tei_info(engine: PrefillEngine, info: EngineInfo, settings: Settings) -> dict[str, Any]:
    """Return the fields of TEI's /info. info: of the engine."""
    return {
        "model_id": served_name(settings),
        "model_sha": info.commit,
        "model_dtype": info.dtype,
        "model_type": _model_type(engine, info),
        "max_concurrent_requests": settings.max_queue_sequences,
        "max_input_length": info.max_tokens,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": settings.max_batch_sequences,
        "max_client_batch_size": settings.max_request_inputs,
        "auto_truncate": settings.truncate,
        "tokenization_workers": engine.parallel_runs,
    }


def _model_type(engine: PrefillEngine, info: EngineInfo) -> dict[str, Any]:
    if info.task == "embed":
        return {"embedding": {"pooling": "+".join(info.pooling or ())}}
    labels = info.labels
    kind = "reranker" if engine.pair_scores.supported else "classifier"
    return {
        kind: {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
        }
    }
