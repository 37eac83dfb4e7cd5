"""Measure models of the papers' sizes with random weights: loading memory, full speed and hit-path speed.

    python -m benchmarks model-sizes [--model llama-3.2-1b] [--lengths 32 128 512] [--rounds 5] [--threads 2]
    python -m benchmarks model-sizes --model llama-3.2-1b --write FOLDER --tokenizer OTHER_MODEL

No pretrained model is needed: random weights are written to a temporary folder in bfloat16. With --write, the
model is written to a folder together with the tokenizer of another model; any command accepts this folder as
its --model. Loading memory is measured in a separate process that only loads the model. The full path and the
hit path alternate in one process, on batches of 1024 tokens. The hit path includes search and fetch, and
reuses every head.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from attncache_core import AttentionDatabase, PrefillEngine, find_checkpoint
from attncache_core.models import load_model
from attncache_core.runtime.threads import available_processors
from benchmarks.measuring.synthetic import write_database
from service.commands.report import machine, show_machine, show_table

BATCH_TOKENS = 1024
_DEBERTA_V3: dict[str, Any] = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
SIZES: dict[str, Callable[[], Any]] = {
    "bert-base": lambda: BertModel(BertConfig()),
    "deberta-v3-base": lambda: DebertaV2Model(
        DebertaV2Config(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
            # transformers declares no parameters with these names.
            **_DEBERTA_V3,
        )
    ),
    "llama-3.2-1b": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
    ),
}


def write_checkpoint(folder: Path, name: str, tokenizer: str | None = None) -> None:
    """Write a model of this size to a folder, with another model's tokenizer or a tokenizer for one word."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        SIZES[name]().save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    if tokenizer:
        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).save_pretrained(folder)
        return
    one_word = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=one_word, model_max_length=512).save_pretrained(folder)


def measure_loading(folder: Path) -> dict[str, float]:
    """Return the memory before loading and the peak memory in GB, and the loading time in seconds."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks", "model-sizes", "--load", str(folder)],
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def load_and_tell(folder: str) -> None:
    """Load the model, and print memory and time as JSON."""
    checkpoint = find_checkpoint(folder)
    before, started = peak_gigabytes(), time.perf_counter()
    load_model(checkpoint, torch.bfloat16)
    taken = time.perf_counter() - started
    print(json.dumps({"before": before, "peak": peak_gigabytes(), "seconds": taken}))


def peak_gigabytes() -> float:
    """Return the peak memory of this process. (`resource` would include the memory of the parent process.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found
    return int(found[1]) * 1024 / 1e9


def measure_speed(folder: Path, lengths: list[int], rounds: int, threads: int) -> list[list[str]]:
    """Return a table row per length: tokens per second in full and on the hit path, and their ratios."""
    checkpoint = find_checkpoint(str(folder))
    database = folder / "database"
    write_database(database, checkpoint, lengths, most_records=32)
    full = PrefillEngine.load(checkpoint, threads=threads)
    hits = PrefillEngine.load(checkpoint, threads=threads, database=AttentionDatabase.open(database))
    random, rows = np.random.default_rng(1), []
    for length in lengths:
        count = max(1, BATCH_TOKENS // length)
        batch = random.integers(2000, 20000, (count, length)).tolist()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        attention: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds + 1):
            for reuse, engine in ((False, full), (True, hits)):
                started = time.perf_counter()
                result = engine.run(engine.requests(batch, reuse=reuse))
                seconds[reuse].append(time.perf_counter() - started)
                attention[reuse].append(result.report.attention_seconds)
                assert all(outcome.is_hit for outcome in result.outcomes) == reuse
        # The first round reads records from the disk and builds kernels, so it is left out.
        in_full, on_hit = (statistics.median(seconds[reuse][1:]) for reuse in (False, True))
        shares = [statistics.median(attention[reuse][1:]) for reuse in (False, True)]
        rows.append(
            [
                f"{count} x {length}",
                f"{count * length / in_full:.0f}",
                f"{count * length / on_hit:.0f}",
                f"{in_full / on_hit:.2f}",
                f"{shares[0] / shares[1]:.2f}",
                f"{shares[0] / in_full:.2f}",
            ]
        )
    return rows


def main() -> None:
    """Measure the chosen models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SIZES, action="append")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32, 128, 512], help="Sequence lengths in tokens."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="Write the models to this folder, and stop."
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="With --write: the model whose tokenizer is used."
    )
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load_and_tell(arguments.load)
        return
    names = arguments.model or SIZES
    if arguments.write:
        for name in names:
            write_checkpoint(arguments.write / name, name, arguments.tokenizer)
        return
    show_machine(machine(arguments.threads))
    for name in names:
        with tempfile.TemporaryDirectory(prefix="attncache-sizes-") as folder:
            write_checkpoint(Path(folder), name)
            loading = measure_loading(Path(folder))
            weights = (Path(folder) / "model.safetensors").stat().st_size / 1e9
            print(
                f"\n{name}: weights {weights:.2f} GB; loaded in {loading['seconds']:.1f} s, at most "
                f"{loading['peak']:.2f} GB, including {loading['before']:.2f} GB before the first weight"
            )
            show_table(
                f"{name}: tokens per second",
                ["sequences x tokens", "full", "hits", "speed-up", "of attention", "attention's share, full"],
                measure_speed(Path(folder), arguments.lengths, arguments.rounds, arguments.threads),
            )
