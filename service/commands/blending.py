"""`attncache calibrate --segments`: measure how the chunks of prompts may be blended."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from attncache_core import InvalidInput, PrefillEngine
from attncache_core.calibration.blending import calibrate_blending, read_segmented
from attncache_core.reuse.blend.gate import BlendGate, write_gate
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.reuse.maps.policy import Budget
from service.commands.progress import shown_progress
from service.commands.report import require_writable, show_table


def calibrate_segments(
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
    _require_writable(output, kept)
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
    _show(gate, output)


def _require_writable(output: Path, kept: Path) -> None:
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


def _show(gate: BlendGate, output: Path) -> None:
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
