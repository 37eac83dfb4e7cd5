"""The log-probabilities of tokens that requests ask for, read from the last hidden states of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core.engine.request import PrefillRequest
from attncache_core.models import PackedModel
from attncache_core.text.prompts import Target
from attncache_core.text.token_batch import TokenBatch


def targets_of(request: PrefillRequest) -> Sequence[Target]:
    """Return the targets of a request."""
    return request.sequence_plan.targets if request.sequence_plan else ()


def log_probabilities(
    model: PackedModel, batch: TokenBatch, hidden: torch.Tensor, requests: Sequence[PrefillRequest]
) -> list[np.ndarray] | None:
    """Return the log-probabilities of each request's targets; None if no request has targets.

    hidden: output of the last layer, [tokens, hidden]. requests: the sequences of the batch, in the caller's
    order.
    """
    targets = [targets_of(request) for request in requests]
    counts = [len(own) for own in targets]
    if not any(counts) or model.language_head is None:
        return None
    backs, tokens = np.array([target for own in targets for target in own], dtype=np.int64).T
    lengths = np.array([len(request.ids) for request in requests], dtype=np.int64)
    sequences = np.repeat(np.arange(len(requests)), counts)
    rows = batch.rows(sequences, lengths[sequences] - 1 - backs)
    found = (
        model.language_head.log_probabilities(
            hidden,
            torch.from_numpy(rows).to(hidden.device),
            torch.from_numpy(np.ascontiguousarray(tokens)).to(hidden.device),
        )
        .cpu()
        .numpy()
    )
    return np.split(found, np.cumsum(counts)[:-1])
