"""A conversation: turns that are tokenised one by one, and the sequence that they make together.

    History before + one new turn, or a whole transcript
      -> token ids of the turns -> what fits into the model's window -> sequence, and the History that follows

Adding a turn changes no token of the turns before it, so their stored keys and values can be reused. If a
conversation does not fit into the window, its oldest tokens are cut, unless `OverflowWay` refuses it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal
from zlib import crc32

import orjson

from attncache_core import InputTooLong, PrefillEngine
from attncache_core.text.prompts import Frame, Prompt
from attncache_core.text.tokenizer import continued
from service.batching.sources import Tokenized
from service.settings.reuse import OverflowWay

# Models give much attention to the first tokens, whatever they are (StreamingLLM keeps four).
_SINKS = 4
# Of the room in the window, after a cut: several turns fit before the next one.
_KEPT_SHARE = 0.5
# The requests of so many turns are remembered. A request comes again within seconds, or never.
_REMEMBERED = 8
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class History:
    """The turns of a session until now, and which of their tokens are cut."""

    turns: tuple[array[int], ...] = ()  # token ids of each turn, also of what is cut
    sinks: int = 0  # tokens in front of the tokens that are cut
    dropped: int = 0  # tokens that are cut
    # The salt of the keys and values that were truncated and not computed again; None: all are exact.
    namespace: bytes | None = None
    requests: tuple[str, ...] = ()  # digests of the ids of the requests that the last turns came with
    begun: float = 0.0  # when the transcript arrived that it began with, seconds since 1970

    @classmethod
    def read(cls, content: bytes, vocabulary: int | None = None) -> History:
        """Return the history that `written` has made these bytes of. Raises ValueError for other bytes.

        vocabulary: number of token ids that there are; None: ids are not checked.
        """
        header, _, ids = content[_CHECKSUM_BYTES:].partition(b"\n")
        try:
            lengths, sinks, dropped, namespace, requests, begun = orjson.loads(header)
            tokens = array("i", ids)
            ends = list(accumulate(lengths, initial=0))
            turns = tuple(tokens[first:last] for first, last in pairwise(ends))
            salt = None if namespace is None else bytes.fromhex(namespace)
            history = cls(turns, sinks, dropped, salt, tuple(requests), begun)
            is_cut_inside = 0 <= sinks <= sinks + dropped <= len(tokens)
            is_whole = is_cut_inside and ends[-1] == len(tokens) and history.written() == content
            if vocabulary is not None and tokens:
                is_whole = is_whole and min(tokens) >= 0 and max(tokens) < vocabulary
        except TypeError as error:
            raise ValueError("the bytes are no history") from error
        if not is_whole:
            raise ValueError("the bytes are no history")
        return history

    def written(self) -> bytes:
        """Return the history as bytes: CRC-32 of the rest, a line of JSON, and the token ids of all turns."""
        namespace = None if self.namespace is None else self.namespace.hex()
        lengths = [*map(len, self.turns)]
        header = [lengths, self.sinks, self.dropped, namespace, self.requests, self.begun]
        content = b"\n".join((orjson.dumps(header), b"".join(turn.tobytes() for turn in self.turns)))
        return b"%08x" % crc32(content) + content

    @property
    def tokens(self) -> int:
        """The number of tokens of all turns."""
        return sum(map(len, self.turns))

    def kept(self) -> list[int]:
        """Return the token ids that are not cut."""
        ids = [token for turn in self.turns for token in turn]
        return ids[: self.sinks] + ids[self.sinks + self.dropped :]

    def followed_by(self, turn: array[int], request: str) -> History:
        """Return this history with one more turn, which came with a request."""
        requests = (*self.requests, request)[-_REMEMBERED:]
        return replace(self, turns=(*self.turns, turn), requests=requests)

    def after(self, request: str, turn: array[int]) -> History | None:
        """Return this history as it was after a request; None if this turn did not come with the request.

        If several turns came with the id, it names no request, and only the last turn can come again.
        """
        first = len(self.turns) - len(self.requests)
        numbers = [number for number, known in enumerate(self.requests, first + 1) if known == request]
        if not numbers or self.turns[numbers[-1] - 1] != turn:
            return None
        if numbers[-1] == len(self.turns):
            return self
        # More turns have followed, and what was cut then is not known any more.
        return History(self.turns[: numbers[-1]]) if len(numbers) == 1 else None

    def edited(
        self, turns: Iterable[array[int]], room: int, request: str = "", arrived: float = 0.0
    ) -> History:
        """Return the history with these turns instead, the last of which came with a request.

        The cut stays where it is if the turns agree with the former turns until there, if they would not fit
        into `room` tokens without a cut, and if it leaves as many tokens as a new cut would.
        """
        following = History(tuple(turns), requests=(request,) if request else (), begun=arrived)
        common = 0  # tokens of the turns in front that are equal
        for former, turn in zip(self.turns, following.turns, strict=False):
            if former != turn:
                break
            common += len(turn)
        enough = _tokens_kept(len(following.turns[-1]), self.sinks, room)
        leaves_enough = following.tokens - self.dropped >= enough
        if following.tokens > room and 0 < self.sinks + self.dropped <= common and leaves_enough:
            return replace(following, sinks=self.sinks, dropped=self.dropped, namespace=self.namespace)
        return following


def _tokens_kept(new: int, sinks: int, room: int) -> int:
    """Return how many tokens a cut leaves, the `sinks` first ones included. new: tokens of the last turn."""
    return min(room, max(int(_KEPT_SHARE * room), new + sinks, 1))


@dataclass(eq=False)
class Conversation:
    """One request of a session: a source of the sequence of all turns (see service/batching/sources)."""

    history: History  # before the request
    turns: Sequence[str]  # the new turn if `field` is append, else all turns
    field: Literal["append", "transcript"]
    truncate: bool  # whether a new turn that is too long by itself may be cut too
    overflow: OverflowWay
    # A digest of the request's id. If a turn of the history came with this request, the request came before,
    # and was perhaps not answered: it is answered, and the history stays as it is.
    request: str = ""
    arrived: float = 0.0  # when the request arrived, seconds since 1970
    count = 1

    def __post_init__(self) -> None:
        # Set by `tokenize`: what `history` becomes if the request succeeds, and what the answer is about.
        self.following = self.answered = self.history
        self.approximate = False  # whether truncated keys and values are used; set by `tokenize`

    @property
    def characters(self) -> int:
        """The number of characters of the new turns, and of the history about as many."""
        return sum(map(len, self.turns)) + 4 * self.history.tokens

    @property
    def kept_tokens(self) -> int:
        """The tokens of the conversation that are not cut, the new turn included."""
        return self.answered.tokens - self.answered.dropped

    def tokenize(
        self, engine: PrefillEngine, prompt: Prompt, salt: bytes | None, max_total_tokens: int
    ) -> Iterator[Tokenized]:
        """Yield the sequence of the conversation in the prompt; see Source.

        Raises InputTooLong, which names `field`, if the conversation does not fit and must not be cut.
        """
        frame = engine.tokenizer.frame(prompt)
        turns = [array("i", ids) for ids in engine.tokenizer.turns(self.turns, self.field)]
        before = self.history.after(self.request, turns[-1]) if self.request else None
        if before is not None and self.field == "transcript" and before.turns != tuple(turns):
            before = None
        whole = before or self._followed(turns, frame.room)
        if self.overflow == "refuse":
            # A cut is of a server with another overflow.
            whole = replace(whole, sinks=0, dropped=0)
        following, kept = whole, whole.kept()
        if max(len(kept), len(turns[-1])) > frame.room:
            self._require_cutting(len(turns[-1]), frame.room)
        if len(kept) > frame.room:
            following = self._cut(whole, len(turns[-1]), frame.room)
            namespace = self._truncated(engine, prompt, frame, salt, whole, following)
            following = replace(following, namespace=namespace)
            kept = following.kept()
        if self.overflow in ("recompute", "refuse"):
            # The cut may be of a server that truncated.
            following = replace(following, namespace=None)
        self.answered = following
        self.following = self.history if before is not None else following
        self.approximate = salt is not None and following.namespace is not None
        sequences = continued([frame.around(kept)], prompt.sequence_plans, max_total_tokens)
        own_salt = following.namespace if self.approximate else salt
        yield Tokenized(sequences, own_salt, passing=len(frame.after))

    def _followed(self, turns: Sequence[array[int]], room: int) -> History:
        if self.field == "transcript":
            return self.history.edited(turns, room, self.request, self.arrived)
        return self.history.followed_by(turns[0], self.request)

    def _require_cutting(self, new: int, room: int) -> None:
        """Raise InputTooLong if the conversation must not be cut. new: tokens of the last turn."""
        if self.overflow == "refuse":
            raise InputTooLong(
                f"the conversation has more than {room} tokens; begin a new session, or send a transcript "
                "with fewer or shorter turns",
                field=self.field,
            )
        if new > room and not self.truncate:
            raise InputTooLong(
                f"the last turn has more than {room} tokens; shorten the turn or allow truncation",
                field=self.field,
            )

    def _cut(self, whole: History, new: int, room: int) -> History:
        """Return the history with as many tokens cut as the overflow says, at least as many as necessary.

        The last turn, of `new` tokens, is cut only if it does not fit by itself.
        """
        sinks = min(_SINKS, room // 2) if self.overflow == "keep-sinks" else 0
        if new <= room:
            sinks = min(sinks, room - new)
        if whole.dropped:
            sinks = min(sinks, whole.sinks)
        return replace(whole, sinks=sinks, dropped=whole.tokens - _tokens_kept(new, sinks, room))

    def _truncated(
        self,
        engine: PrefillEngine,
        prompt: Prompt,
        frame: Frame,
        salt: bytes | None,
        whole: History,
        cut: History,
    ) -> bytes | None:
        """Keep the stored keys and values of tokens that are not cut, for their new positions.

        Returns the salt under which they are found; None if they are to be computed again.
        """
        if salt is None or engine.key_values is None or self.overflow == "recompute":
            return None
        before = whole.kept()[: -len(whole.turns[-1]) or None]
        sinks = min(cut.sinks, len(before))
        newest = cut.tokens - cut.dropped - cut.sinks - len(cut.turns[-1])
        newest = max(0, min(newest, len(before) - sinks))
        if not sinks + newest:
            return None
        front, plan = len(frame.before), prompt.sequence_plans[0]
        positions = [*range(front + sinks), *range(front + len(before) - newest, front + len(before))]
        ids = [*frame.around(before), *plan.continuation]
        own_salt = whole.namespace or salt
        return engine.key_values.truncate(ids, plan, own_salt, positions, passing=len(frame.after))
