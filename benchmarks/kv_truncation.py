"""Compare truncated keys and values with recomputing the kept tokens: cosines and decisions.

    python -m benchmarks kv-truncation tiny-prompt-llama SST2_train.tsv:sentence

Each conversation is a window full of turns (texts of the file). It is cut to its newest tokens, and one more
turn follows. The last token's state is compared with the state after the kept tokens were computed again.

    truncated    stored keys and values at new positions (CachedAttention, section 3.4)
    keep sinks   the same, and the first four tokens stay
    naive        keys keep the rotation of their old positions
    int8         nothing is cut, but keys and values are rounded to 8 bits; compared with all tokens
    all tokens   nothing is cut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click
import numpy as np
import torch

from attncache_core import KeyValueOptions, PrefillEngine, PrefillRequest, find_checkpoint
from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.corpus.reading import read_texts
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.key_value_reuse import KeyValueReuse
from attncache_core.reuse.kv.quantized import Int8Slots
from service.commands.report import machine, show_machine, show_table

SINKS = 4


def conversations(
    engine: PrefillEngine, texts: Sequence[str], window: int
) -> list[tuple[list[int], list[int]]]:
    """Return token ids of full windows, each with the turn that follows."""
    turns = [ids[1:] for ids in engine.tokenize(texts)]  # without the token that begins every text
    found: list[tuple[list[int], list[int]]] = []
    ids: list[int] = []
    for turn in turns:
        if len(ids) >= window:
            found.append((ids[:window], turn))
            ids = []
        else:
            ids += turn
    return found


def reuse_of(engine: PrefillEngine) -> KeyValueReuse:
    """Return the reuse of keys and values, which every engine of this benchmark has."""
    assert engine.key_values is not None
    return engine.key_values


def state(engine: PrefillEngine, ids: Sequence[int], salt: bytes | None) -> np.ndarray:
    """Return the last token's state, float32 [1, width]."""
    request = PrefillRequest(ids, False, None, engine.prefix_key(ids, None, salt))
    return engine.run([request]).outputs


def unrotated(engine: PrefillEngine, salt: bytes, ids: Sequence[int], positions: Sequence[int]) -> None:
    """Turn the keys of truncated blocks so that reading them gives the rotation of their old positions."""
    store, model = reuse_of(engine).store, engine.model
    pool, dtype = store.memory.pool, model.stack.dtype if model.stack else model.dtype
    known = store.memory.known(reuse_of(engine).prefix_key(ids, None, salt))
    for number, block in enumerate(known.blocks):
        new = np.arange(number * BLOCK_TOKENS, number * BLOCK_TOKENS + block.name.length)
        delta = torch.from_numpy(np.asarray(positions)[new] - new)
        for layer, slots in zip(model.layers, pool.slots(block.place), strict=True):
            written = torch.from_numpy(slots[: block.name.length]).view(dtype)
            key, _ = layer.projections.keys_and_values(written.to(model.dtype), delta)
            heads = written.shape[1] // 2 // key.shape[2]
            written[:, : written.shape[1] // 2] = key[:, :: key.shape[1] // heads].flatten(1).to(dtype)


def rounded(engine: PrefillEngine, ids: Sequence[int], salt: bytes) -> None:
    """Round the stored keys and values of a sequence to 8 bits."""
    store, model = reuse_of(engine).store, engine.model
    dtype = model.stack.dtype if model.stack else model.dtype
    quantized = Int8Slots(store.layout.part_bytes, store.layout.slot_bytes, dtype)
    for block in store.memory.known(reuse_of(engine).prefix_key(ids, None, salt)).blocks:
        parts = store.memory.pool.parts(block.place)
        for index, part in enumerate(quantized.encode(parts, block.name.length)):
            quantized.decode(index, part, parts[index])


@click.command()
@click.argument("model")
@click.argument("texts")
@click.option("--ratio", default=0.5, show_default=True, help="Share of the window that is kept.")
@click.option("--window", default=256, show_default=True, help="Tokens of each conversation.")
@click.option("--conversations", "most", default=200, show_default=True)
@torch.inference_mode()
def main(model: str, texts: str, ratio: float, window: int, most: int) -> None:
    """Print how near each way comes to computing everything."""
    checkpoint = replace(find_checkpoint(model), pooling=Pooling(("lasttoken",)))
    engine = PrefillEngine.load(checkpoint, key_values=KeyValueOptions(memory_bytes=2**30))
    found: dict[str, list[np.ndarray]] = {}
    cut, whole = [], []
    for number, (ids, turn) in enumerate(conversations(engine, read_texts(texts), window)[:most]):
        newest = list(range(window - int(window * ratio), window))
        cut.append(state(engine, [ids[at] for at in newest] + turn, None))
        whole.append(state(engine, ids + turn, None))
        ways = {"truncated": newest, "keep sinks": [*range(SINKS), *newest[SINKS:]], "naive": newest}
        for way, positions in ways.items():
            salt = b"%d %s" % (number, way.encode())
            state(engine, ids, salt)
            own_salt = reuse_of(engine).truncate(ids, None, salt, positions)
            own_ids = [ids[at] for at in positions]
            assert own_salt is not None, "the window is stored, and outputs read the last token"
            if way == "naive":
                unrotated(engine, own_salt, own_ids, positions)
            found.setdefault(way, []).append(state(engine, own_ids + turn, own_salt))
        salt = b"%d int8" % number
        state(engine, ids, salt)
        rounded(engine, ids, salt)
        found.setdefault("int8", []).append(state(engine, ids + turn, salt))
        reuse_of(engine).store.clear()
    show_machine({**machine(engine.threads), "model": model, "dtype": engine.dtype})
    rows = []
    for way, states in (*found.items(), ("all tokens", whole)):
        against = whole if way == "int8" else cut
        cosine = cosines(np.concatenate(states), np.concatenate(against))
        rows.append((way, f"{cosine.mean():.4f}", f"{np.quantile(cosine, 0.05):.4f}"))
    title = f"{len(whole)} conversations of {window} tokens, {ratio:g} of them kept"
    show_table(title, ("way", "mean cosine", "5th percentile"), rows)
