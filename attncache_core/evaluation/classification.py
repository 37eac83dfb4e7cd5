"""Classification by a linear classifier on embeddings, with reuse off and on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core.attention_maps.search import Outcome
from attncache_core.classifier import fit_classifier
from attncache_core.engine import PrefillEngine, PrefillResult
from attncache_core.outputs import cosines

Labelled = tuple[Sequence[str], Sequence[str]]  # texts and their labels


@dataclass(frozen=True, slots=True)
class ClassificationReport:
    """One test set under one database. Fractions are in [0, 1]."""

    texts: int
    recorded_texts: int  # hits of similarity 1: their very tokens are in the database
    reused_heads: int
    heads: int
    threshold: float
    hit_rate: float  # hits / all texts
    mean_cosine: float  # of the hits' embeddings to the full model's
    cosine_5th_percentile: float
    accuracy_full: float
    accuracy_reuse: float
    hits_accuracy_full: float
    hits_accuracy_reuse: float
    agreement_on_hits: float  # decisions of the hits that stay what they were
    full_seconds: float  # median over the rounds, all texts; tokenising left out
    reuse_seconds: float  # the same, search and fetch included
    search_seconds: float  # of the last round, within the time of reuse
    speedup: float  # median over the rounds of full / reuse


def evaluate_classification(
    full: PrefillEngine,
    reusing: PrefillEngine,
    train: Labelled,
    test: Labelled,
    *,
    batch_size: int = 64,
    rounds: int = 5,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> ClassificationReport:
    """Fit on the full model's embeddings of `train`; classify `test` in full and with reuse.

    full: an engine without a database, reusing: the same model with one. Times are taken in turn, a round
    of each, on batches in the order of the data.
    """
    if reusing.database is None:
        raise ValueError("the reusing engine has no database")
    embeddings = _outputs(_run(full, full.tokenize(train[0]), batch_size)[0])
    classifier = fit_classifier(embeddings, train[1], fingerprint="", model=full.checkpoint.name)
    sequences = full.tokenize(test[0])
    for engine in (full, reusing):
        _run(engine, sequences[:batch_size], batch_size)  # warms up
    timings = []
    for number in range(rounds):
        computed, full_seconds = _run(full, sequences, batch_size)
        reused, reuse_seconds = _run(reusing, sequences, batch_size)
        timings.append((full_seconds, reuse_seconds))
        on_step(number + 1, rounds)
    hits = np.array([outcome == Outcome.HIT for result in reused for outcome in result.outcomes])
    similarities = np.concatenate([result.similarities for result in reused])
    cosine = cosines(_outputs(reused), _outputs(computed))[hits]
    decided_full, decided_reuse = (np.array(classifier.predict(_outputs(run))) for run in (computed, reused))
    labels = np.array(test[1])
    return ClassificationReport(
        texts=len(labels),
        recorded_texts=int((similarities == 1.0).sum()),
        reused_heads=reusing.database.mask.total,
        heads=reusing.database.mask.heads,
        threshold=reusing.database.search.threshold,
        hit_rate=float(hits.mean()),
        mean_cosine=float(cosine.mean()) if hits.any() else float("nan"),
        cosine_5th_percentile=float(np.percentile(cosine, 5)) if hits.any() else float("nan"),
        accuracy_full=_share(decided_full == labels),
        accuracy_reuse=_share(decided_reuse == labels),
        hits_accuracy_full=_share((decided_full == labels)[hits]),
        hits_accuracy_reuse=_share((decided_reuse == labels)[hits]),
        agreement_on_hits=_share((decided_full == decided_reuse)[hits]),
        full_seconds=statistics.median(full_seconds for full_seconds, _ in timings),
        reuse_seconds=statistics.median(reuse_seconds for _, reuse_seconds in timings),
        search_seconds=sum(result.search_seconds for result in reused),
        speedup=statistics.median(full_seconds / reuse_seconds for full_seconds, reuse_seconds in timings),
    )


def _run(
    engine: PrefillEngine, sequences: Sequence[Sequence[int]], batch_size: int
) -> tuple[list[PrefillResult], float]:
    started = time.perf_counter()
    results = [
        engine.run(batch, [True] * len(batch))
        for batch in (sequences[at : at + batch_size] for at in range(0, len(sequences), batch_size))
    ]
    return results, time.perf_counter() - started


def _outputs(results: list[PrefillResult]) -> np.ndarray:
    return np.concatenate([result.outputs for result in results])


def _share(decisions: np.ndarray) -> float:
    return float(decisions.mean()) if decisions.size else float("nan")
