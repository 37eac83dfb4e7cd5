"""Which database a segment belongs to, and the digests by which that database recognises texts.

    DIR/key    32 random bytes, readable by their owner alone

The id of a database is derived from its key and stands in every segment. Without the key, the digests of
token sequences in a database tell nobody which texts it holds.
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
from attncache_core.files import write_whole

_KEY_BYTES = 32
_DIGEST_BYTES = 16


def key_path(folder: Path) -> Path:
    """The file of the key of the database `folder`."""
    return folder / "key"


@dataclass(frozen=True)
class Seal:
    """What all segments of one database have in common, and those of no other database."""

    key: bytes  # 32, random and secret
    fingerprint: str  # of the model whose maps the segments hold, 64 hexadecimal digits

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> Seal:
        """The seal of the database `folder` of a model's maps. Raises CorruptDatabase."""
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
        """The seal of the database `folder`, which gets a random key unless it has one. Raises OSError."""
        path = key_path(folder)
        if not path.is_file() or path.stat().st_size != _KEY_BYTES:
            write_whole(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
        return cls.read(folder, fingerprint)

    @cached_property
    def id(self) -> str:
        """The database's id, 32 hexadecimal digits; does not reveal the key."""
        return blake2b(key=self.key, person=b"database id", digest_size=_DIGEST_BYTES).hexdigest()

    def token_digest(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """16 bytes that identify a token sequence within this database."""
        # A copy of a hash that has taken in the key is as cheap as a hash without a key.
        digest = self._keyed.copy()
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
        return digest.digest()

    @cached_property
    def _keyed(self) -> blake2b:
        return blake2b(key=self.key, digest_size=_DIGEST_BYTES)
