"""API keys: who may use the server, for what, and how much.

    --api-keys FILE, ATTNCACHE_API_KEY -> KeyRing -> the KeyHolder of a request, or Unauthorized

A line of the file is a name, a key, and what the key may do. Several lines of one name are keys of one
holder, so that a key can be replaced while both the old and the new one are valid:

    search  Zr8vC2mW0qL5xT1nYb4k  requests_per_minute=600 tokens_per_minute=200000 in_flight=8
    ops     uE7hJ3sP9dKa6gRf2wXo  admin

Only digests of the keys are kept, with a salt that no client knows. So a request's key is looked up, and not
compared character by character, and the time of a response tells nothing about other keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from service.access.quotas import Quotas, QuotaUse
from service.errors import InvalidSettings, Unauthorized
from service.settings import Settings
from service.store import Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# What a bearer token may be (RFC 6750), and long enough that nobody guesses it.
_MAX_SECRET_CHARACTERS = 256
_SECRET = re.compile(r"(?=.{16,256}\Z)[A-Za-z0-9._~+/-]+=*")
_COMMENT = re.compile(r"(?:^|\s)#")
_COUNT = re.compile("[1-9][0-9]{0,14}")
# What the line of an admin key says.
ADMIN = "admin"
_QUOTAS = tuple(Quotas.__dataclass_fields__)
_ACCEPTED = f"accepted are {ADMIN}, {', '.join(f'{quota}=NUMBER' for quota in _QUOTAS)}"
_Digest = Callable[[bytes], bytes]
_CHALLENGE = 'Bearer realm="attncache"'


@dataclass(frozen=True, slots=True, eq=False)
class KeyHolder:
    """A client with one key or several. Holders share no sessions, stored keys and values or results."""

    name: str
    is_admin: bool
    quotas: Quotas
    use: QuotaUse

    @property
    def namespace(self) -> bytes:
        """What separates all that is kept for this holder."""
        return namespace_of(self.name)


class KeyRing:
    """The keys that are valid now. Used on the event loop."""

    def __init__(
        self,
        file: Path | None,
        option: str | None,
        *stores: Store,
        max_seconds: float,
        process: str | None = None,
    ) -> None:
        """file: of --api-keys. option: the text of --api-key. Others: see QuotaUse.

        Raises InvalidSettings, as `reload`.
        """
        self._file = file
        self._use = partial(QuotaUse, max_seconds=max_seconds, process=process)
        self._stores = stores
        self._salt = secrets.token_bytes(32)
        self._option_lines = _lines_of_option(option, self._digest) if option is not None else []
        self._holders: dict[bytes, KeyHolder] = {}  # by the digest of a key
        self.reload()

    def reload(self) -> None:
        """Read the file again. A holder whose quotas stay the same keeps the count of what it has used.

        Raises InvalidSettings, which names the line and never its content, and then changes nothing.
        """
        lines = [*self._option_lines, *(_lines_of_file(self._file, self._digest) if self._file else ())]
        before = {holder.name: holder for holder in self._holders.values()}
        holders: dict[str, KeyHolder] = {}
        found: dict[bytes, KeyHolder] = {}
        for line in lines:
            holder = holders.get(line.name)
            if holder is None:
                known = before.get(line.name)
                if known is not None and known.quotas == line.quotas:
                    use = known.use
                else:
                    use = self._use(line.name, line.quotas, *self._stores)
                holder = holders[line.name] = KeyHolder(line.name, line.is_admin, line.quotas, use)
            elif (holder.is_admin, holder.quotas) != (line.is_admin, line.quotas):
                raise _refused(f"{line.where}: all lines of one name must have the same words after the key")
            if line.digest in found:
                raise _refused(f"{line.where}: the key is the same as that of an earlier line")
            found[line.digest] = holder
        self._holders = found

    @property
    def names(self) -> list[str]:
        """The names of all holders."""
        return sorted({holder.name for holder in self._holders.values()})

    def holder(self, headers: Mapping[bytes, bytes]) -> KeyHolder:
        """Return the holder of the key in a request's headers. Raises Unauthorized."""
        presented = _presented(headers)
        if presented is None:
            raise Unauthorized(
                "an API key is required: send it as Authorization: Bearer KEY, or as X-API-Key: KEY",
                challenge=_CHALLENGE,
            )
        holder = None
        if len(presented) <= _MAX_SECRET_CHARACTERS:
            holder = self._holders.get(self._digest(presented))
        if holder is None:
            raise Unauthorized(
                "the API key is not known to this server", challenge=f'{_CHALLENGE}, error="invalid_token"'
            )
        return holder

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._salt, digest_size=32).digest()


