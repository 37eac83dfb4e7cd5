"""Fit the familiarity test: from measured damage to a strangeness that token ids alone predict.

    probes like the corpus, and unfamiliar ones   -> the damage that their records do    (measured elsewhere)
    ridge regression on the means of their tokens -> a weight for each token
    quantile regression on cheap statistics       -> strangeness

The token means hold how rare the tokens are in the corpus, how far their embeddings lie from the corpus' mean
embedding, and the embeddings themselves. Both kinds of probes count equally, however many there are of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attncache_core.attention_maps.familiarity import Familiarity, sequence_statistics
from attncache_core.models import PackedModel
from attncache_core.tokens import TokenBatch

# The quantile of the damage that strangeness predicts: a text in ten like it is damaged more.
_QUANTILE = 0.9
_FOLDS = 5
# Chosen on the default database and on one of banking questions, by the damage let through among kinds of
# text that took no part in the fit. Scales of 0.1 to 0.3 and shrinkages of 0.02 to 0.2 do about equally well.
_EMBEDDING_SCALE = 0.3
_SHRINKAGE = 0.08
_SELDOM = 2  # occurrences in the corpus
_TOKENS_PER_PASS = 8192
# Below this damage rounding speaks.
_LEAST_DAMAGE = 1e-4


@dataclass(frozen=True)
class TokenStatistics:
    """How often each token occurs in a corpus, and where the model's first layer places it."""

    model: PackedModel
    counts: np.ndarray  # int64 [vocabulary]

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the statistics of tokens int64 [n]: float32 [n, 7 + hidden]."""
        counts, size = self.counts[ids], len(self.counts)
        surprise = np.log((self.counts.sum() + 0.5 * size) / (counts + 0.5))
        embeddings = self._embeddings(ids)
        distance = np.linalg.norm(embeddings - self._mean, axis=1)
        norms = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(self._mean)
        likeness = embeddings @ self._mean / np.maximum(norms, 1e-12)
        rarity = [counts == 0, counts <= _SELDOM, surprise, surprise**2, distance, distance**2, likeness]
        return np.concatenate([np.stack(rarity, axis=1), embeddings], axis=1, dtype=np.float32)

    @cached_property
    def _mean(self) -> np.ndarray:
        known = np.flatnonzero(self.counts)
        weights = (self.counts[known] / self.counts.sum()).astype(np.float32)
        parts = range(0, len(known), _TOKENS_PER_PASS)
        return np.sum([weights[_part(at)] @ self._embeddings(known[_part(at)]) for at in parts], axis=0)

    @torch.inference_mode()
    def _embeddings(self, ids: np.ndarray) -> np.ndarray:
        """What the first layer reads of each token alone, float32 [n, hidden]."""
        alone = TokenBatch(torch.from_numpy(ids), np.ones(len(ids), dtype=np.int64), np.arange(len(ids)))
        hidden = self.model.search_input(self.model.embed(alone.on(self.model.device)))
        return hidden.float().cpu().numpy()


def count_tokens(sequences: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """Return how often each token occurs in the sequences, int64 [vocabulary]."""
    ids = np.fromiter((token for ids in sequences for token in ids), dtype=np.int64)
    return np.bincount(ids, minlength=vocabulary)


@dataclass(frozen=True)
class FittedFamiliarity:
    """The test, and the strangeness of the probes as fits without them predict it."""

    familiarity: Familiarity
    strangeness: np.ndarray  # float32 [probes]


def fit_familiarity(
    tokens: TokenStatistics,
    sequences: Sequence[Sequence[int]],
    damage: np.ndarray,
    kinds: Sequence[str | None],
) -> FittedFamiliarity:
    """Fit the test to the measured damage [probes] of token sequences.

    kinds: of each probe the kind of unfamiliar text, or None if it is like the corpus. The probes' own
    strangeness comes from five further fits, each without a fifth of the kinds and of the other probes, so
    that it is as for texts, and kinds of text, that are new.
    """
    fit = _Fit(tokens, sequences, damage, kinds)
    strangeness = np.empty(len(sequences), dtype=np.float32)
    for left_out in _folds(kinds):
        strangeness[left_out] = fit.without(left_out)
    return FittedFamiliarity(fit.whole(), strangeness)


class _Fit:
    """The probes' statistics, made once for all fits."""

    def __init__(
        self,
        tokens: TokenStatistics,
        sequences: Sequence[Sequence[int]],
        damage: np.ndarray,
        kinds: Sequence[str | None],
    ) -> None:
        self._tokens = tokens
        self._ids = np.fromiter((token for ids in sequences for token in ids), dtype=np.int64)
        self._lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        self._target = np.log(np.maximum(damage, _LEAST_DAMAGE))
        self._like_corpus = np.array([kind is None for kind in kinds])
        self._used, self._places = np.unique(self._ids, return_inverse=True)
        self._of_tokens = tokens.of(self._used)  # float32 [distinct tokens, statistics]
        starts = np.cumsum(self._lengths) - self._lengths
        self._means = np.stack(
            [
                np.add.reduceat(column[self._places], starts) / self._lengths
                for column in np.ascontiguousarray(self._of_tokens.T)
            ],
            axis=1,
        )

    def without(self, left_out: np.ndarray) -> np.ndarray:
        """Return the strangeness of the probes `left_out` (bool [probes]) as the others tell it."""
        direction = self._direction(~left_out)
        statistics = self._statistics(self._of_tokens @ direction)
        coefficients, intercept = self._quantile(statistics, ~left_out)
        return np.exp(statistics[left_out] @ coefficients + intercept)

    def whole(self) -> Familiarity:
        """Return the test that all probes tell."""
        everyone = np.ones(len(self._lengths), dtype=bool)
        direction = self._direction(everyone)
        coefficients, intercept = self._quantile(self._statistics(self._of_tokens @ direction), everyone)
        vocabulary = np.arange(len(self._tokens.counts))
        parts = range(0, len(vocabulary), _TOKENS_PER_PASS)
        weights = [self._tokens.of(vocabulary[_part(at)]) @ direction for at in parts]
        return Familiarity(
            np.concatenate(weights).astype(np.float32),
            coefficients.astype(np.float32),
            np.array([intercept], dtype=np.float32),
        )

    def _statistics(self, weights: np.ndarray) -> np.ndarray:
        """The cheap statistics of the probes [probes, 8] if the used tokens have these weights."""
        return sequence_statistics(weights[self._places].astype(np.float32), self._ids, self._lengths).astype(
            np.float64
        )

    def _direction(self, fitted: np.ndarray) -> np.ndarray:
        """The weight of each token statistic, float64 [statistics]: ridge regression on the probes' means."""
        # Loading scikit-learn takes most of a second, and only fitting needs it.
        from sklearn.linear_model import Ridge

        embeddings = self._tokens.model.hidden_size
        others = self._means.shape[1] - embeddings
        # What repeats and how long a text is must not be ascribed to its tokens.
        whole = self._statistics(np.zeros(len(self._used)))[:, [2, 3, 4, 6]]
        features = np.concatenate([self._means, whole, whole[:, 3:] ** 2], axis=1)
        spread = features[fitted].std(axis=0) + 1e-6
        spread[others : others + embeddings] /= _EMBEDDING_SCALE
        weights = self._weights(fitted)
        ridge = Ridge(alpha=_SHRINKAGE * weights.sum()).fit(
            features[fitted] / spread, self._target[fitted], weights
        )
        return (ridge.coef_ / spread)[: others + embeddings]

    def _quantile(self, statistics: np.ndarray, fitted: np.ndarray) -> tuple[np.ndarray, float]:
        """Coefficients and intercept of the quantile regression on the statistics."""
        from sklearn.linear_model import QuantileRegressor

        spread = statistics[fitted].std(axis=0) + 1e-6
        regression = QuantileRegressor(quantile=_QUANTILE, alpha=1e-3).fit(
            statistics[fitted] / spread, self._target[fitted], self._weights(fitted)
        )
        return regression.coef_ / spread, float(regression.intercept_)

    def _weights(self, fitted: np.ndarray) -> np.ndarray:
        """Weights with which the probes like the corpus count as much as the others."""
        like = self._like_corpus[fitted]
        unlike = max(1, int((~like).sum()))
        return np.where(like, unlike / max(1, int(like.sum())), 1.0)


def _folds(kinds: Sequence[str | None]) -> list[np.ndarray]:
    """Fifths of the probes, bool [probes] each: a kind stays together, and the others are spread evenly."""
    names = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    fold_of = {name: place % _FOLDS for place, name in enumerate(names)}
    alike = iter(range(len(kinds)))
    folds = np.array([next(alike) % _FOLDS if kind is None else fold_of[kind] for kind in kinds])
    return [folds == fold for fold in range(_FOLDS) if (folds == fold).any()]


def _part(at: int) -> slice:
    return slice(at, at + _TOKENS_PER_PASS)
