"""Measure how much faster the layers are if every text hits, for masks of several sizes: the limit of reuse.

    python -m benchmarks hit-limit --database banking77.db --data banking77_test_a.tsv --heads 24,36,48,72

Every text takes the same maps from memory, so no search, digest, familiarity test or fetch is timed, and the
outputs mean nothing. The heads of the masks are the mildest of the database. The methods alternate in random
order. Of each batch the fastest pass counts, because another program on the machine only makes passes slower.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import click
import numpy as np
import torch

from attncache_core import AttentionDatabase, InvalidInput, PrefillEngine, find_checkpoint
from attncache_core.calibration.savings import with_reused
from attncache_core.corpus.reading import read_texts
from attncache_core.engine.layers import NO_REUSED_MAPS, run_layers
from attncache_core.native.stack import ReusedRecords
from attncache_core.reuse.execution.reused_maps import HitRecords
from attncache_core.reuse.mask import ReuseMask, mildest_mask
from attncache_core.text.token_batch import TokenBatch, pack
from service.commands.report import machine, show_machine, show_table

_BATCHES = 6


@click.command()
@click.option("--model", default="all-MiniLM-L6-v2", show_default=True)
@click.option("--database", type=click.Path(path_type=Path), required=True)
@click.option("--data", required=True, help="FILE or FILE:column,column with texts.")
@click.option("--heads", default="24,36,48,72", show_default=True, help="Sizes of the masks.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--max-tokens", type=int, help="Cut texts to this number of tokens.")
@click.option("--rounds", default=11, show_default=True)
def main(
    model: str, database: Path, data: str, heads: str, batch_size: int, max_tokens: int | None, rounds: int
) -> None:
    """Print the milliseconds of a batch without reuse and with each mask."""
    engine = PrefillEngine.load(find_checkpoint(model), max_tokens=max_tokens)
    if engine.model.stack is None:
        raise InvalidInput("the model does not run on the compiled stack", field="model")
    rank = np.array(AttentionDatabase.open(database).manifest.rank)
    ids = engine.tokenize(read_texts(data)[: _BATCHES * batch_size])
    batches = [pack(ids[at : at + batch_size]) for at in range(0, len(ids), batch_size)]
    passes: dict[str, Callable[[TokenBatch], object]] = {
        "none": lambda batch: run_layers(engine.model, batch, None, NO_REUSED_MAPS)
    }
    for size in map(int, heads.split(",")):
        passes[str(size)] = _all_hit(engine, mildest_mask(rank, size))
    seconds = _fastest(passes, batches, rounds)
    show_machine(machine(engine.threads))
    show_table(
        f"texts in a batch: {batch_size}",
        ["reused heads", "ms", "speed-up"],
        [[name, f"{1e3 * taken:.2f}", f"{seconds['none'] / taken:.3f}"] for name, taken in seconds.items()],
    )


def _all_hit(engine: PrefillEngine, mask: ReuseMask) -> Callable[[TokenBatch], object]:
    """Return a function that runs a batch of which every text takes the maps of the mask's heads."""
    model = with_reused(engine, mask.order, mask.reused)
    before = (0, *accumulate(mask.reused[:-1]))

    def run(batch: TokenBatch) -> object:
        longest = int(batch.lengths.max())
        maps = torch.full((mask.total * longest * longest,), 1 / longest, dtype=torch.bfloat16)
        return run_layers(model, batch, None, _SameMaps(maps, before, len(batch.lengths)))

    return run


class _SameMaps(HitRecords):
    """The same maps for every sequence of a batch."""

    def __init__(self, maps: torch.Tensor, heads_before: tuple[int, ...], count: int) -> None:
        super().__init__([])
        self._maps, self._before, self.count = maps, heads_before, count

    def records(self) -> ReusedRecords:
        """See ReusedMaps.records."""
        addresses = np.full(self.count, self._maps.data_ptr(), dtype=np.uint64)
        return ReusedRecords(addresses, self._maps.dtype, heads_before=self._before)


@torch.inference_mode()
def _fastest(
    passes: dict[str, Callable[[TokenBatch], object]], batches: list[TokenBatch], rounds: int
) -> dict[str, float]:
    """Return the seconds of each pass: the fastest round of each batch, mean over the batches."""
    taken: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in passes}
    for _ in range(rounds + 1):  # the first round warms up
        for number, batch in enumerate(batches):
            for name in random.sample(list(passes), len(passes)):
                started = time.perf_counter()
                passes[name](batch)
                taken[name][number].append(time.perf_counter() - started)
    return {
        name: float(np.mean([min(of_text[1:]) for of_text in seconds])) for name, seconds in taken.items()
    }
