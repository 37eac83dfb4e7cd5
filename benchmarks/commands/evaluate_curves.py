"""`evaluate curves`: measure and plot quality, hits and saved time of a database and texts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from attncache_core import (
    AttentionDatabase,
    Checkpoint,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    Progress,
)
from attncache_core.calibration.database import unrecorded
from attncache_core.calibration.probes import find_probes
from attncache_core.calibration.savings import measure_savings
from attncache_core.calibration.trial import full_outputs
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_texts
from attncache_core.evaluation.comparison import FULL, compare
from attncache_core.evaluation.tasks import AgreementTask
from attncache_core.heads.comparator import Measure
from benchmarks.papers.curves import measure_curves
from benchmarks.papers.methods import PaperMethods, Preset
from benchmarks.plots import PaperPlots
from service.commands.options import max_tokens_option, model_options
from service.commands.progress import shown_progress

_ROUNDS = 3


@click.command("curves")
@model_options
@max_tokens_option
@click.option("--database", type=click.Path(path_type=Path), required=True, help="Folder of the database.")
@click.option(
    "--data",
    required=True,
    multiple=True,
    metavar="FILE",
    help="Texts to measure on: FILE or FILE:column,column. May be repeated.",
)
@click.option(
    "--classifier",
    type=click.Path(path_type=Path),
    help="Folder of a fitted classifier, to measure agreement of its decisions. Default: none.",
)
@click.option(
    "--most", type=click.IntRange(min=20), default=600, show_default=True, help="Most texts to measure on."
)
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Folder for plots (PNG) and data (CSV)."
)
def curves(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    max_tokens: int | None,
    database: Path,
    data: tuple[str, ...],
    classifier: Path | None,
    most: int,
    output: Path,
) -> None:
    """Plot quality against saved time for many masks and ways to choose a record, and hits against θ."""
    texts = [text for source in data for text in read_texts(source)]
    full = PrefillEngine.load(
        checkpoint,
        dtype=dtype,
        threads=threads,
        max_tokens=max_tokens,
        classifier=LinearClassifier.load(classifier) if classifier else None,
    )
    opened = AttentionDatabase.open(database)
    with shown_progress() as progress:
        _plot_curves(full, opened, full.tokenize(texts), most, output, progress)
    click.echo(f"{output}: " + ", ".join(sorted(path.name for path in output.iterdir())))


def _plot_curves(
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
    database.require_fingerprint(full.checkpoint)
    store, manifest = database.search.store, database.manifest
    if sum(store.layout.stored_heads) < database.mask.heads:
        raise InvalidInput(
            f"the records hold {sum(store.layout.stored_heads)} of {database.mask.heads} heads, and curves "
            "compare masks of all heads; build a database without --heads layers",
            field="database",
        )
    unseen = unrecorded(database, sequences, field="data")
    comparator = full.decisions.comparator(Measure.AGREEMENT if full.decisions.labels else Measure.COSINE)
    plots = PaperPlots(output, str(comparator.measure))
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
    methods = PaperMethods(full, full.checkpoint, database, [])
    names = (FULL, "attncache", *(f"attncache:{preset}" for preset in Preset))
    task = AgreementTask("texts", comparator, unseen[:most], full_outputs(full, unseen[:most]))
    plots.presets(
        compare(
            {name: methods.make(name) for name in names},
            task,
            full.decisions.comparator(Measure.COSINE),
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
