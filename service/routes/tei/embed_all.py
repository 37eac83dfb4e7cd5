"""POST /embed_all: an embedding of every token, without pooling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncache_core import PrefillEngine
from attncache_core.text.prompts import Prompt
from service.batching.sources import Source, Tokenized, prompt_of, source_of
from service.routes.common import answer, check_count, computed, json_list
from service.routes.embed import embedding_server
from service.routes.tei.schemas import EmbedAllRequest
from service.web.call import Answer, CurrentCall

# Of one response, which has some 12 bytes per number.
_MAX_NUMBERS = 2**23


@dataclass(frozen=True, slots=True)
class _Limited:
    """A source of at most `max_total_tokens` tokens."""

    source: Source
    max_total_tokens: int

    @property
    def count(self) -> int:
        """The number of texts."""
        return self.source.count

    @property
    def characters(self) -> int:
        """The number of characters of all texts, about."""
        return self.source.characters

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequences of the source; see Source."""
        return self.source.tokenize(engine, prompt, salt, min(max_total_tokens, self.max_total_tokens))


async def embed_all(call: CurrentCall) -> Answer:
    """Embed every token of the inputs: for each input, one list of numbers per token.

    These are what the model's pooling reads, special tokens included. They are not brought to unit length.
    """
    serving, settings = embedding_server(call), call.state.settings
    engine = serving.engine
    reuse = call.reuse_requested()
    body = await call.read(EmbedAllRequest)
    check_count(body.inputs, "inputs", settings.max_request_inputs)
    source = source_of(body.inputs, call.truncates(body.truncate), body.truncation_direction or "right")
    prompt = prompt_of(engine, source, body.prompt_name) or engine.tokenizer.default_prompt
    reading = replace(
        prompt, sequence_plans=tuple(replace(plan, states=True) for plan in prompt.sequence_plans)
    )
    limited = _Limited(source, _MAX_NUMBERS // engine.model.hidden_size)
    result = await computed(call, serving, limited, reuse=reuse, prompt=reading, salt=call.salt())
    texts = []
    for states in result.token_states or ():
        texts.append(await json_list(states))
        await asyncio.sleep(0)  # other requests are served
    return answer(texts, result, call)
