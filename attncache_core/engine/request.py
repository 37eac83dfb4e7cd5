"""Requests to the engine, and its results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from attncache_core.reuse.blend.chunks import Blend, BlendReport
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.plan import Outcome
from attncache_core.text.pairs import PairTokens
from attncache_core.text.prompts import SequencePlan


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One token sequence to run through the model."""

    ids: Sequence[int]  # token ids; PairTokens for a pair
    # Whether this sequence may reuse anything. A pair takes no attention maps in either case.
    reuse: bool = True
    # Which outputs to read from this sequence; None: the outputs of the default prompt.
    sequence_plan: SequencePlan | None = None
    # How stored keys and values are looked up; None: none are used, and none are stored.
    prefix_key: PrefixKey | None = None
    # Sequences share prefixes inside a batch only with sequences of their group.
    group: Hashable = None
    # The chunks whose keys and values are blended; None: everything is computed exactly.
    blend: Blend | None = None

    @property
    def reads_states(self) -> bool:
        """Whether the last state of every token is read."""
        return self.sequence_plan is not None and self.sequence_plan.states

    @property
    def reads_more(self) -> bool:
        """Whether more than the output is read."""
        plan = self.sequence_plan
        return plan is not None and (plan.states or bool(plan.targets))

    @property
    def takes_maps(self) -> bool:
        """Whether this sequence may take attention maps from records."""
        return self.reuse and not isinstance(self.ids, PairTokens)


@dataclass(frozen=True)
class PrefillResult:
    """The results of a batch, in the order of its requests."""

    outputs: np.ndarray  # float32 [sequences, d]: embeddings before normalisation, or class logits
    finite: np.ndarray  # bool [sequences], whether all numbers computed for each sequence are finite
    outcomes: tuple[Outcome, ...]
    similarities: np.ndarray  # float32 [sequences], nan if the sequence was not compared with records
    tokens: int  # number of tokens that were computed; a shared prefix counts once
    asked_tokens: int  # tokens of all sequences
    cached_tokens: np.ndarray  # int64 [sequences], tokens of each sequence whose keys and values were stored
    search_seconds: float  # of planning: familiarity, projector, index and checks
    forward_seconds: float  # of everything else
    attention_seconds: float  # of attention, without the output projections; part of forward_seconds
    corrupt_records: int  # number of records that were found damaged and were not used
    # float32 [sequences], nan if the strangeness of the sequence was not computed; see maps/familiarity.py
    strangeness: np.ndarray | None = field(default=None, kw_only=True)
    # Lengths whose records cannot be used any more, because their file was truncated or cannot be read.
    lost_lengths: tuple[int, ...] = field(default=(), kw_only=True)
    # Log-probabilities of each sequence's targets, float32 [targets]; None if no sequence has targets.
    log_probabilities: list[np.ndarray] | None = field(default=None, kw_only=True)
    # States of the tokens of each sequence whose plan reads them, float32 [tokens, hidden], else [0, hidden];
    # None if no plan reads any.
    token_states: list[np.ndarray] | None = field(default=None, kw_only=True)
    # What was done with the chunks of each sequence; None for one without, and if no sequence has any.
    blends: list[BlendReport | None] | None = field(default=None, kw_only=True)


def joined_results(parts: Sequence[PrefillResult], indices: Sequence[np.ndarray]) -> PrefillResult:
    """Return the result of several batches of one engine, in the order of the requests.

    indices: int64, for each part the indices of its sequences among the requests.
    """
    order = np.argsort(np.concatenate(indices))

    def rows(name: str) -> np.ndarray:
        joined: np.ndarray = np.concatenate([getattr(part, name) for part in parts])[order]
        return joined

    def arrays(name: str) -> list[np.ndarray] | None:
        if all(getattr(part, name) is None for part in parts):
            return None
        none = np.zeros(0, dtype=np.float32)
        found = [own for part in parts for own in getattr(part, name) or [none] * len(part.outcomes)]
        return [found[index] for index in order.tolist()]

    outcomes = [outcome for part in parts for outcome in part.outcomes]
    blends = [own for part in parts for own in part.blends or [None] * len(part.outcomes)]
    return PrefillResult(
        outputs=rows("outputs"),
        finite=rows("finite"),
        outcomes=tuple(outcomes[index] for index in order.tolist()),
        similarities=rows("similarities"),
        tokens=sum(part.tokens for part in parts),
        asked_tokens=sum(part.asked_tokens for part in parts),
        cached_tokens=rows("cached_tokens"),
        search_seconds=sum(part.search_seconds for part in parts),
        forward_seconds=sum(part.forward_seconds for part in parts),
        attention_seconds=sum(part.attention_seconds for part in parts),
        corrupt_records=sum(part.corrupt_records for part in parts),
        strangeness=rows("strangeness"),
        lost_lengths=tuple(length for part in parts for length in part.lost_lengths),
        log_probabilities=arrays("log_probabilities"),
        token_states=arrays("token_states"),
        blends=[blends[index] for index in order.tolist()] if any(blends) else None,
    )
