"""The scores of pairs: how well a document answers a query.

a single class            a cross-encoder's logit -> sigmoid, or the logit itself
two labels of a decoder   logit of the second label minus logit of the first -> sigmoid (the softmax)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from attncache_core.checkpoints.checkpoint import Activation, Checkpoint
from attncache_core.engine.decisions import Decisions
from attncache_core.errors import InvalidInput
from attncache_core.heads.decisions import class_scores
from attncache_core.text.prompts import Prompt
from attncache_core.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class PairScores:
    """Scores pairs with the outputs of an engine, if its model is made for pairs."""

    checkpoint: Checkpoint
    decisions: Decisions
    tokenizer: TextTokenizer

    @property
    def supported(self) -> bool:
        """Whether the model scores pairs.

        It does if it has a single class, or if two labels are scored in a template of pairs.
        """
        if self.checkpoint.task == "classify":
            return len(self.checkpoint.classes) == 1
        labels = self.decisions.label_tokens
        return labels is not None and len(labels.labels) == 2 and self.checkpoint.template.is_for_pairs

    def require(self) -> None:
        """Raise InvalidInput unless the model scores pairs."""
        if not self.supported:
            raise InvalidInput(
                "the model scores no pairs of query and document: this needs a model with a single class, or "
                "a decoder with task label-logits, two labels, and a template with {query} and {document}",
                field="model",
            )

    def prompt(self, instruction: str | None = None) -> Prompt:
        """Return the prompt in which pairs are tokenised.

        instruction: replaces the template's instruction; None: keeps it. Raises InvalidInput if the model
        scores no pairs, if its template holds no instruction, or if the instruction leaves no room.
        """
        self.require()
        labels = self.decisions.label_tokens
        if instruction is None:
            return labels.prompt if labels else self.tokenizer.default_prompt
        template = self.checkpoint.template.instructed(instruction)
        prompt = self.tokenizer.prompt(template, field="instruction")
        return self.decisions.labels_in(template).prompt if labels else prompt

    def logits(
        self, outputs: np.ndarray, log_probabilities: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Return a logit for each pair, float32 [pairs], from the results of `run`.

        outputs, log_probabilities: of all sequences of the pairs. For two labels, the logit is the difference
        of their logits. Raises InvalidInput if the model scores no pairs.
        """
        self.require()
        labels = self.decisions.label_tokens
        if labels is None:
            single: np.ndarray = outputs[:, 0]
            return single
        both = self.decisions.label_logits(labels, outputs, log_probabilities)
        difference: np.ndarray = both[:, 1] - both[:, 0]
        return difference

    def scores(
        self,
        outputs: np.ndarray,
        log_probabilities: Sequence[np.ndarray] | None = None,
        activation: Activation | None = None,
    ) -> np.ndarray:
        """Return a score for each pair, float32 [pairs], from the results of `run`; higher is better.

        activation: "sigmoid" for scores between 0 and 1, "identity" for logits; None: as the checkpoint's
        configuration says, which is what sentence-transformers' CrossEncoder returns. Other arguments and
        errors: see `logits`; InvalidInput also for another activation.
        """
        if activation not in (None, *get_args(Activation)):
            raise InvalidInput("activation must be sigmoid or identity", field="activation")
        logits = self.logits(outputs, log_probabilities)
        if (activation or self.checkpoint.activation) == "identity":
            return logits
        return class_scores(logits, multi_label=True)
