"""A fake engine without a model, and the real app around it.

A token is a character. The "embedding" of a text counts the text's characters, so a test can compute it
(`embedding_of`), and equal texts have cosine 1. Texts in `stored` and `prototypes` hit with similarity 0.999,
and the output of a hit has cosine 1 - `damage` to the full output. There are two length groups: up to 8
tokens, and more.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import numpy as np

from attncache_core import InputTooLong, InvalidInput, NoClassifier, Outcome, PrefillResult
from attncache_core import normalize as unit_length
from attncache_core.checkpoints.template import Template
from attncache_core.engine.info import EngineInfo
from attncache_core.engine.result import BatchReport, Compared
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.embedding import require_dimensions
from attncache_core.reuse.maps.info import DatabaseInfo
from attncache_core.reuse.maps.policy import Budget, KindPolicy, LengthGroup, ReusePolicy
from attncache_core.reuse.maps.policy_state import ServedPolicy
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.text.pairs import TruncatedTokens
from attncache_core.text.prompts import Frame, Piece, Prompt, SequencePlan
from service.app import create_app
from service.settings import Settings

DIMENSIONS = 128
FAILING = "the engine must fail on this text"
NOT_FINITE = "the engine makes NaN of this text"
CORRUPT = "the record of this text is damaged"
SIMILARITY = 0.999  # of every hit
OWN_PROMPT = Prompt(Template(), (SequencePlan(0),))
UNITS = np.eye(DIMENSIONS, dtype=np.float32)  # the embeddings of single tokens


def embedding_of(ids):
    return np.bincount([code % DIMENSIONS for code in ids], minlength=DIMENSIONS).astype(np.float32)


def policy_of(measure=Measure.COSINE, floor=0.0, limit=None):
    kinds = {RecordKind.STORED: KindPolicy(0.9), RecordKind.PROTOTYPE: KindPolicy(0.95)}
    groups = (LengthGroup(8, kinds), LengthGroup(9, kinds))
    return ReusePolicy(Budget(measure, least=0.985, floor=floor), groups, limit)


class FakeMapReuse:
    """The policy of the fake engine, kept in `folder` as a real server keeps its own; None: not kept."""

    gain = None
    search = SimpleNamespace(store=SimpleNamespace(records=0, scrub=lambda _: ()))

    def __init__(self, policy, folder):
        self._policy = policy
        self._served = ServedPolicy(folder, policy) if folder else None
        self.database = SimpleNamespace(
            folder="fake.db", manifest=SimpleNamespace(id="fake"), search=SimpleNamespace(policy=policy)
        )

    @property
    def policy(self):
        return self._served.policy if self._served else self._policy

    @property
    def reuse_off(self):
        return self._served.reuse_off if self._served else []

    def reuses(self, index):
        return not self.policy.groups[index].is_off

    def tighten(self, index):
        if self._served:
            self._served.tighten(index)
        else:
            self._policy = self._policy.tightened(index)

    def keep_verified(self, new, patience_seconds=0.0):
        return self._served.keep(new, patience_seconds) if self._served else None

    def info(self):
        return DatabaseInfo(7, 0, 4096, [1, 64], [], "float32", [1], 1, False, self.policy.info(), {})


class FakeTokenizer:
    vocabulary = 0x110000
    max_tokens = 64
    default_prompt = OWN_PROMPT

    def named_prompt(self, name):
        if name is None:
            return self.default_prompt
        return Prompt(Template(prefix=f"{name}: "), (SequencePlan(len(name) + 2),))

    def pieces(self, texts, *, special=True):  # noqa: ARG002
        return [
            [Piece(ord(letter), letter, False, place, place + 1) for place, letter in enumerate(text)]
            for text in texts
        ]

    def decode(self, sequences, *, skip_special=True):  # noqa: ARG002
        # Surrogates are no characters.
        return ["".join(map(chr, ids)).encode(errors="replace").decode() for ids in sequences]

    def turns(self, texts, field="inputs"):  # noqa: ARG002
        return [[ord(character) for character in text] for text in texts]

    def frame(self, prompt):
        before, after = self.turns([prompt.template.prefix, prompt.template.suffix])
        return Frame(before, after, self.max_tokens - len(before) - len(after))


class FakeEngine:
    fingerprint = "0123456789abcdef" * 4
    vocabulary = 0x110000
    model = SimpleNamespace(hidden_size=DIMENSIONS)
    dimensions = DIMENSIONS
    label_tokens = None
    multi_label = False
    temperature = 1.0  # of its decisions
    parallel_runs = 1
    key_values = None
    blending = SimpleNamespace(gate=None, refusal="the engine is fake")
    key_values_off = "the engine is fake"

    def __init__(
        self,
        *,
        task="embed",
        labels=None,
        stored=(),
        prototypes=(),
        damage=0.0,
        policy=None,
        strangeness=lambda _: np.nan,
        folder=None,
        failure=RuntimeError,
    ):
        """damage, strangeness: of each text. folder: where the findings of verification are kept."""
        self.tokenizer = FakeTokenizer()  # tests change its limit
        self.checkpoint = SimpleNamespace(config={}, prompts={}, default_prompt=None, classes=(), task=task)
        self.labels = labels
        self.decisions = self
        self.stored = stored
        self.prototypes = prototypes
        self.damage = damage
        self.strangeness = strangeness
        self.map_reuse = FakeMapReuse(policy or policy_of(), folder)
        self.failure = failure
        self.sharing = False  # whether prefixes are shared, which changes only the number of tokens
        self.before_failing = lambda: None
        self.batches = []
        self.verified = []  # the batches that were computed without reuse
        self.may_run = threading.Event()  # cleared: the engine is busy
        self.may_run.set()
        self.runs = threading.Semaphore(0)  # released when a batch begins that must wait for `may_run`

    @property
    def policy(self):
        return self.map_reuse.policy if self.map_reuse else None

    scores_pairs = False

    def may_blend(self, *_):
        return False

    def may_reuse(self, prompt, labels=None, reads=None):  # noqa: ARG002
        return labels is None and prompt == OWN_PROMPT

    def shares_prefixes(self, reuse):  # noqa: ARG002
        return self.sharing

    def prefix_key(self, ids, plan, salt, *, passing=0):
        """Nothing is stored."""

    def close(self):
        """Nothing waits to be saved."""

    def require_known(self, sequences, first=0, plans=1):
        """The model has all tokens."""

    def without_padding(self, sequences, first=0):  # noqa: ARG002
        return sequences

    def stored_tokens(self, prefix_key):  # noqa: ARG002
        return 0

    def tokenize(
        self,
        texts,
        truncate,
        prompt=OWN_PROMPT,
        max_total_tokens=None,  # noqa: ARG002
    ):
        texts = [prompt.template.around(text) for text in texts]
        for index, text in enumerate(texts):
            if len(text) > self.tokenizer.max_tokens and not truncate:
                raise InputTooLong(
                    f"the text has more than {self.tokenizer.max_tokens} tokens", field=f"inputs[{index}]"
                )
        whole = [list(map(ord, text)) for text in texts]
        longest = self.tokenizer.max_tokens
        return [ids if len(ids) <= longest else TruncatedTokens(ids[:longest]) for ids in whole]

    def run(self, requests):
        assert all(request.sequence_plan for request in requests)
        texts = texts_of(requests)
        self.batches.append(texts)
        if not any(request.reuse for request in requests):
            self.verified.append(texts)
        if not self.may_run.is_set():
            self.runs.release()
            assert self.may_run.wait(timeout=240)
        if FAILING in texts:
            self.before_failing()
            raise self.failure(f"cannot compute {texts}")
        outcomes = tuple(
            self._outcome(text, request.reuse) for text, request in zip(texts, requests, strict=True)
        )
        outputs = [
            self._damaged(text) if outcome.is_hit else embedding_of(request.ids)
            for request, text, outcome in zip(requests, texts, outcomes, strict=True)
        ]
        return PrefillResult(
            outputs=np.stack(outputs),
            finite=np.array([text != NOT_FINITE for text in texts]),
            outcomes=outcomes,
            asked_tokens=np.array([len(text) for text in texts]),
            cached_tokens=np.zeros(len(texts), np.int64),
            report=BatchReport(sum(map(len, texts)), 0.002, 0.0, 0.001, texts.count(CORRUPT)),
            compared=Compared(
                np.array([_SIMILARITY[outcome] for outcome in outcomes], np.float32),
                np.array([self.strangeness(text) for text in texts], np.float32),
            ),
            token_states=[UNITS[np.remainder(request.ids, DIMENSIONS)] for request in requests],
        )

    def embeddings(self, outputs, *, normalize=None, dimensions=None):
        kept = outputs[:, :dimensions]
        return kept if normalize is False else unit_length(kept)

    def require_dimensions(self, dimensions):
        if dimensions is not None:
            require_dimensions(dimensions, DIMENSIONS, ())

    def class_logits(self, outputs):
        """The winner is the label whose index is the text's length modulo the number of labels."""
        assert self.labels is not None
        winners = outputs.sum(axis=1).astype(int) % len(self.labels)
        return np.eye(len(self.labels), dtype=np.float32)[winners] * 3 - np.arange(len(self.labels)) / 10

    def comparator(self, measure):
        if measure is Measure.COSINE:
            return OutputComparator(measure, None)
        if self.labels is None:
            raise NoClassifier("there are no decisions to agree on")
        return OutputComparator(measure, self.class_logits)

    def info(self):
        return EngineInfo(
            model="fake",
            model_source="folder",
            revision=None,
            commit=None,
            fingerprint=self.fingerprint,
            variant={},
            task=self.checkpoint.task,
            labels=list(self.labels or ()),
            template="{}",
            prompts={},
            pooling=None,
            dimensions=None,
            matryoshka_dimensions=(),
            max_tokens=self.tokenizer.max_tokens,
            dtype="float32",
            device="cpu",
            threads=1,
            attention="torch",
            compiled_off=None,
            reuse_off=self.map_reuse.reuse_off if self.map_reuse else [],
            gain=None,
            database=self.map_reuse.info() if self.map_reuse else None,
            key_values=None,
            key_values_off=self.key_values_off,
        )

    def require_pairs(self):
        raise InvalidInput("the model scores no pairs", field="model")

    def _outcome(self, text, reuse):
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

    def _damaged(self, text):
        """The embedding, turned to a cosine of 1 - damage by a character that no text has."""
        damage = self.damage(text) if callable(self.damage) else self.damage
        row = embedding_of([ord(character) for character in text])
        sideways = np.zeros_like(row)
        sideways[0] = np.linalg.norm(row) * np.tan(np.arccos(1 - damage))
        return row + sideways


