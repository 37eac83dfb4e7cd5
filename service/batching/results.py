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
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attncache_core import Outcome, PrefillResult
from attncache_core.engine.request import PrefillPart
from attncache_core.reuse.blend.chunks import BlendReport
from attncache_core.text.pairs import token_types
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
    asked_tokens: int  # of all sequences
    cached_tokens: int  # of these, those whose keys and values were stored
    repeated: int = 0  # sequences whose results were computed for others, or earlier
    # For each sequence, or nothing if no sequence has any.
    log_probabilities: tuple[np.ndarray, ...] = ()  # float32 [targets]
    token_states: tuple[np.ndarray, ...] = ()  # float32 [tokens, hidden], if the plan reads them
    blends: tuple[BlendReport | None, ...] = ()  # None: the sequence was computed exactly

    @classmethod
    def of(cls, result: PrefillResult, rows: range, tokens: int) -> RequestResult:
        """Return the results of some sequences of a batch.

        rows: indices of the sequences in the batch. tokens: of all these sequences.
        """
        part = slice(rows.start, rows.stop)
        return cls(
            result.outputs[part],
            result.outcomes[part],
            tokens,
            sum(result.cached_tokens[part].tolist()),
            log_probabilities=tuple((result.log_probabilities or ())[part]),
            token_states=tuple((result.token_states or ())[part]),
            blends=tuple((result.blends or ())[part]),
        )

    @property
    def hits(self) -> int:
        """The number of sequences that took maps from a record of any kind."""
        return self.outcomes.count(Outcome.HIT) + self.prototype_hits

    @property
    def prototype_hits(self) -> int:
        """The number of sequences that took maps from a prototype."""
        return self.outcomes.count(Outcome.PROTOTYPE_HIT)

    @property
    def blended(self) -> list[BlendReport]:
        """What was done with the chunks of the sequences whose chunks were blended."""
        return [report for report in self.blends if report is not None]

    @property
    def bytes(self) -> int:
        """The memory that the result takes."""
        arrays = [self.outputs, *self.log_probabilities, *self.token_states]
        return sum(array.nbytes for array in arrays) + _OVERHEAD_BYTES

    def repeatable(self, index: int, tokens: int) -> RequestResult:
        """Return the result of one sequence, of so many tokens, for other sequences of the same tokens.

        It holds copies, because a row of a batch's outputs would keep all of them in memory.
        """
        place = slice(index, index + 1)
        return RequestResult(
            self.outputs[place].copy(),
            self.outcomes[place],
            tokens,
            0,
            1,
            tuple(array.copy() for array in self.log_probabilities[place]),
            tuple(array.copy() for array in self.token_states[place]),
        )


def joined(parts: Sequence[tuple[Sequence[int], RequestResult]]) -> RequestResult:
    """Join the parts of a request's result. Each part has the places of its sequences in the request."""
    order = np.argsort(np.concatenate([places for places, _ in parts])).tolist()

    def in_order(name: str, absent: Any = None) -> tuple[Any, ...]:
        columns = [getattr(part, name) for _, part in parts]
        if not any(columns):
            return ()
        lengths = [len(part.outcomes) for _, part in parts]
        whole = [column or (absent,) * length for column, length in zip(columns, lengths, strict=True)]
        values = list(chain.from_iterable(whole))
        return tuple([values[index] for index in order])

    return RequestResult(
        np.concatenate([part.outputs for _, part in parts])[order],
        in_order("outcomes"),
        sum(part.asked_tokens for _, part in parts),
        sum(part.cached_tokens for _, part in parts),
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

    def of(self, part: PrefillPart, places: Sequence[int]) -> list[bytes]:
        """Return the name of each sequence. places: of each, among the sequences of the request."""
        named, plans = [], len(self._plans)
        for index, (first, stop) in enumerate(pairwise(part.offsets)):
            name = self._common.copy()
            if plans > 1 or part.pairs:
                # The types of a pair's tokens are not in its token ids.
                types = token_types(part.pairs[index]) if part.pairs else None
                name.update(repr((places[index] % plans, types)).encode() + b"\0")
            name.update(part.ids[first:stop])
            named.append(name.digest())
        return named

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
        self._computing: set[bytes] = set()
        self._waiters: dict[bytes, list[W]] = {}  # of what is being computed
        self.bytes = 0  # of the results that are kept

    def __len__(self) -> int:
        """Return the number of results that are kept."""
        return len(self._kept)

    def find(self, names: Sequence[bytes], waiter: Callable[[int], W]) -> list[RequestResult | Lookup]:
        """Return for each name a result that is kept, or whether `waiter(index)` waits from now on.

        If a result is unknown, others wait for the caller, who must call `settle` or `give_up`. If `waiter`
        raises, nobody waits for the caller.
        """
        found: list[RequestResult | Lookup] = []
        with self._lock:
            try:
                for name in names:
                    found.append(self._find(name, waiter, len(found)))
            except BaseException:
                self._computing.difference_update(
                    name for name, result in zip(names, found, strict=False) if result is Lookup.UNKNOWN
                )
                raise
        return found

    def kept(self, name: bytes) -> RequestResult | None:
        """Return a result that is kept, without waiting for one; None if there is none."""
        with self._lock:
            return self._get(name)

    def settle(self, results: Mapping[bytes, RequestResult]) -> list[tuple[W, RequestResult]]:
        """Keep results that were computed. Returns who waited for which result."""
        with self._lock:
            for name, result in results.items():
                self._keep(name, result)
            waited = [
                (waiter, result) for name, result in results.items() for waiter in self._waiters.pop(name, ())
            ]
            self._computing.difference_update(results)
        return waited

    def give_up(self, names: Iterable[bytes]) -> list[W]:
        """Note that results will not be computed after all. Returns who waited for them."""
        with self._lock:
            ended = list(names)
            waited = [waiter for name in ended for waiter in self._waiters.pop(name, ())]
            self._computing.difference_update(ended)
        return waited

    def clear(self) -> None:
        """Drop all results that are kept."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    # The caller must hold the lock.

    def _find(self, name: bytes, waiter: Callable[[int], W], index: int) -> RequestResult | Lookup:
        kept = self._get(name)
        if kept is not None:
            return kept
        if name in self._computing:
            self._waiters.setdefault(name, []).append(waiter(index))
            return Lookup.WAITS
        self._computing.add(name)
        return Lookup.UNKNOWN

    def _get(self, name: bytes) -> RequestResult | None:
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
        return kept

    def _keep(self, name: bytes, result: RequestResult) -> None:
        if name in self._kept or result.bytes > self._max_bytes:
            return
        self._kept[name] = result
        self.bytes += result.bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].bytes
