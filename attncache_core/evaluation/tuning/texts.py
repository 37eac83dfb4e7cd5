"""The texts of a tuning, split into two parts: texts that choose, and held-out texts that measure.

The choosing part ranks the layers, fits a classifier for accuracies, and is recorded in databases of maps.
Nothing is chosen on the measuring part except the way itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attncache_core.errors import InvalidInput


@dataclass(frozen=True)
class Texts:
    """Texts, and their labels if they are known."""

    texts: list[str]
    labels: list[str] | None

    def rows(self, indices: Sequence[int]) -> Texts:
        """Return the texts at these indices."""
        labels = None if self.labels is None else [self.labels[index] for index in indices]
        return Texts([self.texts[index] for index in indices], labels)


def split(
    given: Texts, sequences: Sequence[Sequence[int]], needed: int, most: int, seed: int = 0
) -> tuple[Texts, Texts]:
    """Split texts at random into those that choose and those that measure, which are half of them.

    sequences: the token ids of each text; a text whose tokens occurred before, and a text without tokens, are
    left out. needed: the fewest texts to measure on. most: the most texts to measure on; the others choose.
    Raises InvalidInput if there are too few texts.
    """
    if most < needed:
        raise InvalidInput(
            f"sample must be at least {needed}: fewer texts cannot prove that the budget is kept",
            field="sample",
        )
    first = {tuple(ids): index for index, ids in reversed(list(enumerate(sequences))) if ids}
    distinct = np.random.default_rng(seed).permutation(sorted(first.values())).tolist()
    if len(distinct) < 2 * needed:
        raise InvalidInput(
            f"texts has {len(distinct)} different texts, and at least {2 * needed} are needed: half of them "
            f"measure, and fewer than {needed} cannot prove that the budget is kept (min_text_cosine 0, or "
            "a smaller min_agreement, needs fewer)",
            field="texts",
        )
    measuring = min(most, len(distinct) // 2)
    return given.rows(distinct[measuring:]), given.rows(distinct[:measuring])
