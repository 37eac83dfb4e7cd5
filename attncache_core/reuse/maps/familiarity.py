"""Predict from the tokens of a text how much damage reuse would do: the familiarity test.

    token ids -> statistics of each sequence -> strangeness: the damage to expect if a record serves

A text with a high strangeness does not resemble the texts that the database was calibrated on. A sequence
with a strangeness above the policy's limit is computed in full.

The statistics are cheap: mean, spread and maximum of learned token weights, the share of repetitions, and the
length. A linear model of the statistics predicts the 98th percentile of the log of the damage (1 - cosine).
`fit_familiarity` fits the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from attncache_core import native
from attncache_core.errors import CorruptDatabase
from attncache_core.native.search import NativeStrangeness
from attncache_core.runtime.files import write_whole

_PREFIX = "familiarity-"
LOG_OF_LENGTH = 6  # column of the statistics


@dataclass(frozen=True)
class Familiarity:
    """The fitted model: a weight per token, and a coefficient per statistic of a sequence."""

    token_weights: np.ndarray  # float32 [vocabulary]
    coefficients: np.ndarray  # float32 [statistics]
    intercept: np.ndarray  # float32 [1]

    def strangeness(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the damage to expect for each sequence, float32 [sequences].

        ids: int64 [tokens], token ids of all sequences, one sequence after another. lengths: int64
        [sequences], tokens of each sequence.
        """
        if self._compiled:
            logarithms = np.log(lengths, dtype=np.float32) * self.coefficients[LOG_OF_LENGTH]
            return np.exp(self._compiled(ids, lengths) + logarithms + self.intercept)
        statistics = sequence_statistics(self.token_weights[ids], ids, lengths)
        return np.exp(statistics @ self.coefficients + self.intercept)

    @cached_property
    def _compiled(self) -> NativeStrangeness | None:
        kernel = native.kernel()
        if kernel is None:
            return None
        return NativeStrangeness(kernel.library, self.token_weights, self.coefficients)


def write_familiarity(folder: Path, familiarity: Familiarity | None, token_counts: np.ndarray) -> str:
    """Write the familiarity test, if there is one, and the token counts of the corpus, int64 [vocabulary].

    Returns the name of the file in the database `folder`. The name contains a digest of the content, so a
    calibration that is interrupted does not overwrite the test that the manifest names. Raises OSError.
    """
    content = save({"token_counts": token_counts, **(asdict(familiarity) if familiarity else {})})
    name = f"{_PREFIX}{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    write_whole(folder / name, content)
    return name


def familiarity_name(files: Iterable[str]) -> str:
    """Return the name of the familiarity test among a manifest's files. Raises CorruptDatabase if absent."""
    for name in files:
        if name.startswith(_PREFIX):
            return name
    raise CorruptDatabase("the manifest names no familiarity test", field="database")


def remove_other_tests(folder: Path, name: str) -> None:
    """Remove the familiarity tests of earlier and of interrupted calibrations. Raises OSError."""
    for path in folder.glob(f"{_PREFIX}*.safetensors"):
        if path.name != name:
            path.unlink()


def read_familiarity(path: Path) -> tuple[Familiarity | None, np.ndarray]:
    """Read the familiarity test and the token counts from a file. Raises CorruptDatabase."""
    try:
        tensors = load_file(path)
        token_counts = tensors.pop("token_counts")
        return (Familiarity(**tensors) if tensors else None), token_counts
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        raise CorruptDatabase(f"{path} cannot be read", field="database") from error


def sequence_statistics(weights: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the statistics of each sequence, float32 [sequences, 8].

    weights: float32 [tokens], the weight of each token. ids: int64 [tokens]. lengths: int64 [sequences]. The
    columns are: mean and standard deviation of the weights; shares of the tokens and of the pairs of
    neighbouring tokens that occurred before in the sequence; share of tokens equal to their predecessor;
    maximum of the weights; log of the length; mean of the weights divided by the length.
    """
    if len(lengths) > _MAX_SEQUENCES:
        first, rest = lengths[:_MAX_SEQUENCES], lengths[_MAX_SEQUENCES:]
        end = int(first.sum())
        parts = (weights[:end], ids[:end], first), (weights[end:], ids[end:], rest)
        return np.concatenate([sequence_statistics(*part) for part in parts])
    starts = np.cumsum(lengths) - lengths
    # The first token of a sequence has no predecessor, so it counts as its own predecessor.
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[starts] = ids[starts]
    # Sorting by sequence, token and predecessor makes repetitions within a sequence neighbours.
    keys = ids << _ID_BITS
    keys |= before
    keys |= np.repeat(np.arange(len(lengths)) << 2 * _ID_BITS, lengths)
    keys.sort()
    tokens = keys >> _ID_BITS
    summed = np.zeros((5, len(ids)), dtype=np.float32)
    summed[0] = weights
    np.multiply(weights, weights, out=summed[1])
    np.equal(tokens[1:], tokens[:-1], out=summed[2, 1:])
    np.equal(keys[1:], keys[:-1], out=summed[3, 1:])
    np.equal(ids, before, out=summed[4])
    statistics = np.empty((8, len(lengths)), dtype=np.float32)
    np.divide(np.add.reduceat(summed, starts, axis=1), lengths, out=statistics[:5], casting="same_kind")
    mean, square = statistics[0], statistics[1]
    statistics[1] = np.sqrt(np.maximum(square - mean * mean, 0))
    np.maximum.reduceat(weights, starts, out=statistics[5])
    np.log(lengths, out=statistics[LOG_OF_LENGTH], casting="same_kind")
    np.divide(mean, lengths, out=statistics[7], casting="same_kind")
    return statistics.T


# A key holds two token ids below 2^24 and the index of a sequence, and must fit into 63 bits.
_ID_BITS = 24
_MAX_SEQUENCES = 2**15
