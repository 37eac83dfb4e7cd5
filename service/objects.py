"""Objects below a URL: s3://, gs://, az://, http(s):// and file://. The only module that imports obstore.

obstore needs the extra [cluster]. A URL may hold secrets as its user and its query, so errors show neither. A
foreign error becomes an OSError whose file name is the URL and whose text is the reason.

An object appears at once or not at all, in every store. In a local folder it has also reached the disk.
"""

from __future__ import annotations

import errno
import io
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit, urlunsplit
from urllib.request import url2pathname

from attncache_core import InvalidInput
from attncache_core.runtime.files import locked, remove_unfinished, write_whole

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
RANGE_BYTES = 16 * 2**20
# A store that sends nothing for so long is stuck. A slow line may take longer for a range.
_READ_SECONDS, _REQUEST_SECONDS = 60, 3600
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
# In the text of a foreign error -> what is shown of it.
_REASONS = (
    (r"onfiguration key: '(\w+)' is not valid", r"its query has \1, which the store does not know"),
    (
        r"/latest/(?:api|meta-data)|computeMetadata|169\.254\.169\.254",
        "there are no credentials: the variables of the store are not set, and this machine has no role",
    ),
    (r"Missing (\w+)\n", r"\1 is missing among the variables of the store"),
    (r"Account must be specified", "the account is missing (AZURE_STORAGE_ACCOUNT_NAME)"),
    (r"Unable to open service account file", "the file of GOOGLE_APPLICATION_CREDENTIALS cannot be read"),
    (r"Unable to canonicalize filesystem root", "there is no such folder"),
    (r"ange request not supported|NotSupported", "the store answers no requests for ranges of an object"),
    (r"Connection refused|ConnectionRefused", "the connection is refused"),
    (r"dns error|lookup address", "the name of the host is not known"),
    (r"timed out|TimedOut|Timeout", "the store does not answer in time"),
    (r"No space left", "there is no space left"),
    (r"(?:operation on|open file) (.+?): Permission denied", r"permission is denied for \1"),
    (r"status[\w ]*[:( ]+(\d{3})", r"the store answers with status \1"),
    (r"rror sending request", "the store cannot be reached"),
    (r"decoding response body|ncomplete|nd of file", "the connection is cut"),
)

_CHANGED = "it was changed by somebody else"


class Changed(OSError):
    """An object is not, or is no longer, what the caller has seen."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store says about an object."""

    name: str  # relative to the folder
    bytes: int
    etag: str  # changes with the content; empty if the store has none
    version: str | None = None


def is_url(text: str) -> bool:
    """Return whether a text is a URL, and not a path."""
    return "://" in text


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises InvalidInput, which does not quote it, if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise InvalidInput(f"a URL is malformed: {error}") from None


