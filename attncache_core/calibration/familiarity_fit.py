"""Fit the familiarity test, which predicts the damage of reuse (strangeness) from token ids alone.

    probes like the corpus, and unfamiliar probes      -> damage of reuse           (calibration.probes)
    ridge regression on the means of token features    -> one weight per token
    quantile regression on statistics of the sequence  -> strangeness of the sequence

The features of a token are its rarity in the corpus, the distance of its embedding from the mean embedding of
the corpus, and the embedding itself. Both groups of probes have equal weight in the fits, whatever their
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from attncache_core.models import PackedModel
from attncache_core.reuse.maps.familiarity import Familiarity, sequence_statistics
from attncache_core.text.token_batch import TokenBatch

# Strangeness predicts this quantile of the damage: one in fifty similar texts is damaged more. The floor of a
# budget is about such texts. With the 90th percentile, more of them passed the same limit.
_QUANTILE = 0.98
_FOLDS = 5
# Chosen on the default database and on a database of banking questions, by the damage that the test let
# through for kinds of text outside the fit. Scales of 0.1 to 0.3 and shrinkages of 0.02 to 0.2 give similar
# results.
_EMBEDDING_SCALE = 0.3
_SHRINKAGE = 0.08
_RARE = 2  # occurrences in the corpus, at most
_TOKENS_PER_PASS = 8192
# Smaller damage is rounding noise.
_MIN_DAMAGE = 1e-4


@dataclass(frozen=True)
class TokenStatistics:
    """Features of single tokens: the frequency in a corpus, and the input of the model's first layer."""

    model: PackedModel
    counts: np.ndarray  # int64 [vocabulary]

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the features of token ids int64 [n], float32 [n, 7 + hidden]: rarity, then embedding."""
        counts, size = self.counts[ids], len(self.counts)
        surprise = np.log((self.counts.sum() + 0.5 * size) / (counts + 0.5))
        embeddings = self._embeddings(ids)
        distance = np.linalg.norm(embeddings - self._mean, axis=1)
        norms = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(self._mean)
        likeness = embeddings @ self._mean / np.maximum(norms, 1e-12)
        rarity = [counts == 0, counts <= _RARE, surprise, surprise**2, distance, distance**2, likeness]
        return np.concatenate([np.stack(rarity, axis=1), embeddings], axis=1, dtype=np.float32)

    @cached_property
    def _mean(self) -> np.ndarray:
        known = np.flatnonzero(self.counts)
        weights = (self.counts[known] / self.counts.sum()).astype(np.float32)
        parts = zip(_parts(weights), _parts(known), strict=True)
        return np.sum([weights @ self._embeddings(ids) for weights, ids in parts], axis=0)

    @torch.inference_mode()
    def _embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Return the first layer's input for each token as a sequence of its own, float32 [n, hidden]."""
        alone = TokenBatch(torch.from_numpy(ids), np.ones(len(ids), dtype=np.int64), np.arange(len(ids)))
        hidden = self.model.search_input(self.model.embed(alone.on(self.model.device)))
        return hidden.float().cpu().numpy()


def count_tokens(sequences: Sequence[Sequence[int]], vocabulary: int) -> np.ndarray:
    """Return how often each token occurs in the sequences, int64 [vocabulary]."""
    ids = np.fromiter((token for ids in sequences for token in ids), dtype=np.int64)
    return np.bincount(ids, minlength=vocabulary)


def fit_familiarity(
    tokens: TokenStatistics,
    sequences: Sequence[Sequence[int]],
    damage: np.ndarray,
    kinds: Sequence[str | None],
) -> tuple[Familiarity, np.ndarray]:
    """Return the familiarity test, and the strangeness of the probes, float32 [probes].

    damage: measured with reuse, 1 - cosine, [probes]. kinds: for each probe the kind of unfamiliar text, or
    None if the probe is like the corpus. The strangeness comes from five further fits (cross-validation).
    Each of these fits leaves out a fifth of the unfamiliar kinds and a fifth of the other probes, so the
    probes are scored like new texts and new kinds of text.
    """
    fit = _Fit(tokens, sequences, damage, kinds)
    strangeness = np.empty(len(sequences), dtype=np.float32)
    for left_out in _folds(kinds):
        strangeness[left_out] = fit.without(left_out)
    return fit.whole(), strangeness


