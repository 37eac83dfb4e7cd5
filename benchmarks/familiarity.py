"""Measure how the strangeness limit protects unfamiliar texts, kind by kind, and what the test costs.

    python -m benchmarks familiarity --database banking77.db --corpus banking77_train.tsv \\
        --data banking77_test_a.tsv --data STSB_test.tsv:sentence1,sentence2 --most 600

The unfamiliar texts are of the kinds that no familiarity test is fitted on, generated with another seed than
in calibration. Each text, and each text of --data, is embedded three times: in full, with the database, and
with the database without its limit. --generated 0 measures the files of --data alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from attncache_core import AttentionDatabase, PrefillEngine, default_corpus, find_checkpoint
from attncache_core.calibration.trial import full_outputs
from attncache_core.corpus import unfamiliar_texts
from attncache_core.corpus.reading import read_texts, spread
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.maps.familiarity import Familiarity
from service.commands.report import machine, show_machine, show_table

_BATCH = 64
_TIMINGS = 1000


@click.command()
@click.option("--model", default="all-MiniLM-L6-v2", show_default=True)
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--corpus", help="FILE or FILE:column,column. Default: the shipped corpus.")
@click.option("--data", multiple=True, help="FILE or FILE:column,column with texts of one corpus.")
@click.option("--most", type=int, help="Most texts of each corpus, evenly spread. Default: all.")
@click.option("--generated", default=40, show_default=True, help="Generated texts of each unfamiliar kind.")
@click.option("--seed", default=1, show_default=True)
def main(
    model: str,
    database: Path,
    corpus: str | None,
    data: tuple[str, ...],
    most: int | None,
    generated: int,
    seed: int,
) -> None:
    """Print the hits and cosines of each kind of text, with and without the limit."""
    opened = AttentionDatabase.open(database)
    checkpoint = find_checkpoint(model)
    without = replace(opened.search, policy=replace(opened.search.policy, limit=None))
    engines = [
        PrefillEngine.load(checkpoint, database=each) for each in (opened, replace(opened, search=without))
    ]
    known = read_texts(corpus) if corpus else [sentence.text for sentence in default_corpus()]
    texts = [text for text in unfamiliar_texts(known, generated, seed) if not text.fitted]
    added = [
        (Path(source.partition(":")[0]).stem, text)
        for source in data
        for distinct in [list(dict.fromkeys(read_texts(source)))]
        for text in spread(distinct, most or len(distinct))
    ]
    sequences = engines[0].tokenize([*(text.text for text in texts), *(text for _, text in added)])
    full = full_outputs(engines[0], sequences, _BATCH)
    measured = [_measured(engine, sequences, full) for engine in engines]
    kinds = np.array([*(text.kind for text in texts), *(name for name, _ in added)])
    unfamiliar = np.arange(len(kinds)) < len(texts)
    rows = [_row(kind, kinds == kind, measured) for kind in dict.fromkeys(kinds.tolist())]
    if texts:
        rows.append(_row("all kinds", unfamiliar, measured))
    familiarity = opened.search.familiarity
    cost = "no test" if familiarity is None else f"{_microseconds(familiarity):.2f} µs"
    show_machine({**machine(engines[0].threads), "strangeness of a text of 16 tokens, 64 together": cost})
    columns = ("kind", "texts", "hits", "mean", "least", "below 0.95", "hits", "mean", "least", "below 0.95")
    show_table("hits and their cosines with the limit, and without", columns, rows)


def _measured(
    engine: PrefillEngine, sequences: Sequence[Sequence[int]], full: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which sequences hit, bool [n], and the cosine of each output to the full output, float32 [n]."""
    batches = [sequences[at : at + _BATCH] for at in range(0, len(sequences), _BATCH)]
    results = [engine.run(engine.requests(batch)) for batch in batches]
    hits = [outcome.is_hit for result in results for outcome in result.outcomes]
    return np.array(hits), cosines(np.concatenate([result.outputs for result in results]), full)


def _row(kind: str, rows: np.ndarray, measured: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[object]:
    """Return the table row of one kind of text; rows: bool [n], which texts are of the kind."""
    cells: list[object] = [kind, int(rows.sum())]
    for hits, likeness in measured:
        of_hits = likeness[rows & hits]
        cells += [
            len(of_hits),
            f"{of_hits.mean():.4f}" if len(of_hits) else "",
            f"{of_hits.min():.4f}" if len(of_hits) else "",
            int((of_hits < 0.95).sum()),
        ]
    return cells


def _microseconds(familiarity: Familiarity) -> float:
    """Return the median time of the familiarity test per text, for batches of 64 texts of 16 tokens."""
    ids = np.random.default_rng(0).integers(0, len(familiarity.token_weights), 16 * _BATCH)
    lengths = np.full(_BATCH, 16)
    seconds = []
    for _ in range(_TIMINGS):
        started = time.perf_counter()
        familiarity.strangeness(ids, lengths)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) / _BATCH * 1e6
