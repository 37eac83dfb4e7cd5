"""γ, the speed-up degradation ratio: how much quality each unit of speed-up costs."""

from __future__ import annotations

# Below this a gain is no more than what repeated measurements differ by, and γ would divide by noise.
LEAST_SPEEDUP = 1.02


def gamma(full_metric: float, metric: float, speedup: float) -> float | None:
    """(full metric - metric) / (speedup - 1); the smaller, the better. None for a speed-up below 1.02.

    full_metric, metric: quality of the full model and of the method, as fractions (a Spearman correlation or
    an accuracy, not in percent). speedup: the full model's time over the method's. Negative where the method
    is better than the full model. AttnCache, Eq. 6, after He et al. 2024; the full model's own speed-up is 1.
    """
    if speedup < LEAST_SPEEDUP:
        return None
    return (full_metric - metric) / (speedup - 1)
