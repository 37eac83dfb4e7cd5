"""The disk tier gives back exactly what was written, or nothing, and never exceeds its limit."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import resource
import shutil
import stat
import struct
import tempfile
import threading
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from core_models import flip
from full_disk import largest_file
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.reuse.kv import disk
from attncache_core.reuse.kv.block_file import DamagedBlock
from attncache_core.reuse.kv.blocks import BlockName
from attncache_core.reuse.kv.disk import DiskTier

SIZES = (48, 48, 20)
HEAD_BYTES = 4096
BLOCK_BYTES = HEAD_BYTES + sum(SIZES)
IDENTITY_BYTES = 8 + 3 * 4 + 2 * 32 + 64 + 3 * 8  # up to the checksums of the parts
USAGE_BYTES = 8
MANY = 100 * BLOCK_BYTES

# The children only use files, so that they need nothing of the threads that a fork leaves behind.
fork = multiprocessing.get_context("fork")


def limit(blocks: int) -> int:
    return blocks * BLOCK_BYTES + USAGE_BYTES


def block(number: int) -> BlockName:
    tokens = np.arange(number, number + 1 + number % 16, dtype="<i4").tobytes()
    parent = hashlib.sha256(b"root").digest()
    return BlockName(hashlib.sha256(parent + tokens).digest(), parent, tokens)


def content(number: int, sizes=SIZES) -> list[bytes]:
    return [np.random.default_rng((number, index)).bytes(size) for index, size in enumerate(sizes)]


def read(tier: DiskTier, name: BlockName, sizes=SIZES) -> list[bytes] | None:
    """The parts of a block, or None if the tier does not have the whole block."""
    opened = tier.open(name)
    if opened is None:
        return None
    parts = [bytearray(size) for size in sizes]
    with opened:
        try:
            for index, part in enumerate(parts):
                opened.read_part(index, memoryview(part))
        except DamagedBlock:
            return None
    return [bytes(part) for part in parts]


def path_of(folder: Path, name: BlockName) -> Path:
    return folder / name.key.hex()[:2] / f"{name.key.hex()}.kv"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "usage"]


def real_bytes(folder: Path) -> int:
    """The sum of the sizes of all files, at a moment when no process creates, renames or removes a file."""
    with (folder / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        return USAGE_BYTES + sum(path.stat().st_size for path in files(folder))


def assert_accounted(tier: DiskTier, folder: Path) -> None:
    assert tier.bytes_used + USAGE_BYTES == real_bytes(folder)


def set_age(folder: Path, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path_of(folder, block(number)), (then, then))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def tier(folder):
    return DiskTier(folder, SIZES, MANY)


def test_file_that_cannot_get_its_size_takes_no_room(tier, folder):
    assert tier.write(block(0), content(0))
    with largest_file(BLOCK_BYTES // 2):
        assert not tier.write(block(1), content(1))
    assert_accounted(tier, folder)


@contextmanager
def temporary_folder():
    """A new folder for each example of a property."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "kv"


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16),
)
@settings(max_examples=40)
def test_block_comes_back_bit_by_bit(sizes, tokens):
    name = BlockName(bytes(range(32)), bytes(32), np.array(tokens, dtype="<i4").tobytes())
    with temporary_folder() as folder:
        tier = DiskTier(folder, sizes, 10**6)
        assert tier.write(name, content(1, sizes))
        assert read(tier, name, sizes) == content(1, sizes)
        # A restart finds it too.
        assert read(DiskTier(folder, sizes, 10**6), name, sizes) == content(1, sizes)
        assert tier.counts.read_bytes == sum(sizes)
        assert tier.counts.written_bytes == tier.bytes_used == real_bytes(folder) - USAGE_BYTES


def test_file_is_laid_out_as_described(tier, folder):
    tier.write(block(5), content(5))
    written = path_of(folder, block(5)).read_bytes()
    fields = struct.unpack_from("<8sIII32s32s64s3Q3I", written)
    key, parent, tokens = block(5)
    checksums = [zlib.crc32(part) for part in content(5)]
    expected = (b"ATTNKEYS", 1, 3, 6, key, parent, tokens.ljust(64, b"\0"), *SIZES, *checksums)
    assert fields == expected
    assert struct.unpack("<I", written[HEAD_BYTES - 4 : HEAD_BYTES]) == (
        zlib.crc32(written[: HEAD_BYTES - 4]),
    )
    assert written[HEAD_BYTES:] == b"".join(content(5))


