"""`attncache fit-classifier`: fit a linear classifier on labelled texts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click
import numpy as np

from attncache_core import Checkpoint, InvalidInput, NotFinite, PrefillEngine, fit_classifier
from attncache_core.checkpoints.checkpoint import Dtype
from attncache_core.corpus.reading import read_labelled
from attncache_core.corpus.tables import FORMATS
from attncache_core.heads.classifier import require_labels
from service.batching.sources import moved
from service.commands.options import model_options
from service.commands.progress import shown_progress
from service.errors import rename

_BATCH = 64


@click.command("fit-classifier")
@model_options
@click.option(
    "--data", required=True, help="Labelled texts: a .tsv, .csv or .jsonl file, or - for standard input."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="Format of the data. Default: the ending of the file's name.",
)
@click.option("--text-column", default="text", show_default=True, help="Column with the texts.")
@click.option("--label-column", default="label", show_default=True, help="Column with the labels.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Folder to create for the classifier."
)
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
    """Fit a linear classifier on the full model's embeddings. To serve it, use `serve --classifier`."""
    if output.is_symlink() or (output.exists() and not _was_stopped(output)):
        raise InvalidInput(f"{output} exists; remove it or choose another name", field="output")
    if output.parent.exists() and not output.parent.is_dir():
        raise InvalidInput(f"{output.parent} is a file; choose another --output", field="output")
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)  # fails before texts are embedded, and not afterwards
    with suppress(OSError):  # another process may have begun to write there
        for folder in missing:
            folder.rmdir()
    texts, labels = read_labelled(data, text_column, label_column, file_format)
    require_labels(labels)
    engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)
    embeddings: list[np.ndarray] = []
    with shown_progress() as progress:
        for first in range(0, len(texts), _BATCH):
            try:
                embeddings.extend(engine.embed(texts[first : first + _BATCH]))
            except NotFinite as error:
                raise NotFinite.of(first + error.index, "data") from error
            except InvalidInput as error:
                rename(error, (moved(error.field, first) or "data").replace("inputs", "data", 1))
                raise
            progress("embedding texts", min(first + _BATCH, len(texts)), len(texts))
    fitted = fit_classifier(
        np.array(embeddings),
        labels,
        fingerprint=engine.checkpoint.embedding_fingerprint(),
        model=checkpoint.name,
    )
    fitted.save(output)
    click.echo(f"{output}: {len(fitted.labels)} labels from {len(texts)} texts")


def _was_stopped(folder: Path) -> bool:
    """Return whether a folder holds only what a stopped command left: the description is written last."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if not path.name.endswith(".unfinished")}
    return names <= {"classifier.safetensors"}
