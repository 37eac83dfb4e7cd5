"""Commands run as a user does, and what is asked of their output."""

from __future__ import annotations

import re

from click import Command
from click.testing import CliRunner, Result

from service.cli import main

# A text of a user, which no message may hold.
PRIVATE = "zanzibar"


def run(*arguments: object, standard_input: bytes | None = None, program: Command = main) -> Result:
    return CliRunner().invoke(program, [str(argument) for argument in arguments], input=standard_input)


def succeeded(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def assert_one_line(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert PRIVATE not in result.stderr
    (line,) = without_progress(result.stderr)
    assert line.startswith("attncache: ")
    for word in words:
        assert word in line


def without_progress(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not re.fullmatch(r"[a-z ]+: \d+/\d+", line)]


def model_arguments(checkpoint) -> tuple[str, ...]:
    return "--model", str(checkpoint.folder), "--dtype", "float32"
