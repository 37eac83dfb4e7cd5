"""`attncache calibrate`: choose what may be reused for an operator's texts and budget.

--texts       mask and thresholds of a database
--segments    how the chunks of prompts may be blended
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from attncache_core import (
    AttentionDatabase,
    InvalidInput,
    LinearClassifier,
    PrefillEngine,
    calibrate_database,
)
from attncache_core.build.options import BuildOptions, default_budget
from attncache_core.calibration.blending import calibrate_blending, read_segmented
from attncache_core.corpus import unfamiliar_texts
from attncache_core.corpus.reading import read_texts
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.blend.gate import BlendGate, write_gate
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.reuse.maps.policy import Budget
from service.commands.build import budget_options
from service.commands.database import show_database
from service.commands.options import classifier_option, engine_options, exclude_option, kept_indices
from service.commands.progress import shown_progress
from service.commands.report import require_writable, show_table


@click.command("calibrate")
@engine_options
@click.option(
    "--database", type=click.Path(path_type=Path), help="Folder of the database to change, with --texts."
)
@click.option(
    "--texts",
    multiple=True,
    metavar="FILE",
    help="Texts like those that clients will send: a .txt, .tsv, .csv or .jsonl file, FILE or "
    "FILE:column,column. May be repeated.",
)
@click.option(
    "--segments",
    type=click.Path(path_type=Path),
    help="Prompts like those that clients will send, to measure how their chunks may be blended: a .jsonl "
    "file, one "
    '{"segments": [...], "query": "..."} per line. Needs --output.',
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File to write for `serve --blend`, with --segments."
)
@click.option("--separator", default="\n", show_default=r"\n", help="Text between segments, with --segments.")
@click.option(
    "--listwise",
    is_flag=True,
    help="The segments are the documents of listwise reranking, with --segments and --task label-logits.",
)
@exclude_option
@classifier_option
@budget_options("hits", "full model")
def calibrate(
    load: Callable[..., PrefillEngine],
    database: Path | None,
    texts: tuple[str, ...],
    segments: Path | None,
    output: Path | None,
    separator: str,
    listwise: bool,
    exclude: tuple[str, ...],
    classifier: Path | None,
    **bounds: Any,
) -> None:
    """Choose what may be reused within a quality budget: of a database (--texts), or of chunks (--segments).

    With --texts: the mask and the thresholds of a database are chosen again. The choice saves the most time
    within the budget, measured on the given texts that are not in the database. The budget is a mean over the
    hits of each group of lengths; its 95 % bound must keep it. Without classes, the mean is the cosine to the
    full model's embedding. With classes (of the model, a classifier or labels), the mean is the share of
    hits that keep the full model's decision. In addition, 99 of 100 hits keep --min-text-cosine, and texts
    that do not resemble the given texts are computed in full. Restart running servers afterwards.

    With --segments: the share of reused tokens is chosen that must be computed again, so that answers keep
    the budget. A calibration that was stopped continues.
    """
    load = partial(load, classifier=LinearClassifier.load(classifier) if classifier else None)
    chosen_budget = partial(default_budget, options=BuildOptions(**bounds))
    if segments is not None:
        if database is not None or texts:
            raise InvalidInput("give --segments, or --database with --texts, not both", field="segments")
        if output is None:
            raise InvalidInput("--segments needs --output, the file to write", field="output")
        # Of a list, clients read which document is the best one.
        own_budget = (
            (lambda _: Budget(Measure.AGREEMENT, bounds["min_agreement"])) if listwise else chosen_budget
        )
        _calibrate_segments(load, own_budget, segments, output, separator, listwise)
        return
    if database is None or not texts:
        raise InvalidInput("give --database with --texts, or --segments with --output", field="texts")
    chosen = [text for source in texts for text in read_texts(source)]
    opened = AttentionDatabase.open(database)
    engine = load()
    chosen = [chosen[index] for index in kept_indices(engine, chosen, exclude)]
    budget = chosen_budget(engine)
    with shown_progress() as progress:
        calibrate_database(
            engine, opened, engine.tokenize(chosen), unfamiliar_texts(chosen), budget, progress
        )
    show_database(AttentionDatabase.open(database))
    click.echo("running servers use the new mask and thresholds once they are started again", err=True)


def _calibrate_segments(
    load: Callable[..., PrefillEngine],
    budget: Callable[[PrefillEngine], Budget],
    segments: Path,
    output: Path,
    separator: str,
    listwise: bool,
) -> None:
    """Measure the prompts of a file, write the gate to `output`, and show it.

    Raises InvalidInput, as calibrate_blending, and if the output cannot be written.
    """
    kept = output.with_name(output.name + ".measured")
    _require_own(output, kept)
    prompts = read_segmented(segments)
    engine = load(key_values=KeyValueOptions())
    with shown_progress() as progress:
        try:
            gate = calibrate_blending(
                engine,
                prompts,
                budget(engine),
                separator=separator,
                listwise=listwise,
                kept=kept,
                on_prompt=partial(progress, "measuring prompts"),
            )
            write_gate(output, gate)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InvalidInput(f"{output} cannot be written: {reason}", field="output") from error
    engine.close()
    if repeated := len(prompts) - gate.prompts:
        click.echo(f"{repeated} of {len(prompts)} prompts are equal to others, and count once", err=True)
    _show_gate(gate, output)


def _require_own(output: Path, kept: Path) -> None:
    """Raise InvalidInput unless the gate, and the file of what was measured, are missing or of calibrate."""
    for path in (output, kept):
        require_writable(path, "--output")
    foreign = None
    if kept.exists() and (content := kept.read_bytes()) and not content.startswith(b'{"key"'):
        foreign = kept
    if output.exists() and not _is_gate(output):
        foreign = output
    if foreign:
        raise InvalidInput(
            f"--output {output} would overwrite {foreign}, which calibrate has not written; choose another "
            "file, or remove this one",
            field="output",
        )


def _is_gate(path: Path) -> bool:
    """Return whether a file looks like a gate, of any version."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {"format", "measured"} <= content.keys()


