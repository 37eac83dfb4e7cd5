"""Renew a database from newer texts, and let the new generation serve only if it is better.

    texts of a corpus, or of the sample that servers keep, oldest first          corpus.sample
      1 split     hold out the newest tenth; near-duplicates of it leave the rest
      2 prospect  measure whether reuse can pay for the model on this machine     calibration.prospect
      3 build     build the next generation in a hidden folder                   builder
      4 gain      measure in which length groups reuse pays, for both generations  calibration.gain
      5 trial     serve the held-out texts with both generations                 calibration.trial
      6 decide    publish the new generation, or remove it                       reuse.maps.publishing

A renewal that is stopped goes on if it is started again with the same corpus, and one that had decided
returns its decision if the options are the same too. A renewal from the sample keeps its texts in the
workspace for a day, and goes on with them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from attncache_core.build.builder import build_database
from attncache_core.build.options import PROTOTYPES, BuildOptions, bounds_of
from attncache_core.calibration.calibrate import Progress
from attncache_core.calibration.gain import require_gain
from attncache_core.calibration.prospect import could_pay
from attncache_core.calibration.quality import texts_needed
from attncache_core.calibration.trial import Trial, full_outputs, savings_of, try_generation, why_refused
from attncache_core.corpus import CorpusSentence
from attncache_core.corpus.near_duplicates import near_duplicates
from attncache_core.corpus.reservoir import SampledText
from attncache_core.corpus.sample import read_log, read_sample, sample_folder, write_log
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import DatabaseRefused, InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.generations import Renewal, Result
from attncache_core.reuse.maps.publishing import (
    SAMPLED,
    begin_building,
    decide,
    now,
    renewing,
)
from attncache_core.reuse.storage.layout import MapForm

_HELD_OUT_SHARE = 10  # one of so many texts, the newest
_SAMPLE_KEPT_SECONDS = 24 * 3600
_MAX_AHEAD_SECONDS = 60  # clocks of machines that share a folder differ a little

# Loads the model, with a database or without one.
Load = Callable[[AttentionDatabase | None], PrefillEngine]


def renew_database(
    load: Load,
    folder: Path,
    texts: Sequence[str] | None = None,
    *,
    min_gain: float,
    synthetic_only: bool = False,
    progress: Progress = lambda *_: None,
) -> Renewal:
    """Build the next generation of the database in `folder`, publish it if it is better, and return why.

    texts: oldest first; None: of the sample that servers keep in the folder. min_gain: see require_gain;
    0 measures no gain, so reuse counts as paying. synthetic_only: leave out the records of single texts, also
    if the present generation has such records. Records of sampled texts are always left out, because one
    client's text would serve another client.

    Raises DatabaseRefused if the present generation cannot be opened or is of another model or another use
    of the model, InvalidInput if the database keeps no budget, or if there is no sample or too few texts,
    BuildFailed if another process renews or the build fails, MachineBusy if nothing can be measured, and
    OSError. A renewal that fails changes nothing that serves, and a later one goes on with what was built.
    """
    with renewing(folder) as finished:
        present = AttentionDatabase.open(folder)
        options = _options_like(present, synthetic_only or texts is None)
        engine = load(None)
        present.require_fingerprint(engine.checkpoint)
        present.require_use(engine.checkpoint)
        if present.decisions is not None and engine.classifier is None:
            raise InvalidInput(
                f"database {folder} keeps the decisions among the labels "
                f"{', '.join(present.decisions.labels)}; give --labels with them",
                field="labels",
            )
        present.require_classifier(engine.classifier)
        measured: dict[str, Any] = {}
        if texts is not None:
            measured["request"] = _digest([texts, min_gain, synthetic_only, str(engine.dtype)])
            if finished is not None and _answers(finished, measured["request"], present):
                return finished
        if texts is None:
            renewed_from = _Texts.of_sample(engine, _sampled(folder, engine, present), present)
        else:
            renewed_from = _Texts.of_corpus(engine, texts, present)
        lengths = Counter(map(len, renewed_from.held_out))
        if min_gain > 0 and not could_pay(engine, lengths, min_gain):
            reason = (
                "nothing was built, because reuse of attention maps cannot make this model as much faster on "
                "this machine as --min-gain asks for"
            )
            return _decided(folder, present, Result.NO_GAIN, present.generation.number, reason, measured)
        built = _build(engine, folder, present, renewed_from, options, progress)
        trials = _trials(load, engine, present, built, renewed_from, min_gain, progress)
        measured |= renewed_from.figures() | {name: trial.figures() for name, trial in trials.items()}
        refused = why_refused(trials["present"], trials["new"], built.manifest.policy.budget)
        result = Result.REFUSED if refused else Result.PUBLISHED
        number, reason = int(built.folder.name), refused or "it keeps the budget and saves more time"
        return _decided(folder, present, result, number, reason, measured)


def _answers(finished: Renewal, request: str, present: AttentionDatabase) -> bool:
    """Return whether a decision that was just finished is about this request, and was carried out."""
    serves = finished.generation if finished.result is Result.PUBLISHED else finished.before
    return finished.measured.get("request") == request and present.generation.number == serves


@dataclass(frozen=True)
class _Texts:
    """The texts of a renewal."""

    training: list[CorpusSentence]
    held_out: list[list[int]]  # distinct token sequences that the present generation has not recorded
    clients: list[bytes]  # digest of the client of each of these sequences; empty if it is not known
    near_duplicates: int  # texts that are not trained on, because they resemble held-out texts
    sampled: list[SampledText]  # all texts, if they are of a sample

    @classmethod
    def of_corpus(cls, engine: PrefillEngine, texts: Sequence[str], present: AttentionDatabase) -> _Texts:
        """Hold out the newest tenth. Raises InvalidInput if it cannot prove the budget."""
        sentences = [CorpusSentence(text, text) for text in texts]
        return cls._divided(engine.tokenize(texts), [b""] * len(texts), sentences, [], present)

    @classmethod
    def of_sample(
        cls, engine: PrefillEngine, sampled: list[SampledText], present: AttentionDatabase
    ) -> _Texts:
        """Hold out the newest tenth. Raises InvalidInput if it cannot prove the budget."""
        tokens = [text.token_ids for text in sampled]
        decoded = zip(engine.tokenizer.decode(tokens), tokens, strict=True)
        sentences = [CorpusSentence(text, text, tuple(ids)) for text, ids in decoded]
        return cls._divided(tokens, [text.client for text in sampled], sentences, sampled, present)

    @classmethod
    def _divided(
        cls,
        tokens: Sequence[list[int]],
        clients: Sequence[bytes],
        sentences: Sequence[CorpusSentence],
        sampled: list[SampledText],
        present: AttentionDatabase,
    ) -> _Texts:
        is_newest = _newest_tenth(clients)
        newest = {tuple(tokens[index]): clients[index] for index in np.flatnonzero(is_newest).tolist()}
        store = present.search.store
        held_out = {ids: client for ids, client in newest.items() if store.record_of(ids) is None}
        _require_enough(len(held_out), len(tokens), present)
        older = np.flatnonzero(~is_newest)
        resembling = near_duplicates([tokens[index] for index in older.tolist()], list(newest))
        training = [sentences[index] for index in older[~resembling].tolist()]
        return cls(training, list(map(list, held_out)), [*held_out.values()], int(resembling.sum()), sampled)

    def figures(self) -> dict[str, Any]:
        """Return the numbers of texts for renewals.jsonl."""
        return {
            "texts": len(self.training),
            "held_out": len(self.held_out),
            "near_duplicates": self.near_duplicates,
        }


def _newest_tenth(clients: Sequence[bytes]) -> np.ndarray:
    """Return which texts are held out, bool [texts]: the newest tenth of each client.

    So no client decides alone, whenever it asks. clients: of each text, oldest first. Clients with few texts
    count as one.
    """
    counts = Counter(clients)
    texts_of: dict[bytes, list[int]] = defaultdict(list)
    for index, client in enumerate(clients):
        texts_of[client if counts[client] >= _HELD_OUT_SHARE else b""].append(index)
    is_newest = np.zeros(len(clients), dtype=bool)
    for indices in texts_of.values():
        is_newest[indices[len(indices) - len(indices) // _HELD_OUT_SHARE :]] = True
    return is_newest


def _require_enough(held_out: int, texts: int, present: AttentionDatabase) -> None:
    needed = texts_needed(present.manifest.policy.budget)
    if held_out < needed:
        raise InvalidInput(
            f"the newest tenth of the {texts} texts has {held_out} distinct texts that are not in the "
            f"database, and at least {needed} are needed to show that the budget is kept; renew from at "
            f"least {needed * _HELD_OUT_SHARE} texts that the database does not hold",
            field="corpus",
        )


def _sampled(folder: Path, engine: PrefillEngine, present: AttentionDatabase) -> list[SampledText]:
    """Return the texts of a renewal that was stopped, or of the sample. Raises InvalidInput, and OSError."""
    kept = folder / SAMPLED
    # Texts of a clock that was ahead would count as new until that time has come.
    is_fresh = (
        kept.is_file() and -_MAX_AHEAD_SECONDS <= time.time() - kept.stat().st_mtime < _SAMPLE_KEPT_SECONDS
    )
    # Twice as many as can suffice, because texts that are recorded already prove nothing.
    least = 2 * _HELD_OUT_SHARE * texts_needed(present.manifest.policy.budget)
    sampled = (read_log(kept) if is_fresh else []) or read_sample(folder, least)
    if not sampled:
        raise InvalidInput(
            f"{folder} holds no sample of texts that were asked before now; start the server with --sample, "
            "or give --corpus FILE",
            field="corpus",
        )
    if max(max(text.token_ids, default=0) for text in sampled) >= engine.tokenizer.vocabulary:
        raise InvalidInput(
            f"{sample_folder(folder)} holds texts of another model; remove this folder", field="corpus"
        )
    return sampled


def _options_like(present: AttentionDatabase, synthetic_only: bool) -> BuildOptions:
    """Return the options of the present generation's build, with the budget of its last calibration.

    Raises InvalidInput if there is no budget that a new generation can be measured by.
    """
    manifest, budget = present.manifest, present.manifest.policy.budget
    if not budget.binds:
        raise InvalidInput(
            f"database {present.folder} keeps no quality budget, so nothing can show that a new generation "
            "is better; calibrate it, or build it again without --threshold, and with a budget",
            field="database",
        )
    if present.decisions is not None and present.decisions.fitted:
        raise InvalidInput(
            f"database {present.folder} keeps the decisions of a classifier, which renew cannot build for; "
            "build a new database and calibrate it with --classifier",
            field="database",
        )
    known = {option.name for option in fields(BuildOptions)}
    given = {name: value for name, value in manifest.build.items() if name in known}
    given["threshold"] = None  # the budget, which a calibration has set since, replaces the θ of the build
    form = given.get("form")
    given["form"] = MapForm(form) if form else None
    if synthetic_only:
        given |= {"synthetic_only": True, "prototypes": given.get("prototypes") or PROTOTYPES}
    return BuildOptions(**given | bounds_of(budget))


def _build(
    engine: PrefillEngine,
    folder: Path,
    present: AttentionDatabase,
    texts: _Texts,
    options: BuildOptions,
    progress: Progress,
) -> AttentionDatabase:
    """Build the next generation, or go on with what a renewal with equal inputs has built."""
    training = [sentence.token_ids or sentence.text for sentence in texts.training]
    inputs = [training, texts.held_out, present.manifest.id, asdict(options), str(engine.dtype)]
    if present.decisions:
        inputs.append(present.decisions.digest())
    digest = _digest(inputs).encode()

    def keep_sample() -> None:
        if texts.sampled:
            write_log(folder / SAMPLED, texts.sampled)

    target = begin_building(folder, digest, keep_sample)
    if target.is_dir() and not _opens(target):
        shutil.rmtree(target)
    build_database(engine, texts.training, target, options, progress, keep_existing=True, start_from=present)
    return AttentionDatabase.open(target)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _opens(folder: Path) -> bool:
    """Return whether the folder holds a database that can be opened."""
    try:
        AttentionDatabase.open(folder)
    except DatabaseRefused:
        return False
    return True


def _trials(
    load: Load,
    engine: PrefillEngine,
    present: AttentionDatabase,
    built: AttentionDatabase,
    texts: _Texts,
    min_gain: float,
    progress: Progress,
) -> dict[str, Trial]:
    """Serve the held-out texts with both generations."""
    full = full_outputs(engine, texts.held_out, field="corpus")
    savings = savings_of(engine, built.search, texts.held_out)
    trials: dict[str, Trial] = {}
    for name, database in (("present", present), ("new", built)):
        progress("comparing generations", len(trials), 2)
        loaded = load(database)
        reuse = loaded.map_reuse
        assert reuse is not None
        # Keeps the gain with the database, so that a server with equal threads need not measure it.
        require_gain(loaded, min_gain)
        if reuse.gain:
            # The batches of the comparison are of any size, and every record counts as read already.
            reuse.reuse_in(reuse.gain.paying)
        trials[name] = try_generation(loaded, texts.held_out, texts.clients, full, savings)
    progress("comparing generations", 2, 2)
    return trials


def _decided(
    folder: Path,
    present: AttentionDatabase,
    result: Result,
    generation: int,
    reason: str,
    measured: dict[str, Any],
) -> Renewal:
    renewal = Renewal(now(), result, present.generation.number, generation, reason, measured)
    decide(folder, renewal)
    return renewal