def test_parts_may_be_arrays_of_any_shape_and_are_read_into_such_arrays(tier):
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    tier.write(block(1), [first.data, *content(1)[1:]])
    again = np.zeros_like(first)
    with tier.open(block(1)) as opened:
        opened.read_part(0, again.data)
    assert (again == first).all()


def test_short_system_calls_are_continued(tier, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, memoryview(data)[:37], offset))
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: preadv(file, [into[0][:41]], offset))
    assert tier.write(block(1), content(1))
    assert read(tier, block(1)) == content(1)


@given(
    st.one_of(st.integers(0, IDENTITY_BYTES + 20), st.integers(0, BLOCK_BYTES - 1), st.integers(-120, -1)),
    st.integers(0, 7),
)
@settings(max_examples=150)
def test_any_flipped_bit_is_found_and_the_block_removed(position, bit):
    with temporary_folder() as folder:
        tier = DiskTier(folder, SIZES, MANY)
        tier.write(block(3), content(3))
        flip(path_of(folder, block(3)), position, bit)
        assert read(tier, block(3)) is None
        assert tier.counts.damaged == 1
        assert not tier.contains(block(3).key)
        assert tier.bytes_used == 0
        assert tier.write(block(3), content(3))
        assert read(tier, block(3)) == content(3)


def test_damaged_part_leaves_the_other_parts_readable_but_the_block_is_gone(tier, folder):
    tier.write(block(3), content(3))
    flip(path_of(folder, block(3)), HEAD_BYTES + SIZES[0])
    first, second = bytearray(SIZES[0]), bytearray(SIZES[1])
    with tier.open(block(3)) as opened:
        with pytest.raises(DamagedBlock):
            opened.read_part(1, memoryview(second))
        opened.read_part(0, memoryview(first))
    assert first == content(3)[0]
    assert tier.open(block(3)) is None
    assert tier.counts.damaged == 1


@pytest.mark.parametrize(
    "size", ["a fifo", 0, 1, 8, IDENTITY_BYTES, *(HEAD_BYTES + more for more in (-1, 0, 48, 96, 115, 117))]
)
def test_file_of_another_size_or_a_fifo_is_absent_and_removed_and_not_waited_for(tier, folder, size):
    tier.write(block(3), content(3))
    path = path_of(folder, block(3))
    if size == "a fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        os.truncate(path, size)
    assert tier.open(block(3)) is None
    assert (tier.counts.damaged, files(folder)) == (1, [])


def test_file_cut_after_it_was_opened_is_found(tier, folder):
    tier.write(block(3), content(3))
    with tier.open(block(3)) as opened:
        os.truncate(path_of(folder, block(3)), BLOCK_BYTES - 1)
        with pytest.raises(DamagedBlock):
            opened.read_part(2, memoryview(bytearray(SIZES[2])))
    assert not tier.contains(block(3).key)


@pytest.mark.parametrize(
    "other",
    [
        block(4),
        block(3)._replace(parent=bytes(32)),
        block(3)._replace(tokens=block(4).tokens),
        block(3)._replace(tokens=block(3).tokens + bytes(4)),
    ],
    ids=["key", "parent", "tokens", "one more token 0"],
)
def test_block_of_another_name_is_absent(tier, folder, other):
    tier.write(block(3), content(3))
    path_of(folder, other).parent.mkdir(exist_ok=True)
    path_of(folder, block(3)).rename(path_of(folder, other))
    assert tier.contains(other.key)
    assert tier.open(other) is None
    assert tier.counts.damaged == 1


@pytest.mark.parametrize("sizes", [(48, 20, 48), (48, 48), (116,), (48, 48, 20, 1), (12, 12, 5)])
def test_block_with_other_parts_is_absent(tier, folder, sizes):
    tier.write(block(3), content(3))
    assert DiskTier(folder, sizes, MANY).open(block(3)) is None


