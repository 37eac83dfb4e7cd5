"""How much faster whole passes are with reuse, measured on the loaded model, and which groups it pays in.

    batches of one text and of 1,024 tokens, in the lengths that calibration saw
      -> each pass with reuse and without, in turn         -> Gain of each length group
      -> passes with all groups that gain enough, together -> MeasuredGain, kept beside the database

The texts are made up, and as many of them hit as calibration found. So the passes do all that passes do while
serving: familiarity, digests, search, fetch and the layers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy.optimize import nnls

from attncache_core.attention_maps.fetch import Fetch
from attncache_core.attention_maps.policy import ReusePolicy, uniform_policy
from attncache_core.attention_maps.search import ReusePlan, SearchEngine
from attncache_core.attention_maps.store import RecordKind
from attncache_core.files import locked, write_whole
from attncache_core.forward import forward_pass
from attncache_core.models import PackedModel
from attncache_core.tokens import Group, TokenBatch, pack

_BATCH_TOKENS = 1024
_BATCH_SEQUENCES = 64
_BATCHES = 3  # different ones of each size
_ROUNDS = 7
# Measured anew, a group that reused goes on down to this share of the least gain.
_HYSTERESIS = 0.5
_MACHINES = 16  # kept
_ANY_STRANGENESS = 1e9


@dataclass(frozen=True)
class Gain:
    """How much faster passes are with reuse: seconds without it / seconds with it - 1."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    one_text: float  # in batches of one text
    full_batch: float  # in batches of 1,024 tokens

    @property
    def least(self) -> float:
        """The smaller of the two: a group gains where both kinds of batches do."""
        return min(self.one_text, self.full_batch)


@dataclass(frozen=True)
class MeasuredGain:
    """What was measured on one machine, and what was decided there."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    circumstances: dict[str, Any]  # processor, threads, versions, mask, policy
    min_gain: float
    groups: dict[int, Gain]  # number of each length group that may approximate -> its gain
    paying: tuple[int, ...]  # numbers of the groups that reuse
    together: Gain  # in the mix of all lengths: of the groups that reuse or, where none does, of all

    def info(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures for people and /info. names: of the policy's length groups."""
        return {
            "min_gain": self.min_gain,
            "groups": [
                {"lengths": names[place], **asdict(gain), "reuses": place in self.paying}
                for place, gain in self.groups.items()
            ],
            "together": asdict(self.together),
        }


@dataclass(frozen=True)
class Traffic:
    """What calibration saw: how often each length came, and how many texts of each length group hit."""

    lengths: Mapping[int, int]  # tokens -> texts
    hit_rates: Mapping[int, float]  # number of each length group that may approximate -> share of hits

    def of_group(self, policy: ReusePolicy, place: int) -> dict[int, int]:
        """Return the lengths, and how often each came, of the policy's length group number `place`."""
        return {length: count for length, count in self.lengths.items() if policy.place_of(length) == place}

    def token_share(self, policy: ReusePolicy, places: Collection[int]) -> float:
        """Return which share of all tokens belongs to these length groups."""
        tokens = [length * count for length, count in self.lengths.items()]
        inside = [policy.place_of(length) in places for length in self.lengths]
        return float(np.dot(tokens, inside) / max(1, sum(tokens)))


@dataclass(frozen=True)
class Rehearsal(SearchEngine):
    """A search engine that does all its work for made-up texts, and then lets a share of them hit."""

    hit_rates: Mapping[int, float] = field(default_factory=dict)  # number of a length group -> share

    @classmethod
    def of(cls, search: SearchEngine, hit_rates: Mapping[int, float]) -> Rehearsal:
        """Return the rehearsal of a search engine, for which no text is too strange to be searched."""
        limit = search.policy.limit
        policy = replace(search.policy, limit=limit and replace(limit, strangest=_ANY_STRANGENESS))
        parts = {part.name: getattr(search, part.name) for part in fields(SearchEngine)}
        return cls(**{**parts, "policy": policy, "paying": frozenset(hit_rates)}, hit_rates=hit_rates)

    def plan(self, batch: TokenBatch, hidden: torch.Tensor, allowed: np.ndarray) -> ReusePlan:
        """Return the plan of the search engine with other hits; see SearchEngine.plan."""
        plan = super().plan(batch, hidden, allowed)
        random = np.random.default_rng(0)
        for group in batch.groups():
            hits = random.random(group.count) < self.hit_rates.get(self.policy.place_of(group.length), 0.0)
            records, kind = self._donors(group)
            plan.records[group.sequences] = np.where(hits, records, -1)
            plan.kinds[group.sequences] = kind
        return plan

    def _donors(self, group: Group) -> tuple[np.ndarray, RecordKind]:
        """The records that serve a group's sequences: the mean or, where they are searched, one for each."""
        if not self._is_searched(group.length):
            return np.full(group.count, self.prototypes.means[group.length]), RecordKind.MEAN
        segment = self.store.segments[group.length]
        records = np.arange(group.count) % len(segment)
        segment.are_sound(records)
        return records, RecordKind.STORED