def _show_gate(gate: BlendGate, output: Path) -> None:
    budget, measure = gate.budget, gate.budget.measure.value
    title = f"{gate.prompts} prompts, budget: mean {measure} {budget.least}"
    columns = [
        "ratio",
        f"mean {measure}",
        "95 % bound",
        "keeps the budget",
        "time of exact",
        "under load",
    ]
    rows = [
        [
            f"{measured.ratio:.2f}",
            f"{measured.mean:.4f}",
            f"{measured.lower_bound:.4f}",
            "yes" if measured.keeps_budget else "no",
            f"{measured.seconds:.2f}",
            f"{measured.loaded_seconds:.2f}",
        ]
        for measured in gate.measured
    ]
    if budget.floor:
        title += f", and {budget.floor} for 99 of 100 prompts"
        columns.insert(3, "99 of 100 keep")
        for measured, row in zip(gate.measured, rows, strict=True):
            row.insert(3, "-" if measured.floor is None else f"{measured.floor:.4f}")
    show_table(title, columns, rows)
    shapes = gate.shapes
    click.echo(
        f"measured: {_range(shapes.chunks)} chunks, each of {_range(shapes.chunk_tokens)} tokens, on average "
        f"of {_range(shapes.mean_chunk_tokens)} and together of {_range(shapes.all_chunk_tokens)}, with "
        f"{_range(shapes.other_tokens)} other tokens; prompts of other shapes are computed exactly"
    )
    if gate.ratio is None:
        click.echo(f"{output}: chunks will be computed exactly, because {gate.off()}")
    else:
        click.echo(
            f"{output}: {gate.ratio:.0%} of the reused tokens will be computed again; serve with --blend "
            f"{output}"
        )


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{end:.0f}" for end in ends))
