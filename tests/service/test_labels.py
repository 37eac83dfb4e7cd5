import sys
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.labels import LabelMemory

# Room for one short label with a short embedding, but not for two.
ONE = 600


def remembering(*labels, capacity_bytes):
    memory = LabelMemory(capacity_bytes)
    for label in labels:
        memory.remember([label], True, np.full((1, 2), len(label)))
    return memory


def test_cache_keeps_the_labels_used_last():
    memory = remembering("a", "bb", capacity_bytes=2 * ONE)
    memory.recall(["a"], True)
    memory.remember(["ccc"], True, np.full((1, 2), 3))
    assert set(memory.recall(["a", "bb", "ccc"], True)) == {"a", "ccc"}


def test_truncated_label_is_another_label_than_the_whole_label():
    assert remembering("a", capacity_bytes=ONE).recall(["a"], False) == {}


def test_more_labels_than_fit_are_answered_and_dropped():
    memory = LabelMemory(ONE)
    memory.remember(["a", "b", "c"], True, np.eye(3))
    assert list(memory.recall(["a", "b", "c"], True)) == ["c"]


def test_label_of_two_concurrent_requests_is_counted_once():
    memory = LabelMemory(2 * ONE)
    for label in "abbbbbb":
        memory.remember([label], True, np.eye(1))
    assert set(memory.recall(["a", "b"], True)) == {"a", "b"}


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("aä中🙂")), min_size=1, max_size=60),
    st.integers(1, 600),
)
def test_cache_never_exceeds_its_capacity(sizes, dimensions):
    memory = LabelMemory(50_000)
    labels = [f"{number}{character * length}" for number, (length, character) in enumerate(sizes)]
    for label in labels:
        memory.remember([label], True, np.zeros((1, dimensions), np.float32))
        kept = memory.recall(labels, True)
        assert sum(sys.getsizeof(name) + kept[name].nbytes for name in kept) <= 50_000
    # The last labels that fit.
    (kept, fitting), room = (list(memory.recall(labels, True)), []), 50_000.0
    for label in reversed(labels):
        room -= 1.5 * (sys.getsizeof(label) + 4 * dimensions + 500)
        if room < 0:
            break
        fitting.append(label)
    assert set(fitting) <= set(kept)


def test_long_labels_of_many_requests_do_not_fill_the_memory():
    """A label of 1.6 MB, as a body of 2 MB may hold, takes four bytes per character; 40 take 260 MB."""
    memory = LabelMemory()
    tracemalloc.start()
    for number in range(40):
        memory.remember([f"{number}🙂" + "a" * 1_600_000], True, np.zeros((1, 384), np.float32))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 35 * 2**20


def test_cached_embedding_keeps_no_other_embedding_in_memory():
    memory = LabelMemory()
    memory.remember(["a"], True, np.zeros((1000, 384), np.float32)[:1])
    assert memory.recall(["a"], True)["a"].base is None
