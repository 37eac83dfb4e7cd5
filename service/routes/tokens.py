"""POST /tokenize and POST /decode: texts to tokens, and tokens to texts. Nothing is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, Field

from attncache_core import InputTooLong, InvalidInput
from attncache_core.text.prompts import Piece
from service.routes.common import check_count
from service.schemas import Body, Inputs, PromptName, TokenIdLists, TokenIds, as_lists_of_ids
from service.web.call import Answer, Call, CurrentCall

# Of one request. The response has some 60 bytes per token.
_MAX_CHARACTERS = 2**18
_MAX_TOKENS = 2**18
_Done = TypeVar("_Done")


class TokenizeRequest(Body):
    """The body of POST /tokenize."""

    inputs: Inputs = Field(description="One text or a list of texts.")
    add_special_tokens: bool = Field(
        True, description="Add the special tokens that open and close a sequence."
    )
    prompt_name: PromptName = None


class DecodeRequest(Body):
    """The body of POST /decode."""

    ids: Annotated[
        TokenIdLists,
        BeforeValidator(as_lists_of_ids, json_schema_input_type=TokenIds | TokenIdLists),
    ] = Field(description="The token ids of one text, or of several.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")


class SimpleToken(BaseModel):
    """A token of a text."""

    id: int
    text: str
    special: bool
    start: int | None  # index of the first character; null for a special token
    stop: int | None  # index behind the last character; null for a special token


async def tokenize(call: CurrentCall) -> Answer:
    """Return the tokens of each text in the server's template, as /embed computes them, without cutting."""
    engine = call.engine
    body = await call.read(TokenizeRequest)
    check_count(call, body.inputs, "inputs")
    prompt = engine.tokenizer.named_prompt(body.prompt_name)
    if prompt.template.is_for_pairs:
        raise InvalidInput("the server's template takes pairs, and /tokenize takes texts", field="inputs")
    characters = sum(map(len, body.inputs)) + prompt.template.characters * len(body.inputs)
    if characters > _MAX_CHARACTERS:
        raise InputTooLong(
            f"inputs have {characters} characters in the template, and at most {_MAX_CHARACTERS} are "
            "accepted; send fewer or shorter inputs",
            field="inputs",
        )
    texts = list(map(prompt.template.around, body.inputs))
    content = await _in_turn(
        call,
        lambda: orjson.dumps(
            [
                list(map(_token, pieces))
                for pieces in engine.tokenizer.pieces(texts, special=body.add_special_tokens)
            ]
        ),
    )
    return Answer(content)


async def decode(call: CurrentCall) -> Answer:
    """Return the text of each list of token ids."""
    engine = call.engine
    body = await call.read(DecodeRequest)
    check_count(call, body.ids, "ids")
    tokens = sum(map(len, body.ids))
    if tokens > _MAX_TOKENS:
        raise InputTooLong(
            f"ids has {tokens} token ids, and at most {_MAX_TOKENS} are accepted; send fewer", field="ids"
        )
    for index, ids in enumerate(body.ids):
        if max(ids) >= engine.tokenizer.vocabulary:
            raise InvalidInput(
                f"ids[{index}] has a number that is no token id of this model, whose ids are 0 to "
                f"{engine.tokenizer.vocabulary - 1}",
                field=f"ids[{index}]",
            )
    texts = await _in_turn(
        call, lambda: engine.tokenizer.decode(body.ids, skip_special=body.skip_special_tokens)
    )
    return Answer(orjson.dumps(texts))


async def _in_turn(call: Call, work: Callable[[], _Done]) -> _Done:
    """Do the work of a request in a thread, one request after the other. Raises as Call.require_client.

    Many requests at once would take all threads, for which label scores, metrics and findings wait too.
    """
    async with call.state.tokenizing:
        await call.require_client()
        return await asyncio.to_thread(work)


def _token(piece: Piece) -> dict[str, Any]:
    return {
        "id": piece.id,
        "text": piece.text,
        "special": piece.is_special,
        "start": piece.start,
        "stop": piece.stop,
    }
