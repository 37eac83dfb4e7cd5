"""Explain what an engine reuses for one text, and what the reuse changes.

    tokens -> a pass with reuse: the outcome            as the engine decides for a request
           -> strangeness, and the nearest records      also where the plan does not search
           -> full computation: the text's own maps     by the plain loop, which has the maps as tensors
           -> the nearest record's maps, and the output with them beside the full output

An explanation computes the text several times. It changes nothing: it stores no keys and values, and the
database does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from attncache_core.engine.layers import first_input, reused_by, run_layers
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.request import PrefillRequest
from attncache_core.heads.comparator import Measure
from attncache_core.models import PackedModel
from attncache_core.models.attention import apply_maps
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.plan import Outcome, no_reuse
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.reuse.storage.segment import RecordsChanged, Segment
from attncache_core.runtime.threads import use_threads
from attncache_core.text.token_batch import TokenBatch, pack


@dataclass(frozen=True)
class Candidate:
    """The nearest record of one kind, and whether the policy would let it serve."""

    kind: RecordKind
    similarity: float  # 1 - L2 distance; 1 for a text's own record
    threshold: float  # θ: the least similarity of a hit; above 1: no record of this kind hits
    expected_damage: float  # 1 - cosine, by the curve of the calibration
    record: int  # index in the segment of the text's length


@dataclass(frozen=True)
class LayerMaps:
    """Attention maps of one layer. Heads have the checkpoint's numbers."""

    full: np.ndarray  # float32 [heads, L, L], of the full computation of the text
    reused_heads: tuple[int, ...]  # that take the maps of a record if the text hits
    given: np.ndarray | None  # float32 [reused heads, L, L], of the record; None without a record


@dataclass(frozen=True)
class Explanation:
    """What an engine reuses for one text, and why."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]  # as text; see TextTokenizer.written
    outcome: Outcome
    length_group: str | None  # range of lengths that share thresholds, such as "14-20"; None: no database
    searched: bool  # whether texts of this length are compared with records
    gain: float | None  # how much faster full batches of this length group are at least; None: not measured
    min_gain: float | None
    strangeness: float | None  # expected damage from the tokens alone; None: no test of familiarity
    strangeness_limit: float | None
    candidates: tuple[Candidate, ...]  # the nearest record of each kind
    chosen: Candidate | None  # that served, or would be the best to serve
    cosine: float | None  # of the output with the maps of `chosen` to the full output
    cached_tokens: int | None  # at the front, with stored keys and values; None: the engine stores none
    layers: tuple[LayerMaps, ...] | None  # None if maps were not asked for


@torch.inference_mode()
def explain(
    engine: PrefillEngine, ids: Sequence[int], *, salt: bytes = b"", maps: bool = True
) -> Explanation:
    """Explain what the engine reuses for a token sequence of its default prompt. Thread safe.

    salt: of the stored keys and values that are looked up. maps: include the attention maps, which take
    layers x heads x L x L numbers, twice.
    """
    use_threads(engine.threads)
    outcome = engine.run([PrefillRequest(ids)]).outcomes[0]
    batch = pack([ids], [engine.tokenizer.prompt_tokens]).on(engine.model.device)
    hidden = first_input(engine.model, batch).to(engine.model.dtype)
    reuse, found = engine.map_reuse, _Found()
    if reuse:
        with engine.deciding:
            found = _search(reuse.search, batch, engine.model.search_input(hidden))
    prefix_key = engine.prefix_key(ids, engine.tokenizer.default_prompt.sequence_plan(0), salt)
    cosine, reused_maps = _with_record(engine, batch, found)
    if reused_maps is None:
        found = replace(found, chosen=None)
    layers = _layers(engine, _full_maps(engine.model, batch, hidden), reused_maps) if maps else None
    group = reuse.policy.group_index(len(ids)) if reuse else None
    limit = reuse.policy.limit if reuse else None
    measured = reuse.gain if reuse else None
    gain = measured.groups.get(group) if measured and group is not None else None
    return Explanation(
        ids=tuple(ids),
        tokens=tuple(engine.tokenizer.written(ids)),
        outcome=outcome,
        length_group=reuse.policy.names()[group] if reuse and group is not None else None,
        searched=found.searched,
        gain=gain.full_batch_bound if gain else None,
        min_gain=measured.min_gain if measured else None,
        strangeness=found.strangeness,
        strangeness_limit=limit.strangest if limit else None,
        candidates=found.candidates,
        chosen=found.chosen,
        cosine=cosine,
        cached_tokens=engine.stored_tokens(prefix_key) if engine.key_values else None,
        layers=layers,
    )


@dataclass(frozen=True)
class _Found:
    """What a search found for one sequence."""

    strangeness: float | None = None
    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    segment: Segment | None = None  # with the records of the sequence's length
    changes: int = 0  # of the segment, when the records were found
    searched: bool = False  # whether the engine compares the sequence with these records


def _search(search: SearchEngine, batch: TokenBatch, attended: torch.Tensor) -> _Found:
    """Return the nearest records of the one sequence of a batch, whether the policy would search or not."""
    length = int(batch.lengths[0])
    strangeness = None
    if search.familiarity:
        strangeness = float(search.familiarity.strangeness(batch.ids.cpu().numpy(), batch.lengths)[0])
    known = length in search.index or length in search.prototypes
    if not (search.store.may_serve(length) and known):
        return _Found(strangeness)
    segment = search.store.segments[length]
    nearest = search.nearest(batch, attended, batch.groups())
    policy = search.policy.group_of(length)
    candidates = tuple(
        Candidate(
            kind,
            float(nearest.similarities[kind, 0]),
            policy.kinds[kind].threshold,
            float(policy.kinds[kind].expected_damage(nearest.similarities[kind])[0]),
            record,
        )
        for kind, record in zip(RecordKind, nearest.records[:, 0].tolist(), strict=True)
        if record >= 0 and segment.is_sound(record)
    )
    chosen = _chosen(search, batch, candidates)
    return _Found(
        strangeness, candidates, chosen, segment, segment.changes, searched=search.is_searched(length)
    )


def _chosen(search: SearchEngine, batch: TokenBatch, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that the policy lets serve, or would choose if θ did not refuse all of them."""
    length = int(batch.lengths[0])
    policy = search.policy.group_of(length)
    by_kind = {candidate.kind: candidate for candidate in candidates}
    if not by_kind:
        return None
    stored = by_kind.get(RecordKind.STORED)
    if stored and stored.similarity == 1:
        return stored
    if not search.is_searched(length) and policy.mean_serves and RecordKind.MEAN in by_kind:
        return by_kind[RecordKind.MEAN]
    kinds, _ = policy.choose({kind: np.array([found.similarity]) for kind, found in by_kind.items()})
    return by_kind[RecordKind(int(kinds[0]))]


