"""How much to compute again while saved keys and values are loaded, and where to save them (CacheBlend,
section 5).

Loading takes  token_bytes · tokens / throughput  seconds, and computing a share r of the tokens again takes
r · tokens / prefill speed  seconds, both for all layers. Layers are loaded while earlier layers are computed,
so a share that takes no longer than loading costs no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The share at which a device is chosen: the least share that keeps quality in the paper's measurements.
USUAL_RATIO = 0.15


def ratio_beside_loading(least: float, load_seconds: float, prefill_speed: float, tokens: int) -> float:
    """Return the share of `tokens` tokens to compute again while others are loaded for `load_seconds`.

    It is the largest share that costs no time beside loading, but at least `least`. prefill_speed: tokens
    that are computed in a second.
    """
    return min(1.0, max(least, load_seconds * prefill_speed / tokens)) if tokens else least


@dataclass(frozen=True)
class Device:
    """A place where keys and values can be saved."""

    path: str
    bytes_per_second: float
    cost_per_gb_hour: float  # in any currency


def cheapest_device(
    devices: Sequence[Device], token_bytes: int, prefill_speed: float, ratio: float = USUAL_RATIO
) -> tuple[Device, bool]:
    """Return the cheapest device from which loading takes no longer than computing a share again.

    If there is none, the fastest device. The second result says whether loading is hidden. Raises ValueError
    without devices. token_bytes: of the keys and values of a token in all layers. prefill_speed: tokens that
    are computed in a second.
    """
    if not devices:
        raise ValueError("there is no device to choose from")
    per_token = ratio / prefill_speed  # seconds
    hidden = [device for device in devices if token_bytes / device.bytes_per_second <= per_token]
    if hidden:
        return min(hidden, key=lambda device: (device.cost_per_gb_hour, -device.bytes_per_second)), True
    return max(devices, key=lambda device: device.bytes_per_second), False


def cost_per_hour(device: Device, token_bytes: int, tokens: int) -> float:
    """Return what keeping the keys and values of some tokens on a device costs per hour."""
    return device.cost_per_gb_hour * token_bytes * tokens / 1e9
