"""Identify the database that a segment belongs to, and digest token sequences with the database's key.

    DIR/key    32 random bytes, readable by their owner only

The id of a database is derived from the key and is part of every segment header. The digests of token
sequences are keyed: without the key, nobody can test whether a text is in the database.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np

from attncache_core.errors import CorruptDatabase
from attncache_core.runtime.files import write_whole

_KEY_BYTES = 32
_DIGEST_BYTES = 16


def key_path(folder: Path) -> Path:
    """Return the path of the key of the database `folder`."""
    return folder / "key"


@dataclass(frozen=True)
class Seal:
    """The key and the model that all segments of one database share."""

    key: bytes  # 32 bytes, random and secret
    fingerprint: str  # fingerprint of the model, 64 hexadecimal digits

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> Seal:
        """Read the seal of the database `folder`, which holds maps of the model `fingerprint`.

        Raises CorruptDatabase if the key is missing, cannot be read or has a wrong size.
        """
        path = key_path(folder)
        try:
            key = path.read_bytes()
        except OSError as error:
            raise CorruptDatabase(f"{path} is missing or cannot be read", field="database") from error
        if len(key) != _KEY_BYTES:
            raise CorruptDatabase(f"{path} has {len(key)} bytes instead of {_KEY_BYTES}", field="database")
        return cls(key, fingerprint)

    @classmethod
    def create(cls, folder: Path, fingerprint: str) -> Seal:
        """Return the seal of the database `folder`, and create a random key unless there is one.

        Raises OSError if the key cannot be written.
        """
        path = key_path(folder)
        if not path.is_file() or path.stat().st_size != _KEY_BYTES:
            write_whole(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
        return cls.read(folder, fingerprint)

    @cached_property
    def id(self) -> str:
        """The id of the database, 32 hexadecimal digits. The id does not reveal the key."""
        return blake2b(key=self.key, person=b"database id", digest_size=_DIGEST_BYTES).hexdigest()

    def token_digest(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Return 16 bytes that identify a token sequence within this database."""
        # Copying a hash that is already keyed is as cheap as creating a hash without a key.
        digest = self._keyed.copy()
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
        return digest.digest()

    @cached_property
    def _keyed(self) -> blake2b:
        return blake2b(key=self.key, digest_size=_DIGEST_BYTES)
