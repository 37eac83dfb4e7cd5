"""An engine without a model, and the real app round it.

A token is a character; the "embedding" of a text counts its characters, so that its value can be foretold
(`embedding_of`) and equal texts have cosine 1. Texts in `stored` and `prototypes` hit, with similarity 0.999
and an output whose cosine to the full one is 1 - `damage`. There are two length groups, up to 8 and above.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from attncache_core import InputTooLong, NoClassifier, Outcome, PrefillEngine, PrefillResult
from attncache_core.attention_maps.policy import (
    Budget,
    KindPolicy,
    LengthGroup,
    ReusePolicy,
    StrangenessLimit,
)
from attncache_core.attention_maps.store import RecordKind
from attncache_core.attention_maps.tightened import ServedPolicy, Tightened
from attncache_core.attention_maps.verification import Window
from attncache_core.outputs import Judge, Measure
from attncache_core.prompts import Prompt, Reading, Template
from service.app import create_app
from service.settings import Settings

DIMENSIONS = 128
FAILING = "the engine must fail on this text"
NOT_FINITE = "the engine makes NaN of this text"
CORRUPT = "the record of this text is damaged"
SIMILARITY = 0.999  # of every hit
OWN_PROMPT = Prompt(Template(), (Reading(0),))


def embedding_of(ids: Sequence[int]) -> np.ndarray:
    return np.bincount([code % DIMENSIONS for code in ids], minlength=DIMENSIONS).astype(np.float32)


def policy_of(
    measure: Measure = Measure.COSINE, floor: float = 0.0, limit: StrangenessLimit | None = None
) -> ReusePolicy:
    kinds = {RecordKind.STORED: KindPolicy(0.9), RecordKind.PROTOTYPE: KindPolicy(0.95)}
    groups = (LengthGroup(8, kinds), LengthGroup(9, kinds))
    return ReusePolicy(Budget(measure, least=0.985, floor=floor), groups, limit)


class FakeEngine:
    fingerprint = "0123456789abcdef" * 4
    max_tokens = 64
    default_prompt = OWN_PROMPT
    multi_label = False
    database = None

    def __init__(
        self,
        *,
        task: str = "embed",
        labels: tuple[str, ...] | None = None,
        stored: Collection[str] = (),
        prototypes: Collection[str] = (),
        damage: float | Callable[[str], float] = 0.0,
        policy: ReusePolicy | None = None,
        strangeness: Callable[[str], float] = lambda _: np.nan,
        folder: Path | None = None,
        failure: type[BaseException] = RuntimeError,
    ) -> None:
        """damage, strangeness: of each text. folder: where it is kept what verification finds out."""
        self.task = task
        self.labels = labels
        self.stored = stored
        self.prototypes = prototypes
        self.damage = damage
        self.strangeness = strangeness
        calibrated = policy or policy_of()
        self.served = ServedPolicy(folder, calibrated) if folder else None
        self.policy: ReusePolicy | None = self.served.policy if self.served else calibrated
        self.failure = failure
        self.before_failing: Callable[[], None] = lambda: None
        self.batches: list[list[str]] = []
        self.verified: list[list[str]] = []  # those of the batches that were computed without reuse
        self.may_run = threading.Event()  # cleared: the engine is busy
        self.may_run.set()
        self.runs = threading.Semaphore(0)  # released as a batch begins that must wait for `may_run`

    def named_prompt(self, name: str) -> Prompt:
        return Prompt(Template(prefix=f"{name}: "), (Reading(len(name) + 2),))

    def tokenize(
        self,
        texts: list[str],
        truncate: bool,
        prompt: Prompt = OWN_PROMPT,
        most_tokens: int | None = None,  # noqa: ARG002
    ) -> list[list[int]]:
        texts = [prompt.template.around(text) for text in texts]
        for index, text in enumerate(texts):
            if len(text) > self.max_tokens and not truncate:
                raise InputTooLong(
                    f"the text has more than {self.max_tokens} tokens", field=f"inputs[{index}]"
                )
        return [[ord(character) for character in text[: self.max_tokens]] for text in texts]

    def run(
        self, sequences: Sequence[Sequence[int]], reuse: Sequence[bool], readings: Sequence[Reading]
    ) -> PrefillResult:
        assert len(readings) == len(sequences)
        texts = ["".join(map(chr, ids)) for ids in sequences]
        self.batches.append(texts)
        if not any(reuse):
            self.verified.append(texts)
        if not self.may_run.is_set():
            self.runs.release()
            assert self.may_run.wait(timeout=10)
        if FAILING in texts:
            self.before_failing()
            raise self.failure(f"cannot compute {texts}")
        outcomes = tuple(self._outcome(*pair) for pair in zip(texts, reuse, strict=True))
        outputs = [
            self._damaged(text) if outcome.is_hit else embedding_of(ids)
            for ids, text, outcome in zip(sequences, texts, outcomes, strict=True)
        ]
        return PrefillResult(
            outputs=np.stack(outputs),
            finite=np.array([text != NOT_FINITE for text in texts]),
            outcomes=outcomes,
            similarities=np.array([_SIMILARITY[outcome] for outcome in outcomes], np.float32),
            tokens=sum(map(len, sequences)),
            search_seconds=0.001,
            forward_seconds=0.002,
            attention_seconds=0.0,
            corrupt_records=texts.count(CORRUPT),
            strangeness=np.array([self.strangeness(text) for text in texts], np.float32),
        )

    def class_logits(self, outputs: np.ndarray) -> np.ndarray:
        """The label that stands at the text's length, modulo their number, wins."""
        assert self.labels is not None
        winners = outputs.sum(axis=1).astype(int) % len(self.labels)
        return np.eye(len(self.labels), dtype=np.float32)[winners] * 3 - np.arange(len(self.labels)) / 10

    def judge(self, measure: Measure) -> Judge:
        if measure is Measure.COSINE:
            return Judge(measure, None)
        if self.labels is None:
            raise NoClassifier("there are no decisions to agree on")
        return Judge(measure, self.class_logits)

    def tighten(self, place: int | None) -> None:
        assert self.policy is not None
        self.policy = self.served.tighten(place) if self.served else self.policy.tightened(place)

    def keep_verified(
        self, new: Mapping[Window, Sequence[float]], patience_seconds: float = 0.0
    ) -> Tightened | None:
        if self.served is None:
            return None
        kept = self.served.keep(new, patience_seconds)
        self.policy = self.served.policy
        return kept

    def info(self) -> dict[str, object]:
        database = None
        if self.policy:
            told = self.policy.info()
            for told_group, group in zip(told["groups"], self.policy.groups, strict=True):
                told_group["reuses"] = not group.is_off
            database = {"records": 7, "bytes": 4096, "policy": told}
        return {
            "model": "fake",
            "fingerprint": self.fingerprint,
            "task": self.task,
            "reuse_off": self.served.reuse_off if self.served else [],
            "database": database,
        }

    def _outcome(self, text: str, reuse: bool) -> Outcome:
        if not reuse or self.policy is None:
            return Outcome.NOT_SEARCHED
        limit = self.policy.limit
        if limit and self.strangeness(text) > limit.strangest:
            return Outcome.UNFAMILIAR
        kinds = self.policy.group_of(len(text)).kinds
        if text in self.stored and kinds[RecordKind.STORED].threshold <= SIMILARITY:
            return Outcome.HIT
        if text in self.prototypes and kinds[RecordKind.PROTOTYPE].threshold <= SIMILARITY:
            return Outcome.PROTOTYPE_HIT
        return Outcome.MISS

    def _damaged(self, text: str) -> np.ndarray:
        """The embedding, turned to where its cosine is 1 - damage by way of a character that no text has."""
        damage = self.damage(text) if callable(self.damage) else self.damage
        row = embedding_of([ord(character) for character in text])
        sideways = np.zeros_like(row)
        sideways[0] = np.linalg.norm(row) * np.tan(np.arccos(1 - damage))
        return row + sideways


_SIMILARITY = {
    Outcome.HIT: SIMILARITY,
    Outcome.PROTOTYPE_HIT: SIMILARITY,
    Outcome.MISS: 0.5,
    Outcome.NOT_SEARCHED: np.nan,
    Outcome.UNFAMILIAR: np.nan,
}


@asynccontextmanager
async def serving(
    engine: FakeEngine | PrefillEngine | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real app, in this process, when its engine is loaded.

    Nothing is verified unless `verify_rate` says so: what an engine computes is then what clients asked.
    """
    engine = engine or FakeEngine()
    settings.setdefault("verify_rate", 0)
    async with starting(lambda: engine, **settings) as client:
        while (await client.get("/ready")).status_code == 503:
            await asyncio.sleep(0.001)
        try:
            yield client
        finally:
            if isinstance(engine, FakeEngine):
                engine.may_run.set()


@asynccontextmanager
async def starting(
    load_engine: Any, on_failure: Any = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real app that has begun to load; `load_engine` returns one engine or an iterator."""

    def load_engines() -> Iterator[Any]:
        loaded = load_engine()
        yield from loaded if isinstance(loaded, Iterator) else [loaded]

    app = create_app(Settings(**settings), load_engines, on_failure)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client,
    ):
        yield client
