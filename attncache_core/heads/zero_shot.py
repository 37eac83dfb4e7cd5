"""Zero-shot classification: a model of natural language inference decides whether a text entails a label.

    (text, label) -> the pair (text, hypothesis about the label) -> class logits -> scores of the labels

The scores are those of transformers' ZeroShotClassificationPipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from attncache_core.checkpoints.template import Template
from attncache_core.errors import NoClassifier
from attncache_core.heads.decisions import class_scores
from attncache_core.text.limits import list_of, require_distinct
from attncache_core.text.prompts import Prompt

# Says of a text that it belongs to a label; {} stands for the label.
HYPOTHESIS_TEMPLATE = "This example is {}."


@dataclass(frozen=True)
class ZeroShot:
    """Labels to choose from, prepared for a model of natural language inference."""

    labels: tuple[str, ...]
    hypotheses: tuple[str, ...]  # one per label
    prompt: Prompt  # for the pairs; a pair that is too long loses tokens of the text
    entailment: int  # column of the class logits
    contradiction: int  # column of the class logits; -1: the last one

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        prompt: Prompt,
        labels: Iterable[str],
        hypothesis_template: str = HYPOTHESIS_TEMPLATE,
    ) -> Self:
        """Prepare labels for a checkpoint.

        config: of the checkpoint, which names its classes. prompt: its default prompt. hypothesis_template:
        holds {} once, where a label is inserted. Raises NoClassifier if no class is about entailment or if
        there is no label, and InvalidInput if the template is not accepted or if a label is repeated.
        """
        labels = list_of(labels, "labels")
        if not labels:
            raise NoClassifier("give labels to choose from", field="labels")
        require_distinct(labels)
        around = Template.parse(hypothesis_template, "hypothesis_template", pairs=False)
        entailment = entailment_class(config)
        if entailment is None:
            raise NoClassifier(
                "labels are accepted only by a model of natural language inference, and this model has no "
                "class named entailment; leave labels out to get the model's own classes",
                field="labels",
            )
        return cls(
            tuple(labels),
            tuple(map(around.around, labels)),
            replace(prompt, cut="first"),
            entailment,
            -1 if entailment == 0 else 0,
        )

    def pairs(self, texts: Iterable[str]) -> list[tuple[str, str]]:
        """Return the pairs of each text with the hypothesis of each label, text by text."""
        return [(text, hypothesis) for text in list_of(texts) for hypothesis in self.hypotheses]

    def scores(self, logits: np.ndarray, multi_label: bool = False) -> np.ndarray:
        """Return the score of each label, float32 [texts, labels], from the class logits of `pairs`.

        Without multi_label, the scores of a text sum to 1. With it, and for a single label, the score of each
        label is the probability of entailment against contradiction.
        """
        found = self.label_logits(logits, multi_label)
        return class_scores(found, multi_label=self.is_by_itself(multi_label))

    def is_by_itself(self, multi_label: bool) -> bool:
        """Return whether the score of a label does not depend on other labels."""
        return multi_label or len(self.labels) == 1

    def label_logits(self, logits: np.ndarray, multi_label: bool = False) -> np.ndarray:
        """Return what `scores` makes scores of, float32 [texts, labels], in the same order."""
        by_label = logits.reshape(-1, len(self.labels), logits.shape[1])  # [texts, labels, classes]
        found: np.ndarray = by_label[..., self.entailment]
        return found - by_label[..., self.contradiction] if self.is_by_itself(multi_label) else found


def entailment_class(config: dict[str, Any]) -> int | None:
    """Return the number of the class for entailment in a checkpoint's config.json; None if it has none."""
    names, numbers = config.get("id2label") or {}, config.get("label2id")
    if not (numbers and isinstance(numbers, dict)):
        numbers = {name: number for number, name in names.items()}
    for name, number in numbers.items():
        if str(name).lower().startswith("entail"):
            is_class = str(number).isdecimal() and int(number) < len(names or numbers)
            return int(number) if is_class else None
    return None
