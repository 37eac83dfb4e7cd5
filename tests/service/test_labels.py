import numpy as np

from service.labels import LabelMemory


def remembering(*labels: str, capacity: int) -> LabelMemory:
    memory = LabelMemory(capacity)
    for label in labels:
        memory.remember([label], True, np.full((1, 2), len(label)))
    return memory


def test_memory_keeps_the_labels_asked_for_last() -> None:
    memory = remembering("a", "bb", capacity=2)
    memory.recall(["a"], True)
    memory.remember(["ccc"], True, np.full((1, 2), 3))
    assert set(memory.recall(["a", "bb", "ccc"], True)) == {"a", "ccc"}


def test_label_cut_short_is_another_one_than_the_label_never_cut() -> None:
    assert remembering("a", capacity=2).recall(["a"], False) == {}


def test_more_labels_than_fit_are_answered_and_forgotten() -> None:
    memory = LabelMemory(1)
    memory.remember(["a", "b", "c"], True, np.eye(3))
    assert list(memory.recall(["a", "b", "c"], True)) == ["c"]
