"""Calibration: the mask and the policy that save the most time inside a budget, measured on probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attncache_core.attention_maps.choice import FEWEST_PROBES, Savings, choose_policy, report
from attncache_core.attention_maps.cost import measure_costs, search_cost
from attncache_core.attention_maps.damage import damage_of_each, joint_damage, model_for_damage, reuse_rank
from attncache_core.attention_maps.database import AttentionDatabase, keep_calibration_texts, use_of
from attncache_core.attention_maps.mask import ReuseMask, head_order, mildest_mask, parse_heads
from attncache_core.attention_maps.policy import Budget, ReusePolicy, uniform_policy
from attncache_core.attention_maps.probes import Probes, find_probes, measure, stored_batches
from attncache_core.attention_maps.search import SearchEngine
from attncache_core.attention_maps.tightened import forget_tightened
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


def calibrate(
    engine: PrefillEngine,
    search: SearchEngine,
    probes: Probes,
    rank: np.ndarray,
    budget: Budget,
    *,
    heads: str | None = None,
    threshold: float | None = None,
    on_pass: Callable[[int, int], None] = lambda *_: None,
) -> tuple[ReuseMask, ReusePolicy, dict[str, Any]]:
    """The best mask with its policy, and the report for the manifest.

    engine: of the model without a database. rank: [layers, heads], see damage.reuse_rank. heads, threshold:
    an operator's own, which then are not chosen. With too few probes to measure, the largest mask and θ = 1
    (or the given one): recorded sequences only.
    """
    masks = candidate_masks(rank, heads, sum(search.store.layout.stored_heads))
    if len(probes.sequences) < FEWEST_PROBES:
        policy = uniform_policy(budget, 1.0 if threshold is None else threshold)
        return masks[-1], policy, {"measured": 0}
    savings = measure_savings(engine, search, probes, rank)
    judge = engine.judge(budget.measure)
    measured = measure(engine.model, search.store, probes, masks, judge, on_pass)
    chosen, options = choose_policy(probes, masks, measured, budget, savings, threshold)
    finer = masks_between(masks, chosen.mask, rank)
    if finer:
        measured += measure(engine.model, search.store, probes, finer, judge, on_pass)
        masks = masks + finer
        chosen, options = choose_policy(probes, masks, measured, budget, savings, threshold)
    return chosen.mask, chosen.policy, report(chosen, options, probes)


def calibrate_database(
    engine: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    budget: Budget,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Choose mask and policy of a database anew, on token sequences, and write them into its manifest.

    engine: of the database's model, without a database; with a classifier, if the budget is agreement of its
    decisions. Sequences that are recorded or given twice are left out. The damage of each head is measured
    again, with the donors that the search finds; within a layer the heads keep the order of the records.
    Returns the report. Raises InvalidInput if too few sequences are left.
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
    mask, policy, quality = calibrate(
        engine, database.search, probes, rank, budget, on_pass=partial(progress, "measuring masks")
    )
    decides = budget.measure is Measure.AGREEMENT
    quality["left_out"] = len(sequences) - len(unseen)
    calibrated = replace(
        manifest,
        damage=tuple(map(tuple, damage.tolist())),
        rank=tuple(map(tuple, rank.tolist())),
        reused_heads=mask.reused,
        policy=policy,
        use=use_of(engine.checkpoint, decides=decides and engine.classifier is None),
        quality=quality,
    )
    with locked(database.folder, on_wait=lambda: progress("waiting for another process", 0, 1)):
        files = database.keep_decisions(engine.classifier if decides else None)
        keep_calibration_texts(database.folder, unseen)
        replace(calibrated, files=files).write(database.folder)
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

    A hit is measured with two thirds of the heads, or as many of them as records hold; a search on batches of
    probes of all lengths.
    """
    stored = search.store.layout.stored_heads
    wanted = mildest_mask(rank, max(1, rank.size * 2 // 3)).reused
    reused = [min(pair) for pair in zip(wanted, stored, strict=True)]
    if not any(reused):
        reused = list(stored)
    model = load_model(
        engine.checkpoint,
        engine.dtype,
        prompt_tokens=engine.tokenizer.prompt_tokens,
        head_order=head_order(rank),
        reused_heads=reused,
        device=engine.model.device,
    )
    costs = measure_costs(model, search)
    return Savings(
        per_head=lambda lengths: costs.saved_per_head(lengths, sum(reused)),
        search=lambda lengths: search_cost(engine.model, search, probes.sequences, lengths),
    )
