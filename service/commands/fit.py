"""`attncache fit-classifier`: labelled texts to a linear classifier."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from attncache_core import Checkpoint, NotFinite, PrefillEngine, fit_classifier
from attncache_core.corpus.reading import FORMATS, read_labelled
from attncache_core.devices import Dtype
from service.commands.options import model_options
from service.commands.progress import shown_progress

_BATCH = 64


@click.command("fit-classifier")
@model_options
@click.option("--data", required=True, help="A .tsv, .csv or .jsonl file, or - for standard input.")
@click.option(
    "--format", "file_format", type=click.Choice(FORMATS), help="Default: told by the file's ending."
)
@click.option("--text-column", default="text", show_default=True)
@click.option("--label-column", default="label", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
def fit(
    checkpoint: Checkpoint,
    dtype: Dtype,
    threads: int | None,
    data: str,
    file_format: str | None,
    text_column: str,
    label_column: str,
    output: Path,
) -> None:
    """Fit a linear classifier on the full model's embeddings; serve it with --classifier."""
    texts, labels = read_labelled(data, text_column, label_column, file_format)
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    embeddings: list[np.ndarray] = []
    with shown_progress() as progress:
        for at in range(0, len(texts), _BATCH):
            try:
                embeddings.extend(engine.embed(texts[at : at + _BATCH]))
            except NotFinite as error:
                raise NotFinite.of(at + error.index, "data") from error
            progress("embedding texts", min(at + _BATCH, len(texts)), len(texts))
    fitted = fit_classifier(
        np.array(embeddings), labels, fingerprint=checkpoint.embedding_fingerprint(), model=checkpoint.name
    )
    fitted.save(output)
    click.echo(f"{output}: {len(fitted.labels)} labels from {len(texts)} texts")
