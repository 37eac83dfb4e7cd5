"""`attncache build`, `inspect` and `verify`: make a database, look into it, prove it whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    Checkpoint,
    CorpusSentence,
    CorruptDatabase,
    Manifest,
    PrefillEngine,
    build_database,
)
from attncache_core.attention_maps.choice import could_keep_floor
from attncache_core.attention_maps.store import MapForm
from attncache_core.attention_maps.tightened import ServedPolicy
from attncache_core.corpus.reading import FORMATS, read_rows, read_texts
from attncache_core.devices import Device, Dtype
from service.commands.options import device_option, max_tokens_option, model_options
from service.commands.progress import shown_progress
from service.commands.texts import places_without

_defaults = BuildOptions()

min_text_cosine_option = click.option(
    "--min-text-cosine",
    type=click.FloatRange(0, 1),
    default=_defaults.min_text_cosine,
    show_default=True,
    help="Quality budget of single texts: 99 of 100 hits have this cosine to the full model's; 0: none.",
)


@click.command("build")
@model_options
@max_tokens_option
@device_option
@click.option(
    "--corpus",
    "corpora",
    required=True,
    multiple=True,
    help="A .txt, .tsv, .csv or .jsonl file, FILE or FILE:column,column, or - for standard input.",
)
@click.option(
    "--without", multiple=True, help="Leave out the texts of this file, FILE or FILE:column,column."
)
@click.option(
    "--format", "file_format", type=click.Choice(FORMATS), help="Default: told by the file's ending."
)
@click.option("--column", default="text", show_default=True, help="Column or field with the texts.")
@click.option(
    "--source-column", help="Column that says which texts belong together; they are held out together."
)
@click.option("--database", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@click.option(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    default=_defaults.min_cosine,
    show_default=True,
    help="Quality budget: mean cosine of the hits' embeddings to the full model's, on held-out texts.",
)
@min_text_cosine_option
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    default=_defaults.min_agreement,
    show_default=True,
    help="Quality budget of a model with classes: share of the hits' decisions that stay.",
)
@click.option(
    "--prototypes",
    type=click.IntRange(min=0),
    default=_defaults.prototypes,
    show_default=True,
    help="Synthetic records of each length, at most; 0: none.",
)
@click.option(
    "--heads", help="Heads to reuse: all, layers:0-3, or a number. Default: chosen within the budget."
)
@click.option(
    "--threshold", type=float, help="θ, the least similarity of a hit. Default: chosen with the heads."
)
@click.option(
    "--maps",
    "form",
    type=click.Choice([form.value for form in MapForm]),
    callback=lambda _context, _option, value: value and MapForm(value),
    help="square: whole maps; packed: the lower triangles of a causal model's, half the bytes. Default: "
    "packed where the model is causal.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    default=_defaults.max_length,
    show_default=True,
    help="Tokens; longer texts are not recorded, for a record grows with the square.",
)
@click.option(
    "--dimensions",
    type=click.IntRange(min=2),
    default=_defaults.dimensions,
    show_default=True,
    help="Numbers of a feature vector.",
)
@click.option("--seed", type=int, default=_defaults.seed, show_default=True)
def build(
    checkpoint: Checkpoint,
    dtype: Dtype,
    device: Device,
    threads: int | None,
    max_tokens: int | None,
    corpora: tuple[str, ...],
    without: tuple[str, ...],
    file_format: str | None,
    column: str,
    source_column: str | None,
    database: Path,
    **options: Any,
) -> None:
    """Build a database of attention maps from a corpus.

    A build that was stopped goes on where it was when the same command is given again.
    """
    sentences = [
        sentence
        for corpus in corpora
        for sentence in _read_corpus(corpus, column, source_column, file_format)
    ]
    engine = PrefillEngine.load(
        checkpoint, dtype=dtype, device=device, threads=threads, max_tokens=max_tokens
    )
    if without:
        kept = places_without(engine, [sentence.text for sentence in sentences], without)
        click.echo(f"{len(sentences) - len(kept)} of {len(sentences)} texts left out", err=True)
        sentences = [sentences[place] for place in kept]
    with shown_progress() as progress:
        build_database(engine, sentences, database, BuildOptions(**options), progress)
    show_database(AttentionDatabase.open(database))


def _read_corpus(
    corpus: str, column: str, source_column: str | None, file_format: str | None
) -> list[CorpusSentence]:
    if source_column:
        return [CorpusSentence(*row) for row in read_rows(corpus, (column, source_column), file_format)]
    # A text without a source is its own.
    return [CorpusSentence(text, text) for text in read_texts(corpus, column, file_format)]


@click.command("inspect")
@click.argument("database", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def inspect(database: Path, as_json: bool) -> None:
    """Show what is in a database."""
    opened = AttentionDatabase.open(database)
    if as_json:
        click.echo((database / "manifest.json").read_text(encoding="utf-8"), nl=False)
    else:
        show_database(opened)


@click.command("verify")
@click.argument("database", type=click.Path(path_type=Path))
def verify(database: Path) -> None:
    """Read all files of a database and say what is wrong with them. Exit code 1 if anything is."""
    try:
        opened = AttentionDatabase.open(database)
        wrong = opened.verify()
    except CorruptDatabase as error:
        wrong = [str(error)]
    for sentence in wrong:
        click.echo(sentence)
    if wrong:
        sys.exit(1)
    click.echo(f"{opened.search.store.records} records, all sound")


def show_database(database: AttentionDatabase) -> None:
    """Print a database's manifest for a person: records and bytes per length, mask, θ, quality at build."""
    manifest, console = database.manifest, Console(highlight=False)
    console.print(f"[bold]{database.folder}[/bold]")
    console.print(f"model        {manifest.model} (fingerprint {manifest.fingerprint[:12]})")
    variant = manifest.build.get("variant")
    if variant:
        changes = ", ".join(f"{name.replace('_', ' ')} {change}" for name, change in variant.items())
        console.print(f"variant      {changes}")
    store = database.search.store
    console.print(
        f"records      {store.records:,} in {manifest.dtype}, {manifest.form} maps, {_size(store.file_bytes)}"
    )
    layers = ", ".join(
        f"{layer}: {' '.join(map(str, sorted(order[:reused]))) or 'none'}"
        for layer, (order, reused) in enumerate(zip(database.mask.order, database.mask.reused, strict=True))
    )
    console.print(
        f"reuse mask   {database.mask.total} of {database.mask.heads} heads (layer: heads) {layers}"
    )
    served = ServedPolicy(database.folder, database.search.policy)
    policy = served.policy
    for reason in served.reuse_off:
        console.print(f"reuse off    {reason}")
    console.print(f"budget       mean {policy.budget.measure} of the hits at least {policy.budget.least}")
    for name, group in zip(policy.names(), policy.groups, strict=True):
        thresholds = ", ".join(
            f"{kind.name.lower()} {of_kind.threshold:.4f}" for kind, of_kind in group.kinds.items()
        )
        serves = "the mean serves" if group.mean_serves else "only recorded texts hit"
        unsearched = "" if group.searched else f"no search, {serves}; else "
        console.print(f"threshold θ  {name} tokens: {unsearched}{thresholds}")
    console.print(f"quality      {_quality(manifest)}")
    distances = manifest.quality.get("map_distance")
    if distances:
        means = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in distances.items())
        console.print(f"map distance {means}")
    console.print(f"built        {json.dumps(manifest.build)}")
    table = Table("tokens", "records", "bytes", title="records by length", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for length, segment in store.segments.items():
        table.add_row(str(length), f"{len(segment):,}", f"{segment.file_bytes:,}")
    console.print(table)


def why_exact(manifest: Manifest) -> str:
    """Say why no text may take the maps of another."""
    probes = manifest.quality["measured"]
    if not could_keep_floor(manifest.policy.budget, probes):
        return (
            f"only recorded texts hit: {probes} held-out texts cannot tell that 99 of 100 hits keep cosine "
            f"{manifest.policy.budget.floor}; 299 can, of some 3,000 texts in all (or --min-text-cosine 0)"
        )
    return "no mask fits the budget, so only recorded texts hit"


def _quality(manifest: Manifest) -> str:
    quality = manifest.quality
    if not quality["measured"]:
        return "not measured (too few texts to hold out): only recorded texts hit unless θ is lowered"
    measured = f"{quality['measured']} held-out texts: hit rate {quality['hit_rate']:.3f}"
    if quality["mean"] is None:
        return f"{measured}; {why_exact(manifest)}"
    return (
        f"{measured} ({quality['prototype_hit_rate']:.3f} by prototypes), mean of the hits "
        f"{quality['mean']:.4f}, cosine {quality['mean_cosine']:.4f} on average and "
        f"{quality['cosine_5th_percentile']:.4f} at the 5th percentile"
    )


def _size(size: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
