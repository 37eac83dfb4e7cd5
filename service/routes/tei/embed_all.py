"""POST /embed_all: an embedding of every token, without pooling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import orjson

from attncache_core import PrefillEngine
from attncache_core.text.prompts import Prompt
from service.batching.sources import Source, Tokenized, prompt_of, source_of
from service.routes.common import answer, check_count, computed
from service.routes.embed import embedding_server
from service.routes.tei.schemas import EmbedAllRequest
from service.web.call import Answer, CurrentCall

# Of one response, which has some 12 bytes per number.
_MAX_NUMBERS = 2**23
# Tokens are written as JSON in parts, because other requests wait for the interpreter meanwhile.
_PART_TOKENS = 64


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
    content = await asyncio.to_thread(_json, result.token_states or ())
    return answer(orjson.Fragment(content), result, call)


def _json(states: Sequence[np.ndarray]) -> bytes:
    """Return states, each float32 [tokens, hidden], as JSON."""
    return b"[" + b",".join(map(_json_of_text, states)) + b"]"


def _json_of_text(states: np.ndarray) -> bytes:
    parts = (
        orjson.dumps(states[first : first + _PART_TOKENS], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        for first in range(0, len(states), _PART_TOKENS)
    )
    return b"[" + b",".join(parts) + b"]"
