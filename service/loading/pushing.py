"""Send a database to an object store, as `remote.py` describes it.

What is there need not be sent again. If the pointer names the database already, what is there is read, and
what is damaged is sent again. The pointer is written last, and only if nobody has written it meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from attncache_core import AttentionDatabase, CorruptDatabase, InvalidInput, Progress
from attncache_core.reuse.maps.integrity import damaged_records, file_digest
from attncache_core.runtime.files import PRIVATE, when_written
from service.loading.remote import FILE_NAME, FINDINGS, POINTER, POINTER_CONTENT, Pointer, PushedFile
from service.objects import RANGE_BYTES, Changed, ObjectFolder, StoredObject

# What belongs to a machine: the gain that was measured on it.
_OF_THE_MACHINE = "gain.json"


def push(root: Path, url: str, progress: Progress) -> str:
    """Send the database that serves in a folder to a store, and return in one line what was done.

    Raises DatabaseRefused, CorruptDatabase, InvalidInput if somebody else has pushed meanwhile, and OSError.
    """
    database = AttentionDatabase.open(root)
    listed = _listed(database.folder)
    findings = _read_findings(database.folder)
    store = ObjectFolder(url, "url", writes=True, mode=PRIVATE)
    if fault := next(damaged_records(database.search.store), None):
        raise CorruptDatabase(
            f"{root} is damaged: {fault}; see attncache verify {root}, and build it again", field="database"
        )
    seen = _pointer_object(store)
    pointer = Pointer(database.manifest.id, _files(database.folder, listed, findings, progress))
    if _listed(database.folder) != listed:
        raise OSError(errno.ESTALE, "the database was changed while it was read; push again", str(root))
    for below in ("", database.manifest.id):
        store.remove_unfinished(below)
    content = POINTER_CONTENT.dump_json(pointer, indent=1)
    # The pointer names this database, perhaps with other findings.
    reads = seen is not None and pointer.id.encode() in seen[0]
    sent = _send(store, database.folder, pointer, findings, progress, reads=reads)
    if not sent and seen is not None and seen[0] == content:
        return f"{store.url} holds this database already"
    try:
        store.put_if(POINTER, content, seen[1] if seen else None)
    except Changed as changed:
        # The store may have got the pointer although its answer was lost.
        if (found := _pointer_object(store)) is None or found[0] != content:
            raise InvalidInput(
                f"somebody else has pushed to {store.url} meanwhile, and their database serves; push again "
                "if this one should serve instead",
                field="url",
            ) from changed
    return f"{store.url}: {sent} of {len(pointer.files)} files sent, {pointer.bytes:,} bytes in all"


def _listed(folder: Path) -> dict[Path, tuple[int, ...] | None]:
    """Return the files that belong together, in order, each with what differs once it is written anew."""
    paths = sorted(
        path
        for pattern in ("*", "index/*", "maps/*", "decisions*/*")
        for path in folder.glob(pattern)
        if path.is_file()
        and FILE_NAME.fullmatch(name := str(path.relative_to(folder)))
        # Generation 0 shares its folder with these.
        and name not in (_OF_THE_MACHINE, FINDINGS, "current", "renewals.jsonl")
    )
    return {path: when_written(path) for path in paths}


def _read_findings(folder: Path) -> bytes | None:
    try:
        return (folder / FINDINGS).read_bytes()
    except FileNotFoundError:
        return None


def _files(
    folder: Path, paths: Collection[Path], findings: bytes | None, progress: Progress
) -> dict[str, PushedFile]:
    files = {}
    for done, path in enumerate(paths, 1):
        files[str(path.relative_to(folder))] = PushedFile(path.stat().st_size, file_digest(path))
        progress("reading files", done, len(paths))
    if findings is not None:
        files[FINDINGS] = PushedFile(len(findings), hashlib.sha256(findings).hexdigest())
    return files


def _send(
    store: ObjectFolder,
    folder: Path,
    pointer: Pointer,
    findings: bytes | None,
    progress: Progress,
    *,
    reads: bool,
) -> int:
    """Send the files that are not there. Returns their number. reads: compare bytes, and not only sizes."""
    there = {stored.name: stored.bytes for stored in store.list(pointer.id)}
    missing = []
    for done, (name, file) in enumerate(pointer.files.items(), 1):
        stored = pointer.object_name(file)
        if there.get(stored) != file.bytes or (reads and not _holds(store, stored, file)):
            missing.append(name)
        progress("checking objects", done, len(pointer.files))
    for done, name in enumerate(missing, 1):
        file = pointer.files[name]
        parts: Iterable[bytes]
        parts = [findings] if name == FINDINGS and findings is not None else _unchanged(folder / name, file)
        # A small file is one request, and parts are three or more.
        store.put(pointer.object_name(file), b"".join(parts) if file.bytes <= RANGE_BYTES else parts)
        progress("sending files", done, len(missing))
    return len(missing)


def _holds(store: ObjectFolder, name: str, file: PushedFile) -> bool:
    """Return whether an object has the content of a file of the same size."""
    digest = hashlib.sha256()
    for start in range(0, file.bytes, RANGE_BYTES):
        digest.update(store.read_range(name, start, min(RANGE_BYTES, file.bytes - start)))
    return digest.hexdigest() == file.sha256


def _unchanged(path: Path, file: PushedFile) -> Iterator[bytes]:
    """Yield the parts of a file. Raises OSError, before the object is complete, if it has changed."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while part := opened.read(RANGE_BYTES):
            digest.update(part)
            yield part
    if digest.hexdigest() != file.sha256:
        raise OSError(errno.ESTALE, "the file was changed while it was sent; push again", str(path))


def _pointer_object(store: ObjectFolder) -> tuple[bytes, StoredObject] | None:
    try:
        return store.read(POINTER)
    except FileNotFoundError:
        return None