def measure_gain(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    min_gain: float,
    circumstances: Mapping[str, Any],
    folder: Path | None,
    fetch: Fetch = Fetch.AUTO,
) -> MeasuredGain:
    """Return in which length groups reuse makes passes faster by at least `min_gain` on this machine.

    What was measured under the same circumstances is kept in `folder` and holds at the next start. Under new
    circumstances it is measured again, in seconds; a group that reused before on the same processor then goes
    on unless it gains less than half of `min_gain`. Several processes wait for the one that measures. Without
    a folder nothing is kept.
    """
    if folder is None:
        measured = _measure(model, search, traffic, circumstances, fetch)
        return _decide(model, search, traffic, replace(measured, min_gain=min_gain), None, fetch)
    path = folder / "gain.json"
    with contextlib.ExitStack() as stack:
        # A read-only database is measured at each start.
        with contextlib.suppress(OSError):
            stack.enter_context(locked(path, on_wait=lambda: None))
        kept = _read(path)
        known = next((entry for entry in kept if entry.circumstances == dict(circumstances)), None)
        if known and known.min_gain == min_gain:
            return known
        before = known or _same_machine(kept, circumstances)
        measured = known or _measure(model, search, traffic, circumstances, fetch)
        decided = _decide(model, search, traffic, replace(measured, min_gain=min_gain), before, fetch)
        others = [entry for entry in kept if entry.circumstances != dict(circumstances)]
        with contextlib.suppress(OSError):
            write_whole(path, _KEPT.dump_json([decided, *others][:_MACHINES], indent=1))
    return decided


def _measure(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    circumstances: Mapping[str, Any],
    fetch: Fetch,
) -> MeasuredGain:
    """Measure each length group by itself; nothing is decided yet."""
    rehearsal = Rehearsal.of(search, traffic.hit_rates)
    groups = {
        place: gain_of(model, rehearsal, traffic.of_group(search.policy, place), fetch)
        for place in traffic.hit_rates
    }
    return MeasuredGain(dict(circumstances), 0.0, groups, (), Gain(0.0, 0.0))


def _decide(
    model: PackedModel,
    search: SearchEngine,
    traffic: Traffic,
    measured: MeasuredGain,
    before: MeasuredGain | None,
    fetch: Fetch,
) -> MeasuredGain:
    """Enter the groups that gain enough, if they do so together as well."""
    least = measured.min_gain
    # That a smaller gain was enough once says nothing.
    reused = set(before.paying) if before and before.min_gain >= least else set()
    paying = [
        place
        for place, gain in measured.groups.items()
        if gain.least >= least * (_HYSTERESIS if place in reused else 1.0)
    ]
    served = paying or list(measured.groups)
    rates = {place: traffic.hit_rates[place] for place in served}
    together = gain_of(model, Rehearsal.of(search, rates), traffic.lengths, fetch)
    share = traffic.token_share(search.policy, paying)
    keeps = together.least >= least * share * (_HYSTERESIS if reused & set(paying) else 1.0)
    return replace(measured, paying=tuple(paying) if keeps else (), together=together)


def gain_of(
    model: PackedModel,
    search: SearchEngine,
    lengths: Mapping[int, int],
    fetch: Fetch = Fetch.AUTO,
    rounds: int = _ROUNDS,
) -> Gain:
    """Measure passes over batches of these lengths (tokens -> texts) with the search and without, in turn."""
    one_text, full_batch = (
        [seconds_of(model, search, batch, fetch, rounds) for batch in batches]
        for batches in (_single_texts(lengths), _full_batches(lengths))
    )
    gains = (np.sum(seconds, axis=0) for seconds in (one_text, full_batch))
    return Gain(*(float(without / with_reuse - 1) for without, with_reuse in gains))


def seconds_of(
    model: PackedModel, search: SearchEngine, batch: TokenBatch, fetch: Fetch, rounds: int
) -> tuple[float, float]:
    """Return the median seconds of a pass over a batch without and with the search, taken in turn."""
    allowed = np.ones(len(batch.lengths), dtype=bool)
    passes: list[Callable[[], object]] = [
        lambda: forward_pass(model, batch, None, allowed, fetch),
        lambda: forward_pass(model, batch, search, allowed, fetch),
    ]
    taken: list[list[float]] = [[], []]
    # The first round is there to warm up: kernels are built, and records are read.
    for turn in range(rounds + 1):
        for place in (0, 1) if turn % 2 else (1, 0):
            started = time.perf_counter()
            passes[place]()
            taken[place].append(time.perf_counter() - started)
    without, with_reuse = (statistics.median(seconds[1:]) for seconds in taken)
    return without, with_reuse


