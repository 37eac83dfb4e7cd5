"""The sample of texts in files: what is synced is kept, whatever happens to the process or the log."""

import os
import stat
import time
from collections import Counter

import numpy as np
import pytest
from full_disk import largest_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncache_core.corpus.reservoir import SampledText
from attncache_core.corpus.sample import TextSampler, read_log, read_sample, sample_folder, write_log

HOUR = 3600


def opened(root, max_texts=1000):
    return TextSampler.open(root, max_texts=max_texts, half_life_hours=168)


def offer(sampler, count, first=0, client=None, asked_at=0):
    for number in range(first, first + count):
        sampler.offer([101, number, 102], client, asked_at)


def end(sampler):
    sampler.sync()
    sampler.close()


def sampled(root, count, max_texts=1000, **options):
    """Offer texts in a process that ends."""
    sampler = opened(root, max_texts)
    offer(sampler, count, **options)
    end(sampler)


def numbers(root):
    return [text.token_ids[1] for text in read_sample(root)]


def log(root):
    return sample_folder(root) / "0.log"


def test_synced_texts_are_read_oldest_first(tmp_path):
    sampler = opened(tmp_path)
    for number, hours in [(1, 5), (2, 3), (3, 9)]:
        sampler.offer(np.array([101, number, 102]), None, hours * HOUR)
    assert numbers(tmp_path) == []
    sampler.sync()
    assert numbers(tmp_path) == [2, 1, 3]
    assert len(sampler) == 3
    # Within the same ten minutes, nothing is written.
    sampler.offer(np.array([101, 1, 102]), None, 5 * HOUR + 599)
    assert not sampler.sync()
    sampler.close()


def test_synced_texts_are_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    sampler = opened(tmp_path)
    offer(sampler, 10)
    assert sampler.sync()
    assert flushed == [log(tmp_path).stat().st_size]
    sampler.close()


def test_next_process_goes_on_and_removes_what_a_killed_one_left_unfinished(tmp_path):
    sampled(tmp_path, 10)
    left = sample_folder(tmp_path) / ".0.log.abcdef.unfinished"
    left.write_bytes(b"texts")
    sampler = opened(tmp_path)
    assert not left.exists()
    assert len(sampler) == 10
    offer(sampler, 5, first=10)
    end(sampler)
    assert sorted(numbers(tmp_path)) == [*range(15)]


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(33)])
def test_damaged_key_is_made_anew(tmp_path, damaged):
    opened(tmp_path).close()
    key = sample_folder(tmp_path) / "key"
    key.write_bytes(damaged)
    opened(tmp_path).close()
    assert len(key.read_bytes()) == 32


def test_two_processes_have_a_log_each_and_equal_texts_count_once(tmp_path):
    one, another = opened(tmp_path), opened(tmp_path)
    offer(one, 10)
    offer(another, 10, first=5, asked_at=HOUR)
    for sampler in (one, another):
        end(sampler)
    assert sorted(path.name for path in sample_folder(tmp_path).glob("*.log")) == ["0.log", "1.log"]
    assert sorted(numbers(tmp_path)) == [*range(15)]
    assert [text.asked_at for text in read_sample(tmp_path)] == [0] * 5 + [HOUR] * 10


@pytest.mark.parametrize("written_last", ["0.log", "1.log"])
def test_log_that_was_written_last_says_how_many_texts_the_sample_holds(tmp_path, written_last):
    several = [opened(tmp_path, max_texts) for max_texts in (30, 20)]
    for number, sampler in enumerate(several):
        offer(sampler, 20, first=20 * number)
        end(sampler)
    for name in ("0.log", "1.log"):
        os.utime(sample_folder(tmp_path) / name, (HOUR, 2 * HOUR if name == written_last else HOUR))
    assert len(read_sample(tmp_path)) == (30 if written_last == "0.log" else 20)


