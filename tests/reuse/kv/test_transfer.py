"""Blocks between memory and disk: overlap, answers before saves, damage, full disks, look-ahead."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from core_models import flip
from kv_models import assert_same, computed_by, plain, prefix_key, random_ids, run, settled, store_of

from attncache_core.engine import continued
from attncache_core.reuse.kv.block_file import OpenBlock
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.opening import block_layout
from attncache_core.reuse.kv.transfer import Transfers

LAYERS = 3


def test_first_second_and_third_request_and_after_a_restart_are_the_same(model, open_store):
    sequences = [random_ids(70), random_ids(70)[:40] + random_ids(5, 1), random_ids(9, 2)]
    store, expected = open_store(), plain(model, sequences).outputs
    for _ in range(3):
        assert_same(model, run(model, store, sequences).outputs, expected)
    settled(store)
    after = open_store()
    found = run(model, after, sequences)
    assert_same(model, found.outputs, expected)
    assert found.report.tokens == 0
    assert after.counts.given_blocks == {"memory": 0, "disk": len(store.memory)}
    longer = [ids + random_ids(12, 3) for ids in sequences]
    again = open_store()
    result = run(model, again, longer)
    assert_same(model, result.outputs, plain(model, longer).outputs)
    assert result.cached_tokens.tolist() == [70, 45, 9]
    settled(again)


def test_layers_compute_while_later_layers_load(model, open_store, monkeypatch):
    """The last layer is loaded only after the first layer has computed its rows."""
    store, ids, new = open_store(), random_ids(64), random_ids(20, 1)
    run(model, store, [ids])
    settled(store)
    store, events = open_store(), []
    written = np.zeros(LAYERS, dtype=np.int32)
    read_part, computing = OpenBlock.read_part, computed_by(model)
    compute = getattr(continued, computing)

    def read(self, index, into):
        if index == LAYERS - 1:
            while written[0] < len(new):
                time.sleep(0.001)
            events.append("last layer")
        read_part(self, index, into)

    def noting(*arguments, slots, **more):
        events.append("run")
        result = compute(*arguments, slots=slots.__class__(**{**vars(slots), "written": written}), **more)
        events.append("computed")
        return result

    monkeypatch.setattr(OpenBlock, "read_part", read)
    monkeypatch.setattr(continued, computing, noting)
    found = run(model, store, [ids + new])
    assert events[0] == "run"
    assert events[1] == "last layer"
    assert events[-1] == "computed"
    assert_same(model, found.outputs, plain(model, [ids + new]).outputs)


@pytest.fixture
def may_write(monkeypatch):
    """An event without which no block is written."""
    event, write = threading.Event(), DiskTier.write
    monkeypatch.setattr(
        DiskTier, "write", lambda *arguments, **more: event.wait(240) and write(*arguments, **more)
    )
    return event


def test_the_answer_leaves_before_the_save_ends(model, open_store, may_write):
    store = open_store()
    ids = random_ids(50)
    run(model, store, [ids])  # is the answer
    assert not store.transfers.disk.contains(prefix_key(ids).names[0].key)
    may_write.set()
    settled(store)
    assert all(store.transfers.disk.contains(name.key) for name in prefix_key(ids).names)


def test_what_does_not_fit_into_the_write_buffer_is_dropped_and_counted(model, open_store, may_write):
    store = open_store(buffer=2)
    expected = plain(model, [random_ids(160)]).outputs
    assert_same(model, run(model, store, [random_ids(160)]).outputs, expected)
    assert 7 <= store.transfers.counts.dropped_writes <= 8  # the thread may have taken one block already
    may_write.set()
    settled(store)
    assert run(model, store, [random_ids(160)]).report.tokens == 0  # memory has them all


@pytest.mark.parametrize("part", [0, 1, LAYERS - 1, LAYERS])
def test_a_changed_byte_is_recomputed_counted_and_never_used(model, open_store, tmp_path, part):
    store, ids = open_store(), random_ids(64)
    expected = run(model, store, [[*ids, 5]]).outputs
    settled(store)
    layout, names = store.layout, prefix_key(ids).names
    store = open_store()
    key = names[1].key.hex()
    path = tmp_path / "kv" / key[:2] / f"{key}.kv"
    flip(path, 3 - sum(layout.part_bytes[part:]))
    damaged = path.read_bytes()
    for _ in range(2):
        assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)
    assert store.transfers.disk.counts.damaged == 1
    assert store.counts.recomputed_tokens > 0
    settled(store)
    assert path.read_bytes() != damaged  # it was computed and saved again


def test_a_full_disk_loses_nothing_but_the_save(model, open_store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    store, ids = open_store(), random_ids(64)
    monkeypatch.setattr(os, "pwrite", full)
    expected = run(model, store, [ids]).outputs
    store.transfers.flush()
    assert store.transfers.disk.counts.failed_writes == 4
    assert_same(model, run(model, store, [ids]).outputs, expected)
    settled(store)


def test_blocks_that_left_memory_come_back_from_disk(model, open_store):
    layout = block_layout(model)
    store = open_store(memory=5 * layout.block_bytes)
    sequences = [random_ids(60, seed) for seed in range(4)]
    expected = [plain(model, [ids]).outputs for ids in sequences]
    for _ in range(2):
        for ids, output in zip(sequences, expected, strict=True):
            assert_same(model, run(model, store, [ids]).outputs, output)
            settled(store)
    assert store.counts.given_blocks["disk"]
    assert store.memory.pool.used <= 5


def test_memory_comes_first_and_the_rest_of_a_sequence_from_disk(model, open_store):
    ids = random_ids(96)
    run(model, open_store(), [ids])
    store = open_store()
    run(model, store, [ids[:32]])
    assert store.lookup(prefix_key(ids)) == (32, 64)
    result = run(model, store, [[*ids, 4]])
    assert result.cached_tokens.tolist() == [96]
    assert store.lookup(prefix_key(ids)) == (96, 0)
    settled(store)


@pytest.mark.parametrize("in_memory", [0, 5, 16, 20, 32, 38, 40])
def test_a_saved_block_at_the_end_that_is_short_counts_as_stored(model, open_store, in_memory):
    ids = random_ids(40)
    run(model, open_store(), [ids])
    store = open_store()
    if in_memory:
        run(model, store, [ids[:in_memory]])
    found = store.lookup(prefix_key(ids))
    assert found.memory >= in_memory
    assert sum(found) == 40
    # The last token may not be given, so nothing of its block is known.
    assert sum(store.lookup(prefix_key(ids, max_given=39))) <= max(32, found.memory)
    assert sum(store.lookup(prefix_key([*ids[:39], 2]))) <= max(32, found.memory)


def test_waiting_sequences_are_fetched_into_memory(model, open_store):
    sequences = [random_ids(40, seed) for seed in range(3)]
    run(model, open_store(), sequences)
    store = open_store()
    store.expect([prefix_key(ids) for ids in sequences[:2]])
    settled(store)
    # A short block at the end is fetched too.
    assert [store.lookup(prefix_key(ids)).memory for ids in sequences] == [40, 40, 0]
    assert store.expected == {name.key for ids in sequences[:2] for name in prefix_key(ids).names}
    store.fetch(prefix_key(sequences[0]))  # nothing is left to fetch


def test_fetching_evicts_no_more_than_it_brings(model, open_store):
    layout, hot, long = block_layout(model), random_ids(160), random_ids(160, 1)
    run(model, open_store(), [long[:16]])
    store = open_store(memory=12 * layout.block_bytes)
    run(model, store, [hot])
    store.expect([prefix_key(long)])
    settled(store)
    assert store.lookup(prefix_key(long)).memory == 16
    assert store.lookup(prefix_key(hot)).memory == 160
    assert not store.memory.evicted["full"]


def test_waiting_sequences_are_fetched_once_and_behind_what_a_batch_loads(open_store, monkeypatch):
    store, order = open_store(), []
    started, may_go_on = threading.Event(), threading.Event()

    def work(number):
        order.append(number)
        started.set()
        assert may_go_on.wait(240)

    store.transfers.prefetch([lambda: work(0), lambda: work(1)])
    assert started.wait(240)
    store.transfers.prefetch([lambda: work(2)])
    run_by_a_batch = threading.Event()
    monkeypatch.setattr(store.transfers, "run", lambda _: (order.append("batch"), run_by_a_batch.set()))
    store.transfers.load(None)
    may_go_on.set()
    assert run_by_a_batch.wait(240)
    store.transfers.flush()
    assert order.index("batch") <= 2
    assert 1 not in order
    assert 2 in order


def test_a_batch_waits_for_one_fetch_though_each_batch_before_has_asked_for_some(open_store):
    store = open_store()
    begun, may_end = threading.Event(), threading.Event()
    store.transfers.prefetch([lambda: (begun.set(), may_end.wait(240))])
    assert begun.wait(240)
    for _ in range(5):
        store.transfers.prefetch([lambda: None] * 3)
    assert store.transfers._loads.qsize() == 0
    may_end.set()
    store.transfers.flush()
    store.transfers.prefetch([begun.clear])
    store.transfers.flush()
    assert not begun.is_set()


def test_threads_end_with_transfers_that_nobody_closes():
    """As those of a load that was refused later."""
    transfers = Transfers(None, 1)
    threads = transfers._threads
    fetched, saved = threading.Event(), threading.Event()
    transfers.prefetch([fetched.set])
    assert transfers.save(None, [], saved.set)
    assert fetched.wait(240)
    assert saved.wait(240)
    del transfers
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


def test_a_damaged_block_is_not_fetched(model, open_store):
    ids = random_ids(40)
    run(model, open_store(), [ids])
    store = open_store()
    path = next(store.transfers.disk._folder.rglob("*.kv"))
    flip(path, -1)
    store.fetch(prefix_key(ids))
    assert store.lookup(prefix_key(ids)).memory == 0
    settled(store)
    assert_same(model, run(model, store, [ids]).outputs, plain(model, [ids]).outputs)


def test_nothing_is_loaded_where_computing_is_faster(model, open_store):
    ids = random_ids(64)
    run(model, open_store(), [ids])
    store = open_store()
    store.transfers.load_speed, store.transfers.prefill_speed = 1.0, 1e9
    assert run(model, store, [ids]).report.tokens == 64
    store = open_store()
    store.transfers.load_speed, store.transfers.prefill_speed = 1e12, 1.0
    assert run(model, store, [ids]).report.tokens == 0


def test_two_stores_of_one_folder_find_each_others_blocks(model, tmp_path):
    def open_one():
        disk = DiskTier(tmp_path / "kv", block_layout(model).part_bytes, 2**24)
        return store_of(model, transfers=Transfers(disk, 1000))

    first, second, ids = open_one(), open_one(), random_ids(40)
    run(model, first, [ids])
    first.transfers.flush()
    assert run(model, second, [ids]).report.tokens == 0
    first.clear()
    third = open_one()
    assert run(model, third, [ids]).report.tokens == 40
    for store in (first, second, third):
        store.close()


def test_speed_of_loading_is_measured_and_the_blocks_are_removed(open_store, monkeypatch):
    store = open_store()
    store.transfers.measure(store.layout.part_bytes)
    assert store.transfers.load_speed > 0
    assert store.transfers.disk.bytes_used == 0
    monkeypatch.setattr(DiskTier, "write", lambda *_: False)
    unmeasured = open_store().transfers
    unmeasured.measure(store.layout.part_bytes)
    assert unmeasured.load_speed == 0
    assert unmeasured.pays(store.layout.token_bytes)


def test_what_waits_is_saved_before_the_threads_end(model, open_store):
    store, ids = open_store(), random_ids(64)
    run(model, store, [ids])
    store.close()
    store.transfers.flush()  # has nothing to wait for
    assert all(store.transfers.disk.contains(name.key) for name in prefix_key(ids).names)


def test_without_threads_blocks_are_still_loaded_and_none_waits_to_be_saved(model, open_store):
    """A forked process has no threads of its parent, and an engine may run after it was closed."""
    store = open_store(memory=5 * block_layout(model).block_bytes)
    ids, others = random_ids(64), random_ids(64, 1)
    run(model, store, [ids])
    store.close()
    run(model, store, [others])  # evicts the first sequence
    assert store.transfers.counts.dropped_writes
    settled(store)
    result = run(model, store, [ids + random_ids(5, 2)])
    assert result.cached_tokens.tolist() == [64]
    assert_same(model, result.outputs, plain(model, [ids + random_ids(5, 2)]).outputs)
    settled(store)


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_a_loading_thread_that_fails_goes_on_and_its_blocks_are_not_used(
    model, open_store, monkeypatch, error
):
    ids = random_ids(40)
    run(model, open_store(), [ids])
    store, read_part = open_store(), OpenBlock.read_part

    def failing(self, index, into):
        if index == 1:
            raise error
        read_part(self, index, into)

    monkeypatch.setattr(OpenBlock, "read_part", failing)
    assert_same(model, run(model, store, [ids]).outputs, plain(model, [ids]).outputs)
    store.clear()
    monkeypatch.setattr(OpenBlock, "read_part", read_part)
    settled(store)


def test_speed_of_loading_is_not_measured_where_blocks_would_be_evicted(model, open_store):
    size = open_store().transfers.disk.file_bytes
    store, ids = open_store(most=6 * size), random_ids(64)
    run(model, store, [ids])
    store.transfers.flush()
    store.transfers.measure(store.layout.part_bytes)
    assert store.transfers.load_speed == 0
    assert store.lookup(prefix_key(ids)).disk == 0
    assert all(store.transfers.disk.contains(name.key) for name in prefix_key(ids).names)
