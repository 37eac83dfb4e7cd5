"""Measure which recompute ratios keep a quality budget for one model, and which of them save time.

prompts of a .jsonl file: segments and a query -> exact answers -> answers with each ratio -> BlendGate
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from attncache_core.calibration.gain import BATCH_TOKENS
from attncache_core.calibration.quality import Quality, texts_needed
from attncache_core.corpus.reading import neighbours
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.result import PrefillResult
from attncache_core.errors import InvalidInput, NotFinite
from attncache_core.heads.comparator import Measure
from attncache_core.heads.decisions import listwise_headings
from attncache_core.reuse.blend.chunks import Recomputation
from attncache_core.reuse.blend.gate import BlendGate, MeasuredRatio, PromptShapes, checksum_of
from attncache_core.reuse.maps.policy import Budget
from attncache_core.text.segments import Segmented, segmented


class SegmentedText(NamedTuple):
    """A prompt of segments and a query."""

    segments: tuple[str, ...]
    query: str
    place: str = "a prompt"  # for errors: where it was read


def read_segmented(path: Path) -> list[SegmentedText]:
    """Return the prompts of a file. Blank lines are skipped.

    Raises InvalidInput, which names the line but no text, if the file cannot be read or a line is no prompt.
    """
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInput(f"{path} cannot be read: {reason}", field="segments") from error
    prompts = [_prompt(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidInput(f"{path} holds no prompts", field="segments")
    return prompts


def _prompt(line: bytes, path: Path, number: int) -> SegmentedText:
    try:
        found = orjson.loads(line)
        segments, query = found["segments"], found["query"]
    except (ValueError, KeyError, TypeError):
        segments, query = None, None
    place = f"{path}, line {number}"
    is_prompt = isinstance(segments, list) and all(
        text and isinstance(text, str) for text in [*segments, query]
    )
    if not (is_prompt and segments):
        raise InvalidInput(
            f"{place} is no prompt; write "
            '{"segments": ["...", "..."], "query": "..."} on each line, without empty texts',
            field="segments",
        )
    return SegmentedText(tuple(segments), query, place)


# Under load, about as many tokens of prompts are measured, in as many rounds.
_LOADED_TOKENS = 8192
_LOADED_ROUNDS = 3

_CHECK_LAYER = 1
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)


@dataclass(frozen=True)
class PromptMeasured:
    """What was measured with one prompt, by ratio."""

    fidelities: Mapping[float, float]
    seconds: Mapping[float, float]  # as a share of the exact answer's


class Measurements:
    """What was measured until now, kept in a file, so that a stopped calibration continues."""

    def __init__(self, path: Path | None, key: str) -> None:
        """path: None keeps nothing. key: stands for all that changes the figures; others are not
        continued.
        """
        self._path, self._key = path, key
        self._known: dict[str, PromptMeasured] = {}
        if path is not None and path.exists():
            self._read(path)

    def measured(self, name: str, measure: Callable[[], PromptMeasured]) -> PromptMeasured:
        """Return what was measured with a prompt, now or earlier."""
        if name not in self._known:
            self._known[name] = found = measure()
            if self._path is not None:
                line = {"key": self._key, "name": name, "ratios": list(found.fidelities)}
                line |= {"fidelities": [*found.fidelities.values()], "seconds": [*found.seconds.values()]}
                with self._path.open("a") as file:
                    file.write(json.dumps(line | {"checksum": checksum_of(line)}) + "\n")
        return self._known[name]

    def close(self) -> None:
        """Remove the file: everything was measured."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        for text in path.read_bytes().splitlines():
            # Other lines were being written when the process was killed, or were damaged.
            with suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["key"] == self._key and checksum_of(line) == line["checksum"]:
                    found = (
                        dict(zip(map(float, line["ratios"]), line[part], strict=True))
                        for part in ("fidelities", "seconds")
                    )
                    self._known[line["name"]] = PromptMeasured(*found)


def calibrate_blending(
    engine: PrefillEngine,
    prompts: Sequence[SegmentedText],
    budget: Budget,
    *,
    separator: str,
    listwise: bool = False,
    ratios: Sequence[float] = RATIOS,
    kept: Path | None = None,
    on_prompt: Callable[[int, int], None] = lambda _done, _all: None,
) -> BlendGate:
    """Measure prompts, and return the gate of the engine's model.

    separator: text between segments. listwise: the segments are documents of listwise reranking. kept: file
    of what was measured, with which a stopped calibration continues; it is removed at the end. on_prompt:
    called after each prompt, with the number of measured prompts and of all. Equal prompts count once. Raises
    InvalidInput if chunks cannot be blended with this model, if a prompt does not fit or has fewer than two
    segments, or for too few prompts.
    """
    engine.blending.require(listwise)
    if len(engine.model.layers) <= _CHECK_LAYER:
        raise InvalidInput(
            f"chunks of a model with {len(engine.model.layers)} layer cannot be blended, because layer "
            f"{_CHECK_LAYER} chooses what is computed again",
            field="segments",
        )
    sequences = {_name(sequence): sequence for sequence in _sequences(engine, prompts, separator, listwise)}
    if len(sequences) < (needed := texts_needed(budget)):
        lower = "--min-agreement" if budget.measure is Measure.AGREEMENT else "--min-text-cosine"
        raise InvalidInput(
            f"there are too few different prompts ({len(sequences)}) to prove this budget, even if no answer "
            f"changes; give {needed} or more, or a lower {lower}",
            field="segments",
        )
    key = json.dumps([engine.fingerprint, separator, listwise, list(ratios), _CHECK_LAYER, str(engine.dtype)])
    measurements = Measurements(kept, hashlib.sha256(key.encode()).hexdigest())
    measuring = _Measuring(engine, budget.measure, listwise, ratios)
    found = []
    for name, sequence in sequences.items():
        found.append(measurements.measured(name, partial(measuring.prompt, sequence)))
        on_prompt(len(found), len(sequences))
    loaded = measuring.under_load(list(sequences.values()))
    gate = BlendGate(
        engine.fingerprint,
        budget,
        separator,
        len(sequences),
        tuple(_of_ratio(ratio, found, budget, loaded[ratio]) for ratio in sorted(ratios)),
        PromptShapes.of((sequence.spans, len(sequence.ids)) for sequence in sequences.values()),
        _CHECK_LAYER,
        listwise,
    )
    measurements.close()
    return gate