def test_read_error_of_the_disk_makes_a_block_absent(tier, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    tier.write(block(3), content(3))
    with tier.open(block(3)) as opened, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(DamagedBlock):
            opened.read_part(0, memoryview(bytearray(SIZES[0])))
    tier.write(block(3), content(3))
    monkeypatch.setattr(os, "preadv", fails)
    assert tier.open(block(3)) is None
    assert tier.counts.damaged == 2


def test_block_that_another_process_evicted_is_absent_but_not_damaged(tier, folder):
    tier.write(block(3), content(3))
    assert tier.contains(block(3).key)
    DiskTier(folder, SIZES, MANY).remove(block(3).key)
    assert tier.open(block(3)) is None
    assert tier.counts.damaged == 0


def test_open_block_stays_readable_when_it_is_removed(tier):
    tier.write(block(3), content(3))
    part = bytearray(SIZES[0])
    with tier.open(block(3)) as opened:
        tier.remove(block(3).key)
        opened.read_part(0, memoryview(part))
    assert part == content(3)[0]


def test_block_that_is_there_is_not_written_again(tier, folder):
    tier.write(block(3), content(3))
    before, written = path_of(folder, block(3)).stat(), tier.counts.written_bytes
    for again in (tier, DiskTier(folder, SIZES, MANY)):
        assert again.write(block(3), content(4))
    after = path_of(folder, block(3)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert tier.counts.written_bytes == written
    assert read(tier, block(3)) == content(3)


def test_of_two_writers_of_one_block_the_faster_one_stays(tier, folder):
    other = DiskTier(folder, SIZES, MANY)
    assert tier.write(block(3), content(3), lambda index: index or other.write(block(3), content(4)))
    assert read(tier, block(3)) == content(4)
    assert len(files(folder)) == 1
    assert_accounted(tier, folder)


def test_writer_is_told_of_each_part_and_may_stop(tier, folder):
    told = []
    tier.write(block(3), content(3), told.append)
    assert told == [0, 1, 2]

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier.write(block(4), content(4), interrupt)
    assert files(folder) == [path_of(folder, block(3))]
    assert_accounted(tier, folder)


def test_wrong_sizes_are_refused(tier, folder):
    tier.write(block(3), content(3))
    with pytest.raises(ValueError, match=r"parts of \(48, 48\)"):
        tier.write(block(4), content(4)[:2])
    with pytest.raises(ValueError, match="cannot have 31, 32 and 4 bytes"):
        tier.open(BlockName(bytes(31), bytes(32), bytes(4)))
    for tokens in (b"", bytes(5), bytes(68)):
        with pytest.raises(ValueError, match="cannot have"):
            tier.open(block(3)._replace(tokens=tokens))
    with tier.open(block(3)) as opened, pytest.raises(ValueError, match="part 2 has 20 bytes, not 19"):
        opened.read_part(2, memoryview(bytearray(19)))
    for sizes in ((), (4, 0)):
        with pytest.raises(ValueError, match="part sizes"):
            DiskTier(folder, sizes, MANY)
    assert len(files(folder)) == 1


# Each step: which tier acts, what it does, with which block, and which block the other tier writes meanwhile.
steps = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["write", "write", "read", "remove"]),
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(st.lists(steps, max_size=25), st.integers(0, 5))
@settings(max_examples=60)
def test_no_order_of_steps_of_two_tiers_exceeds_the_limit(order, blocks):
    most = limit(blocks) + 1000
    with temporary_folder() as folder:
        tiers = [DiskTier(folder, SIZES, most) for _ in range(2)]
        for who, act, number, meanwhile in order:

            def write_meanwhile(index, other=tiers[1 - who], number=meanwhile):
                assert real_bytes(folder) <= most
                if index == 1:
                    other.write(block(number), content(number))
                    assert real_bytes(folder) <= most

            match act:
                case "write":
                    if tiers[who].write(block(number), content(number), write_meanwhile):
                        assert blocks > 0
                case "read":
                    there = tiers[who].contains(block(number).key)
                    assert read(tiers[who], block(number)) == (content(number) if there else None)
                case "remove":
                    tiers[who].remove(block(number).key)
            assert real_bytes(folder) <= most
            assert_accounted(tiers[who], folder)
        assert all(path.suffix == ".kv" for path in files(folder))


def write_blocks(folder: Path, blocks: range, most: int) -> None:
    tier = DiskTier(folder, SIZES, most)
    for number in blocks:
        tier.write(block(number), content(number))


def test_two_processes_stay_below_the_limit_together(folder):
    most = limit(7)
    DiskTier(folder, SIZES, most)
    writers = [
        fork.Process(target=write_blocks, args=(folder, numbers, most))
        for numbers in (range(0, 60), range(40, 100))
    ]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(real_bytes(folder))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert max(seen) <= most
    tier = DiskTier(folder, SIZES, most)
    kept = [number for number in range(100) if tier.contains(block(number).key)]
    assert len(kept) >= 6
    assert all(read(tier, block(number)) == content(number) for number in kept)
    assert_accounted(tier, folder)


def test_full_tier_evicts_the_block_that_was_not_used_for_the_longest_time(folder):
    tier = DiskTier(folder, SIZES, limit(3))
    for number in range(3):
        tier.write(block(number), content(number))
        set_age(folder, number, 30 - number)
    tier.open(block(0)).close()
    assert tier.write(block(3), content(3))
    assert [number for number in range(4) if not tier.contains(block(number).key)] == [1]
    assert tier.counts.evictions == 1


@pytest.mark.parametrize(("fit", "kept"), [(3, [0, 2, 4]), (2, [0, 2])])
def test_start_with_a_lower_limit_evicts_blocks_of_a_clock_that_was_ahead_and_then_the_oldest(
    folder, fit, kept
):
    tier = DiskTier(folder, SIZES, limit(5))
    for number, age in enumerate((30, -86_400, -30, -90_000, 60)):
        tier.write(block(number), content(number))
        set_age(folder, number, age)
    tier = DiskTier(folder, SIZES, limit(fit))
    assert [number for number in range(5) if tier.contains(block(number).key)] == kept
    assert_accounted(tier, folder)


def test_use_after_the_last_scan_protects_a_block(folder):
    writer, reader = (DiskTier(folder, SIZES, limit(4)) for _ in range(2))
    for number in range(4):
        writer.write(block(number), content(number))
        set_age(folder, number, 30 - number)
    writer.write(block(4), content(4))  # evicts block 0, and lists blocks 1 to 3
    reader.open(block(1)).close()
    writer.write(block(5), content(5))
    assert [number for number in range(6) if writer.contains(block(number).key)] == [1, 3, 4, 5]


def test_use_is_recorded_at_most_once_a_second(tier, folder):
    tier.write(block(0), content(0))
    set_age(folder, 0, 0.3)
    before = path_of(folder, block(0)).stat().st_mtime_ns
    tier.open(block(0)).close()
    assert path_of(folder, block(0)).stat().st_mtime_ns == before
    set_age(folder, 0, 1.5)
    tier.open(block(0)).close()
    assert path_of(folder, block(0)).stat().st_mtime_ns > before
    # As if the clock had been ahead at the last use.
    set_age(folder, 0, -86_400)
    tier.open(block(0)).close()
    assert path_of(folder, block(0)).stat().st_mtime < time.time() + 3600


def test_protected_blocks_are_never_evicted(folder):
    protected = {block(0).key, block(2).key}
    tier = DiskTier(folder, SIZES, limit(3), protected=lambda: protected)
    for number in range(20):
        assert tier.write(block(number), content(number))
    assert [number for number in range(20) if tier.contains(block(number).key)] == [0, 2, 19]
    protected.add(block(19).key)
    assert not tier.write(block(20), content(20))
    assert (tier.counts.failed_writes, len(files(folder))) == (1, 3)
    protected.clear()
    assert tier.write(block(20), content(20))
    assert not tier.contains(block(0).key)


def test_block_larger_than_the_limit_is_refused_and_evicts_nothing(folder):
    DiskTier(folder, SIZES, limit(3)).write(block(0), content(0))
    sizes = (3 * BLOCK_BYTES,)
    tier = DiskTier(folder, sizes, limit(3))
    assert not tier.write(block(1), content(1, sizes))
    assert tier.counts.failed_writes == 1
    assert tier.contains(block(0).key)


@pytest.mark.parametrize(("most", "fit"), [(limit(3), 3), (limit(3) - 1, 2)])
def test_limit_is_used_up_to_the_last_byte(folder, most, fit):
    write_blocks(folder, range(5), most)
    assert len(files(folder)) == fit


def test_full_tier_evicts_a_twentieth_at_once(folder):
    write_blocks(folder, range(40), limit(40))
    assert len(files(folder)) == 40
    write_blocks(folder, range(40, 41), limit(40))
    assert len(files(folder)) == 39


def test_full_tier_rarely_scans_the_folder(folder, monkeypatch):
    scans, iterdir = [], Path.iterdir
    everything = {block(number).key for number in range(1000)}
    protected = set()
    tier = DiskTier(folder, SIZES, limit(40), protected=lambda: protected)
    monkeypatch.setattr(Path, "iterdir", lambda path: scans.append(path) or iterdir(path))
    for number in range(160):
        tier.write(block(number), content(number))
    assert len(scans) in (3, 4)
    # While nothing can be evicted, the second refusal needs no scan either.
    protected.update(everything)
    while tier.write(block(number := number + 1), content(number)):
        pass
    before = len(scans)
    assert not any(tier.write(block(number), content(number)) for number in range(200, 210))
    assert len(scans) == before


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_full_disk_leaves_nothing_and_is_said_once(tier, folder, monkeypatch, writes, caplog):
    tier.write(block(0), content(0))
    pwrite, done = os.pwrite, []

    def pwrite_until_full(descriptor, data, offset):
        if len(data) > USAGE_BYTES:
            if len(done) == writes:
                raise OSError(errno.ENOSPC, "No space left on device")
            done.append(offset)
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite_until_full)
        assert not tier.write(block(1), content(1))
        assert not tier.write(block(1), content(1))
    assert len(done) == writes
    assert files(folder) == [path_of(folder, block(0))]
    assert tier.counts.failed_writes == 2
    assert caplog.text.count(f"keys and values are not saved in {folder}: No space left on device") == 1
    assert_accounted(tier, folder)
    assert tier.write(block(1), content(1))


