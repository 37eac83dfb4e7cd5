"""How much one request, one batch and one queue may hold."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from service.settings.names import MAX_SECONDS, Group

# A batch may hold one text for every so many tokens that it may hold, and in any case this number of texts.
_TOKENS_OF_SHORT_TEXT, _ALWAYS_ALLOWED_TEXTS = 16, 64


class Limits(Group):
    """Sizes of texts, requests, batches and queues."""

    title: ClassVar[str] = "Batching and limits"

    truncate: bool = Field(
        True,
        description="Cut texts that are too long. With --no-truncate such texts are refused. A request may "
        "override the setting.",
    )
    check_token_ids: bool = Field(
        True,
        description="Refuse token ids at /v1/embeddings that do not begin and end with the special tokens of "
        "this model's tokenizer. LangChain sends ids of OpenAI's tokenizer by default.",
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Longest text in tokens. Default: the longest text that the model accepts."
    )
    max_batch_tokens: int = Field(
        1024,
        ge=1,
        description="Most tokens in one batch. A prefix that is computed once counts once. A longer text is "
        "a batch of its own.",
    )
    max_queue_sequences: int = Field(
        8192, ge=1, description="Most texts that may wait. Further requests get status 429."
    )
    max_queue_seconds: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=True,
        description="Most seconds of work that may come before a request, as measured. Further requests of "
        "the same client get status 429 at once. A full batch may always wait; inf has no limit.",
    )
    max_inflight_bytes: int = Field(
        256 * 2**20,
        ge=1,
        description="Most bytes of the bodies of all requests that are being answered, and as many of large "
        "answers that are being made, or that clients have not read yet. Further requests get status 429.",
    )
    request_seconds: float = Field(
        60.0,
        gt=0,
        le=MAX_SECONDS,
        description="Drop a request that is not answered after this time, with status 504. A request may ask "
        "for less by X-AttnCache-Timeout.",
    )
    result_memory_bytes: int = Field(
        64 * 2**20,
        ge=0,
        description="Most bytes of exact results that are kept, so that an equal text is not computed again; "
        "0 computes every text.",
    )
    max_request_inputs: int = Field(1024, ge=1, description="Most texts in one request.")
    max_request_tokens: int = Field(
        2**19,
        ge=1,
        description="Most tokens of all sequences of one request. Labels of several tokens make several "
        "sequences of each text.",
    )
    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1, description="Most bytes in the body of one request.")

    @property
    def max_batch_sequences(self) -> int:
        """Most texts of one batch, however short they are."""
        return max(_ALWAYS_ALLOWED_TEXTS, self.max_batch_tokens // _TOKENS_OF_SHORT_TEXT)
