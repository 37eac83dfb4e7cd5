"""Collect the figures of a calibration for the manifest: hit rates, quality of the hits, time saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from attncache_core.calibration.policy_selection import Calibrated
from attncache_core.calibration.probes import Probes
from attncache_core.calibration.thresholds import CONFIDENCE, mean_or_none, upper_bounds
from attncache_core.reuse.storage.layout import RecordKind


def report(chosen: Calibrated, options: Sequence[Calibrated], probes: Probes) -> dict[str, Any]:
    """Return the figures of the chosen option and of all candidates, ready for JSON.

    A figure without a measurement is None.
    """
    policy = chosen.policy
    group_indices = policy.group_indices(probes.lengths)
    groups = [
        {"lengths": name, "searched": group.searched, **_figures(chosen, group_indices == index)}
        for index, (name, group) in enumerate(zip(policy.names(), policy.groups, strict=True))
    ]
    return {
        "measured": len(probes.sequences),
        "confidence": CONFIDENCE,
        "heads": chosen.mask.total,
        **_figures(chosen, np.ones(len(probes.sequences), dtype=bool)),
        "saved_microseconds": chosen.saved,
        "lengths": dict(Counter(map(str, probes.lengths.tolist()))),
        "groups": groups,
        "candidates": [
            {
                "heads": option.mask.total,
                "hit_rate": float(option.served.mean()),
                "mean_cosine": mean_or_none(1 - option.damage),
                "saved_microseconds": option.saved,
            }
            for option in options
        ],
    }


def _figures(chosen: Calibrated, rows: np.ndarray) -> dict[str, Any]:
    """Return the hit rates and the quality of the hits among these probes. rows: bool [probes]."""
    hits = chosen.served & rows
    count = max(1, int(rows.sum()))
    fidelity = chosen.fidelity[hits]
    bound = upper_bounds(1 - fidelity, chosen.policy.budget.measure)[-1] if hits.any() else np.inf
    return {
        "probes": int(rows.sum()),
        "hit_rate": float(hits.sum() / count),
        "prototype_hit_rate": float((hits & (chosen.kinds != RecordKind.STORED)).sum() / count),
        "mean_cosine": mean_or_none(1 - chosen.damage[hits]),
        "cosine_5th_percentile": float(np.percentile(1 - chosen.damage[hits], 5)) if hits.any() else None,
        "mean": mean_or_none(fidelity),
        "lower_bound": float(1 - bound) if np.isfinite(bound) else None,
    }
