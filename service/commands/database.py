"""`attncache inspect` and `verify`: show a database for people, and prove that its files are intact."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from attncache_core import AttentionDatabase, Manifest
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import verify_generations
from attncache_core.reuse.maps.generations import CURRENT, require_database, structural_faults
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.maps.policy_state import ServedPolicy
from service.loading.summary import has_given_threshold, why_exact


@click.command("inspect")
@click.argument("database", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the manifest as JSON. Default: a summary for people."
)
def inspect(database: Path, as_json: bool) -> None:
    """Show the content of a database. Of a database that was renewed, the generation that serves is shown."""
    opened = AttentionDatabase.open(database)
    if as_json:
        click.echo((opened.folder / "manifest.json").read_bytes(), nl=False)
    else:
        show_database(opened)


@click.command("verify")
@click.argument("database", type=click.Path(path_type=Path))
def verify(database: Path) -> None:
    """Read all files of a database and report damage. The exit code is 1 if anything is damaged.

    Of a database that was renewed, all generations are read. What a renewal that was stopped has left is no
    damage: the next renewal goes on with it, or removes it.
    """
    require_database(database)
    faults = list(structural_faults(database))
    for fault in faults:
        click.echo(fault)
    for generation in verify_generations(database):
        of_which = f"generation {generation.number}: " if (database / CURRENT).is_file() else ""
        click.echo(
            "\n".join(generation.faults)
            or f"{of_which}{generation.records:,} records and prototypes, all sound"
        )
        faults += generation.faults
    if faults:
        sys.exit(1)


def show_database(database: AttentionDatabase) -> None:
    """Print a database's manifest for people: model, records by length, mask, thresholds, quality."""
    manifest, console = database.manifest, Console(highlight=False, markup=False)
    console.print(str(database.folder), style="bold")
    console.print(f"model        {manifest.model} (weights and tokenizer {manifest.fingerprint[:12]})")
    variant = manifest.build.get("variant")
    if variant:
        changes = ", ".join(f"{name.replace('_', ' ')} {change}" for name, change in variant.items())
        console.print(f"variant      {changes}")
    store, info = database.search.store, database.info()
    console.print(
        f"records      {info.records:,} and {info.prototypes:,} prototypes in {manifest.dtype}, "
        f"{manifest.form} maps, {_size(store.file_bytes)}"
    )
    layers = ", ".join(
        f"{layer}: {' '.join(map(str, sorted(order[:reused]))) or 'none'}"
        for layer, (order, reused) in enumerate(zip(database.mask.order, database.mask.reused, strict=True))
    )
    console.print(
        f"reuse mask   {database.mask.total} of {database.mask.heads} heads (layer: heads) {layers}"
    )
    if database.refitted:
        console.print("weights      hits take refitted weights")
    served = ServedPolicy(database.folder, database.search.policy)
    policy = served.policy
    for reason in served.reuse_off:
        console.print(f"reuse off    {reason}")
    console.print(f"budget       {_budget(policy.budget, is_given=has_given_threshold(manifest))}")
    for name, group in zip(policy.names(), policy.groups, strict=True):
        thresholds = ", ".join(
            f"{kind.name.lower()} {of_kind.threshold:.4f}" for kind, of_kind in group.kinds.items()
        )
        serves = "the mean serves" if group.mean_serves else "only recorded texts hit"
        unsearched = "" if group.searched else f"no search up to {group.longest}, {serves}; else "
        console.print(f"threshold θ  {name} tokens: {unsearched}{thresholds}")
    console.print(f"quality      {_quality(manifest)}")
    if left_out := (manifest.quality.get("unfamiliar") or {}).get("left_out"):
        console.print(f"other texts  {_left_out(left_out, policy.budget)}")
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


def overlap(
    database: AttentionDatabase, evaluated: Collection[Sequence[int]], excluded: int
) -> Iterator[str]:
    """Yield sentences about evaluated texts that a database was made from.

    evaluated: token ids of each text. excluded: the number of their records; see AttentionDatabase.without.
    """
    yield f"{excluded} of {database.info().records} records excluded: records of evaluated texts"
    if known := database.calibrated_on(evaluated):
        yield (
            f"{known} evaluated texts are among the texts that the database was calibrated on; calibrate "
            "with --exclude for an honest figure"
        )
    if excluded:
        yield (
            "prototypes and thresholds were made with these records; to exclude the texts there too, build "
            "with --exclude"
        )
    if database.manifest.build.get("synthetic_only"):
        yield (
            "the database was built with --synthetic-only, and does not tell which texts it was made from: "
            "evaluate texts that were not in its corpus"
        )


def _budget(budget: Budget, *, is_given: bool) -> str:
    if is_given:
        return "none: θ was given, so texts may hit outside any budget"
    floor = f", and {budget.floor} for 99 of 100 hits" if budget.floor else ""
    return f"mean {budget.measure} of the hits at least {budget.least}{floor}"


def _quality(manifest: Manifest) -> str:
    quality, is_given = manifest.quality, has_given_threshold(manifest)
    if not quality["measured"]:
        hits = "only recorded texts hit unless θ is lowered"
        if is_given:
            hits = "with this θ, texts may hit outside the budget"
        return f"not measured (too few texts to hold out): {hits}"
    texts = f"{quality['measured']} held-out texts, {'with this θ' if is_given else 'on which θ was chosen'}"
    measured = f"{texts}: hit rate {quality['hit_rate']:.3f}"
    if quality["mean"] is None:
        return f"{measured}; {why_exact(manifest)}"
    return (
        f"{measured} ({quality['prototype_hit_rate']:.3f} by prototypes), mean of the hits "
        f"{quality['mean']:.4f}, cosine {quality['mean_cosine']:.4f} on average and "
        f"{quality['cosine_5th_percentile']:.4f} at the 5th percentile"
    )


def _left_out(left_out: dict[str, Any], budget: Budget) -> str:
    """Return the results on the kinds of text that were left out when the limit of strangeness was chosen."""
    text = f"{left_out['kinds']} kinds unlike the corpus, each left out of the fit: {left_out['hits']} hits"
    if budget.floor or budget.measure is Measure.AGREEMENT:
        harmed = f"below {budget.floor}" if budget.floor else "with another decision"
        text += (
            f", {left_out['harmed']} of them {harmed} (by 95 % bounds over hits and over kinds, at most "
            f"{left_out['harmed_at_most']:.1%})"
        )
    if worst := left_out["worst"]:
        text += f"; the worst mean of a kind is {worst['mean']:.4f} ({worst['kind']}, {worst['hits']} hits)"
    return text


def _size(size: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
