"""Calibration: the mask and the policy that save the most time inside a budget, measured on probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from attncache_core.attention_maps.choice import (
    FEWEST_PROBES,
    Calibrated,
    Savings,
    Terms,
    by_time_saved,
    calibrated,
    choose_policy,
    could_keep_floor,
    recorded_only,
    report,
)
from attncache_core.attention_maps.damage import damage_of_each, joint_damage, model_for_damage, reuse_rank
from attncache_core.attention_maps.database import AttentionDatabase, use_of
from attncache_core.attention_maps.familiarity import (
    Familiarity,
    familiarity_name,
    remove_other_tests,
    write_familiarity,
)
from attncache_core.attention_maps.familiarity_fit import TokenStatistics
from attncache_core.attention_maps.gain import fit_savings, saved_by_hits, search_cost
from attncache_core.attention_maps.integrity import file_digest
from attncache_core.attention_maps.mask import ReuseMask, head_order, mildest_mask, parse_heads
from attncache_core.attention_maps.policy import Budget, ReusePolicy, uniform_policy
from attncache_core.attention_maps.probes import Measured, Probes, find_probes, measure, stored_batches
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.store import RecordKind
from attncache_core.attention_maps.tightened import forget_tightened
from attncache_core.attention_maps.unfamiliar import Limited, choose_limit, figures, find_unfamiliar
from attncache_core.corpus import UnfamiliarText
from attncache_core.engine import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.files import locked
from attncache_core.models import load_model
from attncache_core.outputs import Measure

# Called as work goes on: what is being done, how much of it is done, how much there is.
Progress = Callable[[str, int, int], None]

# A head's damage is a mean; a few hundred sentences tell the heads apart.
MOST_DAMAGE_PROBES = 300
# Sizes of mask that are tried, spread evenly up to all heads.
_MASK_SIZES = 12
# Unfamiliar texts, at most, for each probe like the corpus.
_UNFAMILIAR_PER_PROBE = 3


@dataclass(frozen=True)
class Calibration:
    """What was chosen, and the report for the manifest."""

    mask: ReuseMask
    policy: ReusePolicy
    familiarity: Familiarity | None  # None where any text may hit: θ is an operator's, or only records hit
    quality: dict[str, Any]


def calibrate(
    engine: PrefillEngine,
    search: SearchEngine,
    probes: Probes,
    unfamiliar: Sequence[UnfamiliarText],
    token_counts: np.ndarray,
    rank: np.ndarray,
    budget: Budget,
    *,
    heads: str | None = None,
    threshold: float | None = None,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Choose the mask and the policy that save the most time inside the budget.

    engine: of the model without a database. unfamiliar: texts unlike the corpus. token_counts: int64
    [vocabulary], of the corpus. rank: [layers, heads], see damage.reuse_rank. heads, threshold: an
    operator's own, which then are not chosen; with a threshold of his own, any text may hit. With too few
    probes to measure, the largest mask and θ = 1 (or the given one): recorded sequences only.
    """
    masks = candidate_masks(rank, heads, sum(search.store.layout.stored_heads))
    if len(probes.sequences) < FEWEST_PROBES:
        policy = uniform_policy(budget, 1.0)
        if threshold is not None:
            policy = policy.with_threshold(threshold)
        return Calibration(masks[-1], policy, None, {"measured": 0})
    savings = measure_savings(engine, search, probes, rank)
    trials = _Trials(engine, search, Terms.of(probes, budget, savings), progress)
    trials.measure(masks)
    chosen, options = choose_policy(trials.terms, trials.masks, trials.measured, threshold)
    if threshold is not None:
        return Calibration(chosen.mask, chosen.policy, None, report(chosen, options, probes))
    trials.measure(masks_between(masks, chosen.mask, rank))
    return _with_limit(trials, unfamiliar, token_counts)


class _Trials:
    """Masks, and what they did to the probes."""

    def __init__(self, engine: PrefillEngine, search: SearchEngine, terms: Terms, progress: Progress) -> None:
        self.engine, self.search, self.terms, self._progress = engine, search, terms, progress
        self.masks: list[ReuseMask] = []
        self.measured: list[dict[RecordKind, Measured]] = []

    def measure(self, masks: Sequence[ReuseMask]) -> None:
        """Measure what these masks do to the probes of the terms, beside those measured before."""
        if masks:
            self.measured += self.measure_on(self.terms.probes, masks, "measuring masks")
            self.masks += masks

    def measure_on(
        self,
        probes: Probes,
        masks: Sequence[ReuseMask],
        stage: str,
        kinds: Sequence[RecordKind] = tuple(RecordKind),
    ) -> list[dict[RecordKind, Measured]]:
        """Return what these masks do to probes, if records of these kinds serve them."""
        judge = self.engine.judge(self.terms.budget.measure)
        on_pass = partial(self._progress, stage)
        return measure(self.engine.model, self.search.store, probes, masks, judge, on_pass, kinds)


