"""What the outputs of an engine decide, and between which labels; and how well a document answers a query.

classes of the checkpoint     logits are the model's own
a classifier on embeddings    logits are the classifier's
labels of a decoder           logits of the labels' tokens behind a template
pairs, by a single class      a cross-encoder's logit -> sigmoid, or the logit itself
pairs, by two labels          logit of the second label minus logit of the first -> sigmoid (the softmax)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import get_args

import numpy as np
import torch

from attncache_core.checkpoints.checkpoint import Activation, Checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.errors import InvalidInput, NoClassifier
from attncache_core.heads.classifier import SIMILARITY_TEMPERATURE, LinearClassifier
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.heads.decisions import LETTERS, LISTWISE, class_scores
from attncache_core.heads.vectors import require_finite
from attncache_core.heads.zero_shot import HYPOTHESIS_TEMPLATE, ZeroShot
from attncache_core.models import PackedModel
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt
from attncache_core.text.tokenizer import TextTokenizer


class Decisions:
    """Turns outputs into logits of labels, and into scores of pairs if the model is made for pairs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: PackedModel,
        tokenizer: TextTokenizer,
        classifier: LinearClassifier | None,
        database: AttentionDatabase | None,
    ) -> None:
        """classifier: on embeddings. database: the attention maps that are reused, if any."""
        self._database = database
        self._checkpoint, self._model, self._tokenizer = checkpoint, model, tokenizer
        self.classifier = classifier
        self.label_tokens: LabelTokens | None = None  # the operator's labels, scored by their tokens
        if checkpoint.task == "label-logits":
            tokenizer.require_open_end()
            if checkpoint.labels:
                self.label_tokens = LabelTokens.of(tokenizer, checkpoint.template, checkpoint.labels)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The classes of the checkpoint or the classifier, or the operator's labels of one token each.

        In the order of `class_logits`; None if outputs decide nothing.
        """
        if self.classifier:
            return self.classifier.labels
        if self.label_tokens and self.label_tokens.one_token_each:
            return self.label_tokens.labels
        if self._checkpoint.task == "classify":
            return self._checkpoint.classes
        return None

    @property
    def multi_label(self) -> bool:
        """Whether each class is decided by itself: its score is a sigmoid, and scores do not sum to 1.

        True for models with `problem_type: multi_label_classification` and for models with a single class.
        """
        if self._checkpoint.task != "classify":
            return False
        return self._checkpoint.config.get("problem_type") == "multi_label_classification" or (
            self.labels is not None and len(self.labels) == 1
        )

    @property
    def temperature(self) -> float:
        """What `class_logits` are divided by already: cosines of labels are."""
        return SIMILARITY_TEMPERATURE if self.classifier and not self.classifier.fitted else 1.0

    def class_logits(self, outputs: np.ndarray) -> np.ndarray:
        """Return logits [n, labels] from outputs [n, d].

        Raises NoClassifier if there are no classes, and InvalidInput if a label has several tokens.
        """
        if self.classifier:
            return self.classifier.logits(outputs)
        if self.label_tokens and self.labels:
            return self.label_logits(self.label_tokens, outputs)
        if self.label_tokens:
            raise InvalidInput(
                "labels of several tokens are not decided by outputs alone; call label_logits with "
                "decisions.label_tokens, and with outputs and log_probabilities of the result",
                field="labels",
            )
        if self._checkpoint.task != "classify":
            raise NoClassifier(
                "the model has no classes and no classifier was fitted: give labels", field="labels"
            )
        return outputs

    def labels_in(self, template: Template | None = None, labels: Sequence[str] | None = None) -> LabelTokens:
        """Prepare labels to be scored in a template; None: the operator's template and labels. Thread safe.

        Raises NoClassifier if there are no labels, InvalidInput if the model is not loaded for task
        label-logits, and InvalidInput as LabelTokens.of does.
        """
        if self._checkpoint.task != "label-logits":
            raise InvalidInput("labels are scored in a template by task label-logits only", field="template")
        template, labels = template or self._checkpoint.template, tuple(labels or self._checkpoint.labels)
        if not labels:
            raise NoClassifier("the server has no labels of its own: give labels", field="labels")
        configured = self.label_tokens
        if configured and (template, labels) == (self._checkpoint.template, configured.labels):
            return configured
        return LabelTokens.of(self._tokenizer, template, labels)

    def zero_shot(self, labels: Iterable[str], hypothesis_template: str = HYPOTHESIS_TEMPLATE) -> ZeroShot:
        """Prepare labels for a model of natural language inference; see ZeroShot.of. Thread safe.

        Raises NoClassifier if the model has no class for entailment, and InvalidInput.
        """
        config = self._checkpoint.config if self._checkpoint.task == "classify" else {}
        return ZeroShot.of(config, self._tokenizer.default_prompt, labels, hypothesis_template)

    def comparator(self, measure: Measure, documents: int | None = None) -> OutputComparator:
        """Return the comparator of outputs of `run` with reuse and without reuse.

        Compares the decisions of the model, else of the classifier, else of the classifier for which the
        database was calibrated. documents: in listwise reranking, how many are in the list; only their
        letters are compared. Raises NoClassifier for agreement if nothing decides, and InvalidInput if
        letters cannot be compared.
        """
        if documents is not None:
            return self._letters_comparator(measure, documents)
        if measure is Measure.COSINE and self._checkpoint.task != "classify":
            return OutputComparator(measure, None)
        if self.labels is not None:
            return OutputComparator(measure, self.class_logits, self.multi_label)
        if self._database and self._database.decisions:
            return OutputComparator(measure, self._database.decisions.logits)
        raise NoClassifier(
            "agreement is of decisions, and neither the model nor a classifier has classes",
            field="classifier",
        )

    @cached_property
    def letters(self) -> LabelTokens:
        """The letters that listwise reranking scores. Raises InvalidInput without task label-logits."""
        return self.labels_in(LISTWISE, LETTERS)

    def _letters_comparator(self, measure: Measure, documents: int) -> OutputComparator:
        if not self.letters.one_token_each:
            raise InvalidInput(
                "the letters of documents are several tokens each in this model's tokenizer, so lists of "
                "documents are always computed exactly",
                field="listwise",
            )
        return OutputComparator(
            measure, lambda outputs: self.label_logits(self.letters, outputs)[:, :documents]
        )

    @torch.inference_mode()
    def label_logits(
        self,
        labels: LabelTokens,
        outputs: np.ndarray,
        log_probabilities: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return logits float32 [texts, labels] from the results of the texts' sequences.

        For labels of one token each these are the model's logits, from its outputs; else the sums of the
        log-probabilities of each label's tokens.
        """
        if not labels.one_token_each:
            assert log_probabilities is not None
            return labels.logits(log_probabilities)
        head = self._model.language_head
        assert head is not None
        tokens = [token for (token,) in labels.tokens]
        rows = torch.from_numpy(np.ascontiguousarray(outputs))
        logits: np.ndarray = head.token_logits(rows, tokens).cpu().numpy()
        return logits

    @property
    def scores_pairs(self) -> bool:
        """Whether the model scores pairs.

        It does if it has a single class, or if two labels are scored in a template of pairs.
        """
        if self._checkpoint.task == "classify":
            return len(self._checkpoint.classes) == 1
        labels = self.label_tokens
        return labels is not None and len(labels.labels) == 2 and self._checkpoint.template.is_for_pairs

    def require_pairs(self) -> None:
        """Raise InvalidInput unless the model scores pairs."""
        if not self.scores_pairs:
            raise InvalidInput(
                "the model scores no pairs of query and document: this needs a model with a single class, or "
                "a decoder with task label-logits, two labels, and a template with {query} and {document}",
                field="model",
            )

    def pair_prompt(self, instruction: str | None = None) -> Prompt:
        """Return the prompt in which pairs are tokenised.

        instruction: replaces the template's instruction; None: keeps it. Raises InvalidInput if the model
        scores no pairs, if its template holds no instruction, or if the instruction leaves no room.
        """
        self.require_pairs()
        labels = self.label_tokens
        if instruction is None:
            return labels.prompt if labels else self._tokenizer.default_prompt
        template = self._checkpoint.template.instructed(instruction)
        prompt = self._tokenizer.prompt(template, field="instruction")
        return self.labels_in(template).prompt if labels else prompt

    def pair_logits(
        self, outputs: np.ndarray, log_probabilities: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Return a logit for each pair, float32 [pairs], from the results of `run`.

        outputs, log_probabilities: of all sequences of the pairs. For two labels, the logit is the difference
        of their logits. Raises InvalidInput if the model scores no pairs, and NotFinite with the index of the
        first pair whose logit is not finite, as "documents".
        """
        self.require_pairs()
        if self.label_tokens is None:
            logits: np.ndarray = outputs[:, 0]
        else:
            both = self.label_logits(self.label_tokens, outputs, log_probabilities)
            # Finite outputs have a logit that is not finite if the rows of the labels in the language head
            # are damaged or very large.
            with np.errstate(over="ignore", invalid="ignore"):
                logits = both[:, 1] - both[:, 0]
        require_finite(np.isfinite(logits), "documents")
        return logits

    def pair_scores(
        self,
        outputs: np.ndarray,
        log_probabilities: Sequence[np.ndarray] | None = None,
        activation: Activation | None = None,
    ) -> np.ndarray:
        """Return a score for each pair, float32 [pairs], from the results of `run`; higher is better.

        activation: "sigmoid" for scores between 0 and 1, "identity" for logits; None: as the checkpoint's
        configuration says, which is what sentence-transformers' CrossEncoder returns. Other arguments and
        errors: see `pair_logits`; InvalidInput also for another activation.
        """
        if activation not in (None, *get_args(Activation)):
            raise InvalidInput("activation must be sigmoid or identity", field="activation")
        logits = self.pair_logits(outputs, log_probabilities)
        if (activation or self._checkpoint.activation) == "identity":
            return logits
        return class_scores(logits, multi_label=True)
