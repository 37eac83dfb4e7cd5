"""Compute the logits of the labels that a server has: of a classification model, or the operator's labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attncache_core import NoClassifier, class_scores
from attncache_core.heads.vectors import require_finite
from service.batching.pending_request import RequestResult
from service.batching.sources import Source
from service.routes.common import computed
from service.state import Serving
from service.web.call import Call


class Classified(NamedTuple):
    """The logits of the server's labels for some texts."""

    labels: tuple[str, ...]
    logits: np.ndarray  # float32 [texts, labels]
    multi_label: bool  # whether each label is decided by itself
    result: RequestResult

    def scores(self, multi_label: bool | None = None) -> np.ndarray:
        """Return the scores, float32 [texts, labels]. multi_label: None: as the model says."""
        return class_scores(self.logits, multi_label=self.multi_label if multi_label is None else multi_label)


async def classified(
    call: Call, serving: Serving, source: Source, *, reuse: bool, salt: bytes = b""
) -> Classified:
    """Compute texts, or pairs, and return the logits of the server's labels.

    Raises NoClassifier if the server has no labels, and as Batcher.submit.
    """
    engine = serving.engine
    if engine.task == "label-logits":
        labels = engine.labels_in()
        result = await computed(
            call, serving, source, reuse=reuse, prompt=labels.prompt, labels=labels, salt=salt
        )
        logits = engine.label_logits(labels, result.outputs, result.log_probabilities)
        require_finite(np.isfinite(logits).T, "labels")
        return Classified(labels.labels, logits, False, result)
    if engine.labels is None:
        raise NoClassifier("the server has no labels of its own; use /classify, and give labels")
    result = await computed(call, serving, source, reuse=reuse, salt=salt)
    return Classified(engine.labels, engine.class_logits(result.outputs), engine.multi_label, result)
