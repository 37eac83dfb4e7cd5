"""How the server is reached, and who may ask it for what."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr, field_validator

from service.settings.names import Group, refused

# In --trusted-proxies.
UNIX_PEERS = "unix"
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


class Network(Group):
    """The sockets of the server."""

    title: ClassVar[str] = "Network"

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    unix_socket: Path | None = Field(
        None, description="Listen on this Unix socket instead of a host and a port. Default: none."
    )
    admin_host: str = Field("127.0.0.1", min_length=1, description="Address of --admin-port.")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Second port, and the only one that serves /metrics, /info, /docs, /openapi.json, /cache "
        "and /explain. Default: none; --port serves everything.",
    )
    tls_cert: Path | None = Field(
        None,
        description="File with the certificate and its chain, in PEM, to serve HTTPS. SIGHUP reads the file "
        "again. Default: HTTP.",
    )
    tls_key: Path | None = Field(
        None, description="File with the private key of --tls-cert, in PEM and not encrypted."
    )
    cors_origin: str | None = Field(
        None,
        min_length=1,
        description="Origins whose pages may call the server from a browser, separated by commas; * allows "
        "all. Default: none.",
    )

    @field_validator("cors_origin")
    @classmethod
    def _origins_have_a_scheme(cls, origins: str | None) -> str | None:
        # Browsers send their origin with its scheme, so that any other value would allow nothing.
        if origins is not None and not all(map(_ORIGIN.fullmatch, map(str.strip, origins.split(",")))):
            raise refused("it must be *, or origins such as https://HOST or http://HOST:PORT, without a path")
        return origins

    trusted_proxies: str | None = Field(
        None,
        min_length=1,
        description="Networks of the proxies in front, separated by commas, such as 10.0.0.0/8; unix stands "
        "for the peers of --unix-socket. Requests that they pass on take turns by the client's address in "
        "X-Forwarded-For. Default: requests take turns by connection.",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, proxies: str | None) -> str | None:
        try:
            for name in (proxies or UNIX_PEERS).split(","):
                if name.strip() != UNIX_PEERS:
                    ip_network(name.strip())
        except ValueError:
            raise refused(
                "it must be addresses or networks such as 10.0.0.0/8 or fd00::/8, with no bits beyond the "
                f"mask, or {UNIX_PEERS}, separated by commas"
            ) from None
        return proxies

    gzip: bool = Field(
        False, description="Compress responses of 8 KiB and more for clients that accept gzip."
    )


class Security(Group):
    """What clients may do."""

    title: ClassVar[str] = "Security"

    admin: bool = Field(
        False,
        description="Serve /explain, which shows maps of the database, and the routes of /cache: they show "
        "and change the stored keys and values of all clients.",
    )
    api_keys: Path | None = Field(
        None,
        description="File with the API keys that clients need, one per line: a name, the key, and what the "
        "key may do. SIGHUP reads the file again. Default: no key is needed.",
    )
    api_key: SecretStr | None = Field(
        None,
        description="One API key, or lines as in the file of --api-keys. Prefer the variable or the file, "
        "because others on this machine can see the options of a process. Default: no key is needed.",
    )
