"""Calibrate an existing database again, on texts like those that a server will receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attncache_core.calibration.calibrate import MAX_DAMAGE_PROBES, Progress, calibrate, held_first
from attncache_core.calibration.damage import damage_of_each, joint_damage, model_for_damage, reuse_rank
from attncache_core.calibration.policy_selection import rare_length
from attncache_core.calibration.probes import find_probes, stored_batches
from attncache_core.calibration.quality import texts_needed
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.corpus import UnfamiliarText
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed, InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.models.refitted import REFITTED, write_refitted
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.familiarity import familiarity_name, remove_other_tests, write_familiarity
from attncache_core.reuse.maps.generations import current_generation
from attncache_core.reuse.maps.integrity import file_digest
from attncache_core.reuse.maps.manifest import Manifest, use_of
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.policy_state import forget_tightened
from attncache_core.reuse.maps.publishing import renewing
from attncache_core.reuse.mask import ReuseMask
from attncache_core.runtime.files import remove_unfinished


def calibrate_database(
    engine: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    unfamiliar: Sequence[UnfamiliarText],
    budget: Budget,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Choose the mask and the policy of a database again, and write both into its manifest.

    engine: an engine with the database's model and without a database. If the budget is the agreement of a
    classifier's decisions, the engine has the classifier. sequences: token ids to measure on; recorded and
    repeated sequences are skipped. unfamiliar: texts unlike the sequences, see corpus.unfamiliar_texts.

    Refitted weights are kept if they save the most time with their own mask; otherwise they are removed. They
    are not fitted again, because the database does not hold the texts that it was built from.

    The damage of each head is measured again, with the records that the search finds. Within a layer, the
    heads keep the order in which the records hold them. Returns the report, which the manifest holds as
    `quality`. Raises InvalidInput if too few sequences remain to prove that the budget is kept, and
    BuildFailed if another process renews or calibrates the database, or has renewed it.
    """
    root = database.generation.root
    # A renewal takes the budget of the generation that serves, so none may run meanwhile.
    with renewing(root):
        present = current_generation(root)
        files = Manifest.read(present.folder).files
        if (present, files) != (database.generation, database.manifest.files):
            raise BuildFailed(f"{root} was changed since it was opened; calibrate again", field="database")
        return _calibrate(engine, database, sequences, unfamiliar, budget, progress)


def _calibrate(
    engine: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    unfamiliar: Sequence[UnfamiliarText],
    budget: Budget,
    progress: Progress,
) -> dict[str, Any]:
    database.require_fingerprint(engine.checkpoint)
    store, manifest = database.search.store, database.manifest
    unseen = unrecorded(database, sequences, field="texts", needed=texts_needed(budget))
    probes = find_probes(engine.model, database.search, unseen)
    sample = probes.sample(MAX_DAMAGE_PROBES)
    order = manifest.mask.order
    model = model_for_damage(engine)
    joint = joint_damage(
        model,
        stored_batches(model, store, order, sample, sample.most_similar()),
        engine.decisions.comparator(budget.measure).comparable,
        partial(progress, "measuring heads"),
    )
    held = ReuseMask(order, manifest.stored_heads).as_array()
    rank = held_first(reuse_rank(joint, len(manifest.rank), order), held)
    damage = np.where(held, damage_of_each(joint, len(rank)), manifest.damage)
    chosen = calibrate(
        engine,
        database.search,
        probes,
        unfamiliar,
        database.token_counts,
        rank,
        budget,
        refit=(lambda _: database.refitted) if database.refitted else None,
        refit_masks=[manifest.mask],
        progress=progress,
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
    files = database.keep_decisions(engine.classifier if decides else None)
    name = write_familiarity(database.folder, chosen.familiarity, database.token_counts)
    files.pop(familiarity_name(files))
    files[name] = file_digest(database.folder / name)
    if chosen.refitted is None:
        files.pop(REFITTED, None)
    database.keep_calibration_texts(unseen)
    replace(manifest, files=files).write(database.folder)
    for killed in ("manifest.json", "calibrated_on.json", "familiarity-*"):
        remove_unfinished(database.folder, killed)
    remove_other_tests(database.folder, name)
    database.remove_other_decisions(files)
    if chosen.refitted is None:
        write_refitted(database.folder, None)
    forget_tightened(database.folder)
    return quality


def unrecorded(
    database: AttentionDatabase, sequences: Sequence[Sequence[int]], *, field: str, needed: int = MIN_PROBES
) -> list[list[int]]:
    """Return the distinct sequences that the database can be measured on.

    These sequences are not recorded, and the database has records of their length. Raises InvalidInput for
    `field` if fewer than `needed` of them are of lengths that are measured well enough (see rare_length).
    """
    store = database.search.store
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
    unseen = [ids for ids in distinct if len(ids) in store.segments and store.record_of(ids) is None]
    lengths = np.sort([len(ids) for ids in unseen])
    rare = rare_length(lengths, min(store.segments)) if unseen else 0
    if (may_hit := int((lengths > rare).sum())) < needed:
        of_budget = " (min_text_cosine 0, or a smaller min_agreement, needs fewer)" * (needed > MIN_PROBES)
        raise InvalidInput(
            f"{may_hit} of the texts are not in the database and have a length that it can serve; "
            f"at least {needed} such texts are needed, so give more texts{of_budget}",
            field=field,
        )
    return unseen