def _with_limit(
    trials: _Trials, unfamiliar: Sequence[UnfamiliarText], token_counts: np.ndarray
) -> Calibration:
    """Return the best option with a limit of strangeness.

    A limit takes hits away. So the options are tried by the time they save without one, until none is left
    that could save more than the best so far. Where none keeps the budget, only recorded sequences hit.
    """
    terms = trials.terms
    _, options = choose_policy(terms, trials.masks, trials.measured)
    if not could_keep_floor(terms.budget, len(terms.probes.sequences)):
        return _exact(trials, options)
    most = _UNFAMILIAR_PER_PROBE * len(terms.probes.sequences)
    fitted, unseen = (
        find_unfamiliar(trials.engine, trials.search, unfamiliar, most, fitted=fitted)
        for fitted in (True, False)
    )
    tokens = TokenStatistics(trials.engine.model, token_counts)
    best: Limited | None = None
    for option, measured in sorted(
        zip(options, trials.measured, strict=True), key=lambda pair: by_time_saved(pair[0]), reverse=True
    ):
        if best and by_time_saved(option) <= by_time_saved(best.calibrated):
            break
        (odd,) = trials.measure_on(
            fitted.probes, [option.mask], "measuring unfamiliar texts", _serving_kinds(option.policy)
        )
        limited = choose_limit(option, terms, measured, fitted, odd, tokens)
        if limited and (best is None or by_time_saved(limited.calibrated) > by_time_saved(best.calibrated)):
            best = limited
    if best is None:
        return _exact(trials, options)
    chosen = best.calibrated
    (odd,) = trials.measure_on(
        unseen.probes, [chosen.mask], "measuring kinds not fitted to", _serving_kinds(chosen.policy)
    )
    quality = report(chosen, options, terms.probes) | {"unfamiliar": figures(unseen, best, odd)}
    return Calibration(chosen.mask, chosen.policy, best.familiarity, quality)


def _exact(trials: _Trials, options: Sequence[Calibrated]) -> Calibration:
    """Return the mildest mask, with which only recorded sequences hit."""
    terms = trials.terms
    mask, measured = min(zip(trials.masks, trials.measured, strict=True), key=lambda pair: pair[0].total)
    lengths = (int(terms.probes.lengths[group].max()) for group in terms.groups)
    policy = ReusePolicy(terms.budget, tuple(map(recorded_only, lengths)))
    chosen = calibrated(terms, measured, mask, policy)
    return Calibration(mask, policy, None, report(chosen, options, terms.probes))


def _serving_kinds(policy: ReusePolicy) -> Sequence[RecordKind]:
    """The kinds of records that may serve: where nothing is searched, means alone."""
    return tuple(RecordKind) if any(group.searched for group in policy.groups) else (RecordKind.MEAN,)