def test_folder_that_vanishes_makes_blocks_absent_and_is_made_again(tier, folder, caplog):
    tier.write(block(0), content(0))
    shutil.rmtree(folder)
    assert not tier.contains(block(0).key)
    assert tier.open(block(0)) is None
    assert tier.bytes_used == 0
    assert tier.write(block(1), content(1))
    assert read(tier, block(1)) == content(1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shutil.rmtree(folder)
    tier.clear()
    assert caplog.text.count("was removed, and was made again") == 2


def test_at_most_half_of_the_files_that_the_process_may_open_are_blocks(folder, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, 5))
    tier = DiskTier(folder, SIZES, MANY)
    for number in range(3):
        tier.write(block(number), content(number))
    damaged, first, second = (path_of(folder, block(0)), tier.open(block(1)), tier.open(block(2)))
    assert tier.open(block(0)) is None
    assert read(tier, block(0)) is None
    first.close()
    first.close()
    flip(damaged, 0)
    assert tier.open(block(0)) is None  # damaged, and no place is lost by that
    assert tier.open(block(3)) is None
    with tier.open(block(1)):
        assert tier.open(block(1)) is None
    second.close()


def write_and_hang(folder: Path, reached) -> None:
    def hang(index: int) -> None:
        if index == 1:
            reached.set()
            time.sleep(60)

    DiskTier(folder, SIZES, limit(3)).write(block(1), content(1), hang)


