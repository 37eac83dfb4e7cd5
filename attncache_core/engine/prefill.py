"""PrefillEngine: compute embeddings or class logits of texts, with reuse of attention maps.

texts -> tokenize -> requests -> run (runner.py) -> PrefillResult, in the caller's order
    -> embeddings, class_logits or label_logits
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import overload

import numpy as np
import torch

from attncache_core import native
from attncache_core.checkpoints.checkpoint import Activation, Checkpoint, Device, Dtype
from attncache_core.checkpoints.template import Text
from attncache_core.engine.blending import SWITCHED_OFF, Blending
from attncache_core.engine.decisions import Decisions
from attncache_core.engine.info import EngineInfo
from attncache_core.engine.loading import load_parts, map_reuse_of
from attncache_core.engine.request import PrefillRequest
from attncache_core.engine.runner import Runner
from attncache_core.errors import InvalidInput, NotFinite
from attncache_core.heads.classifier import LinearClassifier, nearest_label
from attncache_core.heads.comparator import Measure
from attncache_core.heads.decisions import LISTWISE
from attncache_core.heads.embedding import require_dimensions
from attncache_core.heads.vectors import normalize as unit_length
from attncache_core.heads.vectors import require_finite
from attncache_core.reuse.blend.gate import BlendGate
from attncache_core.reuse.kv.info import key_value_info
from attncache_core.reuse.kv.memory import PrefixKey
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.runtime.devices import resolve_device
from attncache_core.runtime.threads import limit_threads
from attncache_core.text.labels import LabelTokens
from attncache_core.text.limits import list_of, require_some_tokens
from attncache_core.text.pairs import without_end
from attncache_core.text.prompts import Prompt, SequencePlan


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillEngine(Runner):
    """A loaded model with its tokenizer and what it may reuse. `dataclasses.replace` changes a part.

    After `replace`, a gate is opened again by `open_gate`. Any number of threads may call `run` at once;
    `parallel_runs` says how many threads gain by it.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    classifier: LinearClassifier | None = None  # on embeddings
    key_values_off: str = SWITCHED_OFF  # why, if `key_values` is None
    # Made of the parts above.
    decisions: Decisions = field(init=False)
    blending: Blending = field(init=False)
    # Reasons why reuse is off although a database is set; empty if reuse is on.
    reuse_off: list[str] = field(init=False)

    def __post_init__(self) -> None:
        database = self.map_reuse.database if self.map_reuse else None
        if database:
            database.require_classifier(self.classifier)
        decisions = Decisions(self.checkpoint, self.model, self.tokenizer, self.classifier, database)
        made = {
            "reuse_off": self.map_reuse.reuse_off if self.map_reuse else [],
            "decisions": decisions,
            "blending": Blending(self.key_values, self.key_values_off, decisions.label_tokens),
        }
        for name, part in made.items():
            object.__setattr__(self, name, part)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        database: AttentionDatabase | None = None,
        strategy: ReuseStrategy | None = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        threads: int | None = None,
        classifier: LinearClassifier | None = None,
        max_tokens: int | None = None,
        share_prefixes: bool = True,
        key_values: KeyValueOptions | None = None,
    ) -> PrefillEngine:
        """Load a checkpoint and pack its weights.

        database: attention maps to reuse. strategy: another kind of reuse, instead of a database.
        dtype: "auto" (bfloat16 if the device has fast bfloat16 products, else float32), "bfloat16" or
        "float32". device: device of the model, "cpu" or "cuda"; records and search stay on the CPU.
        threads: number of threads of torch and Faiss in the whole process; None, and at most: one for each
        available processor.
        max_tokens: truncate texts to this number of tokens, if it is below the model's maximum.
        share_prefixes: compute a prefix that several sequences of a batch share once, if the model is causal;
        see shares_prefixes. key_values: store keys and values, and reuse them, if the model allows it;
        `key_values_off` says why not. None: do not.
        Raises InvalidInput for an argument that is not accepted, UnsupportedModel, DatabaseRefused if
        database or classifier belong to another model, and NotFinite if a label's embedding is not finite.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError("checkpoint must be what find_checkpoint(model) returns")
        if not isinstance(database, AttentionDatabase | None):
            raise TypeError("database must be what AttentionDatabase.open(folder) returns")
        for name, number in (("threads", threads), ("max_tokens", max_tokens)):
            if number is not None and not (isinstance(number, Integral) and number >= 1):
                raise InvalidInput(f"{name} must be an integer of at least 1", field=name)
        if classifier and checkpoint.labels:
            raise InvalidInput("give a classifier or labels, not both", field="labels")
        if database and strategy:
            raise InvalidInput("give a database or a strategy, not both", field="strategy")
        # What is stored, or compared with a database, is named by the files that are read now.
        checkpoint = checkpoint.as_it_is()
        if classifier:
            classifier.require_fingerprint(checkpoint.embedding_fingerprint(), checkpoint.name)
        count = limit_threads(threads)
        if database:
            strategy = map_reuse_of(database, checkpoint)
        parts = load_parts(checkpoint, strategy, dtype, resolve_device(device), max_tokens, key_values)
        if database:
            database.require_width(parts.model.hidden_size)
        engine = cls(
            checkpoint=checkpoint,
            threads=count,
            classifier=classifier,
            share_prefixes=share_prefixes,
            **parts._asdict(),
        )
        if classifier and engine.dimensions:
            classifier.require_width(engine.dimensions)
        engine._measure_prefill()
        return engine._with_nearest_label() if checkpoint.task == "embed" and checkpoint.labels else engine

    def _with_nearest_label(self) -> PrefillEngine:
        """Return the engine with a classifier whose classes are the checkpoint's labels."""
        labels = self.checkpoint.labels
        try:
            embeddings = self.embed(labels, reuse=False)
        except NotFinite as error:
            raise NotFinite.of(error.index, "labels") from error
        fingerprint = self.checkpoint.embedding_fingerprint()
        classifier = nearest_label(labels, embeddings, fingerprint=fingerprint, model=self.checkpoint.name)
        return replace(self, classifier=classifier)

    def shares_model_with(self, database: AttentionDatabase) -> bool:
        """Return whether the packed model can serve a database: the heads are in the order of its mask, and
        hits take the model's weights."""
        loaded = self.map_reuse.database if self.map_reuse else None
        if loaded is None or loaded.mask != database.mask:
            return False
        return loaded.refitted is None and database.refitted is None

    def with_database(self, database: AttentionDatabase) -> PrefillEngine:
        """Return an engine with another database and the same model, keys and values.

        Raises DatabaseRefused if the database belongs to another model, and ValueError if the packed model
        cannot serve it; see `shares_model_with`.
        """
        if not self.shares_model_with(database):
            raise ValueError("the database needs the model to be packed again")
        database.require_width(self.model.hidden_size)
        return replace(self, strategy=map_reuse_of(database, self.checkpoint))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of everything that determines the full model's answers.

        Covers the checkpoint's use_fingerprint, the maximum number of tokens, and a fitted classifier. Does
        not cover compute dtype, device and threads, because they change only the rounding of an answer, and
        does not cover reuse. The files are those that the engine was loaded from.
        """
        parts = [self.checkpoint.use_fingerprint(), self.tokenizer.max_tokens]
        # use_fingerprint covers a checkpoint's labels, and the classifier made from them has rounding errors.
        if self.classifier and not self.checkpoint.labels:
            parts.append(self.classifier.digest())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def parallel_runs(self) -> int:
        """The number of batches that can run at once, each in its own thread, and gain by it.

        One batch alone uses all threads. The compiled stack computes batches of several threads side by side;
        without it, all batches share the threads of torch, and one batch at a time is fastest.
        """
        return self.threads if self.model.stack else 1

    @property
    def dimensions(self) -> int | None:
        """The dimensions of an embedding; None if the model gives classes or label logits."""
        if self.checkpoint.task != "embed":
            return None
        head = self.model.outputs.pool.head
        return head.dimensions if head else self.model.hidden_size * len(self.checkpoint.pooling.modes)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model accepts, which are 0 to this number minus one."""
        return self.tokenizer.known_ids

    @overload
    def tokenize(
        self,
        texts: Iterable[str],
        truncate: bool = True,
        prompt: Prompt | None = None,
        max_total_tokens: int | None = None,
    ) -> list[list[int]]: ...

    @overload
    def tokenize(
        self,
        texts: Iterable[Text],
        truncate: bool = True,
        prompt: Prompt | None = None,
        max_total_tokens: int | None = None,
    ) -> Sequence[Sequence[int]]: ...

    def tokenize(
        self,
        texts: Iterable[Text],
        truncate: bool = True,
        prompt: Prompt | None = None,
        max_total_tokens: int | None = None,
    ) -> Sequence[Sequence[int]]:
        """Return the token ids of each text in a prompt; None: the checkpoint's template. Thread safe.

        A text may be a pair (text, text). Raises InputTooLong if a text is too long and `truncate` is False,
        or if all texts together have more than `max_total_tokens` tokens, and InvalidInput as
        TextTokenizer.tokenize and `require_known` do.
        """
        sequences = self.tokenizer.tokenize(
            texts, truncate=truncate, prompt=prompt, max_total_tokens=max_total_tokens
        )
        self.require_known(sequences, plans=len((prompt or self.tokenizer.default_prompt).sequence_plans))
        return sequences

    def embed(
        self,
        texts: Iterable[str],
        *,
        reuse: bool = True,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """Return the embeddings of a list of texts, float32 [texts, d].

        reuse: let the texts reuse what they can. prompt_name: name of one of the checkpoint's prompts; None:
        the default prompt. normalize, dimensions: see `embeddings`. Raises NotFinite with the index of the
        first text whose embedding is not finite, and InvalidInput if an argument is not accepted.
        """
        if self.checkpoint.task != "embed":
            remedy = "; load it without task label-logits" if self.checkpoint.task == "label-logits" else ""
            raise InvalidInput(f"the model is a classifier and gives no embeddings{remedy}", field="model")
        self.require_dimensions(dimensions)
        if not (texts := list_of(texts)):
            return np.zeros((0, dimensions or self.dimensions or 0), np.float32)
        prompt = self.tokenizer.named_prompt(prompt_name)
        sequences = self.tokenize(texts, prompt=prompt)
        result = self.run(self.requests(sequences, prompt, reuse=reuse, reads=Measure.COSINE))
        require_finite(result.finite)
        return self.embeddings(result.outputs, normalize=normalize, dimensions=dimensions)

    def embeddings(
        self, outputs: np.ndarray, *, normalize: bool | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Return the embeddings, float32 [n, d], from the outputs of `run`.

        normalize: bring each embedding to unit length; None: as the checkpoint's configuration says.
        dimensions: keep only the first d numbers of each embedding (Matryoshka, Kusupati et al. 2022), before
        it is brought to unit length; None: all. Raises InvalidInput as `require_dimensions` does.
        """
        self.require_dimensions(dimensions)
        kept = outputs[:, :dimensions]
        return unit_length(kept) if normalize or (normalize is None and self.checkpoint.normalize) else kept

    def require_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidInput unless embeddings can be truncated to this many dimensions; None: all.

        A model that lists the dimensions it was trained for has only these.
        """
        if dimensions is not None:
            require_dimensions(dimensions, self.dimensions or 0, self.checkpoint.matryoshka_dimensions)

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        activation: Activation | None = None,
    ) -> np.ndarray:
        """Return how well each document answers a query, float32 [documents]; higher is better.

        instruction, activation: see Decisions.pair_prompt and Decisions.pair_scores. A pair that is too long
        is cut. Raises InvalidInput if the model scores no pairs, and NotFinite with the index of the first
        document whose score is not finite.
        """
        prompt = self.decisions.pair_prompt(instruction)
        if not (documents := list_of(documents, "documents")):
            return np.zeros(0, np.float32)
        sequences = self.tokenize([(query, document) for document in documents], prompt=prompt)
        result = self.run(self.requests(sequences, prompt, self.decisions.label_tokens))
        plans = len(prompt.sequence_plans)
        require_finite(result.finite.reshape(-1, plans), "documents")
        return self.decisions.pair_scores(result.outputs, result.log_probabilities, activation)

    def requests(
        self,
        sequences: Sequence[Sequence[int]],
        prompt: Prompt | None = None,
        labels: LabelTokens | None = None,
        *,
        reuse: bool = True,
        salt: bytes = b"",
        reads: Measure | None = Measure.AGREEMENT,
    ) -> list[PrefillRequest]:
        """Return the requests for token sequences that `tokenize` returned for this prompt.

        prompt: None for the checkpoint's template. labels: the labels to score, if the prompt is the prompt
        of labels. reuse: let the sequences reuse what they can: stored keys and values of the same salt, and
        attention maps if `may_reuse` allows it for the prompt. reads: as there. Raises InvalidInput as
        `require_some_tokens`, `require_known` and `without_padding` do.
        """
        prompt = prompt or self.tokenizer.default_prompt
        require_some_tokens(sequences, plans=len(prompt.sequence_plans))
        self.require_known(sequences, plans=len(prompt.sequence_plans))
        maps = reuse and self.may_reuse(prompt, labels, reads)
        return [
            PrefillRequest(ids, maps, plan, self.prefix_key(ids, plan, salt if reuse else None))
            for index, ids in enumerate(self.without_padding(sequences))
            for plan in [prompt.sequence_plan(index)]
        ]

    def require_known(self, sequences: Sequence[Sequence[int]], first: int = 0, plans: int = 1) -> None:
        """Raise InvalidInput if a sequence has a token of the tokenizer that the model does not have.

        first: the number of the first sequence, and plans: how many sequences a text has, for errors.
        """
        if self.tokenizer.vocabulary <= self.vocabulary:
            return
        for number, ids in enumerate(sequences, first):
            if max(ids, default=0) >= self.vocabulary:
                text = f"inputs[{number // plans}]"
                raise InvalidInput(
                    f"{text} has a token of the tokenizer that the model does not have, whose ids are 0 to "
                    f"{self.vocabulary - 1}; remove the token from the text or its template",
                    field=text,
                )

    def without_padding(self, sequences: Sequence[Sequence[int]], first: int = 0) -> Sequence[Sequence[int]]:
        """Return the tokens to compute of each sequence: all, unless the model is a decoder with classes.

        Such a decoder reads its class at the last token that is not padding, as in transformers, or at the
        first token if all tokens are padding. The padding behind that token is removed. first: the number of
        the first sequence, for errors. Raises InvalidInput if a sequence ends in padding and the model is not
        causal, because its other tokens depend on the padding.
        """
        padding = self.model.padding
        padded = (number for number, ids in enumerate(sequences, first) if ids and ids[-1] == padding)
        if padding is None or (number := next(padded, None)) is None:
            return sequences
        if not self.model.is_causal:
            raise InvalidInput(
                f"inputs[{number}] ends in the padding token, where this model reads no class; remove the "
                "token from the end of the text, or from what the tokenizer adds to each text",
                field=f"inputs[{number}]",
            )
        return [without_end(ids, padding) for ids in sequences]

    def prefix_key(
        self, ids: Sequence[int], plan: SequencePlan | None, salt: bytes | None, *, passing: int = 0
    ) -> PrefixKey | None:
        """Return how stored keys and values of a sequence are looked up; None if nothing may be stored.

        salt: sequences of one salt share what is stored; None: nothing is given, and nothing is stored.
        passing: tokens before the plan's continuation that are not worth keeping.
        """
        if self.key_values is None or salt is None:
            return None
        return self.key_values.prefix_key(ids, plan, salt, passing=passing)

    def close(self) -> None:
        """Save the keys and values that wait to be saved. The engine must not run any more."""
        if self.key_values:
            self.key_values.store.close()

    def _measure_prefill(self) -> None:
        """Measure how fast the model computes keys and values, to decide whether loading them pays."""
        transfers = self.key_values.store.transfers if self.key_values else None
        if transfers:
            tokens = min(256, self.tokenizer.max_tokens)
            text = [PrefillRequest([0] * tokens, reuse=False)]
            self.run(text)  # the first pass also prepares what later passes share
            transfers.prefill_speed = tokens / self.run(text).report.forward_seconds

    def stored_tokens(self, prefix_key: PrefixKey | None) -> int:
        """Return how many tokens at the front of a sequence would be given to a batch now."""
        return self.key_values.store.givable_tokens(prefix_key) if self.key_values and prefix_key else 0

    def may_reuse(
        self,
        prompt: Prompt,
        labels: LabelTokens | None = None,
        reads: Measure | None = Measure.AGREEMENT,
    ) -> bool:
        """Return whether the quality budget covers what is read of sequences of this prompt.

        reads: what the outputs are read for, without `labels`: AGREEMENT for decisions among all of the
        operator's classes, COSINE for embeddings, None for anything else, such as other classes.

        The budget was measured with the checkpoint's template. A budget of decisions covers no embeddings. It
        covers the operator's labels; for labels of several tokens it was measured on prompts without the
        labels. A cosine budget also covers other single-token labels in the operator's template.
        """
        if labels is not None and labels is self.decisions.label_tokens:
            return True
        if prompt != self.tokenizer.default_prompt or (labels is None and reads is None):
            return False
        if labels is None and (reads is Measure.AGREEMENT or self.map_reuse is None):
            return True
        return self.map_reuse is not None and self.map_reuse.policy.budget.measure is Measure.COSINE

    @property
    def attention(self) -> str:
        """What computes attention: a level of the compiled library, such as "avx512", or "torch"."""
        return (native.level() if self.model.device.type == "cpu" else None) or "torch"

    @property
    def map_reuse(self) -> MapReuse | None:
        """The strategy, if it reuses the attention maps of a database."""
        return self.strategy if isinstance(self.strategy, MapReuse) else None

    def open_gate(self, gate: BlendGate, path: Path | None = None) -> None:
        """Blend chunks as a gate allows from now on. path: its file, in which tightening is kept.

        Raises InvalidInput if chunks cannot be blended, or if the gate belongs to another model.
        """
        self.blending.require(gate.listwise)
        gate.require(self.fingerprint, self.checkpoint.name, len(self.model.layers))
        self.blending.open(gate, path)

    def may_blend(
        self,
        prompt: Prompt,
        labels: LabelTokens | None = None,
        reads: Measure | None = Measure.AGREEMENT,
    ) -> bool:
        """Return whether the gate's budget covers what is read of sequences of this prompt.

        labels, reads: as for may_reuse. A budget of decisions covers no embeddings.
        """
        gate = self.blending.gate
        if gate is None:
            return False
        if gate.listwise:
            return prompt.template == LISTWISE
        if labels is not None:
            return labels is self.decisions.label_tokens
        return prompt == self.tokenizer.default_prompt and reads in (Measure.AGREEMENT, gate.budget.measure)

    def info(self) -> EngineInfo:
        """Return what is loaded, for people and /info."""
        checkpoint, reuse = self.checkpoint, self.map_reuse
        embeds = self.checkpoint.task == "embed"
        return EngineInfo(
            model=checkpoint.name,
            model_source=checkpoint.source,
            revision=checkpoint.revision,
            commit=checkpoint.commit,
            fingerprint=self.fingerprint,
            variant=checkpoint.variant,
            task=self.checkpoint.task,
            labels=list(self.decisions.labels or checkpoint.labels),
            template=str(checkpoint.template),
            prompts=dict(checkpoint.prompts),
            pooling=checkpoint.pooling.modes if embeds else None,
            dimensions=self.dimensions,
            matryoshka_dimensions=tuple(
                number for number in checkpoint.matryoshka_dimensions if number <= (self.dimensions or 0)
            ),
            max_tokens=self.tokenizer.max_tokens,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.model.device),
            threads=self.threads,
            attention=self.attention,
            compiled_off=native.compiled_off() if self.model.device.type == "cpu" else None,
            reuse_off=list(self.reuse_off),
            gain=reuse.gain.info(reuse.policy.names()) if reuse and reuse.gain else None,
            database=reuse.info() if reuse else None,
            key_values=key_value_info(self.key_values.store) if self.key_values else None,
            key_values_off=None if self.key_values else self.key_values_off,
            blending=self.blending.info(),
        )
