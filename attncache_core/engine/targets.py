"""What requests ask for beside their outputs, read from the last hidden states of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attncache_core.engine.request import PrefillRequest
from attncache_core.models import PackedModel
from attncache_core.text.token_batch import TokenBatch


def log_probabilities(
    model: PackedModel, batch: TokenBatch, hidden: torch.Tensor, requests: Sequence[PrefillRequest]
) -> list[np.ndarray] | None:
    """Return the log-probabilities of each request's targets; None if no request has targets.

    hidden: output of the last layer, [tokens, hidden]. requests: the sequences of the batch, in the caller's
    order.
    """
    plans = [request.sequence_plan for request in requests]
    targets = [plan.targets if plan else () for plan in plans]
    counts = [len(of_sequence) for of_sequence in targets]
    if not any(counts) or model.language_head is None:
        return None
    backs, tokens = np.array([target for of_sequence in targets for target in of_sequence], dtype=np.int64).T
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


def token_states(
    model: PackedModel, batch: TokenBatch, hidden: torch.Tensor, requests: Sequence[PrefillRequest]
) -> list[np.ndarray] | None:
    """Return the last states of each request's tokens, which pooling reads; None if no request reads them.

    Arguments: see log_probabilities; the batch has no tree. A request that does not read them has no state.
    """
    if not any(request.reads_states for request in requests):
        return None
    found = [np.zeros((0, hidden.shape[1]), dtype=np.float32)] * len(requests)
    for place, index in enumerate(batch.order.tolist()):
        if requests[index].reads_states:
            rows = hidden[int(batch.offsets[place]) : int(batch.offsets[place + 1])]
            found[index] = model.outputs.states(rows).cpu().numpy()
    return found