@pytest.fixture
def killed_writer(folder):
    """A tier that was opened before a process was killed while it wrote block 1. Block 0 is whole."""
    tier = DiskTier(folder, SIZES, limit(3))
    tier.write(block(0), content(0))
    reached = fork.Event()
    writer = fork.Process(target=write_and_hang, args=(folder, reached))
    writer.start()
    assert reached.wait(240)
    # Another start meanwhile does not take the file from its writer.
    assert DiskTier(folder, SIZES, limit(3)).bytes_used == 2 * BLOCK_BYTES
    writer.kill()
    writer.join()
    assert [path.suffix for path in files(folder)].count(".unfinished") == 1
    return tier


def test_start_removes_what_a_killed_writer_left(killed_writer, folder):
    assert killed_writer.bytes_used == 2 * BLOCK_BYTES
    tier = DiskTier(folder, SIZES, limit(3))
    assert files(folder) == [path_of(folder, block(0))]
    assert tier.bytes_used == BLOCK_BYTES
    assert tier.open(block(1)) is None
    assert read(tier, block(0)) == content(0)
    assert tier.write(block(1), content(1))


def test_full_tier_removes_what_a_killed_writer_left_before_it_evicts(killed_writer, folder):
    for number in (2, 3):
        assert killed_writer.write(block(number), content(number))
    assert killed_writer.counts.evictions == 0
    assert_accounted(killed_writer, folder)


