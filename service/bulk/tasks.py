"""What is computed of each text: an embedding, or a score for each label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core import InvalidInput, NoClassifier, PrefillEngine, PrefillResult, class_scores
from attncache_core.text.labels import LabelTokens
from attncache_core.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """How texts become sequences, and their results become numbers."""

    prompt: Prompt
    width: int  # numbers per text
    numbers: Callable[[PrefillResult], np.ndarray]  # the result of texts -> float32 [texts, width]
    label_tokens: LabelTokens | None = None  # if labels are scored by their tokens
    labels: Sequence[str] = ()  # of the columns, if they are scores


def embedding(engine: PrefillEngine, prompt_name: str | None, dimensions: int | None) -> Task:
    """Return the task of embedding texts. Raises InvalidInput as PrefillEngine.embed does."""
    if engine.dimensions is None:
        raise InvalidInput("the model is a classifier and gives no embeddings", field="model")
    engine.require_dimensions(dimensions)
    prompt = engine.default_prompt if prompt_name is None else engine.named_prompt(prompt_name)
    return Task(
        prompt,
        dimensions or engine.dimensions,
        lambda result: engine.embeddings(result.outputs, dimensions=dimensions),
    )


def classes(engine: PrefillEngine) -> Task:
    """Return the task of scoring the labels of the model, of the classifier or of --labels.

    Raises NoClassifier if there are no labels.
    """
    if engine.task == "label-logits":
        tokens = engine.labels_in()

        def of_tokens(result: PrefillResult) -> np.ndarray:
            return class_scores(engine.label_logits(tokens, result.outputs, result.log_probabilities))

        return Task(tokens.prompt, len(tokens.labels), of_tokens, tokens, tokens.labels)
    if engine.labels is None:
        raise NoClassifier("the model has no classes; give --labels or --classifier", field="labels")
    return Task(
        engine.default_prompt,
        len(engine.labels),
        lambda result: class_scores(engine.class_logits(result.outputs), 1.0, engine.multi_label),
        labels=engine.labels,
    )
