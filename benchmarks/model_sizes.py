"""Models of the papers' sizes with random weights: memory while loading, full and hit-path speed.

    python benchmarks/model_sizes.py [--model llama-3.2-1b] [--lengths 32 128 512] [--rounds 5] [--threads 2]
    python benchmarks/model_sizes.py --model llama-3.2-1b --write FOLDER --tokenizer OTHER_MODEL

Nothing pretrained of these sizes is needed: weights are drawn at random and written to a temporary folder, in
bfloat16; or, with another model's tokenizer, to a folder that any command takes as its --model. The memory is
that of a process of its own that only loads the model. Full and hit path run in turn in one process, on
batches of 1024 tokens; the hit path searches and fetches, and every head is reused.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from attncache_core import AttentionDatabase, PrefillEngine, find_checkpoint
from attncache_core.models import load_model
from attncache_core.threads import available_processors
from service.bench.report import machine, show_machine, show_table
from service.bench.synthetic import write_database

BATCH_TOKENS = 1024
SIZES = {
    "bert-base": lambda: BertModel(BertConfig()),
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
    """A model of this size and the tokenizer in a folder, or one that knows one word."""
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
    """Gigabytes before and at most while a process loads the model, and its seconds."""
    told = subprocess.run(
        [sys.executable, __file__, "--load", str(folder)], capture_output=True, check=True, text=True
    )
    return json.loads(told.stdout.splitlines()[-1])


def load_and_tell(folder: str) -> None:
    """Load the model, and print what that took."""
    checkpoint = find_checkpoint(folder)
    before, started = peak_gigabytes(), time.perf_counter()
    load_model(checkpoint, torch.bfloat16)
    taken = time.perf_counter() - started
    print(json.dumps({"before": before, "peak": peak_gigabytes(), "seconds": taken}))


def peak_gigabytes() -> float:
    """The most memory that this process has had. (What `resource` tells begins with the parent's.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024 / 1e9


def measure_speed(folder: Path, lengths: list[int], rounds: int, threads: int) -> list[list[object]]:
    """A row for each length: tokens a second in full and on the hit path, their ratio, share of attention."""
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
                result = engine.run(batch, [reuse] * count)
                seconds[reuse].append(time.perf_counter() - started)
                attention[reuse].append(result.attention_seconds)
                assert all(outcome.is_hit for outcome in result.outcomes) == reuse
        # The first round reads records from the disk and builds kernels.
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
    """Measure the models asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=SIZES, action="append")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512], help="Tokens of a text.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="Write the models there, and stop.")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="Of another model, for those written.")
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
                f"{loading['peak']:.2f} GB, of which {loading['before']:.2f} GB before the first weight"
            )
            show_table(
                f"{name}: tokens a second",
                ["sequences x tokens", "full", "hits", "speed-up", "of attention", "attention's share, full"],
                measure_speed(Path(folder), arguments.lengths, arguments.rounds, arguments.threads),
            )


if __name__ == "__main__":
    main()
