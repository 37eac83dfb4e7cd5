"""The options that the commands of `attncache evaluate` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from attncache_core.evaluation.methods import METHODS, parse_methods
from service.commands.options import (
    drop_options,
    json_option,
    max_tokens_option,
    use_options,
    whole_model_options,
)


def evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an evaluation and the options for how the model is used."""
    return fixed_evaluation_options(use_options(command))


def fixed_evaluation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an evaluation that itself determines how the model is used."""
    options = (
        max_tokens_option,
        click.option(
            "--database",
            type=click.Path(path_type=Path),
            help="Folder of the database. Default: no database.",
        ),
        click.option(
            "--corpus",
            multiple=True,
            metavar="FILE",
            help="Texts that the database is built from: FILE or FILE:column,column. May be repeated. "
            "Default: none.",
        ),
        click.option(
            "--methods",
            default=",".join(METHODS),
            show_default=True,
            callback=lambda _context, _option, names: parse_methods(names),
            help=f"Methods to compare, separated by commas: {', '.join(METHODS)}.",
        ),
        click.option(
            "--heads",
            help="Heads to reuse: all, layers:0-3, or a number. Default: the reuse mask of the database.",
        ),
        click.option(
            "--threshold",
            type=float,
            help="Least similarity θ of a hit, for all lengths. Default: the thresholds of the database.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Most texts in a batch.",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="Number of timing repetitions; the methods alternate.",
        ),
        json_option,
        click.option(
            "--markdown",
            type=click.Path(path_type=Path),
            help="File to write the table to as Markdown. Default: the table is only printed.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return whole_model_options(drop_options(command))
