"""Requests to the engine, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from attncache_core.reuse.plan import Outcome
from attncache_core.text.prompts import SequencePlan


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One token sequence to run through the model."""

    ids: Sequence[int]  # token ids
    reuse: bool = True  # whether this sequence may reuse anything
    # Which outputs to read from this sequence; None: the outputs of the default prompt.
    sequence_plan: SequencePlan | None = None


@dataclass(frozen=True)
class PrefillResult:
    """The results of a batch, in the order of its requests."""

    outputs: np.ndarray  # float32 [sequences, d]: embeddings before normalisation, or class logits
    finite: np.ndarray  # bool [sequences], whether all numbers computed for each sequence are finite
    outcomes: tuple[Outcome, ...]
    similarities: np.ndarray  # float32 [sequences], nan if the sequence was not compared with records
    tokens: int  # number of tokens of all sequences
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
