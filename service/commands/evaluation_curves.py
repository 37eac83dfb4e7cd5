"""Measure and plot what `attncache evaluate curves` shows for a database and texts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attncache_core import AttentionDatabase, InvalidInput, PrefillEngine, Progress
from attncache_core.calibration.database import unrecorded
from attncache_core.calibration.probes import find_probes
from attncache_core.calibration.savings import measure_savings
from attncache_core.evaluation.comparison import FULL, compare
from attncache_core.evaluation.curves import measure_curves
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.presets import Preset
from attncache_core.evaluation.tasks import AgreementTask, full_outputs
from attncache_core.heads.comparator import Measure
from service.plots import Plots

_ROUNDS = 3


def plot_curves(
    full: PrefillEngine,
    database: AttentionDatabase,
    sequences: Sequence[Sequence[int]],
    most: int,
    output: Path,
    progress: Progress,
) -> None:
    """Measure on sequences that the database does not hold, and write all plots to `output`.

    most: the most sequences to measure on. Raises InvalidInput if the records do not hold all heads.
    """
    database.require_fingerprint(full.checkpoint.fingerprint(), full.checkpoint.name)
    store, manifest = database.search.store, database.manifest
    if sum(store.layout.stored_heads) < database.mask.heads:
        raise InvalidInput(
            f"the records hold {sum(store.layout.stored_heads)} of {database.mask.heads} heads, and curves "
            "compare masks of all heads; build a database without --heads layers",
            field="database",
        )
    unseen = unrecorded(database, sequences, field="data")
    comparator = full.comparator(Measure.AGREEMENT if full.labels else Measure.COSINE)
    plots = Plots(output, str(comparator.measure))
    probes = find_probes(full.model, database.search, unseen).sample(most)
    rank = np.array(manifest.rank)
    curves = measure_curves(
        full.model,
        store,
        probes,
        rank,
        database.mask,
        comparator,
        measure_savings(full, database.search, probes, database.mask.order).per_hit,
        _full_microseconds(full, probes.sequences),
        progress,
    )
    plots.quality_against_time(curves)
    plots.damage(np.array(manifest.damage))
    plots.similarities(curves)
    plots.thresholds(curves)
    methods = Methods(full, full.checkpoint, database, [])
    names = (FULL, "attncache", *(f"attncache:{preset}" for preset in Preset))
    task = AgreementTask("texts", comparator, unseen[:most], full_outputs(full, unseen[:most]))
    plots.presets(
        compare(
            {name: methods.make(name) for name in names},
            task,
            full.comparator(Measure.COSINE),
            rounds=_ROUNDS,
            on_step=lambda done, total: progress("measuring presets", done, total),
        )
    )


def _full_microseconds(full: PrefillEngine, sequences: Sequence[Sequence[int]]) -> float:
    """Return the full model's mean time for one of these sequences in full batches, in microseconds."""
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        full_outputs(full, sequences)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / len(sequences) * 1e6