def _with_record(
    engine: PrefillEngine, batch: TokenBatch, found: _Found
) -> tuple[float | None, list[np.ndarray] | None]:
    """Return the cosine of the output with the chosen record's maps to the full output, and these maps.

    The maps are, layer by layer, float32 [reused heads, L, L]. Returns (None, None) without a record, or if
    the record's file changed meanwhile.
    """
    if found.chosen is None or found.segment is None:
        return None, None
    model, segment, record = engine.model, found.segment, found.chosen.record
    plan = replace(no_reuse(1), segments={segment.length: segment})
    plan.records[:], plan.kinds[:] = record, found.chosen.kind
    plan.similarities[:] = found.chosen.similarity
    try:
        hidden, _ = run_layers(model, batch, None, reused_by(plan, model, batch))
        with_reuse = model.outputs(hidden, batch).cpu().numpy()
        reused_maps = [
            segment.layer_maps(record, number, layer.reused_heads).float().numpy().copy()
            for number, layer in enumerate(model.layers)
        ]
    except RecordsChanged:
        return None, None
    if not segment.is_as_checked(found.changes):
        return None, None
    full = engine.run([PrefillRequest(batch.ids.tolist(), reuse=False)])
    return float(
        engine.decisions.comparator(Measure.COSINE).fidelity(with_reuse, full.outputs)[0]
    ), reused_maps


def _full_maps(model: PackedModel, batch: TokenBatch, hidden: torch.Tensor) -> list[np.ndarray]:
    """Return the maps of all heads, in each layer float32 [heads, L, L], in the order of the loaded model.

    hidden: input of the first layer, [L, hidden], of a batch with one sequence.
    """
    maps = []
    for layer in model.layers:
        x = layer.attention_input(hidden)
        value, query, key = layer.project(x, batch.positions)
        if layer.reused_heads:
            reused = layer.project_reused(x, batch.positions)
            query, key = (torch.cat(pair, dim=1) for pair in zip(reused, (query, key), strict=True))
        computed = layer.attention_maps(query[None], key[None], slice(layer.heads))
        maps.append(computed[0].float().cpu().numpy())
        hidden = layer.finish(hidden, apply_maps(computed, value[None])[0].to(value.dtype))
    return maps


def _layers(
    engine: PrefillEngine, computed: Sequence[np.ndarray], reused_maps: Sequence[np.ndarray] | None
) -> tuple[LayerMaps, ...]:
    """Return the maps with their heads in the order of the checkpoint."""
    mask = engine.strategy.mask if engine.strategy else None
    layers = []
    for number, maps in enumerate(computed):
        order = mask.order[number] if mask else tuple(range(len(maps)))
        reused = order[: mask.reused[number]] if mask else ()
        layers.append(
            LayerMaps(maps[np.argsort(order)], reused, reused_maps[number] if reused_maps else None)
        )
    return tuple(layers)
