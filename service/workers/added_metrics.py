"""The metrics of all workers as the metrics of one server.

Counters and histograms are added, and gauges too, unless adding would say something wrong. Counters must not
become smaller, because Prometheus would take that for a restart. So each worker writes down what it has
counted whenever metrics are read, and the worker that takes its place goes on from there.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# A family: its name, description and type, and its samples: name, labels and value.
Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]

_COUNTING = ("counter", "histogram")
_LEAST = frozenset({"attncache_ready"})
# What is the same in all workers, because they share it, or says how bad it is.
_GREATEST = frozenset(
    {
        *("attncache_build_info", "attncache_overdue_seconds"),
        *("attncache_database_records", "attncache_database_bytes"),
        *("attncache_threshold", "attncache_reuse_off", "attncache_reuse_off_reasons"),
    }
)
# Workers have a memory tier each, and share the disk tier.
_OF_TIERS = frozenset({"attncache_kv_bytes", "attncache_kv_max_bytes"})


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return what a registry holds now."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def counted(families: Iterable[Family]) -> list[Family]:
    """Return the families that count since the start."""
    return [family for family in families if family[2] in _COUNTING]


def added(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """Return families of several workers as one."""
    together: dict[str, tuple[Family, dict[Any, float]]] = {}
    for part in parts:
        for family in part:
            name, _, kind, samples = family
            _, values = together.setdefault(name, (family, {}))
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                join = _join(name, kind, labels)
                values[key] = join(values[key], value) if key in values else value
    return [
        (*family[:3], [(sample, dict(labels), value) for (sample, labels), value in values.items()])
        for family, values in together.values()
    ]


def rendered(families: Iterable[Family], names: Collection[str] = ()) -> bytes:
    """Return families in Prometheus' text format: the time series of these names, or all."""
    return generate_latest(_Given(list(_chosen(families, names))))


def encoded(families: Sequence[Family]) -> bytes:
    """Return families as bytes."""
    # Not orjson, which has no infinity and no NaN.
    return json.dumps(families, separators=(",", ":")).encode()


def decoded(content: bytes) -> list[Family]:
    """Return families from bytes."""
    families = json.loads(content)
    return [(name, text, kind, [tuple(own) for own in samples]) for name, text, kind, samples in families]


def write_down(path: Path, families: Sequence[Family]) -> None:
    """Write to a file what has been counted."""
    beside = path.with_suffix(".new")
    beside.write_bytes(encoded(counted(families)))
    beside.replace(path)


def read_again(path: Path) -> list[Family]:
    """Return what was written down; nothing if there is no such file."""
    try:
        return decoded(path.read_bytes())
    except FileNotFoundError:
        return []


class _Given(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, text, kind, samples in self._families:
            metric = Metric(name, text, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
            yield metric


def _chosen(families: Iterable[Family], names: Collection[str]) -> Iterator[Family]:
    for family in families:
        samples = [sample for sample in family[3] if not names or sample[0] in names]
        if samples or not names:
            yield (*family[:3], samples)


def _join(name: str, kind: str, labels: dict[str, str]) -> Callable[[float, float], float]:
    """Return what makes one value of the values of two workers."""
    if kind in _COUNTING:
        return operator.add
    if name in _LEAST:
        return min
    if name in _GREATEST or (name in _OF_TIERS and labels.get("tier") == "disk"):
        return max
    return operator.add
