"""Results of sequences that were computed lately or are being computed.

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
from itertools import chain, pairwise
from typing import Generic, TypeVar

import numpy as np

from attncache_core import PrefillResult
from attncache_core.engine.request import PrefillPart
from attncache_core.text.pairs import token_types
from attncache_core.text.prompts import SequencePlan

W = TypeVar("W")
# Of a result: its objects, its name, and its entry in the dictionary with its order.
_OVERHEAD_BYTES = 600
# Of an array that only one sequence of the result has, beside its numbers.
_ARRAY_BYTES = 128
# Of every single sequence that is kept.
_FINITE, _NONE_CACHED = np.ones(1, bool), np.zeros(1, np.int64)


def repeatable(result: PrefillResult, index: int) -> PrefillResult:
    """Return the exact result of one sequence, for other sequences of the same tokens.

    It holds copies, because a row of a batch's outputs would keep all of them in memory.
    """
    place = slice(index, index + 1)
    return PrefillResult(
        result.outputs[place].copy(),
        _FINITE,
        result.outcomes[place],
        result.asked_tokens[place].copy(),
        _NONE_CACHED,
        log_probabilities=_copies(result.log_probabilities, place),
        token_states=_copies(result.token_states, place),
        repeated=1,
    )


def _copies(arrays: Sequence[np.ndarray] | None, place: slice) -> Sequence[np.ndarray] | None:
    return arrays and [array.copy() for array in arrays[place]]


def _bytes(result: PrefillResult) -> int:
    """Return about how much memory a result takes."""
    of_sequences = [*(result.log_probabilities or ()), *(result.token_states or ())]
    arrays = [result.outputs, result.finite, result.asked_tokens, result.cached_tokens, *of_sequences]
    numbers = sum(array.nbytes for array in arrays) + 8 * len(result)  # an outcome is a reference
    return numbers + _ARRAY_BYTES * len(of_sequences) + _OVERHEAD_BYTES


def sequence_names(
    salt: bytes, plans: Sequence[SequencePlan], part: PrefillPart, places: Sequence[int]
) -> list[bytes]:
    """Return the names of sequences of one request: equal names have equal results.

    salt: requests of other salts share no result. plans: what is read from each sequence of a text. places:
    of each sequence of the part, among the sequences of the request.
    """
    common = hashlib.blake2b(b"%d:" % len(salt) + salt, digest_size=16)
    for plan in plans:
        counts = plan.prompt_tokens, len(plan.continuation), len(plan.targets), plan.states
        common.update(array("q", counts))
        common.update(array("q", plan.continuation))
        common.update(array("q", chain.from_iterable(plan.targets)))
    names = []
    for index, (first, stop) in enumerate(pairwise(part.offsets)):
        name = common.copy()
        if len(plans) > 1 or part.pairs:
            # The types of a pair's tokens are not in its token ids.
            types = token_types(part.pairs[index]) if part.pairs else None
            name.update(repr((places[index] % len(plans), types)).encode() + b"\0")
        name.update(part.ids[first:stop].data)
        names.append(name.digest())
    return names


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
        self._kept: OrderedDict[bytes, PrefillResult] = OrderedDict()
        self._computing: set[bytes] = set()
        self._waiters: dict[bytes, list[W]] = {}  # of what is being computed
        self.bytes = 0  # of the results that are kept

    def __len__(self) -> int:
        """Return the number of results that are kept."""
        return len(self._kept)

    def find(self, names: Sequence[bytes], waiter: Callable[[int], W]) -> list[PrefillResult | Lookup]:
        """Return for each name a result that is kept, or whether `waiter(index)` waits from now on.

        If a result is unknown, others wait for the caller, who must call `settle` or `give_up`. If `waiter`
        raises, nobody waits for the caller.
        """
        found: list[PrefillResult | Lookup] = []
        with self._lock:
            try:
                for name in names:
                    found.append(self._find(name, waiter, len(found)))
            except BaseException:
                for name, result in zip(names, found, strict=False):
                    if result is Lookup.UNKNOWN:
                        self._computing.discard(name)
                        self._waiters.pop(name, None)  # the caller itself, which has sent the name twice
                raise
        return found

    def kept(self, name: bytes) -> PrefillResult | None:
        """Return a result that is kept, without waiting for one; None if there is none."""
        with self._lock:
            return self._get(name)

    def settle(self, results: Mapping[bytes, PrefillResult]) -> list[tuple[W, PrefillResult]]:
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

    def _find(self, name: bytes, waiter: Callable[[int], W], index: int) -> PrefillResult | Lookup:
        kept = self._get(name)
        if kept is not None:
            return kept
        if name in self._computing:
            self._waiters.setdefault(name, []).append(waiter(index))
            return Lookup.WAITS
        self._computing.add(name)
        return Lookup.UNKNOWN

    def _get(self, name: bytes) -> PrefillResult | None:
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
        return kept

    def _keep(self, name: bytes, result: PrefillResult) -> None:
        if name in self._kept or _bytes(result) > self._max_bytes:
            return
        self._kept[name] = result
        self.bytes += _bytes(result)
        while self.bytes > self._max_bytes:
            self.bytes -= _bytes(self._kept.popitem(last=False)[1])