def texts_of(requests):
    return ["".join(map(chr, request.ids)) for request in requests]


_SIMILARITY = {
    Outcome.HIT: SIMILARITY,
    Outcome.PROTOTYPE_HIT: SIMILARITY,
    Outcome.MISS: 0.5,
    Outcome.NOT_SEARCHED: np.nan,
    Outcome.UNFAMILIAR: np.nan,
}


@asynccontextmanager
async def serving(engine=None, **settings):
    """Yield a client of the real app, in this process, once the engine is loaded.

    By default nothing is verified, so the engine computes only what clients request.
    """
    engine = engine or FakeEngine()
    settings.setdefault("verify_rate", 0)
    # Tests look at what the engine computes, also of equal texts.
    settings.setdefault("result_memory_bytes", 0)
    async with starting(lambda: engine, **settings) as client:
        await ready(client)
        try:
            yield client
        finally:
            if isinstance(engine, FakeEngine):
                engine.may_run.set()


async def ready(client):
    """Wait until the server of a client is ready."""
    while not client._transport.app.state.service.is_ready:
        await asyncio.sleep(0.001)


async def begun(engine, request):
    """Send a request, and return its task once the engine computes it and waits for `may_run`."""
    engine.may_run.clear()
    task = asyncio.create_task(request)
    await asyncio.to_thread(engine.runs.acquire)
    return task


@asynccontextmanager
async def starting(load_engine, on_failure=None, worker=None, **settings):
    """Yield a client of the real app while it loads; `load_engine` returns one engine or an iterator."""

    def load_engines():
        loaded = load_engine()
        yield from loaded if isinstance(loaded, Iterator) else [loaded]

    app = create_app(Settings(**settings), load_engines, on_failure, worker)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=240) as client,
    ):
        yield client


SECRET = "Sesam"


class BrokenEngine(FakeEngine):
    """Fails in the method `breaks`, with an exception that quotes the input."""

    def __init__(self, breaks):
        super().__init__(labels=("a", "b"))
        self.breaks = breaks

    def tokenize(self, texts, *arguments):
        self._break("tokenize", texts)
        return super().tokenize(texts, *arguments)

    def run(self, requests):
        self._break("run", texts_of(requests))
        return super().run(requests)

    def class_logits(self, outputs):
        self._break("class_logits", [SECRET])
        return super().class_logits(outputs)

    def _break(self, where, texts):
        if where == self.breaks:
            try:
                raise KeyError(f"cause: {texts}")
            except KeyError as error:
                raise RuntimeError(f"cannot serve {texts}") from error
