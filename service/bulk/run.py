"""One run: a file of texts to a file of numbers, continued where an earlier run was stopped."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from attncache_core import AttnCacheError, InvalidInput, PrefillEngine, Quantization
from service.bulk.computing import Computing, Task
from service.bulk.formats import check_labels, write_output
from service.bulk.rows import ChunkReader, open_rows
from service.bulk.spool import FINGERPRINT, open_spool, partial, progress, remove_spool


@dataclass(frozen=True, slots=True)
class Files:
    """What is read, and what is written."""

    source: Path
    column: str  # of the texts
    file_format: str | None  # of the source; None: by its name
    output: Path


def check_apart(files: Files) -> None:
    """Raise InvalidInput if the run would write to its input."""
    for written in (files.output, partial(files.output), progress(files.output)):
        if written.exists() and files.source.exists() and written.samefile(files.source):
            raise InvalidInput(
                f"--output {files.output} would write to {written}, which is the input; choose another name",
                field="output",
            )


class Written(NamedTuple):
    """What a run has written."""

    rows: int
    truncated: int  # of the rows that this run has computed, those whose texts were too long and were cut


class Stopped(KeyboardInterrupt):
    """The run was stopped by Ctrl+C. The message says how to continue."""


def run(
    engine: PrefillEngine,
    task: Task,
    files: Files,
    batch_tokens: int,
    begun_with: Mapping[str, Any],
    report: Callable[[int, float | None], None],
) -> Written:
    """Compute all texts of a file and write the output.

    begun_with: options that must not change while the output is unfinished. report: called with the rows that
    are saved and the share of the file, if it is known, after each chunk.
    Raises InvalidInput for a bad row, an unfinished output of other options or another input, NotFinite,
    OSError and Stopped. All of them leave what was saved, and their messages say how to continue.
    """
    check_labels(files.output, task.classes)
    begun = {
        FINGERPRINT: engine.fingerprint[:12],
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "--batch-tokens": batch_tokens,
        **({"numbers": "logits"} if task.classes else {}),  # scores, in earlier versions
        # Torch calibrates int8 when the model is loaded, and the last bits depend on its threads.
        **({"--threads": engine.threads} if engine.checkpoint.quantization is Quantization.INT8 else {}),
        **begun_with,
    }
    with (
        open_rows(files.source, files.column, files.file_format) as rows,
        open_spool(files.output, task.width, begun) as spool,
    ):
        reader = ChunkReader(rows)
        if not reader.skip(spool.done):
            raise InvalidInput(
                f"{files.source} does not begin with the {spool.done.rows:,} rows that are saved in "
                f"{partial(files.output)}; give the same input, or remove this file to begin again",
                field="input",
            )
        try:
            with Computing(engine, task, batch_tokens) as computing:
                for chunk, numbers in computing.computed(reader.chunks(), spool.numbers):
                    spool.append(numbers, chunk.done)
                    report(spool.done.rows, chunk.share)
            if spool.done.rows:
                write_output(files.output, partial(files.output), spool.finish(), task.classes)
        except KeyboardInterrupt as stop:
            raise Stopped(f"stopped; {spool.how_to_continue()}") from stop
        except AttnCacheError as error:
            if not spool.done.rows:
                raise
            remedy = spool.how_to_continue("correct the input and ")
            raise type(error)(f"{error}; {remedy}", field=error.field) from error
        except FileExistsError as error:
            remedy = spool.how_to_continue(f"remove or rename {files.output}, and ")
            raise InvalidInput(
                f"{files.output} was made by another process meanwhile; {remedy}", field="output"
            ) from error
        except OSError as error:
            before = "free space, and " if error.errno == errno.ENOSPC else ""
            reason = f"{error.strerror or error}; {spool.how_to_continue(before)}"
            raise OSError(error.errno, reason, error.filename or str(files.output)) from error
    if not spool.done.rows:
        raise InvalidInput(f"{files.source} has no texts", field="input")
    try:
        remove_spool(files.output)
    except OSError as error:
        reason = f"{error.strerror}; {files.output} is complete, so this file can be removed"
        raise OSError(error.errno, reason, error.filename) from error
    return Written(spool.done.rows, computing.truncated_rows)
