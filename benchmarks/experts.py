"""Time a mixture-of-experts block: as transformers computes it, packed, and quantised.

    python -m benchmarks experts [--tokens 16 128 1024] [--dtype bfloat16] [--rounds 7]

There are two blocks with random weights: one with 64 experts, 8 of which are used per token, and one with 8
experts, 2 of which are used per token. The tables show milliseconds of processor time of one thread for a
batch of tokens: the median of the rounds. The implementations alternate in each round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from attncache_core import Quantization
from attncache_core.models.decoder import feed_forward
from attncache_core.models.linear import quantizing
from attncache_core.runtime.memory import keep_freed_memory
from attncache_core.runtime.threads import limit_threads
from service.commands.report import machine, show_machine, show_table

HIDDEN = 1024
BLOCKS: dict[str, tuple[type[torch.nn.Module], Any]] = {
    "64 experts of width 384, 8 per token": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=384, num_experts=64, num_experts_per_tok=8),
    ),
    "8 experts of width 2048, 2 per token": (
        MixtralSparseMoeBlock,
        MixtralConfig(hidden_size=HIDDEN, intermediate_size=2048, num_local_experts=8, num_experts_per_tok=2),
    ),
}
Implementation = Callable[[torch.Tensor], torch.Tensor]


def _alone(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a block for one sequence [tokens, hidden]."""
    output: torch.Tensor = block(x[None])[0]
    return output


def implementations(
    kind: type[torch.nn.Module], config: MixtralConfig | Qwen3MoeConfig, dtype: torch.dtype
) -> dict[str, Implementation]:
    """Return name -> implementation for all implementations of a block with the same random weights."""
    found: dict[str, Implementation] = {}
    torch.manual_seed(0)
    for implementation in ("eager", "grouped_mm"):
        changed = deepcopy(config)
        changed._experts_implementation = implementation
        block = kind(changed).to(dtype)
        for weight in block.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        found[f"transformers, {implementation}"] = partial(_alone, block)
    for quantization in (None, *Quantization):
        with quantizing(quantization):
            found[quantization or "packed"] = feed_forward(deepcopy(block), config)
    return found


def main() -> None:
    """Measure both blocks and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024], help="Batch sizes.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    keep_freed_memory()
    limit_threads(1)
    torch.set_grad_enabled(False)
    show_machine(machine(1))
    dtype = getattr(torch, options.dtype)
    for title, (kind, config) in BLOCKS.items():
        blocks = implementations(kind, config, dtype)
        taken: dict[str, list[str]] = {name: [] for name in blocks}
        for tokens in options.tokens:
            x = torch.randn(tokens, HIDDEN).to(dtype)
            times: dict[str, list[float]] = {name: [] for name in blocks}
            for _ in range(options.rounds + 1):
                for name, block in blocks.items():
                    started = time.thread_time()
                    block(x)
                    times[name].append((time.thread_time() - started) * 1e3)
            for name, rounds in times.items():
                # oneDNN builds its kernels in the first round, so the first round is left out.
                taken[name].append(f"{statistics.median(rounds[1:]):.1f}")
        rows = [[name, *figures] for name, figures in taken.items()]
        show_table(f"{title}, {options.dtype}", ["tokens", *map(str, options.tokens)], rows)