def test_usage_that_is_too_high_is_corrected_when_the_tier_is_full(folder):
    tier = DiskTier(folder, SIZES, limit(3))
    tier.write(block(0), content(0))
    (folder / "usage").write_bytes(struct.pack("<q", 3 * BLOCK_BYTES))
    assert tier.write(block(1), content(1))
    assert tier.contains(block(0).key)
    assert_accounted(tier, folder)


def test_lost_usage_is_counted_anew(folder):
    tier = DiskTier(folder, SIZES, limit(3))
    for number in range(3):
        tier.write(block(number), content(number))
    (folder / "usage").unlink()
    assert tier.write(block(3), content(3))
    assert len(files(folder)) == 3
    assert_accounted(tier, folder)


def write_for_ever(folder: Path) -> None:
    tier, number = DiskTier(folder, SIZES, limit(3)), 0
    while True:
        tier.write(block(number % 20), content(number % 20))
        number += 1


def test_killed_at_any_time_a_writer_leaves_only_whole_blocks(folder):
    tier = DiskTier(folder, SIZES, limit(3))
    for milliseconds in range(5, 25, 2):
        writer = fork.Process(target=write_for_ever, args=(folder,))
        writer.start()
        while not files(folder):
            time.sleep(0.001)
        time.sleep(milliseconds / 1000)
        writer.kill()
        writer.join()
        assert real_bytes(folder) <= limit(3)
        for number in range(20):
            there = tier.contains(block(number).key)
            assert read(tier, block(number)) == (content(number) if there else None)
        assert tier.counts.damaged == 0
        assert_accounted(DiskTier(folder, SIZES, limit(3)), folder)


def test_threads_share_a_tier(folder):
    tier = DiskTier(folder, SIZES, limit(5))

    def work(offset: int) -> None:
        for step in range(60):
            number = (step * 7 + offset) % 12
            tier.write(block(number), content(number))
            got.append(read(tier, block(number)) in (None, content(number)))

    got: list[bool] = []
    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [True] * 240
    assert (tier.counts.damaged, len(files(folder))) == (0, tier.bytes_used // BLOCK_BYTES)
    assert_accounted(tier, folder)


def test_only_the_owner_can_read_the_blocks(tmp_path):
    folder = tmp_path / "new" / "kv"
    umask = os.umask(0)
    try:
        tier = DiskTier(folder, SIZES, MANY)
        modes = []
        tier.write(
            block(0), content(0), lambda _: modes.extend(path.stat().st_mode for path in files(folder))
        )
    finally:
        os.umask(umask)
    modes += [path.stat().st_mode for path in (*files(folder), folder / "usage")]
    assert {stat.S_IMODE(mode) for mode in modes} == {0o600}
    folders = (folder, path_of(folder, block(0)).parent)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_folder_that_others_can_read_is_made_private(folder):
    folder.mkdir()
    folder.chmod(0o755)
    DiskTier(folder, SIZES, MANY)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskTier(tmp_path / "file" / "kv", SIZES, MANY)


def test_remove_and_clear_remove_blocks_of_all_tiers_and_nothing_else(tier, folder):
    other = DiskTier(folder, SIZES, MANY)
    for number in range(4):
        tier.write(block(number), content(number))
    subfolder = path_of(folder, block(1)).parent
    # The last one has the name of a block, but no block of this name belongs in this subfolder.
    foreign = [folder / "notes.txt", subfolder / "notes.kv", subfolder / path_of(folder, block(2)).name]
    for path in foreign:
        path.write_text("mine", encoding="utf-8")
    other.remove(block(0).key)
    other.remove(block(9).key)
    assert [tier.contains(block(number).key) for number in range(4)] == [False, True, True, True]
    assert tier.bytes_used == 3 * BLOCK_BYTES
    other.clear()
    assert sorted(files(folder)) == sorted(foreign)
    assert tier.bytes_used == 0


def test_a_lock_that_is_never_released_delays_nothing_for_ever(tier, folder, monkeypatch):
    monkeypatch.setattr(disk, "_MAX_LOCK_SECONDS", 0.05)
    tier.write(block(0), content(0))
    with (folder / "usage").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not tier.write(block(1), content(1))
        assert read(tier, block(0)) == content(0)
        with pytest.raises(OSError, match="another process holds its lock"):
            tier.clear()
    assert tier.write(block(1), content(1))


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "letters").write_text("private")
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match="not empty"):
        DiskTier(tmp_path, SIZES, MANY)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]
