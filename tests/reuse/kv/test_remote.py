"""Blocks that other machines have saved: found, exact, refused if they are not what was saved."""

import threading

import pytest
from kv_models import assert_same, plain, prefix_key, random_ids, run, settled, store_of

from attncache_core.reuse.kv import transfer
from attncache_core.reuse.kv.block_file import BlockFormat
from attncache_core.reuse.kv.disk import DiskTier
from attncache_core.reuse.kv.info import key_value_info
from attncache_core.reuse.kv.opening import block_layout
from attncache_core.reuse.kv.remote import RemoteTier
from attncache_core.reuse.kv.transfer import Transfers


class Values:
    """BlockValues in this process. `fails`: what raises OSError."""

    def __init__(self):
        self.known = {}
        self.fails = set()
        self.asked = []

    def _ask(self, what):
        self.asked.append(what)
        if what in self.fails:
            raise OSError("away")

    def heads(self, names, size):
        self._ask("heads")
        return [self.known.get(name, b"")[:size] for name in names]

    def get(self, name):
        self._ask("get")
        return self.known.get(name)

    def contains(self, name):
        self._ask("contains")
        return name in self.known

    def put(self, name, value, seconds=None):  # noqa: ARG002
        self._ask("put")
        self.known[name] = value

    def remove(self, name):
        self.known.pop(name, None)

    def clear(self):
        self.known.clear()

    def close(self):
        self.asked.append("close")


@pytest.fixture
def open_store(model, tmp_path):
    """Open stores of several machines, which share `values`; folder: the disk of one of them."""
    opened = []

    def open_one(values, folder=None, **more):
        parts = block_layout(model).part_bytes
        disk = DiskTier(tmp_path / folder, parts, 2**24) if folder else None
        store = store_of(model, transfers=Transfers(disk, 1000, remote=RemoteTier(values, parts)), **more)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def saved(model, open_store):
    """Save a sequence on another machine: the values, the first 64 token ids, and the outputs."""
    values, ids = Values(), random_ids(64)
    first = open_store(values)
    expected = run(model, first, [[*ids, 5]]).outputs
    settled(first)
    return values, ids, expected


@pytest.mark.parametrize("folder", [None, "kv"])
def test_another_machine_gets_what_was_saved_exactly_and_once(model, open_store, folder):
    values, ids = Values(), random_ids(70)
    sequences = [ids + random_ids(9, 1), ids[:40] + random_ids(30, 2)]
    first = open_store(values, folder and "first")
    run(model, first, [ids])
    settled(first)
    assert len(values.known) == len(prefix_key(ids).names)
    second, expected = open_store(values, folder), plain(model, sequences).outputs
    values.asked.clear()
    for _ in range(2):
        assert_same(model, run(model, second, sequences).outputs, expected)
    assert values.asked.count("get") == 5  # every block once, also the short one at the end
    settled(second)
    assert second.counts.given_blocks["shared"] == 5
    third = open_store(values, folder)
    result = run(model, third, sequences)
    assert_same(model, result.outputs, expected)
    assert result.report.tokens == 0
    # The disk comes first, and has what was computed here.
    assert third.counts.given_blocks["disk"] == (4 if folder else 0)
    settled(third)
    assert key_value_info(third).shared.read_bytes > 0


@pytest.mark.parametrize("part", [-1, 0, 2, 3])
def test_other_bytes_under_the_name_of_a_block_are_refused_removed_counted_and_computed(
    model, open_store, part
):
    values, ids, expected = saved(model, open_store)
    names = [name.key.hex() for name in prefix_key(ids).names]
    before = dict(values.known)
    if part < 0:  # the whole block of another name
        values.known[names[1]] = before[names[2]]
    else:
        content = bytearray(before[names[1]])
        content[BlockFormat(block_layout(model).part_bytes).offsets[part] + 3] ^= 1
        values.known[names[1]] = bytes(content)
    store = open_store(values)
    for _ in range(2):
        assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)
    assert store.transfers.remote.counts.damaged == 1
    assert (store.counts.recomputed_tokens > 0) == (part >= 0)
    settled(store)
    assert values.known == before  # computed and saved again