def _sequences(
    engine: PrefillEngine, prompts: Sequence[SegmentedText], separator: str, listwise: bool
) -> Iterator[Segmented]:
    frame = engine.tokenizer.frame(
        engine.decisions.letters.prompt if listwise else engine.tokenizer.default_prompt
    )
    (between,) = engine.tokenizer.turns([separator])
    for segments, query, place in prompts:
        try:
            *chunks, query_ids = engine.tokenizer.turns([*segments, query])
            headings = engine.tokenizer.turns(listwise_headings(len(chunks))) if listwise else None
            sequence = segmented(frame, chunks, query_ids, between, headings)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error}", field="segments") from error
        if len(sequence.spans) < 2:
            raise InvalidInput(f"{place} has fewer than two segments with tokens", field="segments")
        yield sequence


def _name(sequence: Segmented) -> str:
    return hashlib.sha256(json.dumps([sequence.ids, sequence.spans]).encode()).hexdigest()


class _Measuring:
    def __init__(
        self, engine: PrefillEngine, measure: Measure, listwise: bool, ratios: Sequence[float]
    ) -> None:
        self._engine, self._measure, self._listwise, self._ratios = engine, measure, listwise, ratios

    def prompt(self, sequence: Segmented) -> PromptMeasured:
        """Measure one prompt with all ratios, and exactly. Its chunks are stored before anything is timed."""
        self._run(sequence, self._ratios[0])
        self._run(sequence, None)
        exact, exact_seconds = self._run(sequence, None)
        if not exact.finite.all():
            raise NotFinite("the model computes NaN or infinity for a prompt", field="segments")
        comparator = self._engine.decisions.comparator(
            self._measure, len(sequence.spans) if self._listwise else None
        )
        fidelities, seconds = {}, {}
        for ratio in self._ratios:
            result, taken = self._run(sequence, ratio)
            fidelities[ratio] = float(comparator.fidelity(result.outputs, exact.outputs)[0])
            seconds[ratio] = taken / exact_seconds
        return PromptMeasured(fidelities, seconds)

    def under_load(self, sequences: Sequence[Segmented]) -> dict[float, float]:
        """Return the time of each ratio as a share of the exact time, in full batches on all engine threads.

        Small operations that one pass hides may cost more there. Only the first prompts are measured.
        """
        threads = self._engine.parallel_runs
        ends = list(accumulate(len(sequence.ids) for sequence in sequences))
        count = max(2 * threads, bisect_right(ends, _LOADED_TOKENS))
        batches = list(neighbours(sequences[:count], lambda each: len(each.ids), BATCH_TOKENS))
        shares: dict[float, list[float]] = {ratio: [] for ratio in self._ratios}
        with ThreadPoolExecutor(threads) as pool:

            def seconds(ratio: float | None) -> float:
                requests = [[self._request(sequence, ratio) for sequence in batch] for batch in batches]
                started = time.perf_counter()
                list(pool.map(self._engine.run, requests))
                return time.perf_counter() - started

            for ratio in (self._ratios[0], None):
                seconds(ratio)  # stores chunks, and warms up
            for _ in range(_LOADED_ROUNDS):
                exact = seconds(None)
                for ratio in self._ratios:
                    shares[ratio].append(seconds(ratio) / exact)
        return {ratio: statistics.median(of_ratio) for ratio, of_ratio in shares.items()}

    def _run(self, sequence: Segmented, ratio: float | None) -> tuple[PrefillResult, float]:
        """Run a prompt with a ratio; None: exactly. Return the result and the seconds."""
        request = self._request(sequence, ratio)
        started = time.perf_counter()
        result = self._engine.run([request])
        return result, time.perf_counter() - started

    def _request(self, sequence: Segmented, ratio: float | None) -> PrefillRequest:
        """Return a request with a ratio; None: exactly, behind the first chunk, as without a gate."""
        engine, prefix_key, blend = self._engine, None, None
        if ratio is None:
            behind = len(sequence.ids) - sequence.spans[0][1]
            prefix_key = engine.blending.require(self._listwise).prefix_key(
                sequence.ids, None, b"", passing=behind
            )
        else:
            again = Recomputation(ratio, _CHECK_LAYER)
            blend = engine.blending.blend_with(sequence, sequence.ids, b"", again)
        plan = engine.tokenizer.default_prompt.sequence_plans[0]
        return PrefillRequest(sequence.ids, False, plan, prefix_key, blend=blend)


def _of_ratio(
    ratio: float, found: Sequence[PromptMeasured], budget: Budget, loaded_seconds: float
) -> MeasuredRatio:
    fidelities = np.array([prompt.fidelities[ratio] for prompt in found])
    quality = Quality.of(fidelities, budget.measure)
    seconds = statistics.median(prompt.seconds[ratio] for prompt in found)
    keeps = quality.keeps(budget)
    return MeasuredRatio(
        ratio, quality.mean, quality.lower_bound, keeps, seconds, quality.floor, loaded_seconds
    )
