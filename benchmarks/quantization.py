"""Quantised models beside the same in bfloat16 and float32: time of a batch, and likeness to float32.

    python benchmarks/quantization.py [--texts FILE] [--threads 1] [--rounds 9]

Two models: all-MiniLM-L6-v2, and one of BERT-base's shape with random weights. Milliseconds of batches of one
length, every way in turn, medians of the rounds; with one thread the processor time of that thread, which
neighbours disturb less. Cosines are of embeddings to the float32 model's: of the texts, a line each, or, with
random weights, of random tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertModel

from attncache_core import Checkpoint, Quantization, find_checkpoint
from attncache_core.attention_maps.search import no_reuse
from attncache_core.checkpoint import read_checkpoint
from attncache_core.forward import forward
from attncache_core.memory import keep_freed_memory
from attncache_core.models import PackedModel, load_model
from attncache_core.outputs import cosines
from attncache_core.processor import processor_name
from attncache_core.threads import limit_threads
from attncache_core.tokenizer import TextTokenizer
from attncache_core.tokens import pack

SHAPES = ((1, 16), (4, 16), (32, 32), (8, 128), (2, 512))
WAYS = [
    ("float32", None, torch.float32),
    ("bfloat16", None, torch.bfloat16),
    *((f"{kind}, float32", kind, torch.float32) for kind in Quantization),
    *((f"{kind}, bfloat16", kind, torch.bfloat16) for kind in Quantization),
]
Sequences = Sequence[Sequence[int]]


def embeddings(model: PackedModel, sequences: Sequences) -> np.ndarray:
    """Of each sequence, in batches of 32."""
    parts = []
    for first in range(0, len(sequences), 32):
        batch = pack(sequences[first : first + 32])
        hidden, _ = forward(model, batch, model.embed(batch), no_reuse(len(batch.lengths)), {})
        parts.append(batch.in_callers_order(model.outputs(hidden, batch).representation.numpy()))
    return np.concatenate(parts)


def measure(name: str, checkpoint: Checkpoint, sequences: Sequences, threads: int, rounds: int) -> None:
    """Print a table of the ways to run this checkpoint."""
    models = {way: load_model(replace(checkpoint, quantization=kind), dtype) for way, kind, dtype in WAYS}
    expected = embeddings(models["float32"], sequences)
    random = np.random.default_rng(0)
    clock = time.thread_time if threads == 1 else time.perf_counter
    medians: dict[str, list[float]] = {way: [] for way in models}
    for shape in SHAPES:
        tokens = random.integers(2000, 20000, shape).tolist()
        taken: dict[str, list[float]] = {way: [] for way in models}
        for number in range(rounds + 1):
            for way, model in models.items():
                started = clock()
                embeddings(model, tokens)
                if number:  # the first makes oneDNN's kernels
                    taken[way].append(clock() - started)
        for way in models:
            medians[way].append(statistics.median(taken[way]) * 1e3)
    print(f"\n{name}\n\n| | {' | '.join(f'{n}x{length}' for n, length in SHAPES)} | cosine: mean | least |")
    print("|---" * (len(SHAPES) + 3) + "|")
    for way, model in models.items():
        cosine = cosines(embeddings(model, sequences), expected)
        figures = " | ".join(
            f"{mine:.2f} ({base / mine:.2f})"
            for mine, base in zip(medians[way], medians["float32"], strict=True)
        )
        print(f"| {way} | {figures} | {cosine.mean():.4f} | {cosine.min():.4f} |", flush=True)


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()
    limit_threads(options.threads)
    torch.set_grad_enabled(False)
    print(f"{processor_name()}, {options.threads} threads, torch {torch.__version__}")
    random = np.random.default_rng(0)
    tokens = [random.integers(2000, 20000, random.integers(8, 40)).tolist() for _ in range(64)]
    checkpoint = find_checkpoint("all-MiniLM-L6-v2")
    texts = options.texts.read_text("utf-8").splitlines() if options.texts else []
    asked = TextTokenizer(checkpoint).tokenize(texts, truncate=True) or tokens
    measure(checkpoint.name, checkpoint, asked, options.threads, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        BertModel(BertConfig()).save_pretrained(folder)
        base = read_checkpoint(Path(folder))
        measure("BERT-base's shape, random weights", base, tokens, options.threads, options.rounds)


if __name__ == "__main__":
    main()
