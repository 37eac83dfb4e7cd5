"""Numbers of the engine for /metrics: the database, stored keys and values, and the length groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attncache_core.engine.info import EngineInfo
from attncache_core.reuse.kv.info import TIERS, KeyValueInfo
from attncache_core.reuse.maps.generations import Result
from attncache_core.reuse.maps.info import DatabaseInfo, GroupInfo

_EVICTIONS = (("memory", "full"), ("memory", "cleared"), ("disk", "full"))


class EngineNumbers(Collector):
    """Collects from the engine, whenever metrics are read, what is recorded and stored.

    Without a database, its size is zero and there are no length groups. Without a store of keys and values,
    or without a disk tier, their numbers are zero.
    """

    def __init__(self) -> None:
        self.engine_info: Callable[[], EngineInfo | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with the numbers of now."""
        info = self.engine_info()
        yield GaugeMetricFamily(
            "attncache_reuse_off_reasons",
            "Number of reasons why no text reuses anything; /info lists the reasons",
            value=len(info.reuse_off) if info else 0,
        )
        yield from _of_database(info.database if info else None)
        yield from _of_key_values(info.key_values if info else None)


def _of_database(database: DatabaseInfo | None) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "attncache_database_records",
        "Records of texts in the database, without prototypes",
        value=database.records if database else 0,
    )
    yield GaugeMetricFamily(
        "attncache_database_bytes",
        "Size of the database in bytes",
        value=database.bytes if database else 0,
    )
    yield GaugeMetricFamily(
        "attncache_database_generation",
        "Number of the generation of the database that serves; 0: the database was never renewed",
        value=database.generation if database else 0,
    )
    yield GaugeMetricFamily(
        "attncache_database_age_seconds",
        "Seconds since the generation that serves was built",
        value=_seconds_since(database.created) if database and database.created else 0,
    )
    renewals = CounterMetricFamily(
        "attncache_renewals", "Renewals and rollbacks of the database, by result", labels=("result",)
    )
    for result in Result:
        renewals.add_metric((result.value,), database.renewals.get(result, 0) if database else 0)
    yield renewals
    yield from _of_length_groups(database.policy.groups if database else ())


def _seconds_since(time: str) -> float:
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


def _of_key_values(info: KeyValueInfo | None) -> Iterator[Metric]:
    disk, shared = (info.disk, info.shared) if info else (None, None)
    given = CounterMetricFamily(
        "attncache_kv_blocks_given",
        "Blocks of keys and values that were given to a batch, by the tier that held them",
        labels=("tier",),
    )
    used = GaugeMetricFamily("attncache_kv_bytes", "Bytes of stored keys and values", labels=("tier",))
    maximum = GaugeMetricFamily(
        "attncache_kv_max_bytes", "Most bytes that keys and values may take", labels=("tier",)
    )
    for tier in TIERS:
        given.add_metric((tier,), info.given_blocks[tier] if info else 0)
    for tier, held in (("memory", info.memory if info else None), ("disk", disk)):
        used.add_metric((tier,), held.bytes if held else 0)
        maximum.add_metric((tier,), held.most_bytes if held else 0)
    evictions = CounterMetricFamily(
        "attncache_kv_evictions", "Blocks of keys and values that were dropped", labels=("tier", "reason")
    )
    for tier, reason in _EVICTIONS:
        evicted = info.evicted_blocks.get(tier, {}) if info else {}
        evictions.add_metric((tier, reason), evicted.get(reason, 0))
    yield from (given, used, maximum, evictions)
    yield CounterMetricFamily(
        "attncache_kv_recomputed_tokens",
        "Tokens that were found damaged where they were saved, or lost, and computed after all",
        value=info.recomputed_tokens if info else 0,
    )
    yield CounterMetricFamily(
        "attncache_kv_load_stall_seconds",
        "Seconds that batches waited for saved keys and values after their layers had begun",
        value=info.load_stall_seconds if info else 0,
    )
    yield CounterMetricFamily(
        "attncache_kv_dropped_writes",
        "Blocks that were not saved: the write buffer was full, or the disk or the shared store did not take "
        "them",
        value=sum(
            (
                info.dropped_writes if info else 0,
                disk.failed_writes if disk else 0,
                shared.failed_writes if shared else 0,
            )
        ),
    )
    yield CounterMetricFamily(
        "attncache_kv_damaged_blocks",
        "Blocks on disk, or in the shared store, that were found damaged and removed",
        value=(disk.damaged_blocks if disk else 0) + (shared.damaged_blocks if shared else 0),
    )
    yield CounterMetricFamily(
        "attncache_kv_shared_failures",
        "Questions to the shared store for blocks that were not answered in time, or not asked after a "
        "failure",
        value=shared.failures if shared else 0,
    )
    transferred = CounterMetricFamily(
        "attncache_kv_shared_bytes",
        "Bytes of blocks that were read from the shared store, or written to it",
        labels=("direction",),
    )
    transferred.add_metric(("read",), shared.read_bytes if shared else 0)
    transferred.add_metric(("written",), shared.written_bytes if shared else 0)
    yield transferred


def _of_length_groups(groups: Iterable[GroupInfo]) -> Iterator[Metric]:
    threshold = GaugeMetricFamily(
        "attncache_threshold",
        "Least similarity of a hit; a value above 1 lets nothing hit",
        labels=("lengths", "kind"),
    )
    off = GaugeMetricFamily(
        "attncache_reuse_off", "1 if sequences of these lengths reuse nothing, else 0", labels=("lengths",)
    )
    for group in groups:
        for kind, least in group.threshold.items():
            threshold.add_metric((group.lengths, kind), least)
        off.add_metric((group.lengths,), not group.reuses)
    yield threshold
    yield off