def namespace_of(name: str) -> bytes:
    """Return the namespace of the holder with this name. No namespace is the beginning of another one."""
    return name.encode() + b"\0"


def key_ring(settings: Settings, *stores: Store, process: str | None = None) -> KeyRing | None:
    """Return the keys of these settings, or None if no key is needed. Raises InvalidSettings.

    stores, process: see QuotaUse.
    """
    option = settings.api_key.get_secret_value() if settings.api_key is not None else None
    if settings.api_keys is None and option is None:
        return None
    # Beside its computation, a request is received and its response is sent.
    max_seconds = settings.request_seconds + settings.body_seconds + settings.write_seconds
    return KeyRing(settings.api_keys, option, *stores, max_seconds=max_seconds, process=process)


class _Line(NamedTuple):
    where: str
    name: str
    digest: bytes
    is_admin: bool
    quotas: Quotas


def _presented(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key in a request's headers. X-API-Key comes first: some clients always send a Bearer."""
    key = headers.get(b"x-api-key")
    if key is not None:
        return key.strip()
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else None


def _lines_of_file(path: Path, digest: _Digest) -> list[_Line]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _refused(f"--api-keys {path} cannot be read: {(error.strerror or '').lower()}") from error
    except UnicodeDecodeError:
        # Not chained, because the error holds the content of the file.
        raise _refused(f"--api-keys {path} is not UTF-8") from None
    lines = list(_parsed(text.splitlines(), f"--api-keys {path}, line", digest))
    if not lines:
        raise _refused(f"--api-keys {path} has no key; every line is a name and a key")
    return lines


def _lines_of_option(text: str, digest: _Digest) -> list[_Line]:
    """Return the lines of --api-key, which are separated by line breaks or semicolons."""
    where = "--api-key (ATTNCACHE_API_KEY)"
    if len(text.split()) == 1 and ";" not in text:
        # A single key is the operator's.
        text = f"default {text} {ADMIN}"
    lines = list(_parsed(text.replace(";", "\n").splitlines(), f"{where}, entry", digest))
    if not lines:
        raise InvalidSettings(f"{where} has no key", field="api_key")
    return lines


def _parsed(lines: Iterable[str], where: str, digest: _Digest) -> Iterator[_Line]:
    for number, line in enumerate(lines, 1):
        words = _COMMENT.split(line, maxsplit=1)[0].split()
        if words:
            yield _line(words, f"{where} {number}", digest)


def _line(words: list[str], where: str, digest: _Digest) -> _Line:
    """Return a line from its words. Raises InvalidSettings, which repeats no word: it may be a key."""
    if len(words) < 2:
        raise _refused(f"{where} must be a name, a key, and what the key may do")
    name, secret, *may = words
    if not _NAME.fullmatch(name):
        raise _refused(
            f"{where}: the name must have at most 64 letters, digits, dots, hyphens and underscores, and "
            "begin with a letter or a digit"
        )
    if not _SECRET.fullmatch(secret):
        raise _refused(
            f"{where}: the key must have 16 to {_MAX_SECRET_CHARACTERS} letters, digits and characters of "
            "-._~+/, as `openssl rand -hex 24` makes them"
        )
    quotas: dict[str, int] = {}
    for word in may:
        quota, _, count = word.partition("=")
        if word == ADMIN:
            continue
        if quota not in _QUOTAS or quota in quotas or not _COUNT.fullmatch(count):
            raise _refused(
                f"{where}: after the key, {_ACCEPTED}, each at most once; NUMBER is a whole number from 1 on"
            )
        quotas[quota] = int(count)
    return _Line(where, name, digest(secret.encode()), ADMIN in may, Quotas(**quotas))


def _refused(sentence: str) -> InvalidSettings:
    return InvalidSettings(sentence, field="api_keys")
