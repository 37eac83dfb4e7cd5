"""Pick the tokens whose keys and values deviate most from the given ones (CacheBlend, section 4.3)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch


def deviations(given: np.ndarray, computed: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the squared L2 distance of two sets of slots, token by token: float32 [tokens].

    given, computed: uint8 [tokens, slot bytes], K and V of all heads as `dtype`; for latent attention, the
    latent vectors that K and V are made of. Keys are compared before their rotation, which changes no
    distance between keys at one position. What is not finite deviates infinitely.
    """
    one, other = (
        torch.from_numpy(np.ascontiguousarray(own)).view(dtype).float() for own in (given, computed)
    )
    found: np.ndarray = (one - other).square().sum(1).numpy()
    return np.where(np.isfinite(found), found, np.inf).astype(np.float32)


def picked(deviation: np.ndarray, count: int, choice: Literal["deviation", "random"]) -> np.ndarray:
    """Return the indices of `count` tokens, rising, int64 [count].

    deviation: float32 [tokens]. Of tokens that deviate equally, the earlier ones are picked. "random" picks
    any tokens, the same ones at every call with as many tokens.
    """
    if choice == "random":
        order = np.random.default_rng(len(deviation)).permutation(len(deviation))
    else:
        order = np.argsort(-deviation, kind="stable")
    return np.sort(order[:count])
