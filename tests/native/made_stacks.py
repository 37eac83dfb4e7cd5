"""Random compiled stacks of every kind of layer, for the tests of the stack.

    python made_stacks.py LEVEL LIBRARY WHAT

WHAT is what a process must survive: forks, "sleeping helpers" or "one processor"; test_stack.py runs it.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from attncache_core.native import AttentionKernel
from attncache_core.native.pooling import CompiledNorm, CompiledPooling
from attncache_core.native.products import MatrixKind, PackedMatrix
from attncache_core.native.stack import NO_RECORDS, CompiledStack, ReusedRecords, StackRows
from attncache_core.native.stack_layers import (
    AttentionHalf,
    CompiledEmbedding,
    DistanceTerm,
    ForwardHalf,
    QueryKeyHeads,
)

HEADS, WIDTH, HIDDEN, INNER, LONGEST = 4, 8, 32, 56, 320
WORDS, PLACES = 40, 3
REUSED = (0, 2, 4)  # reused heads of each layer
TOTAL = sum(REUSED)
ALL_LAYERS = range(len(REUSED))


@dataclass(frozen=True)
class Form:
    """What the layers of a stack have."""

    rotated: bool = False  # also norms of each head of Q and K
    gated: bool = False
    branch_norms: bool = False
    norms_first: bool = False
    biased: bool = False  # scores have a bias of their distance
    disentangled: bool = False  # scores have both distance terms, as in DeBERTa
    before: int | None = None
    after: int | None = None
    shared_keys: bool = False  # two heads share a key head and a value head


FORMS = {
    "norms-last": Form(),
    "biased-scores": Form(biased=True),
    "distance-terms": Form(disentangled=True),
    "norms-first-window": Form(norms_first=True, before=5, after=7),
    "decoder": Form(rotated=True, gated=True, norms_first=True, after=0, shared_keys=True),
    "four-norms": Form(branch_norms=True, norms_first=True, gated=True),
}


def made_stack(
    library, form, kind=MatrixKind.WHOLE, reused=REUSED, seed=0, refitted=None, modes=("mean", "max")
):
    """Make a stack with random weights; layer i has reused[i] reused heads.

    refitted: where the stack has refitted weights, "beside" its own or "instead" of them; None: nowhere.
    modes: of pooling.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape, size=1.0):
        return torch.randn(*shape, generator=generator) * size

    def packed(outputs, inputs):
        weight = numbers(outputs, inputs, size=inputs**-0.5)
        return PackedMatrix(library, kind, weight, numbers(outputs, size=0.1))

    def norm(width):
        return CompiledNorm(1 + numbers(width, size=0.1), numbers(width, size=0.1), 1e-5, subtracts_mean=True)

    def heads(count, values=0):
        # With shared keys, a product holds one key head for each two of its heads, or for the last one.
        keys = (count + 1) // 2 if form.shared_keys else count
        at = [number // 2 if form.shared_keys else number for number in range(count)]
        return QueryKeyHeads(packed((values + count + keys) * WIDTH, HIDDEN), at, keys)

    turns = numbers(LONGEST, WIDTH // 2, size=3.0)
    tables = turns.cos(), turns.sin()

    def angles(_):
        return tables

    def term(buckets):
        distances = torch.arange(1 - LONGEST, LONGEST).clamp(-buckets, buckets)
        return DistanceTerm(numbers(HEADS, 2 * buckets + 1, WIDTH), distances + buckets)

    values = HEADS // 2 if form.shared_keys else HEADS
    layers = []
    for count in reused:
        first, last = form.norms_first, not form.norms_first
        attention = AttentionHalf(
            always=heads(HEADS - count, values),
            misses=heads(count) if count else None,
            output=packed(HIDDEN, HEADS * WIDTH),
            value_heads=[head * values // HEADS for head in range(HEADS)],
            values=values,
            width=WIDTH,
            value_width=WIDTH,
            scale=WIDTH**-0.5,
            before=form.before,
            after=form.after,
            input_norm=norm(HIDDEN) if first else None,
            branch_norm=norm(HIDDEN) if form.branch_norms else None,
            output_norm=norm(HIDDEN) if last else None,
            query_norm=norm(WIDTH) if form.rotated else None,
            key_norm=norm(WIDTH) if form.rotated else None,
            angles=angles if form.rotated else None,
            half=WIDTH // 2 if form.rotated else 0,
            bias=numbers(HEADS, 2 * LONGEST - 1) if form.biased else None,
            query_term=term(LONGEST) if form.disentangled else None,
            key_term=term(20) if form.disentangled else None,
        )
        forward = ForwardHalf(
            up=packed(INNER, HIDDEN),
            down=packed(HIDDEN, INNER),
            activation="silu" if form.gated else "gelu",
            gate=packed(INNER, HIDDEN) if form.gated else None,
            input_norm=norm(HIDDEN) if first else None,
            branch_norm=norm(HIDDEN) if form.branch_norms else None,
            output_norm=norm(HIDDEN) if last else None,
        )
        layers.append(with_refitted(attention, forward, packed, refitted))
    embedding = CompiledEmbedding(numbers(WORDS, HIDDEN), numbers(PLACES, HIDDEN), norm(HIDDEN), PLACES)
    dtype = torch.bfloat16 if kind is MatrixKind.PAIRS else torch.float32
    return CompiledStack(library, layers, HIDDEN, embedding, CompiledPooling(modes), dtype)


def with_refitted(attention, forward, packed, where):
    """Return the halves of a layer with other weights "beside" or "instead" of their own; None: without."""
    output, down = packed(HIDDEN, HEADS * WIDTH), packed(HIDDEN, INNER)
    if where == "instead":
        return replace(attention, output=output), [replace(forward, down=down)]
    if where == "beside":
        return replace(attention, refitted_output=output), [replace(forward, refitted_down=down)]
    return attention, [forward]


def made_ids(length, seed):
    """Make a sequence of token ids, int64 [length]."""
    return np.random.default_rng(seed).integers(WORDS, size=length)


def given_to(lengths, total=TOTAL):
    """Make a record of maps for each length, float16 [reused heads of all layers, L, L]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, length, length, generator=generator).softmax(-1).half() for length in lengths]


def reused_records(records, reused=REUSED, refitted=0):
    """Return what the stack reads of records; see `run`."""
    addresses = np.array([record.data_ptr() for record in records], dtype=np.uint64)
    before = tuple(sum(reused[:layer]) for layer in range(len(reused)))
    return ReusedRecords(addresses, torch.float16, False, before, refitted)


def run(stack, sequences, threads, records=(), reused=REUSED, layers=ALL_LAYERS, hidden=None, refitted=0):
    """Run token ids. Return rows [L, HIDDEN] of each sequence, and counts.

    records: of the first sequences. refitted: how many of these sequences take the refitted weights.
    """
    lengths = [len(ids) for ids in sequences]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    ids = np.concatenate(sequences)
    taken = reused_records(records, reused, refitted) if records else NO_RECORDS
    rows = StackRows(offsets, positions)
    if hidden is None:
        rows = replace(rows, ids=ids, types=ids % PLACES)
    found, counts = stack.run(hidden, rows, layers, taken, threads)
    return list(found.split(lengths)), counts


# Batches that are run by columns, by rows and by blocks, if there are four threads.
BATCHES = {"columns": [5, 1, 30], "rows": [300, 60], "blocks": [20] * 60, "even blocks": [60, 60, 60, 60]}


def all_batches(stack, threads):
    """Run all BATCHES and return their rows in one tensor."""
    found = [
        run(stack, [made_ids(length, seed) for seed, length in enumerate(lengths)], threads)[0]
        for lengths in BATCHES.values()
    ]
    return torch.cat([rows for batch in found for rows in batch])


def survive_forks(check):
    """Run stacks in a child and a grandchild of a process whose helpers do not exist there."""
    check(4)
    child = os.fork()
    if child == 0:
        check(4)
        grandchild = os.fork()
        if grandchild == 0:
            check(2)
            os._exit(7)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check(4)


def survive_sleeping_helpers(check, repeatable, ids, others):
    """Run stacks while every helper sleeps for a second, wherever it is. others: all other threads."""
    libc = ctypes.CDLL(None)
    # A signal's handler gets the number of the signal, which is 1, and sleep takes a number of seconds.
    libc.signal(signal.SIGHUP, ctypes.cast(libc.sleep, ctypes.c_void_p))
    count = 12  # many helpers, of which some have begun a unit
    helpers, end = set(), time.monotonic() + 240
    # A run that begins before the helpers of the last run have left starts fewer helpers.
    while len(helpers) < count - 1 and time.monotonic() < end:
        run(repeatable, ids, count)
        helpers = threads_of_process() - others
    assert len(helpers) == count - 1

    def interrupt():
        for helper in helpers:
            assert libc.tgkill(os.getpid(), helper, signal.SIGHUP) == 0

    expected, counts = run(repeatable, ids, 1)
    for _ in range(2):
        sender = threading.Timer(0.05, interrupt)
        sender.start()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            found, repeated = run(repeatable, ids, count)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert (repeated.multiplications, repeated.map_rows) == (counts.multiplications, counts.map_rows)
        sender.join()
        check(4)


def threads_of_process():
    return {int(name) for name in os.listdir("/proc/self/task")}


def survive_one_processor(check):
    """Run stacks while the helpers share the processor of their leader."""
    processors = os.sched_getaffinity(0)
    for thread in threads_of_process():
        os.sched_setaffinity(thread, [min(processors)])
    for _ in range(3):
        check(4)


def main(level, path, *parts):
    others = threads_of_process()
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    library = AttentionKernel(level, Path(path)).library
    stacks = [made_stack(library, form) for form in (FORMS["norms-last"], FORMS["decoder"])]
    expected = [all_batches(stack, 1) for stack in stacks]

    def check(threads):
        for stack, rows in zip(stacks, expected, strict=True):
            assert torch.equal(all_batches(stack, threads), rows)

    for part in parts:
        match part:
            case "forks":
                survive_forks(check)
            case "sleeping helpers":
                survive_sleeping_helpers(check, stacks[0], [made_ids(200, 0), made_ids(80, 1)], others)
            case "one processor":
                survive_one_processor(check)


if __name__ == "__main__":
    main(*sys.argv[1:])
