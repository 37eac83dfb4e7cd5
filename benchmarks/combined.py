"""Compare reuse with smaller models: quantised, AttnDrop, BlockDrop; and combine both (papers' Table 8).

    python -m benchmarks combined --corpus STSB_train.tsv:sentence1,sentence2 --data STS12.tsv \\
        --data STS13.tsv --folder combined

The dropped layers are the least important ones on the corpus, as `python -m benchmarks importance` measures.
Each variant has its own database in --folder. A missing database is built from the texts of the corpus that
are not evaluated. All variants and the whole model are compared in one run, in which they alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    Checkpoint,
    CorpusSentence,
    PrefillEngine,
    Quantization,
    build_database,
    find_checkpoint,
)
from attncache_core.checkpoints.checkpoint import DroppedLayers
from attncache_core.corpus.reading import read_rated, read_texts
from attncache_core.evaluation.comparison import FULL, Method, MethodReport, compare
from attncache_core.evaluation.importance import measure_importance
from attncache_core.evaluation.methods import Methods
from attncache_core.evaluation.tasks import RatedPairs, SimilarityTask
from attncache_core.heads.comparator import Measure
from attncache_core.models import model_shape
from service.commands.progress import shown_progress
from service.commands.report import machine, show_machine, show_table

_SAMPLE = 500  # number of texts on which the importance of layers is measured


@click.command()
@click.option("--model", default="all-MiniLM-L6-v2", show_default=True)
@click.option("--threads", type=int)
@click.option("--corpus", required=True, multiple=True, help="FILE or FILE:column,column")
@click.option(
    "--data", required=True, multiple=True, help="A table with columns score, sentence1 and sentence2."
)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Folder of the databases.")
@click.option("--quantize", type=click.Choice([kind.value for kind in Quantization]), default="int8")
@click.option(
    "--layers", default=1, show_default=True, help="Number of attention modules, or blocks, to drop."
)
@click.option("--share", default=1 / 3, help="Share of the heads to reuse.", show_default="a third")
@click.option("--rounds", default=3, show_default=True)
def main(
    model: str,
    threads: int | None,
    corpus: tuple[str, ...],
    data: tuple[str, ...],
    folder: Path,
    quantize: str,
    layers: int,
    share: float,
    rounds: int,
) -> None:
    """Print the quality, hits and speed-up of each variant, in full and with reuse."""
    checkpoint = find_checkpoint(model)
    full = PrefillEngine.load(checkpoint, threads=threads)
    task = SimilarityTask({Path(path).stem: _rated(full, path) for path in data})
    evaluated = set(map(tuple, task.sequences))
    read = list(dict.fromkeys(text for source in corpus for text in read_texts(source)))
    tokenized = full.tokenize(read)
    texts = [text for text, ids in zip(read, tokenized, strict=True) if tuple(ids) not in evaluated]
    sample = full.tokenize(texts[:: -(-len(texts) // _SAMPLE)])
    variants = _variants(checkpoint, full, sample, Quantization(quantize), layers)
    methods: dict[str, Method] = {}
    for name, variant in variants.items():
        engine = full if name == FULL else PrefillEngine.load(variant, threads=full.threads)
        path = folder / f"{variant.fingerprint()[:12]}.db"
        if not path.exists():
            attending, heads = model_shape(variant)
            _build(engine, texts, path, heads=str(round(share * attending * heads)))
        made = Methods(engine, variant, AttentionDatabase.open(path), [])
        methods[name] = made.make(FULL)
        methods[f"{name} + reuse"] = made.make("attncache")
    with shown_progress() as progress:
        reports = compare(
            methods,
            task,
            full.decisions.comparator(Measure.COSINE),
            rounds=rounds,
            on_step=lambda done, total: progress("measuring", done, total),
        )
    show_machine({**machine(full.threads), "corpus": len(texts), "texts": len(task.sequences)})
    show_table(
        "Spearman, hits and time", ["", *reports[0].scores, "mean", "hits", "speed-up"], map(_row, reports)
    )


def _variants(
    checkpoint: Checkpoint,
    full: PrefillEngine,
    sample: Sequence[Sequence[int]],
    quantization: Quantization,
    layers: int,
) -> dict[str, Checkpoint]:
    """Return name -> checkpoint of the whole model and its three smaller variants."""
    found = measure_importance(full.model, sample)
    attention, blocks = (
        frozenset(np.argsort(importance)[:layers].tolist()) for importance in (found.attention, found.blocks)
    )
    return {
        FULL: checkpoint,
        quantization.value: replace(checkpoint, quantization=quantization),
        f"without attention {_listed(attention)}": replace(
            checkpoint, dropped=DroppedLayers(attention=attention)
        ),
        f"without block {_listed(blocks)}": replace(checkpoint, dropped=DroppedLayers(blocks=blocks)),
    }


def _rated(engine: PrefillEngine, path: str) -> RatedPairs:
    """Read and tokenize the rated pairs of a table."""
    left, right, ratings = read_rated(path, "sentence1", "sentence2", "score")
    return RatedPairs(engine.tokenize(left), engine.tokenize(right), ratings)


def _build(engine: PrefillEngine, texts: Sequence[str], path: Path, heads: str) -> None:
    """Build a database of texts for the engine's model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with shown_progress() as progress:
        build_database(
            engine, [CorpusSentence(text, text) for text in texts], path, BuildOptions(heads=heads), progress
        )


def _listed(layers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(layers)))


def _row(report: MethodReport) -> list[object]:
    scores = (*report.scores.values(), report.score)
    return [
        report.method,
        *(f"{score:.4f}" for score in scores),
        f"{report.hit_rate:.3f}",
        f"{report.speedup:.3f}",
    ]
