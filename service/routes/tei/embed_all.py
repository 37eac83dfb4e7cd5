"""POST /embed_all: an embedding of every token, without pooling."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from service.batching.sources import prompt_of, source_of
from service.routes.common import answer, check_count, computed, json_list
from service.routes.embed import embedding_engine
from service.routes.tei.schemas import EmbedAllRequest
from service.web.call import Answer, CurrentCall


async def embed_all(call: CurrentCall) -> Answer:
    """Embed every token of the inputs: for each input, one list of numbers per token.

    These are what the model's pooling reads, special tokens included. They are not brought to unit length.
    """
    engine, settings = embedding_engine(call), call.state.settings
    body = await call.read(EmbedAllRequest)
    check_count(body.inputs, "inputs", settings.max_request_inputs)
    source = source_of(body.inputs, call.truncates(body.truncate), body.truncation_direction or "right")
    prompt = prompt_of(engine, source, body.prompt_name)
    reading = replace(
        prompt, sequence_plans=tuple(replace(plan, states=True) for plan in prompt.sequence_plans)
    )
    result = await computed(call, source, prompt=reading, salt=call.salt())
    texts = []
    for states in result.token_states or ():
        texts.append(await json_list(states))
        await asyncio.sleep(0)  # other requests are served
    return answer(texts, result, call)
