"""Compare quantised models with bfloat16 and float32: time per batch, memory, cosine to float32.

    python -m benchmarks quantization --texts FILE[:column,...] [--model llama-3.2-1b] [--dtype float32]
                                      [--threads 1] [--rounds 9]

The model is all-MiniLM-L6-v2, or with --model a model of that size with random weights. Times are
milliseconds for batches of equal lengths, medians of the rounds, in which the formats alternate; the number
in parentheses is the speed-up over float32. With one thread, the time is the processor time of that thread,
which other processes disturb less. Megabytes count all tensors that the model keeps. Cosines compare
embeddings with those of the float32 model, for the texts of --texts or for random tokens.
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

from attncache_core import Checkpoint, Quantization, find_checkpoint
from attncache_core.corpus.reading import read_texts
from attncache_core.engine.layers import NO_REUSED_MAPS, run_layers
from attncache_core.heads.vectors import cosines
from attncache_core.models import PackedModel, load_model
from attncache_core.runtime.memory import keep_freed_memory, tensor_bytes
from attncache_core.runtime.threads import limit_threads
from attncache_core.text.token_batch import pack
from attncache_core.text.tokenizer import TextTokenizer
from benchmarks.model_sizes import SIZES, write_checkpoint
from service.commands.report import machine, show_machine

SHAPES = ((1, 16), (4, 16), (32, 32), (8, 128), (2, 512))
Sequences = Sequence[Sequence[int]]
Format = tuple[Quantization | None, torch.dtype]


def number_formats(dtype: torch.dtype) -> dict[str, Format]:
    """Return name -> (quantization, compute dtype); quantised models compute in `dtype`."""
    full: dict[str, Format] = {"float32": (None, torch.float32), "bfloat16": (None, torch.bfloat16)}
    return full | {f"{kind}, {str(dtype)[6:]}": (kind, dtype) for kind in Quantization}


def embeddings(model: PackedModel, sequences: Sequences) -> np.ndarray:
    """Return the embedding of each sequence, computed in batches of 32."""
    parts = []
    for first in range(0, len(sequences), 32):
        batch = pack(sequences[first : first + 32])
        hidden, _ = run_layers(model, batch, model.embed(batch), NO_REUSED_MAPS)
        parts.append(batch.in_callers_order(model.outputs(hidden, batch).numpy()))
    return np.concatenate(parts)


def milliseconds(
    models: dict[str, PackedModel], shape: tuple[int, int], rounds: int, threads: int
) -> list[float]:
    """Return the median time of each model for a batch; shape: number of sequences and their length."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    tokens = np.random.default_rng(0).integers(2000, 20000, shape).tolist()
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            started = clock()
            embeddings(model, tokens)
            taken[name].append((clock() - started) * 1e3)
    # oneDNN builds its kernels in the first round, so the first round is left out.
    return [statistics.median(times[1:]) for times in taken.values()]


def measure(checkpoint: Checkpoint, texts: Sequence[str], options: argparse.Namespace) -> None:
    """Print a table with a row per number format."""
    formats = number_formats(getattr(torch, options.dtype))
    models, megabytes = {}, []
    for name, (quantization, dtype) in formats.items():
        before = tensor_bytes()
        models[name] = load_model(replace(checkpoint, quantization=quantization), dtype)
        megabytes.append((tensor_bytes() - before) / 1e6)
    times = np.array([milliseconds(models, shape, options.rounds, options.threads) for shape in SHAPES])
    random = np.random.default_rng(0)
    sequences: Sequence[Sequence[int]] = [
        random.integers(2000, 20000, random.integers(8, 40)).tolist() for _ in range(64)
    ]
    if texts:
        sequences = TextTokenizer(checkpoint).tokenize(texts, truncate=True)
    expected = embeddings(models["float32"], sequences)
    columns = [*(f"{count}x{length}" for count, length in SHAPES), "MB", "cosine: mean", "5th percentile"]
    print(f"\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for number, (name, model) in enumerate(models.items()):
        cosine = cosines(embeddings(model, sequences), expected)
        figures = [
            f"{milliseconds:.2f} ({own_full / milliseconds:.2f})"
            for milliseconds, own_full in times[:, [number, 0]]
        ]
        figures += [f"{megabytes[number]:.0f}", f"{cosine.mean():.5f}", f"{np.percentile(cosine, 5):.5f}"]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    """Measure the chosen model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SIZES)
    parser.add_argument("--texts", help="FILE or FILE:column,column with texts to embed.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()
    limit_threads(options.threads)
    torch.set_grad_enabled(False)
    show_machine(machine(options.threads))
    if options.model:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), options.model)
            measure(find_checkpoint(folder), [], options)
    else:
        texts = read_texts(options.texts) if options.texts else []
        measure(find_checkpoint("all-MiniLM-L6-v2"), texts, options)
