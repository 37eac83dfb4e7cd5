"""Write a database of random sequences for speed measurements: every head is reused, every sequence hits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from attncache_core.build.recording import smallest_form
from attncache_core.calibration.substitution import collect_maps
from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.familiarity import write_familiarity
from attncache_core.reuse.maps.index import FeatureIndex
from attncache_core.reuse.maps.integrity import file_digests
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.policy import Budget, uniform_policy
from attncache_core.reuse.maps.projector import FeatureProjector
from attncache_core.reuse.maps.prototypes import PrototypeIndex, prototypes_path
from attncache_core.reuse.mask import natural_rank
from attncache_core.reuse.storage.layout import RecordKind, RecordLayout, segment_path
from attncache_core.reuse.storage.seal import Seal
from attncache_core.reuse.storage.segment_file import SegmentWriter
from attncache_core.reuse.storage.store import AttentionMapStore
from attncache_core.runtime.files import PRIVATE
from attncache_core.text.token_batch import pack
from attncache_core.version import __version__

# Short sequences get as many records as a length of a real database; long ones as many as memory can hold.
_MAX_RECORDS = 1000
_MAX_BYTES = 600 * 2**20
EVERYTHING_HITS = -1e9


@torch.inference_mode()
def write_database(
    folder: Path, checkpoint: Checkpoint, lengths: Sequence[int], most_records: int = _MAX_RECORDS
) -> None:
    """Write a database of random token sequences of these lengths to `folder`.

    most_records: the most records of a length.
    """
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
        records[length] = max(16, min(most_records, _MAX_BYTES // layout.record_bytes(length)))
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
    """Return random token ids that every BERT vocabulary has, without special tokens."""
    return random.integers(2000, 20000, length).tolist()
