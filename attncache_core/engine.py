"""PrefillEngine: token sequences in, embeddings or class logits out, with attention maps reused.

texts -> tokenize -> pack -> first hidden states -> search (Algorithm 1) -> hits first, misses after
      -> layers (Algorithm 2) -> outputs, in the caller's order
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from attncache_core import native
from attncache_core.attention_maps.cost import CostModel, cost_model
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.fetch import Fetch
from attncache_core.attention_maps.policy import ReusePolicy
from attncache_core.attention_maps.search import Outcome, ReusePlan, no_reuse
from attncache_core.attention_maps.tightened import keep_tightened
from attncache_core.checkpoint import Checkpoint, Task
from attncache_core.classifier import LinearClassifier, nearest_label
from attncache_core.devices import Device, Dtype, resolve_device, resolve_dtype
from attncache_core.errors import InvalidInput, NoClassifier
from attncache_core.forward import forward, hits_first
from attncache_core.labels import LabelTokens
from attncache_core.memory import keep_freed_memory
from attncache_core.models import PackedModel, load_model
from attncache_core.outputs import Judge, Measure, normalize
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
    outcomes: tuple[Outcome, ...]
    similarities: np.ndarray  # float32 [sequences], nan where nothing was searched
    tokens: int
    search_seconds: float  # projector, index and checks
    forward_seconds: float  # all the rest
    attention_seconds: float  # within it, up to the output projections
    corrupt_records: int  # records found damaged in this batch and not used
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
        self.costs: CostModel | None = None  # without one, every length is searched
        self._segments = database.search.store.segments if database else {}
        self._search = database.search if database else None
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
        Raises InvalidInput where there is no such device, UnsupportedModel, and DatabaseRefused if database
        or classifier are of another model.
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
            engine.classifier = nearest_label(
                checkpoint.labels,
                engine.embed(checkpoint.labels, reuse=False),
                fingerprint=checkpoint.embedding_fingerprint(),
                model=checkpoint.name,
            )
        return engine

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

        prompt_name: one of the checkpoint's prompts, instead of its default one.
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
        outputs = self.run(sequences, [reuse] * len(sequences), readings).outputs
        return normalize(outputs) if self.checkpoint.normalize else outputs

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
        hidden = self.model.embed(batch)
        searched = time.perf_counter()
        plan = self._plan(batch, self.model.search_input(hidden), np.asarray(reuse, dtype=bool)[batch.order])
        search_seconds = time.perf_counter() - searched
        batch, hidden, plan = hits_first(batch, hidden, plan)
        hidden, attention_seconds = forward(self.model, batch, hidden, plan, self._segments, self.fetch)
        outputs = self.model.outputs(hidden, batch)
        log_probabilities = self._log_probabilities(batch, hidden, readings or ())
        return PrefillResult(
            outputs=batch.in_callers_order(outputs.rows.cpu().numpy()),
            outcomes=tuple(batch.in_callers_order(plan.outcomes())),
            similarities=batch.in_callers_order(plan.similarities),
            tokens=int(batch.offsets[-1]),
            search_seconds=search_seconds,
            forward_seconds=time.perf_counter() - started - search_seconds,
            attention_seconds=attention_seconds,
            corrupt_records=plan.corrupt_records,
            log_probabilities=log_probabilities,
        )

    @property
    def policy(self) -> ReusePolicy | None:
        """What decides at present whether a record may serve; None without a database."""
        return self._search.policy if self._search else None

    def tighten(self, place: int) -> None:
        """Make the policy's length group number `place` one step tighter, from the next batch on.

        Kept with the database, if its folder can be written to: only calibration loosens it again.
        """
        if self._search and self.database:
            policy = self._search.policy.tightened(place)
            self._search = replace(self._search, policy=policy)
            with contextlib.suppress(OSError):
                keep_tightened(self.database.folder, self.database.manifest.policy, policy)

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

    def search_always(self) -> None:
        """From now on, compare every sequence with the records, also where that does not pay."""
        self.costs = None
        if self._search:
            self._search = replace(self._search, policy=self._search.policy.searched_everywhere())

    def weigh_costs(self) -> None:
        """From now on, leave lengths unsearched where reuse cannot pay on this machine.

        The cost model is the one kept with the database, or measured now, in a second or two.
        """
        if self.database:
            circumstances = {
                "version": __version__,
                "processor": processor_name(),
                "threads": self.threads,
                "attention": native.level(),
                "torch": torch.__version__,
                "dtype": str(self.dtype),
                "device": str(self.model.device),
                "fetch": self.fetch.value,
                "reused_heads": list(self.database.mask.reused),
            }
            self.costs = cost_model(
                self.model, self.database.search, self.database.folder, circumstances, self.fetch
            )

    def info(self) -> dict[str, Any]:
        """What is loaded, for people and /info."""
        return {
            "model": self.checkpoint.name,
            "model_source": self.checkpoint.source,
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
            "costs": self.costs.info() if self.costs else None,
            "database": self._database_info(),
        }

    def _database_info(self) -> dict[str, Any] | None:
        if self.database is None or self.policy is None:
            return None
        # Not the policy it was opened with, which may have been tightened since.
        return {**self.database.info(), "policy": self.policy.info()}

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

    def _plan(self, batch: TokenBatch, hidden: torch.Tensor, allowed: np.ndarray) -> ReusePlan:
        search = self._search
        if search is None or not allowed.any():
            return no_reuse(len(batch.lengths))
        pays = self.costs.pays if self.costs else lambda _: True
        return search.plan(batch, hidden, allowed, pays)
