"""What a request gets, and results of texts that were computed lately or are being computed.

    a text of a request -> kept: its result, at once
                        -> in flight: the request waits for the text of another request
                        -> neither: the request computes it, and others may wait for it

Texts are looked up by name (service/batching/sources) on the event loop, before anything is queued. Only
exact results are kept. Salts are part of a name, so no client learns by the time of an answer what another
one has sent.

A name that a request computes ends in one of two ways: the result is settled, or the request releases the
name, at the latest when it has ended. A text that a request computes waits for no other request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attncache_core import Outcome, PrefillResult
from attncache_core.engine.request import PrefillPart
from attncache_core.reuse.blend.chunks import BlendReport

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
    parts: tuple[PrefillPart, ...] = ()  # token ids of a text's sequences, if texts are sampled

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
            int(result.cached_tokens[part].sum()),
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
        arrays += [part.ids for part in self.parts]
        return sum(array.nbytes for array in arrays) + _OVERHEAD_BYTES

    def repeatable(self, first: int, stop: int, part: PrefillPart, *, sampled: bool) -> RequestResult:
        """Return the result of the sequences from `first` to `stop` for others of the same text.

        part: all sequences. sampled: whether the result holds the token ids too. It holds copies, because a
        row of a batch's outputs would keep all of them in memory.
        """
        place = slice(first, stop)
        return RequestResult(
            self.outputs[place].copy(),
            self.outcomes[place],
            part.offsets[stop] - part.offsets[first],
            0,
            stop - first,
            tuple(array.copy() for array in self.log_probabilities[place]),
            tuple(array.copy() for array in self.token_states[place]),
            parts=(part.part(first, stop).copied(),) if sampled else (),
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
        tuple(chain.from_iterable(part.parts for _, part in parts)),
    )


class Results(Generic[W]):
    """Keeps results of texts up to a number of bytes, and knows who waits for what. Thread safe.

    W: a request, which computes texts and waits for texts.
    """

    def __init__(self, most_bytes: int) -> None:
        self._max_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, RequestResult] = OrderedDict()
        # Of each name: who computes it, and who waits for it for which of its texts.
        self._computing: dict[bytes, tuple[W, list[tuple[W, int]]]] = {}
        self.bytes = 0  # of the results that are kept

    def __len__(self) -> int:
        """Return the number of results that are kept."""
        return len(self._kept)

    def find(
        self, request: W, names: Iterable[tuple[int, bytes]]
    ) -> tuple[list[tuple[int, RequestResult]], list[int]]:
        """Return the results of texts that are kept, and the texts that nobody computes yet.

        names: of the texts, by their indices. Of what nobody computes, others wait for the request from now
        on, and the request must call `release` when it ends. For all other texts the request waits.
        """
        kept, unknown = list[tuple[int, RequestResult]](), list[int]()
        with self._lock:
            for index, name in names:
                result = self._kept.get(name)
                if result is not None:
                    self._kept.move_to_end(name)
                    kept.append((index, result))
                elif name in self._computing:
                    self._computing[name][1].append((request, index))
                else:
                    self._computing[name] = request, []
                    unknown.append(index)
        return kept, unknown

    def settle(self, results: Mapping[bytes, RequestResult]) -> list[tuple[W, int, RequestResult]]:
        """Keep results that were computed. Returns who waited for which result, for which of its texts."""
        waited = list[tuple[W, int, RequestResult]]()
        with self._lock:
            for name, result in results.items():
                self._keep(name, result)
                _, waiting = self._computing.pop(name, (None, ()))
                waited += [(request, index, result) for request, index in waiting]
        return waited

    def release(self, request: W, names: Iterable[bytes]) -> list[tuple[W, int]]:
        """Note that a request computes none of these names any more. Returns who waited for it."""
        waited = list[tuple[W, int]]()
        with self._lock:
            for name in names:
                if name in self._computing and self._computing[name][0] is request:
                    waited += self._computing.pop(name)[1]
        return waited

    def clear(self) -> None:
        """Drop all results that are kept."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    # The caller must hold the lock.

    def _keep(self, name: bytes, result: RequestResult) -> None:
        if name in self._kept or result.bytes > self._max_bytes:
            return
        self._kept[name] = result
        self.bytes += result.bytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].bytes
