"""POST /v1/classify: texts to the probabilities of the server's labels, as clients of vLLM read them."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, Field

from service.batching.sources import Texts
from service.routes.classify import classified
from service.routes.common import answer, check_count, json_list, named
from service.routes.openai.models import check_model_name, served_name
from service.routes.openai.schemas import ModelName, Salt, Usage, User, usage_of
from service.schemas import Body, Inputs
from service.web.call import Answer, CurrentCall


class ClassificationRequest(Body):
    """The body of POST /v1/classify."""

    input: Inputs = Field(description="One text or a list of texts.")
    model: ModelName = None
    use_activation: bool | None = Field(
        None, description="false returns logits instead of probabilities. Default: true."
    )
    user: User = None
    cache_salt: Salt = None


class Classification(BaseModel):
    """The class of one text."""

    index: int
    label: str  # of the highest probability
    probs: list[float]  # one per class, in the order of the classes
    num_classes: int


class Classifications(BaseModel):
    """The response of POST /v1/classify."""

    id: str
    object: Literal["list"]
    created: int  # Unix time
    model: str
    data: list[Classification]
    usage: Usage


async def create_classifications(call: CurrentCall) -> Answer:
    """Return the probabilities of the labels of the server for each text."""
    settings = call.state.settings
    body = await call.read(ClassificationRequest)
    check_model_name(body.model, settings)
    check_count(call, body.input, "input")
    source = Texts(body.input, settings.truncate)
    with named("input"):
        found = await classified(call, source, salt=call.salt(body.cache_salt))
    rows = found.logits if body.use_activation is False else found.scores()
    best = found.logits.argmax(axis=1).tolist()
    data = (
        {"index": index, "label": found.labels[column], "probs": row, "num_classes": len(found.labels)}
        for index, (column, row) in enumerate(zip(best, rows, strict=True))
    )
    content = {
        "id": f"classify-{call.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": served_name(settings),
        "data": await json_list(data),
        "usage": usage_of(found.result, settings),
    }
    return answer(content, found.result, call)
