"""`evaluate`: `attncache evaluate` with the papers' baselines, and the papers' experiments."""

from __future__ import annotations

from copy import copy
from functools import partial

import click

from attncache_core.evaluation.methods import METHODS, parse_methods
from benchmarks.commands.evaluate_blend import blend
from benchmarks.commands.evaluate_curves import curves
from benchmarks.commands.evaluate_mmlu import mmlu
from benchmarks.papers.methods import PAPER_METHODS, PaperMethods
from service.commands.evaluate import agreement, classification, sts


@click.group("evaluate")
def evaluate() -> None:
    """Measure what reuse costs in quality and saves in time, beside the papers' baselines."""


def _make_paper_methods(context: click.Context, _option: click.Parameter, threshold: float | None) -> None:
    context.obj = partial(PaperMethods, san_threshold=threshold)


def _with_baselines(command: click.Command) -> click.Command:
    """Return an evaluation that also compares the papers' baselines."""
    methods = click.Option(
        ["--methods"],
        default=",".join(METHODS),
        show_default=True,
        callback=lambda _context, _option, names: parse_methods(names, PAPER_METHODS),
        help=f"Methods to compare, separated by commas: {', '.join(PAPER_METHODS)}.",
    )
    san_threshold = click.Option(
        ["--san-threshold"],
        type=float,
        expose_value=False,
        callback=_make_paper_methods,
        help="Divergence below which layers of SAN share maps. Default: half of the layers share maps.",
    )
    changed = copy(command)
    others = (option for option in command.params if option.name != methods.name)
    changed.params = [*others, methods, san_threshold]
    return changed


for _command in (sts, classification, agreement, mmlu):
    evaluate.add_command(_with_baselines(_command))
evaluate.add_command(blend)
evaluate.add_command(curves)