class _Fit:
    """The features of the probes, computed once for all fits."""

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
        self._target = np.log(np.maximum(damage, _MIN_DAMAGE))
        self._like_corpus = np.array([kind is None for kind in kinds])
        # _token_rows: for each token of each probe its row in _used and _of_tokens.
        self._used, self._token_rows = np.unique(self._ids, return_inverse=True)
        self._of_tokens = tokens.of(self._used)  # float32 [distinct tokens, features]
        starts = np.cumsum(self._lengths) - self._lengths
        self._means = np.stack(
            [
                np.add.reduceat(column[self._token_rows], starts) / self._lengths
                for column in np.ascontiguousarray(self._of_tokens.T)
            ],
            axis=1,
        )

    def without(self, left_out: np.ndarray) -> np.ndarray:
        """Return the strangeness of the probes `left_out` (bool [probes]) from a fit to the other probes."""
        direction = self._direction(~left_out)
        statistics = self._statistics(self._of_tokens @ direction)
        coefficients, intercept = self._quantile(statistics, ~left_out)
        return np.exp(statistics[left_out] @ coefficients + intercept)

    def whole(self) -> Familiarity:
        """Return the familiarity test, fitted to all probes."""
        everyone = np.ones(len(self._lengths), dtype=bool)
        direction = self._direction(everyone)
        coefficients, intercept = self._quantile(self._statistics(self._of_tokens @ direction), everyone)
        vocabulary = np.arange(len(self._tokens.counts))
        weights = [self._tokens.of(part) @ direction for part in _parts(vocabulary)]
        return Familiarity(
            np.concatenate(weights).astype(np.float32),
            coefficients.astype(np.float32),
            np.array([intercept], dtype=np.float32),
        )

    def _statistics(self, weights: np.ndarray) -> np.ndarray:
        """Return the cheap statistics of the probes, float64 [probes, 8], for these token weights."""
        return sequence_statistics(
            weights[self._token_rows].astype(np.float32), self._ids, self._lengths
        ).astype(np.float64)

    def _direction(self, fitted: np.ndarray) -> np.ndarray:
        """Return the ridge regression's weight of each token feature, float64 [features]."""
        # Loading scikit-learn takes most of a second, and only fitting needs it.
        from sklearn.linear_model import Ridge

        embeddings = self._tokens.model.hidden_size
        others = self._means.shape[1] - embeddings
        # Repetition and length of a text also cause damage. Their own columns keep the fit from ascribing
        # that damage to the tokens.
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
        """Return the coefficients and the intercept of the quantile regression on the statistics."""
        from sklearn.linear_model import QuantileRegressor

        spread = statistics[fitted].std(axis=0) + 1e-6
        regression = QuantileRegressor(quantile=_QUANTILE, alpha=1e-3).fit(
            statistics[fitted] / spread, self._target[fitted], self._weights(fitted)
        )
        return regression.coef_ / spread, float(regression.intercept_)

    def _weights(self, fitted: np.ndarray) -> np.ndarray:
        """Return sample weights that give the probes like the corpus the same total weight as the others."""
        like = self._like_corpus[fitted]
        unlike = max(1, int((~like).sum()))
        return np.where(like, unlike / max(1, int(like.sum())), 1.0)


def _folds(kinds: Sequence[str | None]) -> list[np.ndarray]:
    """Return five parts of the probes, bool [probes] each. A kind is in one part; others spread evenly."""
    names = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    fold_of = {name: index % _FOLDS for index, name in enumerate(names)}
    alike = iter(range(len(kinds)))
    folds = np.array([next(alike) % _FOLDS if kind is None else fold_of[kind] for kind in kinds])
    return [folds == fold for fold in range(_FOLDS) if (folds == fold).any()]


def _parts(of_tokens: np.ndarray) -> list[np.ndarray]:
    return np.split(of_tokens, range(_TOKENS_PER_PASS, len(of_tokens), _TOKENS_PER_PASS))