def test_nobody_else_can_read_the_sample_and_it_names_no_client(tmp_path):
    sampled(tmp_path, 10, client="marketing")
    folder = sample_folder(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("key", "0.log"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert b"marketing" not in log(tmp_path).read_bytes()


def test_log_is_written_anew_at_twice_what_the_sample_holds(tmp_path):
    sampler = opened(tmp_path, max_texts=3000)
    for hour in range(12):
        offer(sampler, 3000, asked_at=hour * HOUR)
        sampler.sync()
        live = 24 + 3000 * (24 + 12)
        assert log(tmp_path).stat().st_size <= 2 * live
    assert [text.asked_at for text in read_sample(tmp_path)] == [11 * HOUR] * 3000
    sampler.close()


def test_texts_that_the_sample_has_displaced_are_not_read(tmp_path):
    sampler = opened(tmp_path, max_texts=50)
    for first in range(0, 500, 50):
        offer(sampler, 50, first=first)
        sampler.sync()
    kept = {text.tokens for text in sampler._reservoir}
    assert {text.tokens for text in read_sample(tmp_path)} == kept
    assert len(kept) == 50
    sampler.close()


def test_smaller_sample_drops_texts_at_the_next_start(tmp_path):
    sampled(tmp_path, 100)
    opened(tmp_path, max_texts=20).close()
    assert len(numbers(tmp_path)) == 20


def test_key_with_more_than_its_share_is_cut_to_the_next_and_an_only_key_keeps_its_texts(tmp_path):
    sampler = opened(tmp_path, max_texts=10_000)
    offer(sampler, 1000, client="noise")
    sampler.sync()
    assert len(numbers(tmp_path)) == 1000
    offer(sampler, 100, first=5000, client="a", asked_at=HOUR)
    offer(sampler, 60, first=6000, client="b", asked_at=HOUR)
    end(sampler)
    read = numbers(tmp_path)
    assert sum(number < 1000 for number in read) == 100
    assert sum(number >= 5000 for number in read) == 160


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_log_that_is_cut_or_changed_anywhere_is_a_prefix(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("root")
    sampled(root, 20)
    content = log(root).read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]
    log(root).write_bytes(data.draw(st.sampled_from([content[:at], flipped])))
    read = numbers(root)
    whole = max(at - 24, 0) // 36  # 24 bytes of header, 36 bytes of each entry
    assert sorted(read) == [*range(whole)]
    length = log(root).stat().st_size
    sampler = opened(root)
    assert sampler.cut_bytes == length - (24 + 36 * whole if at >= 24 else 0)
    offer(sampler, 1, first=50)
    end(sampler)
    assert sorted(numbers(root)) == [*range(whole), 50]


def test_log_that_is_no_longer_sampled_is_read_as_a_whole_or_not_at_all(tmp_path):
    path, texts = tmp_path / "sampled.log", [SampledText(bytes([number] * 4), b"", 0) for number in range(9)]
    write_log(path, texts)
    assert read_log(path) == texts
    path.write_bytes(path.read_bytes()[:-1])
    assert read_log(path) == []


def test_full_disk_raises_and_what_was_synced_stays(tmp_path):
    sampler = opened(tmp_path)
    offer(sampler, 10)
    sampler.sync()
    offer(sampler, 100, first=10)
    size = log(tmp_path).stat().st_size
    with largest_file(size + 100), pytest.raises(OSError, match="File too large"):
        sampler.sync()
    sampler.close()
    assert sorted(numbers(tmp_path)) == [*range(12)]
    sampled(tmp_path, 1, first=200)
    assert sorted(numbers(tmp_path)) == [*range(12), 200]


def test_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "sample").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match="sample"):
        opened(tmp_path)


def test_log_of_a_process_that_is_gone_ages_like_the_others(tmp_path):
    gone, lasting = opened(tmp_path, max_texts=100), opened(tmp_path, max_texts=100)
    offer(gone, 100, first=500)
    end(gone)
    offer(lasting, 100, asked_at=10**5 * HOUR)
    end(lasting)
    assert [text.asked_at for text in read_sample(tmp_path)] == [10**5 * HOUR] * 100


@pytest.mark.parametrize(("least", "expected"), [(0, 10 + 10 + 10), (60, 60), (1000, 300)])
def test_client_with_most_texts_is_cut_unless_too_few_remain(tmp_path, least, expected):
    sampler = opened(tmp_path, max_texts=10_000)
    offer(sampler, 280, client="a")
    offer(sampler, 10, client="b")
    offer(sampler, 10, client="c")
    end(sampler)
    texts = read_sample(tmp_path, least)
    assert len(texts) == expected
    assert Counter(text.client for text in texts).most_common()[-1][1] == 10


def test_client_with_most_texts_keeps_a_tenth_of_all(tmp_path):
    sampler = opened(tmp_path, max_texts=10_000)
    offer(sampler, 280, client="a")
    offer(sampler, 2, client="b")
    offer(sampler, 88, first=1000)
    end(sampler)
    assert sorted(Counter(text.client for text in read_sample(tmp_path)).values()) == [2, 10, 88]


def test_texts_of_equal_times_are_in_random_order(tmp_path):
    sampled(tmp_path, 200)
    assert np.mean(numbers(tmp_path)[-100:]) == pytest.approx(100, abs=30)


def test_texts_are_kept_while_the_clock_is_behind(tmp_path, monkeypatch):
    """Also if the log is written anew meanwhile."""
    sampled(tmp_path, 100, asked_at=time.time())
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1000.0)
        sampler = opened(tmp_path, max_texts=500)
        assert (len(sampler), sampler.later) == (0, 100)
        offer(sampler, 50, first=1000, asked_at=1000)
        end(sampler)
    assert sorted(numbers(tmp_path)) == [*range(100), *range(1000, 1050)]
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1000.0)
        opened(tmp_path, max_texts=60).close()
    assert sorted(numbers(tmp_path)) == [*range(40, 100)]


def test_texts_of_a_clock_that_was_ahead_keep_no_others_out(tmp_path):
    for days in (1, 0):
        sampled(tmp_path, 100, 100, first=days * 100, asked_at=time.time() + days * 24 * HOUR)
    assert sorted(numbers(tmp_path)) == [*range(100)]
