"""What several machines share, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, field_validator

from service.settings.names import Group, refused

SharedUse = Literal["kv", "sessions", "quotas", "findings"]
SHARED_USES: tuple[SharedUse, ...] = ("kv", "sessions", "quotas", "findings")
_ACCEPTED = (
    "valkeys://USER:PASSWORD@HOST:6379/0, or valkey:// without TLS; user, password, port and the number of "
    "the database may be left out"
)


@dataclass(frozen=True, slots=True)
class SharedAddress:
    """Where the shared store is, and how to log in."""

    is_encrypted: bool
    host: str
    port: int
    database: int
    user: str | None
    password: str | None

    @classmethod
    def parse(cls, url: str) -> SharedAddress:
        """Return the address in a URL. Raises ValueError, whose message may hold parts of the URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("valkey", "valkeys") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("it is not the URL of a Valkey server")
        user, password = (unquote(each) if each else None for each in (parts.username, parts.password))
        if user and not password:
            raise ValueError("there is no password")
        database = int(parts.path.removeprefix("/") or 0)
        if database < 0:
            raise ValueError("there is no such database")
        return cls(parts.scheme == "valkeys", parts.hostname, parts.port or 6379, database, user, password)

    def __str__(self) -> str:
        """Return the URL without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"valkey{'s' if self.is_encrypted else ''}://{host}:{self.port}/{self.database}"


class Cluster(Group):
    """What a server shares with servers on other machines."""

    title: ClassVar[str] = "Shared between machines"

    shared: SecretStr | None = Field(
        None,
        description="Valkey server that machines share, valkeys://USER:PASSWORD@HOST:6379/0, or valkey:// "
        "without TLS. It holds tokens of texts. Prefer the variable, because others on this machine can see "
        "the options of a process. Default: nothing is shared.",
    )
    shared_uses: str = Field(
        ",".join(SHARED_USES),
        description="What --shared is used for, separated by commas.",
    )

    @field_validator("shared")
    @classmethod
    def _is_a_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            try:
                SharedAddress.parse(url.get_secret_value())
            except ValueError:
                # Without its message, which may hold the password.
                raise refused(f"it must be {_ACCEPTED}") from None
        return url

    @field_validator("shared_uses")
    @classmethod
    def _are_known(cls, uses: str) -> str:
        found = uses.split(",")
        if not set(found) <= set(SHARED_USES) or len(set(found)) < len(found):
            raise refused(f"give one or several of {', '.join(SHARED_USES)}, separated by commas")
        return uses

    @property
    def shared_address(self) -> SharedAddress | None:
        """Where the shared store is; None: there is none."""
        return None if self.shared is None else SharedAddress.parse(self.shared.get_secret_value())

    def shared_for(self, *uses: SharedUse) -> SharedAddress | None:
        """Return where the shared store is, if machines share one of these uses there."""
        return self.shared_address if set(uses) & set(self.shared_uses.split(",")) else None
