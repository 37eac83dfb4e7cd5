"""What a store of keys and values holds and has done, as plain data for people, for /info and for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.remote import RemoteTier
from attncache_core.reuse.kv.store import KeyValueStore
from attncache_core.reuse.kv.transfer import TransferCounts, Transfers

TIERS = ("memory", "disk", "shared")


@dataclass(frozen=True)
class MemoryInfo:
    """What the memory tier holds now."""

    bytes: int  # of all places that are taken
    most_bytes: int
    blocks: int  # that are found
    pinned_blocks: int  # of them, blocks that are never evicted


@dataclass(frozen=True)
class DiskInfo:
    """What the disk tier holds now, and what was counted since the start."""

    bytes: int
    most_bytes: int
    damaged_blocks: int  # whose file was not what was saved; they were removed
    failed_writes: int  # blocks that the disk did not take
    loading_pays: bool  # whether loading a token is faster than computing it, as far as known
    load_bytes_per_second: float  # 0: not measured
    prefill_tokens_per_second: float  # 0: not measured


@dataclass(frozen=True)
class SharedInfo:
    """What was exchanged with other machines since the start."""

    failures: int  # questions for blocks that were not answered in time, or not asked after a failure
    damaged_blocks: int  # whose value was not what was saved; they were removed
    failed_writes: int  # blocks that were not taken
    read_bytes: int
    written_bytes: int
    loading_pays: bool  # whether loading a token is faster than computing it, as far as known
    load_bytes_per_second: float  # 0: not measured


@dataclass(frozen=True)
class KeyValueInfo:
    """A store of keys and values: what it holds now, and what was counted since the start."""

    identity: str  # of all that names blocks beside tokens and salt: model, dtype, code that computes, layout
    token_bytes: int  # keys and values of one token in all layers
    block_tokens: int
    block_bytes: int
    memory: MemoryInfo
    disk: DiskInfo | None  # None: there is no disk tier
    shared: SharedInfo | None  # None: no blocks are shared with other machines
    lookups: int  # sequences
    asked_tokens: int  # of these sequences
    given_tokens: int  # of these tokens, the tokens whose keys and values were stored
    given_blocks: Mapping[str, int]  # by tier
    stored_blocks: int  # that were computed and stored
    not_kept_blocks: int  # that were computed and not stored: all blocks in memory were in use
    dropped_writes: int  # blocks that did not fit into the write buffer
    loaded_blocks: int  # from disk, and from the shared store
    load_stall_seconds: float  # that batches waited for these blocks
    recomputed_tokens: int  # that were found damaged where they were saved, or lost, and computed after all
    evicted_blocks: Mapping[str, Mapping[str, int]]  # by tier and reason


def key_value_info(store: KeyValueStore) -> KeyValueInfo:
    """Return what a store holds and has done."""
    layout, counts, memory, transfers = store.layout, store.counts, store.memory, store.transfers
    evicted = {"memory": dict(memory.evicted)}
    disk = transfers.disk if transfers else None
    transferred = transfers.counts if transfers else TransferCounts()
    if disk:
        evicted["disk"] = {"full": disk.counts.evictions}
    return KeyValueInfo(
        identity=store.identity,
        token_bytes=layout.token_bytes,
        block_tokens=BLOCK_TOKENS,
        block_bytes=layout.block_bytes,
        memory=MemoryInfo(
            bytes=memory.pool.used * layout.block_bytes,
            most_bytes=memory.pool.places * layout.block_bytes,
            blocks=len(memory),
            pinned_blocks=store.pinned_blocks,
        ),
        disk=_disk_info(transfers, disk, layout.token_bytes) if transfers and disk else None,
        shared=_shared_info(transfers, transfers.remote, layout.token_bytes)
        if transfers and transfers.remote
        else None,
        lookups=counts.sequences,
        asked_tokens=counts.asked_tokens,
        given_tokens=counts.given_tokens,
        given_blocks={tier: counts.given_blocks[tier] for tier in TIERS},
        stored_blocks=counts.stored_blocks,
        not_kept_blocks=counts.not_kept_blocks,
        dropped_writes=transferred.dropped_writes,
        loaded_blocks=transferred.loaded_blocks,
        load_stall_seconds=transferred.stall_seconds,
        recomputed_tokens=counts.recomputed_tokens,
        evicted_blocks=evicted,
    )


def _disk_info(transfers: Transfers, disk: DiskTier, token_bytes: int) -> DiskInfo:
    return DiskInfo(
        bytes=disk.bytes_used,
        most_bytes=disk.most_bytes,
        damaged_blocks=disk.counts.damaged,
        failed_writes=disk.counts.failed_writes,
        loading_pays=transfers.pays(token_bytes),
        load_bytes_per_second=transfers.load_speed,
        prefill_tokens_per_second=transfers.prefill_speed,
    )


def _shared_info(transfers: Transfers, remote: RemoteTier, token_bytes: int) -> SharedInfo:
    counts = remote.counts
    return SharedInfo(
        failures=counts.failures,
        damaged_blocks=counts.damaged,
        failed_writes=counts.failed_writes,
        read_bytes=counts.read_bytes,
        written_bytes=counts.written_bytes,
        loading_pays=transfers.remote_pays(token_bytes),
        load_bytes_per_second=transfers.remote_speed,
    )