def without_secrets(url: str) -> str:
    """Return a URL without its user and its query. Raises InvalidInput if it is malformed."""
    parts = _split(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def has_secrets(text: str) -> bool:
    """Return whether a text is a URL with what `without_secrets` leaves out."""
    parts = _split(text)
    return is_url(text) and ("@" in parts.netloc or bool(parts.query))


def joined(url: str, name: str) -> str:
    """Return the URL of a name below another URL, with the query of the other URL."""
    parts = _split(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


class ObjectFolder:
    """The objects below a URL, or the files below a local folder. Thread safe."""

    def __init__(self, url: str, field: str, *, writes: bool = False, mode: int = 0o777) -> None:
        """url: or the path of a folder. field: the option that gave it. writes: make a missing folder.

        mode: of a folder that is made. Raises InvalidInput if obstore is missing or the URL is not accepted.
        """
        self._obstore = _obstore(field)
        parts = _split(url if is_url(url) else Path(url).resolve().as_uri())
        if parts.scheme not in SCHEMES:
            accepted = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise InvalidInput(f"{field}: {without_secrets(url)} must begin with {accepted}", field=field)
        self.url = without_secrets(parts.geturl())
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise InvalidInput(
                f"{field}: {self.url} names a host; a local folder is written file:///FOLDER", field=field
            )
        if writes and parts.scheme in ("http", "https"):
            raise InvalidInput(
                f"{field}: {self.url} can only be read; give the store behind it (s3://, gs://, az://, file://)",
                field=field,
            )
        self._folder = Path(url2pathname(parts.path)) if parts.scheme == "file" else None
        if self._folder is not None and writes:
            self._folder.mkdir(mode, parents=True, exist_ok=True)
        try:
            self._store = self._opened(parts.geturl(), dict(parse_qsl(parts.query)))
        except Exception as error:  # obstore's errors quote the URL
            reason = _reason(error)
            raise InvalidInput(f"{field}: {self.url} cannot be opened: {reason}", field=field) from None

    def _opened(self, url: str, config: Any) -> Any:
        from obstore import store

        if self._folder is not None:
            return store.LocalStore(self._folder)
        client: dict[str, Any] = {
            # Whether a connection is encrypted is chosen by the URL.
            "allow_http": True,
            "read_timeout": timedelta(seconds=_READ_SECONDS),
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
        }
        limits: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
        if url.startswith("http"):
            user, _, host = urlsplit(url).netloc.rpartition("@")
            if user:  # obstore does not send it
                name, _, password = user.partition(":")
                sent = b64encode(unquote_to_bytes(f"{name}:{password}")).decode()
                client["default_headers"] = {"authorization": f"Basic {sent}"}
            return store.HTTPStore.from_url(urlunsplit(urlsplit(url)._replace(netloc=host)), **limits)
        return store.from_url(urlunsplit(urlsplit(url)._replace(query="")), **limits, config=config)

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of this machine."""
        return self._folder is not None

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for people."""
        return joined(self.url, name)

    def read(self, name: str) -> tuple[bytes, StoredObject]:
        """Return a small object and what the store says about it. Raises OSError."""
        with self._translated(name):
            got = self._obstore.get(self._store, name)
            return bytes(got.bytes()), _stored(got.meta, name)

    def read_range(self, name: str, start: int, length: int, etag: str | None = None) -> bytes:
        """Return bytes of an object, at least one. Raises Changed if it has another ETag, and OSError."""
        # A weak ETag matches no condition (RFC 9110), and some servers ignore conditions.
        with self._translated(name):
            options: dict[str, Any] = {"range": (start, start + length)}
            if etag is not None and not etag.startswith("W/"):
                options["if_match"] = etag
            got = self._obstore.get(self._store, name, options=options)
            # Some stores write an ETag in quotes only outside of their lists.
            if etag is not None and (got.meta["e_tag"] or "").strip('"') != etag.strip('"'):
                raise Changed(errno.ESTALE, _CHANGED, self.url_of(name))
            content = bytes(got.bytes())
            if not content:
                raise OSError(errno.EIO, "the store sends nothing", self.url_of(name))
            return content

    def about(self, name: str) -> StoredObject:
        """Return what the store says about an object. Raises OSError."""
        with self._translated(name):
            return _stored(self._obstore.head(self._store, name), name)

    def list(self, below: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose names begin with a folder. Object stores yield them in the order of names.

        Raises OSError.
        """
        with self._translated(below):
            for page in self._obstore.list(self._store, below or None):
                for meta in page:
                    yield _stored(meta, meta["path"])

    def broken_links(self) -> Iterator[StoredObject]:
        """Yield links of a local folder whose files are not there. `list` leaves them out; reading fails."""
        if self._folder is not None:
            for folder, _, names in os.walk(self._folder):
                paths = (Path(folder, name) for name in names)
                broken = (path for path in paths if path.is_symlink() and not path.exists())
                for path in broken:
                    yield StoredObject(str(path.relative_to(self._folder)), path.lstat().st_size, "none")

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write an object, or replace it. What `content` raises leaves no object. Raises OSError."""
        with self._translated(name):
            if self._folder is not None:
                write_whole(self._path(name), content)
            else:
                self._obstore.put(self._store, name, content)

    def put_if(self, name: str, content: bytes, seen: StoredObject | None) -> None:
        """Write an object if it is still the one that was seen; None: if there is none.

        Raises Changed, and OSError.
        """
        if self._folder is not None:
            # obstore has no conditional writes of local files.
            with locked(self._path(name), on_wait=lambda: None), self._translated(name):
                self._require_seen(name, seen)
                write_whole(self._path(name), content)
            return
        mode: Any = "create"
        if seen is not None:
            mode = {"e_tag": seen.etag} | ({"version": seen.version} if seen.version else {})
        with self._translated(name):
            self._obstore.put(self._store, name, content, mode=mode, use_multipart=False)

    def remove(self, name: str) -> None:
        """Remove an object, if there is one. Raises OSError."""
        with self._translated(name):
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError:
                return

    def remove_unfinished(self, below: str = "") -> None:
        """Remove what killed processes have left of local files that they wrote in a folder."""
        if self._folder is not None:
            remove_unfinished(self._folder / below)

    def open(self, name: str, about: StoredObject) -> io.BufferedReader:
        """Open an object for reading anywhere. Reading raises Changed if it is another one, and OSError."""
        return io.BufferedReader(_Ranges(self, name, about), buffer_size=2**20)

    def _require_seen(self, name: str, seen: StoredObject | None) -> None:
        try:
            now = self.about(name).etag
        except FileNotFoundError:
            now = None
        if now != (seen.etag if seen else None):
            raise Changed(errno.ESTALE, _CHANGED, self.url_of(name))

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Raise obstore's errors as OSError, without their texts."""
        raised, url = self._obstore.exceptions, self.url_of(name)
        try:
            yield
        except Changed:
            raise
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "it is not there", url) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, url) from None
        except (raised.PreconditionError, raised.AlreadyExistsError):
            raise Changed(errno.ESTALE, _CHANGED, url) from None
        except (raised.PermissionDeniedError, raised.UnauthenticatedError):
            reason = "access is refused; check the credentials"
            raise PermissionError(errno.EACCES, reason, url) from None
        except (raised.BaseError, NotImplementedError, ValueError) as error:
            raise OSError(errno.EIO, _reason(error), url) from None


class _Ranges(io.RawIOBase):
    """An object as a file that can be read anywhere."""

    def __init__(self, folder: ObjectFolder, name: str, about: StoredObject) -> None:
        self._folder, self._name, self._about, self._at = folder, name, about, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._about.bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._about.bytes - self._at, RANGE_BYTES)
        if length <= 0:
            return 0
        content = self._folder.read_range(self._name, self._at, length, self._about.etag)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _stored(meta: Any, name: str) -> StoredObject:
    return StoredObject(name, meta["size"], meta["e_tag"] or "", meta["version"])


def _reason(error: Exception) -> str:
    """Return what may be shown of a foreign error, which may quote secrets."""
    text = str(error)
    for pattern, reason in _REASONS:
        if found := re.search(pattern, text):
            return found.expand(reason)
    return f"the store cannot be used ({type(error).__name__})"


def _obstore(field: str) -> ModuleType:
    """Return the module obstore. Raises InvalidInput if obstore, an extra, is not installed."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise InvalidInput(
            f"{field}: object stores need obstore: pip install 'attncache[cluster]'", field=field
        ) from error
    return obstore
