"""A reservoir keeps the texts of greatest priority, in whatever order and parts they come."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.corpus.reservoir import TIME_STEP_SECONDS, Reservoir, SampledText, _gumbel

KEY = bytes(range(32))
HOUR = 3600

texts = st.builds(
    lambda number, client, hour: SampledText(
        np.int32(number).tobytes(), b"" if client == 0 else bytes([client] * 8), hour * HOUR
    ),
    st.integers(0, 40),
    st.integers(0, 2),
    st.integers(0, 500),
)


def reservoir_of(*streams, max_texts=12, half_life_hours=100.0):
    reservoir = Reservoir(KEY, max_texts=max_texts, half_life_hours=half_life_hours)
    for stream in streams:
        for text in stream:
            reservoir.offer(text)
    return reservoir


def numbered(count, asked_at=0, client=b"", first=0):
    numbers = np.arange(first, first + count, dtype="<i4")
    return [SampledText(number.tobytes(), client, asked_at) for number in numbers]


def by_definition(stream, max_texts, half_life_hours):
    """The latest request of each text; a tenth of each client's texts; the greatest of all. No heaps."""
    latest = {}
    for text in sorted(stream, key=lambda text: text.asked_at):
        latest[text.client, text.tokens] = text

    def priority(text):
        return math.log(2) * text.asked_at / (half_life_hours * HOUR) + _gumbel(digest_of(text))

    ordered, held, kept = sorted(latest.values(), key=priority, reverse=True), Counter(), []
    for text in ordered:
        held[text.client] += 1
        if not text.client or held[text.client] <= max(max_texts // 10, 1):
            kept.append(text)
    return set(kept[:max_texts])


def digest_of(text):
    alone = reservoir_of([text])
    return next(iter(alone._kept))


@given(
    st.lists(texts, max_size=80),
    st.lists(st.booleans(), min_size=80, max_size=80),
    st.sampled_from([1, 12, 25]),
)
def test_kept_texts_are_those_of_the_definition_also_if_reservoirs_are_merged(stream, sides, max_texts):
    kept = reservoir_of(stream, max_texts=max_texts)
    assert set(kept) == by_definition(stream, max_texts, 100.0)
    assert len(kept) == len(set(kept))
    parts = [[text for text, side in zip(stream, sides, strict=False) if side == half] for half in (0, 1)]
    merged = reservoir_of(*(reservoir_of(part, max_texts=max_texts) for part in parts), max_texts=max_texts)
    assert set(merged) == set(kept)


def test_text_that_is_asked_again_counts_once_and_becomes_newer():
    reservoir = Reservoir(KEY, max_texts=10, half_life_hours=1)
    (text,) = numbered(1)
    assert [reservoir.offer(text), reservoir.offer(text)] == [True, False]
    later = text._replace(asked_at=TIME_STEP_SECONDS)
    assert reservoir.offer(later)
    assert [*reservoir] == [later]
    assert not reservoir.offer(text)


def test_memory_is_bounded_however_often_texts_are_asked():
    reservoir = Reservoir(KEY, max_texts=20, half_life_hours=1)
    for step in range(300):
        for text in numbered(2, asked_at=step * TIME_STEP_SECONDS, client=bytes([step % 100 + 1])):
            reservoir.offer(text)
    assert len(reservoir) == 20
    assert len(reservoir._of_client) == len(reservoir._smallest_of_client) <= 20
    for step in range(300, 600):
        for text in numbered(2, asked_at=step * TIME_STEP_SECONDS, client=b"a"):
            reservoir.offer(text)
    heaps = reservoir._smallest, *reservoir._smallest_of_client.values()
    assert max(map(len, heaps)) <= 2 * 20 + 16


def test_one_client_holds_at_most_a_tenth():
    noise = numbered(5000, client=b"a" * 8)
    others = numbered(200, first=10_000)
    kept = Counter(text.client for text in reservoir_of(noise, others, max_texts=100))
    assert kept == {b"a" * 8: 10, b"": 90}


def test_old_texts_decay():
    month = [numbered(200, asked_at=day * 24 * HOUR, first=day * 1000) for day in range(28)]
    kept = reservoir_of(*month, max_texts=1000, half_life_hours=168)
    weeks = np.bincount([text.asked_at // (7 * 24 * HOUR) for text in kept], minlength=4)
    # Each week has twice the weight of the week before, until a week's 1,400 texts are used up.
    assert list(weeks) == sorted(weeks)
    assert 0 < weeks[0] < weeks[3] / 3


def test_shares_of_a_fixed_mixture_stay_over_20_generations():
    # Two kinds of texts, 3 to 1. Each generation asks new texts, and its sample is what a renewal sees.
    random = np.random.default_rng(0)
    reservoir = Reservoir(KEY, max_texts=1000, half_life_hours=168)
    for generation in range(20):
        kinds = random.random(3000) < 0.25
        for number, kind in enumerate(kinds):
            tokens = np.array([kind, generation, number], dtype="<i4").tobytes()
            reservoir.offer(SampledText(tokens, b"", generation * 24 * HOUR))
        share = np.mean([text.token_ids[0] for text in reservoir])
        assert abs(share - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 1000)


def test_greatest_and_smallest_digest_have_finite_priorities():
    assert math.isfinite(_gumbel(b"\xff" * 16))
    assert math.isfinite(_gumbel(bytes(16)))
