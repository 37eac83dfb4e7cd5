"""Token sequences whose keys and values an operator computes early, pins or looks up.

    texts       -> each text's sequence in the server's template
    a template  -> the tokens that all texts in the template begin with
    segments    -> each segment by itself, as prompts of chunks use it

POST /cache/warm computes them between the requests of clients, and `--warm FILE` before the server is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncache_core import InputTooLong, InvalidInput, PrefillEngine
from attncache_core.checkpoints.template import Template
from attncache_core.engine.request import PrefillRequest
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.text.prompts import Prompt, SequencePlan
from service.batching.sources import Tokenized
from service.errors import NoKeyValues


@dataclass(frozen=True, slots=True)
class Chosen:
    """Token sequences of one salt. A source of the batcher (service/batching/sources)."""

    prompt: Prompt
    sequences: list[list[int]]
    salt: bytes
    whole: bool = False  # whether all tokens of the sequences may be given: they are chunks

    @classmethod
    def texts(
        cls,
        engine: PrefillEngine,
        texts: Sequence[str],
        salt: bytes,
        *,
        truncate: bool,
        max_total_tokens: int,
    ) -> Chosen:
        """Return the sequences of texts in the server's template. Raises InputTooLong."""
        prompt = engine.tokenizer.default_prompt
        return cls(prompt, engine.tokenize(texts, truncate, prompt, max_total_tokens), salt)

    @classmethod
    def template(cls, engine: PrefillEngine, written: str, salt: bytes) -> Chosen:
        """Return the sequence that all texts in a template begin with. Raises InvalidInput."""
        template = Template.parse(written)
        return cls(engine.tokenizer.prompt(template), [engine.tokenizer.front(template)], salt)

    @classmethod
    def segments(cls, engine: PrefillEngine, segments: Sequence[str], salt: bytes) -> Chosen:
        """Return the sequences as which segments are stored.

        Raises InvalidInput if the model's keys and values can be used in no other order, and InputTooLong.
        """
        if reason := engine.blending.refusal:
            raise InvalidInput(f"segments cannot be used in any order: {reason}", field="segments")
        frame = engine.tokenizer.frame(engine.tokenizer.default_prompt)
        chunks = engine.tokenizer.turns(segments, "segments")
        if max(map(len, chunks)) > frame.room:
            raise InputTooLong(
                f"a segment has more than {frame.room} tokens; make it shorter", field="segments"
            )
        opening = frame.before[: frame.opening]
        return cls(
            Prompt(Template(), (SequencePlan(0),)), [[*opening, *ids] for ids in chunks], salt, whole=True
        )

    @property
    def count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    @property
    def characters(self) -> int:
        """About the number of characters of all sequences."""
        return 4 * self.tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(map(len, self.sequences))

    def tokenize(
        self,
        engine: PrefillEngine,  # noqa: ARG002
        prompt: Prompt,  # noqa: ARG002
        salt: bytes | None,
        max_total_tokens: int,  # noqa: ARG002
    ) -> Iterator[Tokenized]:
        """Yield the sequences, which are tokenised already; see Source."""
        yield Tokenized(self.sequences, salt)

    def requests(self, engine: PrefillEngine) -> list[PrefillRequest]:
        """Return the engine's requests for the sequences."""
        return engine.requests(self.sequences, self.prompt, salt=self.salt)

    def prefix_key(self, engine: PrefillEngine) -> list[PrefixKey]:
        """Return how the store is asked for the sequences. Raises NoKeyValues if there is no store."""
        if self.whole and engine.key_values:
            return [engine.key_values.whole(ids, self.salt) for ids in self.sequences]
        found = [request.prefix_key for request in self.requests(engine)]
        return [key for key in found if key is not None]


def store_of(engine: PrefillEngine) -> KeyValueStore:
    """Return the engine's store of keys and values. Raises NoKeyValues if it has none."""
    if engine.key_values is None:
        raise NoKeyValues(f"the server stores no keys and values: {engine.key_values_off}")
    return engine.key_values.store