def _single_texts(lengths: Mapping[int, int]) -> list[TokenBatch]:
    """Batches of one text: the quartiles of the lengths."""
    spread = np.repeat(sorted(lengths), [lengths[length] for length in sorted(lengths)])
    places = [(2 * place + 1) * len(spread) // (2 * _BATCHES) for place in range(_BATCHES)]
    return [_made_up([int(spread[place])]) for place in places]


def _full_batches(lengths: Mapping[int, int]) -> list[TokenBatch]:
    """Batches of 1,024 tokens, of texts drawn from the lengths."""
    random = np.random.default_rng(0)
    values, weights = np.array(list(lengths)), np.array(list(lengths.values()), dtype=np.float64)
    batches = []
    for _ in range(_BATCHES):
        drawn = random.choice(values, size=_BATCH_SEQUENCES, p=weights / weights.sum())
        fitting = max(1, int(np.searchsorted(np.cumsum(drawn), _BATCH_TOKENS, side="right")))
        batches.append(_made_up(drawn[:fitting].tolist()))
    return batches


def _made_up(lengths: Sequence[int]) -> TokenBatch:
    """A batch of sequences of these lengths, of a token that every vocabulary has."""
    return pack([[0] * length for length in lengths]).filled()


_KEPT = TypeAdapter(list[MeasuredGain])


def _read(path: Path) -> list[MeasuredGain]:
    """What was kept, the newest first; nothing if it cannot be read: then it is measured anew."""
    try:
        return _KEPT.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return []


def _same_machine(kept: Sequence[MeasuredGain], circumstances: Mapping[str, Any]) -> MeasuredGain | None:
    """The newest entry of the same processor, device and number of threads."""
    names = ("processor", "device", "threads")
    return next(
        (
            entry
            for entry in kept
            if all(entry.circumstances.get(name) == circumstances[name] for name in names)
        ),
        None,
    )


def saved_by_hits(model: PackedModel, search: SearchEngine, length: int) -> float:
    """Return the microseconds a text that passes over full batches of one length save if all texts hit.

    model: with the heads of a reuse mask. The mean of the length serves, unsearched.
    """
    policy = uniform_policy(search.policy.budget, 1.0)
    policy = replace(policy, groups=(replace(policy.groups[0], searched=False),))
    batch = _made_up([length] * max(1, min(_BATCH_SEQUENCES, _BATCH_TOKENS // length)))
    rehearsal = Rehearsal.of(replace(search, policy=policy), {0: 1.0})
    without, with_hits = seconds_of(model, rehearsal, batch, Fetch.AUTO, _ROUNDS)
    return (without - with_hits) / len(batch.lengths) * 1e6


def fit_savings(
    passes: Sequence[tuple[int, int, float]],
) -> Callable[[np.ndarray, int], np.ndarray]:
    """Fit what a hit saves to measured passes: (tokens, reused heads, microseconds saved a text).

    Q and K cost time by the length, their product by its square, each for every head that is reused; a hit
    has a price of its own (digests, a second call of the kernel in each layer). A sum of these three, none of
    them negative, is fitted, so that a disturbance of one measurement weighs little. Returns a function that
    gives the microseconds that hits of lengths [n] save with so many heads, float64 [n].
    """
    tokens, heads, saved = (np.array(column, dtype=np.float64) for column in zip(*passes, strict=True))
    columns = np.stack([heads * tokens, heads * tokens**2, -np.ones_like(tokens)], axis=1)
    (by_length, by_square, price), _ = nnls(columns, saved)

    def per_hit(lengths: np.ndarray, heads: int) -> np.ndarray:
        return heads * (by_length * lengths + by_square * lengths**2) - price

    return per_hit


@torch.inference_mode()
def search_cost(
    model: PackedModel, search: SearchEngine, sequences: Sequence[Sequence[int]], lengths: Collection[int]
) -> float:
    """Microseconds to compare a sequence with its records, if only those of these lengths are compared.

    In full batches of all `sequences`: texts of many lengths share a batch, and each length is a search of
    its own. A length that is alone in being searched also bears what a search costs to start.
    """
    chosen = np.random.default_rng(0).permutation(len(sequences))[: 2 * _ROUNDS * _BATCH_SEQUENCES]
    taken: list[float] = []
    for at in range(0, len(chosen), _BATCH_SEQUENCES):
        batch = pack([sequences[place] for place in chosen[at : at + _BATCH_SEQUENCES]])
        groups = [group for group in batch.groups() if group.length in lengths]
        if groups:
            hidden = model.search_input(model.embed(batch))
            started = time.perf_counter()
            search.nearest(batch, hidden, groups)
            taken.append((time.perf_counter() - started) / sum(group.count for group in groups))
    # The first one is there to warm up.
    return statistics.median(taken[1:] or taken) * 1e6 if taken else 0.0
