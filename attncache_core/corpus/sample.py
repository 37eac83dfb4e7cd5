"""Keep a sample of the texts that clients ask for in files, from which a database is renewed.

    DIR/sample/key      32 random bytes: no client can choose the texts that stay, or be named by the files
    DIR/sample/0.log    the sample of one server process, which holds the lock .0.log.lock

A log is a header, and entries that are only appended:

    header    magic                 8 bytes
              texts at most         uint32
              half-life in hours    float64
              CRC-32 of these       uint32
    entry     CRC-32 of the rest    uint32
              bytes of token ids    uint32
              time                  int64, Unix seconds; see SampledText
              client                8 bytes, a keyed digest of the name of the API key; zeros without one
              token ids             int32

All numbers are little-endian. A log that has twice the size of what the sample holds is written anew. What is
behind the first entry that is not whole is cut off at the next start. The folder is readable by its owner
only (0700), and so are the files (0600). Whoever starts a process takes the first log that no process holds.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attncache_core.corpus.reservoir import CLIENT_SHARE, TIME_STEP_SECONDS, Reservoir, SampledText
from attncache_core.runtime.files import (
    PRIVATE,
    HeldByAnother,
    locked,
    locked_at_once,
    remove_unfinished,
    write_all,
    write_whole,
)

_MAGIC = b"ATCSMPL1"
_HEADER = struct.Struct("<8sId")
_CHECKSUM_BYTES = 4
_HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_ENTRY = struct.Struct("<IIq8s")
_CLIENT_BYTES, _NO_CLIENT = 8, bytes(8)
_KEY_BYTES = 32
_MIN_REWRITE = 1 << 16
_OWNER_ONLY = 0o600


class TextSampler:
    """Keeps the sample of one process. Not thread-safe."""

    def __init__(self, key: bytes, reservoir: Reservoir, path: Path, lock: ExitStack) -> None:
        """Go on with the log `path`, of which `lock` holds the lock. Use `open`. Raises OSError."""
        self._key, self._reservoir, self._path, self._lock = key, reservoir, path, lock
        self._buffered: list[bytes] = []
        log = _read(path)
        self.cut_bytes = log.cut_bytes  # of the log: unfinished, because a process was killed, or damaged
        # They take no part, but are kept: the clock may be behind.
        self._later = log.later[-reservoir.max_texts :]
        for text in log.texts:
            reservoir.offer(text)
        if log.header == _header(reservoir):
            self._file = path.open("r+b", buffering=0)
            self._file.truncate(log.whole_bytes)
            self._written = self._file.seek(0, os.SEEK_END)
            self._live = _HEADER_BYTES + sum(map(len, self._entries()))
        else:
            self._rewrite(self._later)

    @classmethod
    def open(cls, root: Path, *, max_texts: int, half_life_hours: float) -> TextSampler:
        """Go on with a sample in the folder `root` of a database, or begin one.

        max_texts: of this process. half_life_hours: after this time, a text that was not asked again has half
        the weight. Raises OSError if the folder cannot be written to.
        """
        folder = sample_folder(root)
        with locked(folder, on_wait=lambda: None), ExitStack() as lock:
            folder.mkdir(mode=PRIVATE, exist_ok=True)
            key = _kept_key(folder)
            path = _first_free(folder, lock)
            remove_unfinished(folder, path.name)
            reservoir = Reservoir(key, max_texts=max_texts, half_life_hours=half_life_hours)
            return cls(key, reservoir, path, lock.pop_all())

    def __len__(self) -> int:
        return len(self._reservoir)

    @property
    def later(self) -> int:
        """The number of texts in the log that were asked later than now, by this machine's clock.

        They stay in the log until it is written anew. Texts whose time has come by then take part again.
        """
        return len(self._later)

    @property
    def unsynced(self) -> int:
        """The number of texts that are not on the disk yet."""
        return len(self._buffered)

    def offer(self, token_ids: Sequence[int] | np.ndarray, client: str | None, asked_at: float) -> None:
        """Let a text that was answered take part.

        client: name of the API key; None without one. asked_at: Unix time in seconds.
        """
        tokens = np.asarray(token_ids, dtype="<i4").tobytes()
        step = int(asked_at) // TIME_STEP_SECONDS * TIME_STEP_SECONDS
        text = SampledText(tokens, b"" if client is None else self._digest(client), step)
        if self._reservoir.offer(text):
            self._buffered.append(_entry(text))

    def sync(self) -> bool:
        """Let everything that was offered reach the disk, and return whether anything was written.

        Call this method about once a second. Raises OSError; the sampler is of no use afterwards: close it,
        and open another one later.
        """
        # Another process may have renamed or removed the folder: nothing would read what is written there.
        if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
            raise FileNotFoundError(errno.ENOENT, "another log is in place of the open one")
        added = b"".join(self._buffered)
        if self._written + len(added) > 2 * max(self._live, _MIN_REWRITE):
            self._file.close()
            # By now, a clock that was behind is right.
            self._rewrite()
        elif added:
            write_all(self._file, added)
            os.fdatasync(self._file.fileno())
            self._written += len(added)
        self._buffered.clear()
        return bool(added)

    def close(self) -> None:
        """Close the log and release its lock, without another sync."""
        self._file.close()
        self._lock.close()

    def _digest(self, name: str) -> bytes:
        return blake2b(name.encode(), digest_size=_CLIENT_BYTES, key=self._key).digest()

    def _entries(self) -> Iterator[bytes]:
        return map(_entry, chain(self._reservoir, self._later))

    def _rewrite(self, later: Sequence[SampledText] = ()) -> None:
        """Write the log anew. later: texts to keep although their time has not come."""
        latest = _latest()
        for text in self._later:
            if text.asked_at <= latest:
                self._reservoir.offer(text)
        self._later = [text for text in later if text.asked_at > latest]
        content = b"".join([_header(self._reservoir), *self._entries()])
        write_whole(self._path, content, mode=_OWNER_ONLY)
        self._file = self._path.open("r+b", buffering=0)
        self._live = self._written = self._file.seek(0, os.SEEK_END)


class _Log(NamedTuple):
    """What a log holds."""

    header: bytes  # empty if there is no log, or one without a header
    texts: list[SampledText]  # also texts that the sample has not kept
    later: list[SampledText]  # that were asked later than now, because a clock was ahead or is behind
    whole_bytes: int  # of the header and the entries that are whole
    cut_bytes: int  # after them: unfinished or damaged


def sample_folder(root: Path) -> Path:
    """Return the folder with the samples of all processes."""
    return root / "sample"


def began_at(root: Path) -> float | None:
    """Return the Unix time in seconds at which sampling began; None: never."""
    try:
        return (sample_folder(root) / "key").stat().st_mtime
    except OSError:
        return None


def read_sample(root: Path, least: int = 0) -> list[SampledText]:
    """Return the distinct texts that one process would have kept of all texts, oldest first.

    Of an API key that would have more than a tenth of the texts, no more texts are returned than of the key
    that has most texts after it, unless fewer than `least` texts would remain. So no key is most of a sample
    that other keys share. Texts of equal times are in random order. Raises OSError.
    """
    folder = sample_folder(root)
    paths = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    logs = [log for log in map(_read, paths) if log.header]
    if not logs:
        return []
    key = (folder / "key").read_bytes()
    _, max_texts, half_life_hours = _HEADER.unpack_from(logs[-1].header)
    merged = Reservoir(key, max_texts=max_texts, half_life_hours=half_life_hours)
    for log in logs:
        for text in log.texts:
            merged.offer(text)
    shuffled = sorted(merged, key=lambda text: blake2b(text.tokens + text.client, key=key).digest())
    return sorted(_without_excess(shuffled, least), key=lambda text: text.asked_at)


def read_log(path: Path) -> list[SampledText]:
    """Return the texts of a log that `write_log` has written; none if it is damaged. Raises OSError."""
    log = _read(path)
    # If the clock is behind, the later texts too.
    return [] if log.cut_bytes else log.texts + log.later


def write_log(path: Path, texts: Sequence[SampledText]) -> None:
    """Write texts that are no longer sampled. Raises OSError."""
    header = _checked(_HEADER.pack(_MAGIC, len(texts), math.inf))
    write_whole(path, b"".join([header, *map(_entry, texts)]), mode=_OWNER_ONLY)


def _without_excess(texts: list[SampledText], least: int) -> list[SampledText]:
    """Return the texts without the first ones of a client that has too many."""
    counts = Counter(text.client for text in texts if text.client).most_common(2)
    if len(counts) < 2:
        return texts
    (client, held), (_, next_most) = counts
    others = len(texts) - held
    excess = held - max(others // (CLIENT_SHARE - 1), next_most, least - others)
    kept = []
    for text in texts:
        if text.client == client and excess > 0:
            excess -= 1
        else:
            kept.append(text)
    return kept


def _first_free(folder: Path, lock: ExitStack) -> Path:
    """Lock the first log that no process holds, and return its path."""
    number = 0
    while True:
        path = folder / f"{number}.log"
        try:
            lock.enter_context(locked_at_once(folder / f".{path.name}.lock"))
            return path
        except HeldByAnother:
            number += 1


def _kept_key(folder: Path) -> bytes:
    """Return the key of a sample. A key that is missing or damaged is made anew."""
    path = folder / "key"
    key = path.read_bytes() if path.is_file() else b""
    if len(key) != _KEY_BYTES:
        key = secrets.token_bytes(_KEY_BYTES)
        write_whole(path, key, mode=_OWNER_ONLY)
    return key


def _header(reservoir: Reservoir) -> bytes:
    return _checked(_HEADER.pack(_MAGIC, reservoir.max_texts, reservoir.half_life_hours))


def _checked(header: bytes) -> bytes:
    """Return a header with its checksum."""
    return header + zlib.crc32(header).to_bytes(_CHECKSUM_BYTES, "little")


def _entry(text: SampledText) -> bytes:
    rest = (
        _ENTRY.pack(0, len(text.tokens), text.asked_at, text.client or _NO_CLIENT)[_CHECKSUM_BYTES:]
        + text.tokens
    )
    return zlib.crc32(rest).to_bytes(_CHECKSUM_BYTES, "little") + rest


def _read(path: Path) -> _Log:
    """Return what a log holds up to the first entry that is not whole. Raises OSError."""
    content = path.read_bytes() if path.is_file() else b""
    header = content[:_HEADER_BYTES]
    if not header.startswith(_MAGIC) or _checked(header[: _HEADER.size]) != header:
        return _Log(b"", [], [], 0, len(content))
    texts: list[SampledText] = []
    later: list[SampledText] = []
    whole, latest = _HEADER_BYTES, _latest()
    for text, end in _entries(content, whole):
        (texts if text.asked_at <= latest else later).append(text)
        whole = end
    return _Log(header, texts, later, whole, len(content) - whole)


def _latest() -> float:
    """Return the Unix time in seconds after which no text can have been asked."""
    return time.time() + TIME_STEP_SECONDS


def _entries(content: bytes, at: int) -> Iterator[tuple[SampledText, int]]:
    """Yield the texts of the whole entries from byte `at` on, each with the byte at which it ends."""
    while at + _ENTRY.size <= len(content):
        checksum, size, asked_at, client = _ENTRY.unpack_from(content, at)
        end = at + _ENTRY.size + size
        if end > len(content) or zlib.crc32(content[at + _CHECKSUM_BYTES : end]) != checksum:
            return
        tokens = content[at + _ENTRY.size : end]
        yield SampledText(tokens, b"" if client == _NO_CLIENT else client, asked_at), end
        at = end
