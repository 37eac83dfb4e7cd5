"""PrefillEngine: token sequences in, embeddings or class logits out, with attention maps reused.

texts -> tokenize -> pack -> first hidden states -> search (Algorithm 1) -> hits first, misses after
      -> layers (Algorithm 2) -> outputs, in the caller's order
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from attncache_core import native
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.fetch import Fetch
from attncache_core.attention_maps.gain import MeasuredGain, measure_gain
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.search import Outcome
from attncache_core.attention_maps.store import RecordsChanged
from attncache_core.attention_maps.tightened import ServedPolicy, Tightened
from attncache_core.attention_maps.verification import Window
from attncache_core.checkpoint import Checkpoint, Task
from attncache_core.classifier import LinearClassifier, nearest_label
from attncache_core.devices import Device, Dtype, resolve_device, resolve_dtype
from attncache_core.errors import InvalidInput, NoClassifier, NotFinite
from attncache_core.forward import forward_pass
from attncache_core.labels import LabelTokens
from attncache_core.memory import keep_freed_memory
from attncache_core.models import PackedModel, load_model
from attncache_core.outputs import Judge, Measure, finite_sequences, normalize, require_finite
from attncache_core.processor import processor_name
from attncache_core.prompts import Prompt, Reading, Template
from attncache_core.threads import limit_faiss, limit_threads
from attncache_core.tokenizer import TextTokenizer
from attncache_core.tokens import TokenBatch, pack
from attncache_core.version import __version__


@dataclass(frozen=True)
class PrefillResult:
    """What came of a batch, in the order its sequences were given in."""

    outputs: np.ndarray  # float32 [sequences, d]: embeddings, not normalised, or class logits
    finite: np.ndarray  # bool [sequences]: whether all that was computed for it is; else it has no answer
    outcomes: tuple[Outcome, ...]
    similarities: np.ndarray  # float32 [sequences], nan where nothing was searched
    tokens: int
    search_seconds: float  # familiarity, projector, index and checks
    forward_seconds: float  # all the rest
    attention_seconds: float  # within it, up to the output projections
    corrupt_records: int  # records found damaged in this batch and not used
    # float32 [sequences], nan where nobody asked how strange a sequence is; see familiarity.py
    strangeness: np.ndarray | None = field(default=None, kw_only=True)
    # Lengths whose records serve nobody from this batch on: their file was cut short or cannot be read.
    lost_lengths: tuple[int, ...] = field(default=(), kw_only=True)
    # Of each sequence's targets, float32 [targets]; None where no reading has any.
    log_probabilities: list[np.ndarray] | None = field(default=None, kw_only=True)


class PrefillEngine:
    """A model, and a database if there is one, ready to run. `run` is for one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: PackedModel,
        tokenizer: TextTokenizer,
        *,
        dtype: torch.dtype,
        threads: int,
        database: AttentionDatabase | None = None,
        classifier: LinearClassifier | None = None,
        fetch: Fetch = Fetch.AUTO,
    ) -> None:
        self.checkpoint = checkpoint
        self.model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.threads = threads
        self.database = database
        self.classifier = classifier
        self.fetch = fetch
        self.gain: MeasuredGain | None = None  # None: it was not asked for
        self.reuse_off: list[str] = []  # why maps are not reused though they should be, for people
        self._search = database.search if database else None
        self._served: ServedPolicy | None = None
        self._serve(search_always=False)
        self.task: Task = checkpoint.task
        self.max_tokens = tokenizer.max_tokens
        self.label_tokens: LabelTokens | None = None
        if self.task == "label-logits":
            tokenizer.require_open_end()
            # The operator's own; a request may bring others.
            if checkpoint.labels:
                self.label_tokens = LabelTokens.of(tokenizer, checkpoint.template, checkpoint.labels)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        database: AttentionDatabase | None = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        threads: int | None = None,
        classifier: LinearClassifier | None = None,
        fetch: Fetch = Fetch.AUTO,
        max_tokens: int | None = None,
    ) -> PrefillEngine:
        """Load and pack the checkpoint's weights.

        dtype: "auto" (bfloat16 where the device multiplies it, else float32), "bfloat16", "float32".
        device: where the model runs, "cpu" or "cuda"; records and search stay with the processor.
        threads: for torch and Faiss, of the whole process; None: all that the process may use.
        fetch: how the maps of hits get into their product.
        max_tokens: cut texts to so many, if that is fewer than the model takes.
        Raises InvalidInput where there is no such device, UnsupportedModel, DatabaseRefused if database or
        classifier are of another model, and NotFinite for a label whose embedding is not finite.
        """
        if classifier and checkpoint.labels:
            raise InvalidInput("give a classifier or labels, not both", field="labels")
        keep_freed_memory()
        count = limit_threads(threads)
        if database:
            database.require_fingerprint(checkpoint.fingerprint(), checkpoint.name)
            database.require_use(checkpoint)
        if classifier:
            classifier.require_fingerprint(checkpoint.embedding_fingerprint(), checkpoint.name)
        tokenizer = TextTokenizer(checkpoint, max_tokens)
        place = resolve_device(device)
        compute_dtype = resolve_dtype(dtype, place)
        model = load_model(
            checkpoint,
            compute_dtype,
            prompt_tokens=tokenizer.prompt_tokens,
            head_order=database.mask.order if database else None,
            reused_heads=database.mask.reused if database else None,
            device=place,
        )
        if database:
            database.require_width(model.hidden_size)
        engine = cls(
            checkpoint,
            model,
            tokenizer,
            dtype=compute_dtype,
            threads=count,
            database=database,
            classifier=classifier,
            fetch=fetch,
        )
        if checkpoint.task == "embed" and checkpoint.labels:
            try:
                embeddings = engine.embed(checkpoint.labels, reuse=False)
            except NotFinite as error:
                raise NotFinite.of(error.index, "labels") from error
            engine.classifier = nearest_label(
                checkpoint.labels,
                embeddings,
                fingerprint=checkpoint.embedding_fingerprint(),
                model=checkpoint.name,
            )
        return engine

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over all that decides how the full model answers a text.

        The checkpoint's use_fingerprint, the longest text in tokens, and a fitted classifier. Not the compute
        dtype, the device or the threads: they change an answer's rounding only. Reuse does not count either.
        Reads all weight files at first use.
        """
        way = [self.checkpoint.use_fingerprint(), self.max_tokens]
        # Labels of the checkpoint's are covered, and the classifier made of them has rounding errors.
        if self.classifier and not self.checkpoint.labels:
            way.append(self.classifier.digest())
        return hashlib.sha256(json.dumps(way).encode()).hexdigest()

    @property
    def labels(self) -> tuple[str, ...] | None:
        """What outputs decide among: a checkpoint's or a classifier's classes, or labels of one token each.

        In the order of `class_logits`; None where an output decides nothing.
        """
        if self.classifier:
            return self.classifier.labels
        if self.label_tokens and self.label_tokens.one_token_each:
            return self.label_tokens.labels
        if self.task == "classify":
            config = self.checkpoint.config
            # Classes without names are left out of a checkpoint, and so is their number if it is two.
            names = config.get("id2label") or {
                row: f"LABEL_{row}" for row in range(config.get("num_labels", 2))
            }
            return tuple(names[key] for key in sorted(names, key=int))
        return None

    @property
    def multi_label(self) -> bool:
        """Whether each class is decided on by itself: its score is a sigmoid, and scores do not sum to 1.

        So it is of models of `problem_type: multi_label_classification`, and of those with a single class.
        """
        if self.task != "classify":
            return False
        return self.checkpoint.config.get("problem_type") == "multi_label_classification" or (
            self.labels is not None and len(self.labels) == 1
        )

    @property
    def default_prompt(self) -> Prompt:
        """The checkpoint's template, made ready."""
        return self.tokenizer.default_prompt

    def tokenize(
        self,
        texts: Sequence[str],
        truncate: bool = True,
        prompt: Prompt | None = None,
        most_tokens: int | None = None,
    ) -> list[list[int]]:
        """Token ids of each text, in the checkpoint's template or another prompt. Thread safe.

        Raises InputTooLong where `truncate` is False, and for more than `most_tokens` in all.
        """
        return self.tokenizer.tokenize(texts, truncate=truncate, prompt=prompt, most_tokens=most_tokens)

    def named_prompt(self, name: str) -> Prompt:
        """The checkpoint's prompt of this name, instead of its default one. Raises InvalidInput."""
        prompts = self.checkpoint.prompts
        if name not in prompts:
            known = f"known are: {', '.join(prompts)}" if prompts else "the model has none"
            raise InvalidInput(f"prompt_name is none of the model's prompts; {known}", field="prompt_name")
        return self.tokenizer.prompt(Template(prefix=prompts[name]), field="prompt_name")

    def embed(
        self, texts: Sequence[str], *, reuse: bool = True, prompt_name: str | None = None
    ) -> np.ndarray:
        """Embeddings float32 [texts, d] of a list of texts, of unit length if the model's are.

        prompt_name: one of the checkpoint's prompts, instead of its default one. Raises NotFinite, naming the
        first text whose embedding is not finite.
        """
        if self.task != "embed":
            remedy = "; load it without task label-logits" if self.task == "label-logits" else ""
            raise InvalidInput(f"the model is a classifier and gives no embeddings{remedy}", field="model")
        if not texts:
            return np.zeros((0, self.model.hidden_size * len(self.checkpoint.pooling.modes)), np.float32)
        prompt = self.default_prompt if prompt_name is None else self.named_prompt(prompt_name)
        sequences = self.tokenize(texts, prompt=prompt)
        readings = list(prompt.readings) * len(sequences)
        # A database's budget was measured with the default prompt.
        reuse = reuse and prompt == self.default_prompt
        result = self.run(sequences, [reuse] * len(sequences), readings)
        require_finite(result.finite)
        return normalize(result.outputs) if self.checkpoint.normalize else result.outputs

    def class_logits(self, outputs: np.ndarray) -> np.ndarray:
        """Logits [n, labels] from the outputs of `run`. Raises NoClassifier where there are no classes."""
        if self.classifier:
            return self.classifier.logits(outputs)
        if self.label_tokens and self.labels:
            return self.label_logits(self.label_tokens, outputs)
        if self.task != "classify":
            raise NoClassifier(
                "the model has no classes and no classifier was fitted: give labels", field="labels"
            )
        return outputs

    def labels_in(self, template: Template | None = None, labels: Sequence[str] | None = None) -> LabelTokens:
        """Labels made ready to be scored in a template; None: the operator's own. Thread safe.

        Raises NoClassifier where there are no labels, and InvalidInput as LabelTokens.of does and where the
        model is not served for labels' logits.
        """
        if self.task != "label-logits":
            raise InvalidInput("labels are scored in a template by task label-logits only", field="template")
        template, labels = template or self.checkpoint.template, tuple(labels or self.checkpoint.labels)
        if not labels:
            raise NoClassifier("the server has no labels of its own: give labels", field="labels")
        if self.label_tokens and (template, labels) == (self.checkpoint.template, self.label_tokens.labels):
            return self.label_tokens
        return LabelTokens.of(self.tokenizer, template, labels)

    def keeps_budget(self, asked: LabelTokens) -> bool:
        """Whether the database's budget holds for these labels in this template.

        It does for the operator's own; of labels of several tokens it was measured on prompts without them.
        Where it is of outputs and not of decisions, it does for any labels of one token each in the
        operator's template too.
        """
        if asked is self.label_tokens:
            return True
        return (
            asked.prompt == self.default_prompt
            and self.policy is not None
            and self.policy.budget.measure is Measure.COSINE
        )

    @torch.inference_mode()
    def label_logits(
        self,
        asked: LabelTokens,
        outputs: np.ndarray,
        log_probabilities: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Logits float32 [texts, labels] from what `run` made of the sequences of these texts.

        Of labels of one token each these are the model's own, from its outputs; else the summed
        log-probabilities of a label's tokens.
        """
        if not asked.one_token_each:
            assert log_probabilities is not None
            return asked.logits(log_probabilities)
        head = self.model.language_head
        assert head is not None
        tokens = [own for (own,) in asked.tokens]
        rows = torch.from_numpy(np.ascontiguousarray(outputs))
        logits: np.ndarray = head.token_logits(rows, tokens).cpu().numpy()
        return logits

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[Sequence[int]],
        reuse: Sequence[bool],
        readings: Sequence[Reading] | None = None,
    ) -> PrefillResult:
        """Run token sequences through the model.

        reuse: for each sequence whether its attention maps may come from the database.
        readings: of each sequence, as its prompt has it; None: all have the checkpoint's template.
        """
        started = time.perf_counter()
        limit_faiss(self.threads)  # this may be another thread than the one that loaded
        prompt_tokens = [reading.prompt_tokens for reading in readings] if readings else None
        batch = pack(sequences, prompt_tokens).filled().on(self.model.device)
        allowed = np.asarray(reuse, dtype=bool)[batch.order]
        lost = self._drop_lost(set(batch.lengths[allowed].tolist()))
        try:
            done = forward_pass(self.model, batch, self._search, allowed, self.fetch)
        except RecordsChanged as changed:
            # Other maps than those that were checked, or zeros: those sequences are computed in full.
            again = [
                may and len(ids) not in changed.lengths for may, ids in zip(reuse, sequences, strict=True)
            ]
            lost += self._drop_lost(changed.lengths)
            result = self.run(sequences, again, readings)
            return replace(result, lost_lengths=lost + result.lost_lengths)
        batch, plan = done.batch, done.plan
        outputs = done.outputs.rows.cpu().numpy()
        finite = batch.in_callers_order(finite_sequences(batch, done.hidden, outputs))
        log_probabilities = self._log_probabilities(batch, done.hidden, readings or ())
        if log_probabilities is not None:
            finite &= [bool(np.isfinite(own).all()) for own in log_probabilities]
        return PrefillResult(
            outputs=batch.in_callers_order(outputs),
            finite=finite,
            outcomes=tuple(batch.in_callers_order(plan.outcomes())),
            similarities=batch.in_callers_order(plan.similarities),
            strangeness=batch.in_callers_order(plan.strangeness),
            tokens=int(batch.offsets[-1]),
            search_seconds=done.search_seconds,
            forward_seconds=time.perf_counter() - started - done.search_seconds,
            attention_seconds=done.attention_seconds,
            corrupt_records=plan.corrupt_records,
            lost_lengths=lost,
            log_probabilities=log_probabilities,
        )

    @property
    def policy(self) -> ReusePolicy | None:
        """What decides at present whether a record may serve; None without a database."""
        return self._search.policy if self._search else None

    def tighten(self, place: int | None) -> None:
        """Make the policy's length group number `place` one step tighter, from the next batch on.

        None: the limit of strangeness instead. `keep_verified` keeps the step with the database.
        """
        if self._served:
            self._go_by(self._served.tighten(place))

    def keep_verified(
        self, new: Mapping[Window, Sequence[float]], patience_seconds: float = 0.0
    ) -> Tightened | None:
        """Keep with the database what was found out, and adopt what other servers on it found out.

        See ServedPolicy.keep. If that is impossible, reuse is off from the next batch on, until the engine is
        loaded again; `reuse_off` says why.
        """
        if self._served is None:
            return None
        kept = self._served.keep(new, patience_seconds)
        self._go_by(self._served.policy)
        return kept

    def _go_by(self, policy: ReusePolicy) -> None:
        if self._search is None:
            return
        paying = self._search.paying
        if paying is not None:
            # What a group gains was measured before it was tightened.
            before = self._search.policy.groups
            paying = frozenset(place for place in paying if policy.groups[place] == before[place])
        self._search = replace(self._search, policy=policy, paying=paying)

    def _serve(self, *, search_always: bool) -> None:
        """Go by the database's policy, as tight as servers found that it must be."""
        if self.database:
            calibrated = self.database.search.policy
            self._served = ServedPolicy(self.database.folder, calibrated, search_always=search_always)
            self.reuse_off = self._served.reuse_off
            self._go_by(self._served.policy)

    def judge(self, measure: Measure) -> Judge:
        """What compares outputs of `run` with reuse with those in full.

        Decisions are those of the model or the classifier, else of what the database was calibrated for.
        Raises NoClassifier for agreement where there is none of these.
        """
        if measure is Measure.COSINE and self.task != "classify":
            return Judge(measure, None)
        if self.labels is not None:
            return Judge(measure, self.class_logits, self.multi_label)
        if self.database and self.database.decisions:
            return Judge(measure, self.database.decisions.logits)
        raise NoClassifier(
            "agreement is of decisions, and neither the model nor a classifier has classes",
            field="classifier",
        )

    @property
    def approximates(self) -> bool:
        """Whether some texts may take maps of others at present."""
        policy = self.policy
        if policy is None or (policy.limit and policy.limit.is_off):
            return False
        return any(self._reuses(place) and group.approximates for place, group in enumerate(policy.groups))

    def search_always(self) -> None:
        """From now on, compare every sequence with the records, also where that does not pay."""
        self.gain = None
        if self._search:
            self._search = replace(self._search, paying=None)
            self._serve(search_always=True)

    def require_gain(self, min_gain: float, *, keep: bool = True) -> None:
        """From now on, reuse only in length groups in which whole passes are faster by at least `min_gain`.

        0: wherever the budget holds, however long it takes. What is measured on this machine, in a few
        seconds, is kept with the database, unless `keep` is off; see gain.measure_gain.
        """
        self.gain = None
        if self._search is None or self.database is None:
            return
        if min_gain == 0:
            self._search = replace(self._search, paying=None)
            return
        self._search = replace(self._search, paying=frozenset())
        traffic = self.database.traffic(self._search.policy)
        if not traffic.hit_rates:
            return
        try:
            self.gain = measure_gain(
                self.model,
                replace(self._search, paying=None),
                traffic,
                min_gain,
                self._circumstances(self._search.policy),
                self.database.folder if keep else None,
                self.fetch,
            )
        except RecordsChanged as changed:
            self._drop_lost(changed.lengths)
            self.reuse_off.append("files of the database changed while the gain of reuse was measured")
            return
        self._search = replace(self._search, paying=frozenset(self.gain.paying))

    def _circumstances(self, policy: ReusePolicy) -> dict[str, Any]:
        """What a measured gain depends on."""
        return {
            "version": __version__,
            "processor": processor_name(),
            "threads": self.threads,
            "attention": native.level(),
            "torch": torch.__version__,
            "dtype": str(self.dtype),
            "device": str(self.model.device),
            "fetch": self.fetch.value,
            "reused_heads": list(self.database.mask.reused) if self.database else [],
            "policy": policy.digest,
        }

    def info(self) -> dict[str, Any]:
        """What is loaded, for people and /info."""
        return {
            "model": self.checkpoint.name,
            "model_source": self.checkpoint.source,
            "revision": self.checkpoint.revision,
            "commit": self.checkpoint.commit,
            "fingerprint": self.fingerprint,
            "variant": self.checkpoint.variant,
            "task": self.task,
            "labels": list(self.labels or self.checkpoint.labels),
            "template": str(self.checkpoint.template),
            "prompts": list(self.checkpoint.prompts),
            "pooling": self.checkpoint.pooling.modes if self.task == "embed" else None,
            "max_tokens": self.max_tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "threads": self.threads,
            "attention": native.level() or "torch",
            "fetch": self.fetch,
            "reuse_off": list(self.reuse_off),
            "gain": self.gain.info(self.policy.names()) if self.gain and self.policy else None,
            "database": self._database_info(),
        }

    def _database_info(self) -> dict[str, Any] | None:
        if self.database is None or self.policy is None:
            return None
        # Not the policy it was opened with, which may have been tightened since.
        told = self.policy.info()
        for place, group in enumerate(told["groups"]):
            group["reuses"] = self._reuses(place)
        return {**self.database.info(), "policy": told}

    def _reuses(self, place: int) -> bool:
        """Whether sequences of the policy's length group number `place` may hit at all."""
        search = self._search
        if search is None or (search.paying is not None and place not in search.paying):
            return False
        return not search.policy.groups[place].is_off

    def _log_probabilities(
        self, batch: TokenBatch, hidden: torch.Tensor, readings: Sequence[Reading]
    ) -> list[np.ndarray] | None:
        """Of each sequence's targets, in the caller's order; hidden: the last layer's output."""
        counts = [len(reading.targets) for reading in readings]
        if not any(counts) or self.model.language_head is None:
            return None
        last = batch.in_callers_order(batch.offsets[1:] - 1)
        targets = [
            (end - back, token)
            for end, reading in zip(last.tolist(), readings, strict=True)
            for back, token in reading.targets
        ]
        places, tokens = torch.tensor(targets, device=hidden.device).unbind(dim=1)
        found = self.model.language_head.log_probabilities(hidden, places, tokens).cpu().numpy()
        return np.split(found, np.cumsum(counts)[:-1])

    def _drop_lost(self, lengths: Iterable[int]) -> tuple[int, ...]:
        return self._search.store.drop_lost(lengths) if self._search else ()
