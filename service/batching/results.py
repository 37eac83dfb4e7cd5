"""Results of sequences: of those that were computed lately, and of those that are being computed.

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
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from attncache_core import Outcome
from attncache_core.reuse.blend.chunks import BlendReport
from attncache_core.text.prompts import SequencePlan

W = TypeVar("W")
# Of a result: its objects, its name, and its entry in the dictionary with its order.
_OVERHEAD_BYTES = 500


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What the engine computed of one sequence."""

    output: np.ndarray  # float32 [dimensions]
    outcome: Outcome
    tokens: int
    cached_tokens: int = 0  # of the tokens, those whose keys and values were stored
    log_probabilities: np.ndarray | None = None  # float32 [targets]; None without targets
    token_states: np.ndarray | None = None  # float32 [tokens, hidden], if the plan reads them
    blend: BlendReport | None = None  # None: the sequence was computed exactly
    is_repeated: bool = False  # whether it was computed for another sequence, or earlier

    def repeated(self) -> SequenceResult:
        """Return this result for another sequence of the same tokens. It holds copies of its arrays."""
        # Copies, because a row of a batch's outputs would keep all of them in memory.
        return SequenceResult(
            self.output.copy(),
            self.outcome,
            self.tokens,
            log_probabilities=None if self.log_probabilities is None else self.log_probabilities.copy(),
            token_states=None if self.token_states is None else self.token_states.copy(),
            is_repeated=True,
        )

    @property
    def bytes(self) -> int:
        """The memory that the result takes."""
        arrays = (self.output, self.log_probabilities, self.token_states)
        return sum(own.nbytes for own in arrays if own is not None) + _OVERHEAD_BYTES


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
        self._kept: OrderedDict[bytes, SequenceResult] = OrderedDict()
        self._waiters: dict[bytes, list[W]] = {}  # of what is being computed
        self.bytes = 0  # of the results that are kept

    def __len__(self) -> int:
        """Return the number of results that are kept."""
        return len(self._kept)

    def find(self, name: bytes, waiter: W) -> SequenceResult | Lookup:
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

    def settle(self, name: bytes, result: SequenceResult, *, keep: bool) -> tuple[SequenceResult, list[W]]:
        """Take a result that was computed. Returns it as others get it, and who waited for it.

        If this raises, they still wait.
        """
        shared = result.repeated()
        with self._lock:
            if keep:
                self._keep(name, shared)
            return shared, self._waiters.pop(name, [])

    def give_up(self, name: bytes) -> list[W]:
        """Note that a result will not be computed after all. Returns who waited for it."""
        with self._lock:
            return self._waiters.pop(name, [])

    def clear(self) -> None:
        """Drop all results that are kept."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def _keep(self, name: bytes, result: SequenceResult) -> None:
        """Keep a result. The caller must hold the lock."""
        if name in self._kept or result.bytes > self._max_bytes:
            return
        self._kept[name] = result
        self.bytes += result.bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].bytes