def calibrate_database(
    engine: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    unfamiliar: Sequence[UnfamiliarText],
    budget: Budget,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Choose mask and policy of a database anew, on token sequences, and write them into its manifest.

    engine: of the database's model, without a database; with a classifier, if the budget is agreement of its
    decisions. unfamiliar: texts unlike the others, see corpus.unfamiliar_texts. Sequences that are recorded
    or given twice are left out. The damage of each head is measured again, with the donors that the search
    finds; within a layer the heads keep the order of the records. Returns the report. Raises InvalidInput if
    too few sequences are left.
    """
    database.require_fingerprint(engine.checkpoint.fingerprint(), engine.checkpoint.name)
    store, manifest = database.search.store, database.manifest
    unseen = unrecorded(database, sequences, field="texts")
    probes = find_probes(engine.model, database.search, unseen)
    sample = probes.sample(MOST_DAMAGE_PROBES)
    order = manifest.mask.order
    model = model_for_damage(engine)
    batches = stored_batches(model, store, order, sample, sample.most_similar())
    joint = joint_damage(
        model,
        [make for _, make in batches],
        engine.judge(budget.measure).comparable,
        partial(progress, "measuring heads"),
    )
    held = ReuseMask(order, manifest.stored_heads).as_array()
    rank = _held_first(reuse_rank(joint, len(manifest.rank), order), held)
    damage = np.where(held, damage_of_each(joint, len(rank)), manifest.damage)
    chosen = calibrate(
        engine, database.search, probes, unfamiliar, database.token_counts, rank, budget, progress=progress
    )
    decides = budget.measure is Measure.AGREEMENT
    quality = chosen.quality | {"left_out": len(sequences) - len(unseen)}
    manifest = replace(
        manifest,
        damage=tuple(map(tuple, damage.tolist())),
        rank=tuple(map(tuple, rank.tolist())),
        reused_heads=chosen.mask.reused,
        policy=chosen.policy,
        use=use_of(engine.checkpoint, decides=decides and engine.classifier is None),
        quality=quality,
    )
    with locked(database.folder, on_wait=lambda: progress("waiting for another process", 0, 1)):
        files = database.keep_decisions(engine.classifier if decides else None)
        name = write_familiarity(database.folder, chosen.familiarity, database.token_counts)
        files.pop(familiarity_name(files))
        files[name] = file_digest(database.folder / name)
        database.keep_calibration_texts(unseen)
        replace(manifest, files=files).write(database.folder)
        remove_other_tests(database.folder, name)
        forget_tightened(database.folder)
    return quality


def unrecorded(
    database: AttentionDatabase, sequences: Sequence[Sequence[int]], *, field: str
) -> list[list[int]]:
    """The distinct sequences that are not recorded, of lengths that the database holds: to measure on.

    Raises InvalidInput, naming `field`, if they are too few.
    """
    store = database.search.store
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
    unseen = [ids for ids in distinct if len(ids) in store.segments and store.record_of(ids) is None]
    if len(unseen) < FEWEST_PROBES:
        raise InvalidInput(
            f"{len(unseen)} of the texts are not in the database and have a length it holds; "
            f"{FEWEST_PROBES} are needed at the least, and some hundreds to be of use",
            field=field,
        )
    return unseen


def _held_first(rank: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The rank with heads that no record holds (held: bool [layers, heads]) behind all others."""
    places = np.lexsort((rank.ravel(), ~held.ravel()))
    return places.argsort().reshape(rank.shape)


def candidate_masks(rank: np.ndarray, heads: str | None = None, most: int | None = None) -> list[ReuseMask]:
    """Masks of growing size, up to `most` heads, the mildest first; the operator's alone if there is one."""
    if heads:
        return [parse_heads(heads, rank)]
    most = rank.size if most is None else most
    sizes = {max(1, round(most * part / _MASK_SIZES)) for part in range(1, _MASK_SIZES + 1)}
    return [mildest_mask(rank, size) for size in sorted(sizes)]


def masks_between(masks: Sequence[ReuseMask], chosen: ReuseMask, rank: np.ndarray) -> list[ReuseMask]:
    """Up to four masks whose sizes lie between the chosen one's and its neighbours'."""
    sizes = [mask.total for mask in masks]
    place = sizes.index(chosen.total)
    around = {
        round(chosen.total + (sizes[neighbour] - chosen.total) * part / 3)
        for neighbour in (place - 1, place + 1)
        if 0 <= neighbour < len(sizes)
        for part in (1, 2)
    }
    return [mildest_mask(rank, size) for size in sorted(around - set(sizes))]


def measure_savings(engine: PrefillEngine, search: SearchEngine, probes: Probes, rank: np.ndarray) -> Savings:
    """What hits save and searches cost on this machine.

    Hits are measured in whole passes at up to three lengths of the probes, with a third and with all of the
    heads that records hold; a search, on batches of probes of all lengths.
    """
    stored = search.store.layout.stored_heads
    places = np.linspace(0, len(probes.sequences) - 1, 7).round().astype(int)[1::2]
    passes = []
    for reused in ([-(-heads // 3) for heads in stored], stored):
        model = load_model(
            engine.checkpoint,
            engine.dtype,
            prompt_tokens=engine.tokenizer.prompt_tokens,
            head_order=head_order(rank),
            reused_heads=reused,
            device=engine.model.device,
        )
        for length in np.unique(probes.lengths[places]).tolist():
            passes.append((length, sum(reused), saved_by_hits(model, search, length)))
    return Savings(
        per_hit=fit_savings(passes),
        search=lambda lengths: search_cost(engine.model, search, probes.sequences, lengths),
    )
