"""Compute γ, the speed-up degradation ratio: the loss of quality per unit of speed-up."""

from __future__ import annotations

# Repeated measurements differ by about this much, so below this speed-up γ would divide by noise.
LEAST_SPEEDUP = 1.02


def gamma(full_metric: float, metric: float, speedup: float) -> float | None:
    """Return γ = (full_metric - metric) / (speedup - 1); None for a speed-up below 1.02.

    A smaller γ is better; γ is negative if the method is better than the full model. full_metric, metric:
    quality of the full model and of the method as fractions, not in percent. speedup: the full model's time /
    the method's time. AttnCache, Eq. 6, after He et al. 2024, with 1 as the full model's own speed-up.
    """
    if speedup < LEAST_SPEEDUP:
        return None
    return (full_metric - metric) / (speedup - 1)
