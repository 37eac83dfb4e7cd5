"""A database of random sentences, for measuring speed: every head stored and reused, everything hits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from attncache_core.attention_maps.database import Manifest
from attncache_core.attention_maps.familiarity import write_familiarity
from attncache_core.attention_maps.index import FeatureIndex
from attncache_core.attention_maps.integrity import file_digests
from attncache_core.attention_maps.mask import natural_rank
from attncache_core.attention_maps.policy import Budget, uniform_policy
from attncache_core.attention_maps.projector import FeatureProjector
from attncache_core.attention_maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.attention_maps.recording import smallest_form
from attncache_core.attention_maps.seal import Seal
from attncache_core.attention_maps.segment_writer import SegmentWriter
from attncache_core.attention_maps.store import (
    AttentionMapStore,
    RecordKind,
    RecordLayout,
    segment_path,
)
from attncache_core.attention_maps.substitution import collect_maps
from attncache_core.checkpoint import Checkpoint
from attncache_core.engine import PrefillEngine
from attncache_core.files import PRIVATE
from attncache_core.outputs import Measure
from attncache_core.tokens import pack
from attncache_core.version import __version__

# Short maps: as many records as a well-filled length has. Long ones: what memory keeps at hand.
_MOST_RECORDS = 1000
_MOST_BYTES = 600 * 2**20
EVERYTHING_HITS = -1e9


@torch.inference_mode()
def write_database(
    folder: Path, checkpoint: Checkpoint, lengths: Sequence[int], most_records: int = _MOST_RECORDS
) -> None:
    """Write a database of random token sequences of these lengths to `folder`."""
    engine = PrefillEngine.load(checkpoint)
    model, random = engine.model, np.random.default_rng(0)
    layers, heads = len(model.layers), model.layers[0].heads
    dtype = torch.bfloat16 if engine.dtype is torch.bfloat16 else torch.float16
    layout = RecordLayout((heads,) * layers, dtype, smallest_form(model))
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    seal = Seal.create(folder, checkpoint.fingerprint())
    projector = FeatureProjector(model.hidden_size, max(lengths))
    index = FeatureIndex()
    records = {}
    for length in lengths:
        records[length] = max(16, min(most_records, _MOST_BYTES // layout.record_bytes(length)))
        features = []
        path = segment_path(folder, length)
        with SegmentWriter(path, length, records[length], layout, seal) as writer:
            for _ in range(records[length]):
                ids = random_sequence(random, length)
                batch = pack([ids])
                maps = collect_maps(model, batch)
                writer.append([layer[0].to(dtype) for (layer,) in maps], ids, RecordKind.STORED)
                features += projector.project(model.search_input(model.embed(batch)), batch.groups())
        index.add(length, np.concatenate(features))
    index.write(folder)
    (folder / "projector.safetensors").write_bytes(projector.to_bytes())
    none = np.empty(0, dtype=np.int64)
    prototypes = PrototypeIndex(np.empty((0, projector.dimensions), np.float32), none, none, none)
    prototypes_path(folder).write_bytes(prototypes.to_bytes())
    familiarity = write_familiarity(folder, None, none)
    rank = natural_rank(layers, heads)
    Manifest(
        id=seal.id,
        fingerprint=checkpoint.fingerprint(),
        model=checkpoint.name,
        dtype="bfloat16" if dtype is torch.bfloat16 else "float16",
        records=records,
        stored_heads=layout.stored_heads,
        form=layout.form,
        prototypes={},
        damage=((0.0,) * heads,) * layers,
        rank=tuple(map(tuple, rank.tolist())),
        reused_heads=layout.stored_heads,
        policy=uniform_policy(Budget(Measure.COSINE, 0.0), EVERYTHING_HITS),
        quality={"measured": False},
        build={
            "synthetic": True,
            "program": __version__,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        files=file_digests(folder, lengths, familiarity, AttentionMapStore(folder, lengths, layout, seal)),
    ).write(folder)


def random_sequence(random: np.random.Generator, length: int) -> list[int]:
    """Token ids that every BERT vocabulary has, first and last token not special."""
    return random.integers(2000, 20000, length).tolist()
