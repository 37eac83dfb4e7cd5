"""Pairs of texts: how a pair becomes one token sequence, with a type for each token.

    (query, document) -> tokens of each text -> cut -> PairLayout.around -> PairTokens

A cross-encoder reads a pair between the separators of its tokenizer. Some encoders also have an embedding for
the type of a token, which tells the first text from the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, overload

# Which text of a pair that is too long loses tokens at its end: the longer one, until both are equally long,
# or only the first one.
Cut = Literal["longest", "first"]


@dataclass(frozen=True, slots=True)
class PairTokens(Sequence[int]):
    """The token ids of a pair of texts, as a sequence, and the type of each token.

    A pair is not the same as a text with the same token ids, because its types differ. A pair takes no
    attention maps from records.
    """

    ids: list[int]
    types: list[int] | None = None  # None: every token has type 0
    is_cut: bool = False  # whether tokens were cut off

    def __post_init__(self) -> None:
        """Raise ValueError if there is not one type for each token."""
        if self.types is not None and len(self.types) != len(self.ids):
            raise ValueError("a pair of texts needs one type for each token")

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.ids[index]


class TruncatedTokens(list[int]):
    """The token ids of a text that was too long, without the tokens that were cut off."""

    is_cut = True


def truncated_sequences(sequences: Iterable[Sequence[int]]) -> int:
    """Return how many sequences do not have all tokens of their texts."""
    return sum(getattr(ids, "is_cut", False) for ids in sequences)


def token_types(sequence: Sequence[int]) -> list[int] | None:
    """Return the type of each token of a sequence; None if every token has type 0."""
    return sequence.types if isinstance(sequence, PairTokens) else None


def without_end(sequence: Sequence[int], token: int) -> Sequence[int]:
    """Return a sequence without the tokens of this id at its end; its first token stays."""
    count = len(sequence)
    while count > 1 and sequence[count - 1] == token:
        count -= 1
    if isinstance(sequence, PairTokens):
        return replace(sequence, ids=sequence.ids[:count], types=sequence.types and sequence.types[:count])
    return sequence[:count]


class NoRoom(ValueError):
    """The second text, which is not cut, leaves no room for the first."""


class PairLayout(NamedTuple):
    """The special tokens around the two texts of a pair, and the types of all tokens."""

    before: list[int]  # token ids in front of the first text
    between: list[int]  # token ids between the texts
    after: list[int]  # token ids behind the second text
    types: list[int]  # of before, the first text, between, the second text, after

    @classmethod
    def of(cls, ids: list[int], types: list[int], owners: list[int | None]) -> Self:
        """Return the layout of a tokenised pair.

        ids, types: of all tokens. owners: which text each token belongs to, 0 or 1; None: a special token.
        """
        first, second = owners.index(0), owners.index(1)
        between, after = first + owners.count(0), second + owners.count(1)
        bounds = ((0, first), (first, between), (between, second), (second, after), (after, len(ids)))
        kinds = [types[start] if start < end else 0 for start, end in bounds]
        return cls(ids[:first], ids[between:second], ids[after:], kinds)

    def around(
        self,
        first: list[int],
        second: list[int],
        room: int,
        cut: Cut,
        counts: Callable[[], tuple[int, int]] | None = None,
    ) -> PairTokens:
        """Return the sequence of a pair with these token ids, cut to `room` tokens.

        counts: returns how many tokens the texts have, if these are only their first ones, and more than
        `room`; asked only if that matters. Raises NoRoom if a text that is not cut leaves no room.
        """
        special = len(self.before) + len(self.between) + len(self.after)
        lengths = len(first), len(second)
        if counts is not None and 2 * min(lengths) > room - special:
            lengths = counts()
        kept = kept_tokens(*lengths, room - special, cut)
        parts = (self.before, first[: kept[0]], self.between, second[: kept[1]], self.after)
        types = None
        if any(self.types):
            types = [kind for kind, part in zip(self.types, parts, strict=True) for _ in part]
        ids = [token for part in parts for token in part]
        return PairTokens(ids, types, sum(kept) < sum(lengths))


def kept_tokens(first: int, second: int, room: int, cut: Cut) -> tuple[int, int]:
    """Return how many tokens of each text are kept, if the texts have `first` and `second` tokens.

    room: most tokens of both texts together. The texts are cut as transformers cuts them: "longest" is its
    truncation "longest_first", and "first" its truncation "only_first", which keeps at least one token of the
    first text. Raises NoRoom if this is impossible.
    """
    if first + second <= room:
        return first, second
    if room < 1 or (cut == "first" and second >= room):
        raise NoRoom
    if cut == "first":
        return room - second, second
    if 2 * min(first, second) <= room:
        return (first, room - first) if first <= second else (room - second, second)
    # Both are cut to half of the room. The text that was longer keeps the odd token, else the second one.
    half, rest = room // 2, room - room // 2
    return (half, rest) if first <= second else (rest, half)
