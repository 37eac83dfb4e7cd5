"""What a request gets, and results of sequences that were computed lately or are being computed.

    a sequence of a request -> kept: its result, at once
                            -> in flight: the request waits for the sequence of another request
                            -> neither: the request computes it, and others may wait for it

A result is named by a digest of the token ids and of all that changes what is computed of them. Only exact
results are kept. Salts are part of the digest, so no client learns by the time of an answer what another one
has sent.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum, auto
from functools import cached_property
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attncache_core import Outcome, PrefillResult
from attncache_core.reuse.blend.chunks import BlendReport
from attncache_core.text.prompts import SequencePlan

W = TypeVar("W")
# Of a result: its objects, its name, and its entry in the dictionary with its order.
_OVERHEAD_BYTES = 500


class RequestResult(NamedTuple):
    """What was computed of some sequences of a request, in the order of the request's texts and plans.

    A request that is computed in several batches, or whose results are partly kept, joins such parts.
    """

    outputs: np.ndarray  # float32 [sequences, dimensions]
    outcomes: tuple[Outcome, ...]
    tokens: tuple[int, ...]  # of each sequence
    cached: tuple[int, ...]  # of the tokens of each sequence, those whose keys and values were stored
    repeated: int = 0  # sequences whose results were computed for others, or earlier
    # For each sequence, or nothing if no sequence has any.
    log_probabilities: tuple[np.ndarray, ...] = ()  # float32 [targets]
    token_states: tuple[np.ndarray, ...] = ()  # float32 [tokens, hidden], if the plan reads them
    blends: tuple[BlendReport | None, ...] = ()  # None: the sequence was computed exactly

    @classmethod
    def of(cls, result: PrefillResult, rows: range, tokens: list[int]) -> RequestResult:
        """Return the results of some sequences of a batch.

        rows: indices of the sequences in the batch. tokens: the number of tokens of each of the sequences.
        """
        own = slice(rows.start, rows.stop)
        return cls(
            result.outputs[own],
            result.outcomes[own],
            tuple(tokens),
            tuple(result.cached_tokens[own].tolist()),
            log_probabilities=tuple((result.log_probabilities or ())[own]),
            token_states=tuple((result.token_states or ())[own]),
            blends=tuple((result.blends or ())[own]),
        )

    @property
    def hits(self) -> int:
        """The number of sequences that took maps from a record of any kind."""
        return sum(outcome.is_hit for outcome in self.outcomes)

    @property
    def prototype_hits(self) -> int:
        """The number of sequences that took maps from a prototype."""
        return self.outcomes.count(Outcome.PROTOTYPE_HIT)

    @property
    def asked_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.tokens)

    @property
    def cached_tokens(self) -> int:
        """The number of tokens whose keys and values were stored."""
        return sum(self.cached)

    @property
    def blended(self) -> list[BlendReport]:
        """What was done with the chunks of the sequences whose chunks were blended."""
        return [report for report in self.blends if report is not None]

    @property
    def bytes(self) -> int:
        """The memory that the result takes."""
        arrays = [self.outputs, *self.log_probabilities, *self.token_states]
        return sum(array.nbytes for array in arrays) + _OVERHEAD_BYTES

    def repeatable(self, index: int) -> RequestResult:
        """Return the result of one sequence for other sequences of the same tokens.

        It holds copies, because a row of a batch's outputs would keep all of them in memory.
        """
        own = slice(index, index + 1)
        return RequestResult(
            self.outputs[own].copy(),
            self.outcomes[own],
            self.tokens[own],
            (0,),
            1,
            tuple(array.copy() for array in self.log_probabilities[own]),
            tuple(array.copy() for array in self.token_states[own]),
        )


def joined(parts: Sequence[tuple[Sequence[int], RequestResult]]) -> RequestResult:
    """Join the parts of a request's result. Each part has the places of its sequences in the request."""
    order = np.argsort(np.concatenate([places for places, _ in parts])).tolist()

    def in_order(name: str, absent: Any = None) -> tuple[Any, ...]:
        columns = [getattr(part, name) for _, part in parts]
        if not any(columns):
            return ()
        lengths = [len(part.outcomes) for _, part in parts]
        whole = [own or (absent,) * length for own, length in zip(columns, lengths, strict=True)]
        values = list(chain.from_iterable(whole))
        return tuple([values[index] for index in order])

    return RequestResult(
        np.concatenate([part.outputs for _, part in parts])[order],
        in_order("outcomes"),
        in_order("tokens"),
        in_order("cached"),
        sum(part.repeated for _, part in parts),
        in_order("log_probabilities", np.zeros(0, np.float32)),
        in_order("token_states", np.zeros((0, 0), np.float32)),
        in_order("blends"),
    )


class SequenceNames:
    """Names the sequences of one request: equal names have equal results."""

    def __init__(self, salt: bytes, plans: Sequence[SequencePlan]) -> None:
        """salt: requests of other salts share no result. plans: what is read from the sequences.

        Both are read when the first sequence is named, because plans may hold the tokens of many labels.
        """
        self._salt = salt
        self._plans = plans

    def __call__(self, ids: Sequence[int], *changes: object) -> bytes:
        """Return the name of a sequence. changes: all that changes its result, beside its tokens."""
        name = self._common.copy()
        if changes:
            name.update(repr(changes).encode() + b"\0")
        name.update(array("i", ids))
        return name.digest()

    @cached_property
    def _common(self) -> Any:  # a hash object, which has no public type
        common = hashlib.blake2b(b"%d:" % len(self._salt) + self._salt, digest_size=16)
        for plan in self._plans:
            counts = plan.prompt_tokens, len(plan.continuation), len(plan.targets), plan.states
            common.update(array("q", counts))
            common.update(array("q", plan.continuation))
            common.update(array("q", chain.from_iterable(plan.targets)))
        return common


class Lookup(Enum):
    """What was found instead of a result."""

    UNKNOWN = auto()  # nothing: the caller computes it
    WAITS = auto()  # another request computes it


class Results(Generic[W]):
    """Keeps results up to a number of bytes, and knows who waits for what. Thread safe.

    W: who waits for a result.
    """

    def __init__(self, most_bytes: int) -> None:
        self._max_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, RequestResult] = OrderedDict()
        self._waiters: dict[bytes, list[W]] = {}  # of what is being computed
        self.bytes = 0  # of the results that are kept

    def __len__(self) -> int:
        """Return the number of results that are kept."""
        return len(self._kept)

    def find(self, name: bytes, waiter: W) -> RequestResult | Lookup:
        """Return a result that is kept, or whether `waiter` waits for it from now on.

        If the result is unknown, others wait for the caller, who must call `settle` or `give_up`.
        """
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None:
                self._kept.move_to_end(name)
                return kept
            if name in self._waiters:
                self._waiters[name].append(waiter)
                return Lookup.WAITS
            self._waiters[name] = []
            return Lookup.UNKNOWN

    def settle(self, name: bytes, result: RequestResult) -> list[W]:
        """Keep the result of a sequence that was computed. Returns who waited for it."""
        with self._lock:
            self._keep(name, result)
            return self._waiters.pop(name, [])

    def give_up(self, name: bytes) -> list[W]:
        """Note that a result will not be computed after all. Returns who waited for it."""
        with self._lock:
            return self._waiters.pop(name, [])

    def clear(self) -> None:
        """Drop all results that are kept."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def _keep(self, name: bytes, result: RequestResult) -> None:
        """Keep a result. The caller must hold the lock."""
        if name in self._kept or result.bytes > self._max_bytes:
            return
        self._kept[name] = result
        self.bytes += result.bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].bytes
