"""Sequences of chunks for a tiny model, and what Hugging Face's eager float32 model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from family_reference import FamilyReference
from kv_models import pooled_by
from transformers import AutoModelForCausalLM

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.engine import blended
from attncache_core.engine.blended import run_blended
from attncache_core.engine.continued import run_continued
from attncache_core.engine.request import PrefillRequest
from attncache_core.models import load_model
from attncache_core.reuse.blend.chunks import Blend, Recomputation
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.text.prompts import Frame
from attncache_core.text.segments import segmented

OPENING = [0]


def loaded(checkpoint, executor):
    """Load a model in float32 whose layers the compiled stack runs ("stack"), or torch ("plain")."""
    found = pooled_by(load_model(checkpoint, torch.float32), "lasttoken")
    if executor == "plain":
        found.__dict__["stack"] = None
    elif found.stack is None:
        pytest.skip("there is no compiled stack")
    return found


def key_values(store):
    return KeyValueReuse(store, b"model", Pooling(("lasttoken",)), 0)


def joined(chunks: Sequence[Sequence[int]], query: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a sequence of the opening, chunks and a query, and the spans of the chunks."""
    ends = list(accumulate(map(len, chunks), initial=len(OPENING)))
    ids = [*OPENING, *(token for chunk in chunks for token in chunk), *query]
    return ids, list(pairwise(ends))


@torch.inference_mode()
def run_chunks(model, store, chunks, query, recomputation, *, salt=b"", whole=False, plan=None):
    ids, spans = joined(chunks, query)
    reuse = key_values(store)
    blend = Blend.of(reuse, ids, spans, OPENING, salt, recomputation)
    prefix_key = reuse.whole(ids[:-1], salt) if whole else None
    return run_blended(model, store, PrefillRequest(ids, False, plan, prefix_key, blend=blend))


@torch.inference_mode()
def run_share(model, store, chunks, query, ratio, **more):
    return run_chunks(model, store, chunks, query, Recomputation(ratio, **more))


@torch.inference_mode()
def own_full_pass(model, store, ids) -> np.ndarray:
    """Return the last token's state of a pass that takes nothing from the store."""
    return run_continued(model, store, [PrefillRequest(ids, False)], [0]).outputs[0]


def random_chunks(lengths, query, seed=0):
    """Return chunks of these lengths and a query, of random tokens."""
    random = np.random.default_rng(seed)
    *chunks, last = (random.integers(3, 400, length).tolist() for length in (*lengths, query))
    return chunks, last


def prompt(lengths, query, opening=OPENING, separator=(), heading=()):
    """A sequence of random chunks, each behind a heading and in front of a separator, and a query."""
    chunks, last = random_chunks(lengths, query, sum(lengths))
    frame = Frame(list(opening), [], room=10**6, opening=len(opening))
    return segmented(frame, chunks, last, separator, [heading] * len(chunks))


@torch.inference_mode()
def run_prompt(model, store, found, ratio, **more):
    blend = Blend.of(key_values(store), *found, b"", Recomputation(ratio, **more))
    return run_blended(model, store, PrefillRequest(found.ids, False, blend=blend))


class LayerRun(NamedTuple):
    """A layer that a blended pass computed."""

    layer: int
    rows: list[int]  # positions
    only_slots: bool  # whether only the keys and values were computed


@contextmanager
def noted_layers() -> Iterator[list[LayerRun]]:
    """Note the layers that blended passes compute."""
    noted, run_layers = [], blended.run_layers

    def noting(model, batch, hidden, reused_maps, layers, slots):
        noted.extend(LayerRun(layer, batch.positions.tolist(), slots.only) for layer in layers)
        return run_layers(model, batch, hidden, reused_maps, layers, slots=slots)

    with mock.patch.object(blended, "run_layers", noting):
        yield noted


def block_diagonal(folder, chunks, query) -> np.ndarray:
    """Return the last token's state of a pass in which the chunks of `joined` do not see each other."""
    return apart(folder, *joined(chunks, query), OPENING)


@torch.inference_mode()
def apart(folder, ids, spans, opening) -> np.ndarray:
    """Return the last token's last normed state of a pass in which chunks do not see each other.

    What stands in front of the first chunk belongs to it. Every other chunk sees a copy of the opening, as
    far in front of it as in a text of its own. All other tokens see everything in front of them but these
    copies. Layers with a window see only tokens inside it.
    """
    tokens, places = np.array(ids), np.arange(len(ids))
    owner = np.full(len(ids), -1)  # the chunk a token belongs to; -1: none
    owner[: spans[0][1]] = 0
    for number, (first, end) in enumerate(spans[1:], 1):
        owner[first:end] = number
    is_copy = np.zeros(len(ids), dtype=bool)
    for number, (first, _) in reversed([*enumerate(spans)][1:]):
        tokens = np.insert(tokens, first, opening)
        places = np.insert(places, first, np.arange(first - len(opening), first))
        owner = np.insert(owner, first, [number] * len(opening))
        is_copy = np.insert(is_copy, first, [True] * len(opening))
    order = np.arange(len(tokens))
    seen = order[None] <= order[:, None]
    inside = (owner[None] == owner[:, None]) & (owner >= 0) | ((owner[:, None] == -1) & ~is_copy[None])
    model = FamilyReference(folder).model

    def mask(window):
        near = np.subtract.outer(places, places) < (window or len(tokens))
        return torch.from_numpy(np.where(seen & inside & near, 0.0, -np.inf)).float()[None, None]

    window = getattr(model.config, "sliding_window", None)
    masks = {"full_attention": mask(None), "sliding_attention": mask(window)}
    kinds = {*(getattr(model.config, "layer_types", None) or [])}
    if not kinds:
        kind = "sliding_attention" if model.config.model_type in ("mistral", "mixtral") else "full_attention"
        masks = masks[kind]
    found = model(
        torch.from_numpy(tokens)[None], attention_mask=masks, position_ids=torch.from_numpy(places)[None]
    )
    return found.last_hidden_state[0, -1].numpy()


@torch.inference_mode()
def keys_and_values(folder, ids, layer):
    """Keys before their rotation, and values, of all heads of a layer: float32 [tokens, n]."""
    hf = FamilyReference(folder).model
    made = []
    attention = hf.layers[layer].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(lambda _module, _inputs, output: made.append(output[0]))
    hf(torch.tensor([ids]))
    return torch.cat(made, dim=1).numpy()


@torch.inference_mode()
def full_log_probabilities(folder, ids, targets) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(found[-1 - target.back, target.token]) for target in targets]
