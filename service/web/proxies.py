"""Which client a request comes from, if trusted proxies pass it on.

    X-Forwarded-For: 198.51.100.7, 203.0.113.9, 10.0.0.2     10.0.0.3 is the peer
                     whatever a client has sent | added by proxies

Every proxy adds the address of its own peer on the right. So the client is the rightmost address that is no
trusted proxy: whatever stands left of it may be invented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

from service.settings.network import UNIX_PEERS

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_HEADER = b"x-forwarded-for"
# More proxies than any request passes. Reading the addresses of a longer header could take milliseconds.
_MAX_PROXIES = 32
# A provider gives each customer at least so many bits, so a client can have any address within them.
_CLIENT_BITS_OF_IPV6 = 64


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """The networks whose `X-Forwarded-For` is believed, and whether that of a Unix socket is."""

    networks: tuple[Network, ...]
    unix: bool

    @classmethod
    def of(cls, names: str) -> TrustedProxies:
        """Read names such as `10.0.0.0/8,fd00::/8,unix`. Raises ValueError."""
        parts = [name.strip() for name in names.split(",")]
        return cls(tuple(ip_network(part) for part in parts if part != UNIX_PEERS), UNIX_PEERS in parts)

    def client_of(self, scope: Scope) -> str | None:
        """Return what stands for the client: its address, or the network of its IPv6 address.

        None if the peer is no trusted proxy, or no proxy has named the client, or the header is malformed.
        """
        peer = scope.get("client")
        if not (self.unix if peer is None else self._trusts(_address(peer[0]))):
            return None
        client = None
        for number, text in enumerate(_forwarded(scope["headers"])):
            client = _address(text)
            if client is None or number == _MAX_PROXIES:
                return None
            if not self._trusts(client):
                break
        return None if client is None else _shown(client)

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self.networks)


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield the addresses of the header from the right; a header that repeats continues on the right."""
    values = [value for name, value in headers if name == _HEADER]
    for value in reversed(values):
        for part in reversed(value.split(b",")):
            yield part.strip().decode("latin-1")


@lru_cache(maxsize=1024)
def _address(text: str) -> Address | None:
    """Return the address of `1.2.3.4`, `1.2.3.4:80`, `::1`, `[::1]` or `[::1]:80`; None for all else."""
    host, _, port = text.removeprefix("[").partition("]") if text[:1] == "[" else _without_port(text)
    if port.removeprefix(":") and not port.removeprefix(":").isdecimal():
        return None
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _without_port(text: str) -> tuple[str, str, str]:
    return text.partition(":") if text.count(":") == 1 else (text, "", "")


def _shown(address: Address) -> str:
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address.packed, _CLIENT_BITS_OF_IPV6), strict=False))
    return str(address)
