"""POST /predict: texts, or pairs of texts, to the server's labels with scores."""

from __future__ import annotations

import numpy as np

from attncache_core import InvalidInput
from service.batching.sources import Texts
from service.routes.classify import Classified, best_first, classified
from service.routes.common import answer, check_count, json_list
from service.routes.tei.schemas import PredictRequest
from service.web.call import Answer, CurrentCall


async def predict(call: CurrentCall) -> Answer:
    """Score the labels of the server for each text or pair, best first."""
    body = await call.read(PredictRequest)
    check_count(body.inputs.texts, "inputs", call.state.settings.max_request_inputs)
    if body.parameters is not None and not body.inputs.is_list and isinstance(body.inputs.texts[0], tuple):
        # A pair for clients of text-embeddings-inference, and two texts for those that send parameters.
        raise InvalidInput(
            "inputs with parameters must not be a list of two texts; send [[text], [text]] for two texts, or "
            "[[text, text]] for a pair",
            field="inputs",
        )
    source = Texts(body.inputs.texts, call.truncates(body.truncate), body.truncation_direction or "right")
    found = await classified(call, source, salt=call.salt())
    maximum = body.parameters.top_k if body.parameters else None
    scored = zip(found.logits, _scores(found, body).tolist(), strict=True)
    rows = (
        [{"score": scores[column], "label": found.labels[column]} for column in best_first(logits)[:maximum]]
        for logits, scores in scored
    )
    is_list = body.inputs.is_list or body.parameters is not None
    return answer(await json_list(rows) if is_list else next(rows), found.result, call)


def _scores(found: Classified, body: PredictRequest) -> np.ndarray:
    """Return scores, float32 [texts, labels], as the request asks for."""
    function = body.parameters.function_to_apply if body.parameters else None
    if body.raw_scores or function == "none":
        return found.logits
    return found.scores(None if function is None else function == "sigmoid")
