"""Build stage 3: compute the map distances of the sentence pairs that the projector is trained on."""

from __future__ import annotations

import math

import numpy as np

from attncache_core.build.first_inputs import FirstInputs
from attncache_core.build.quality import masked_maps
from attncache_core.build.sentences import Sentences
from attncache_core.build.training import PairGroup, map_distances
from attncache_core.calibration.calibrate import Progress
from attncache_core.errors import BuildFailed
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.storage.store import AttentionMapStore

# Maximum number of records per length: 512 records give 130,000 pairs. Fewer records of long sentences are
# used. _MAX_COMPARISONS limits the number of compared map values, so that comparing one length takes seconds.
_MAX_TRAINING_RECORDS = 512
_MAX_COMPARISONS = 2e9


def pair_groups(
    store: AttentionMapStore,
    sentences: Sentences,
    first_inputs: FirstInputs,
    mask: ReuseMask,
    random: np.random.Generator,
    progress: Progress,
) -> list[PairGroup]:
    """Return, for each length, the inputs and map distances of training sentences.

    The distances are computed over the heads of `mask`. Raises BuildFailed if no two sentences have
    the same length.
    """
    groups, by_length = [], sentences.by_length()
    for done, (length, indices) in enumerate(by_length.items(), 1):
        rows = sentences.rows(indices, held_out=False)
        maximum = min(_MAX_TRAINING_RECORDS, math.isqrt(int(_MAX_COMPARISONS / (mask.total * length**2))))
        rows = [rows[index] for index in random.permutation(len(rows))[:maximum]]
        if len(rows) > 1:
            maps = masked_maps(store, mask, length, rows)
            inputs = first_inputs.of(sentences.chosen([indices[row] for row in rows]))
            groups.append(PairGroup(inputs, map_distances(maps, maps)))
        progress("comparing maps", done, len(by_length))
    if not groups:
        raise BuildFailed(
            "the corpus has no two texts of one length to train the projector on", field="corpus"
        )
    return groups