@pytest.mark.parametrize(
    "fails", [{"heads"}, {"get"}, {"put", "contains"}, {"heads", "get", "put", "contains"}]
)
def test_values_that_cannot_be_had_are_computed_and_counted(model, open_store, fails):
    values, ids, expected = saved(model, open_store)
    values.fails = fails
    store = open_store(values)
    assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)
    settled(store)
    counts = store.transfers.remote.counts
    assert bool(counts.failures) == bool(fails & {"heads", "get"})
    assert bool(counts.failed_writes) == ("put" in fails and "heads" in fails)
    assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)


def test_a_block_that_leaves_between_question_and_reading_is_computed(model, open_store):
    values, ids, expected = saved(model, open_store)
    store = open_store(values)
    heads = values.heads

    def evicting(*arguments):
        found = heads(*arguments)
        values.known.clear()
        return found

    values.heads = evicting
    assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)
    assert store.transfers.remote.counts.damaged == 0
    settled(store)


def test_a_value_that_is_read_for_too_long_is_given_up(model, open_store, monkeypatch):
    monkeypatch.setattr("attncache_core.reuse.kv.remote._MAX_READ_SECONDS", 0.0)
    values, ids, expected = saved(model, open_store)
    store = open_store(values)
    assert_same(model, run(model, store, [[*ids, 5]]).outputs, expected)
    assert "get" not in values.asked
    settled(store)


def test_nothing_is_asked_where_computing_is_faster_and_while_a_slow_store_rests(
    model, open_store, monkeypatch
):
    values, ids = Values(), random_ids(64)
    settled_first = open_store(values)
    run(model, settled_first, [ids])
    settled(settled_first)
    values.asked.clear()
    store = open_store(values)
    store.transfers.remote_speed, store.transfers.prefill_speed = 1.0, 1e9
    assert run(model, store, [ids]).report.tokens == 64
    assert "heads" not in values.asked
    store.transfers.flush()
    for seconds in (60.0, 0.0):
        monkeypatch.setattr(transfer, "_REST_SECONDS", seconds)
        store = open_store(values)
        store.transfers.prefill_speed = 1e12  # and the speed of the store is not known
        assert run(model, store, [ids]).report.tokens == 0
        store.transfers.flush()  # the speed is learned after the answer
        store.transfers.remote_speed = 0.0
        values.asked.clear()
        run(model, store, [random_ids(64, seed=1)])
        assert ("heads" in values.asked) == (seconds == 0)


def test_the_answer_leaves_before_the_block_is_saved_and_the_end_closes_the_connections(model, open_store):
    values, may_put = Values(), threading.Event()
    put = values.put
    values.put = lambda *arguments: may_put.wait(240) and put(*arguments)
    store, ids = open_store(values), random_ids(50)
    run(model, store, [ids])  # is the answer
    assert not values.known
    may_put.set()
    store.close()
    assert len(values.known) == 4
    assert values.asked[-1] == "close"


def test_speed_is_measured_and_nothing_stays(open_store):
    values = Values()
    store = open_store(values)
    store.transfers.measure(store.layout.part_bytes)
    assert store.transfers.remote_speed > 0
    assert values.known == {}
    values.fails = {"put"}
    store = open_store(values)
    store.transfers.measure(store.layout.part_bytes)
    assert store.transfers.remote_speed == 0
    assert store.transfers.remote_pays(store.layout.token_bytes)


def test_speed_is_learned_from_what_is_loaded_if_the_store_was_away_at_the_start(model, open_store):
    values, ids = Values(), random_ids(32 * 16)
    first = open_store(values)
    run(model, first, [ids])
    settled(first)
    values.fails = {"heads", "get", "put", "contains"}
    store = open_store(values)
    store.transfers.measure(store.layout.part_bytes)
    values.fails = set()
    run(model, store, [ids[:40]])
    assert store.transfers.remote_speed == 0  # of a few blocks, it is chance
    assert run(model, store, [ids]).report.tokens == 0
    assert store.transfers.remote_speed > 0
    settled(store)


def test_clearing_removes_the_blocks_of_all_machines(model, open_store):
    values = Values()
    store = open_store(values)
    run(model, store, [random_ids(50)])
    assert store.clear() == 4
    assert values.known == {}
