"""What happens to the files of a server while it serves: its database is damaged, its keys change."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter

from benchmarks.soak.clients import Clients
from benchmarks.soak.served import Process

_RELOAD_SECONDS = 1.0


class Disturbances:
    """Damages copies of files; the originals replace them later."""

    def __init__(self, database: Path, live: Path, keys: Path, seed: int) -> None:
        """database: a whole database, not changed. live: the copy that the server has. keys: its key file."""
        self.made: Counter[str] = Counter()
        self._database = database
        self._live = live
        self._keys = keys
        self._random = Random(seed)

    def new_key(self, *old: str) -> str:
        """Write a key file with a new key and old ones, and return the new key."""
        key = secrets.token_urlsafe(24)
        lines = [f"soak {each} admin\n" for each in (key, *old)]
        self._replace(self._keys, "".join(lines).encode())
        return key

    async def run(self, server: Process, clients: Clients, seconds: float, every: float) -> None:
        """Disturb the server every so many seconds. Ends after `seconds`."""
        ways = [self._cut, self._overwrite, self._remove, self._swap, self._restore]
        until = perf_counter() + seconds
        for turn in count():
            if perf_counter() > until:
                return
            if turn % 3 == 2:
                await self._change_keys(server, clients)
            else:
                way = self._random.choice(ways)
                way()
                self.made[way.__name__.strip("_")] += 1
            await asyncio.sleep(every)

    def _some_file(self) -> Path:
        def files_left() -> list[Path]:
            return [path for path in self._live.rglob("*") if path.is_file() and path.stat().st_size]

        files = files_left()
        if not files:
            self._restore()
            files = files_left()
        return self._random.choice([path for path in files if path.suffix == ".maps"] or files)

    def _cut(self) -> None:
        path = self._some_file()
        os.truncate(path, self._random.randrange(path.stat().st_size))

    def _overwrite(self) -> None:
        path = self._some_file()
        with path.open("r+b") as file:
            file.seek(self._random.randrange(path.stat().st_size))
            file.write(self._random.randbytes(4096))

    def _remove(self) -> None:
        self._some_file().unlink()

    def _restore(self) -> None:
        for path in self._database.rglob("*"):
            if path.is_file():
                copy = self._live / path.relative_to(self._database)
                self._replace(copy, path.read_bytes())

    def _swap(self) -> None:
        fresh, old = self._live.with_name("fresh"), self._live.with_name("old")
        shutil.copytree(self._database, fresh)
        self._live.rename(old)
        fresh.rename(self._live)
        shutil.rmtree(old)

    async def _change_keys(self, server: Process, clients: Clients) -> None:
        self._replace(self._keys, b"this is no key file\n")
        server.reload()
        await asyncio.sleep(_RELOAD_SECONDS)
        key = self.new_key(clients.key)
        server.reload()
        await asyncio.sleep(_RELOAD_SECONDS)
        clients.key = key
        self.made["change keys"] += 1

    def _replace(self, path: Path, content: bytes) -> None:
        beside = path.with_name(f"{path.name}.new")
        beside.write_bytes(content)
        beside.replace(path)
