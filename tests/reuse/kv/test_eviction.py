"""Eviction: textbook orders, the laws of look-ahead, and replays of whole traces through two tiers."""

import random
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.reuse.kv.eviction import LookAhead
from benchmarks.measuring.replay import Action, Event, Job, replay
from benchmarks.papers.eviction import EVICTION, Fifo, Lru

# The example of CachedAttention's Figure 9: two places in memory, four on disk, and windows of 2 and 6 jobs.
# Earlier jobs leave items 2 and 4 in memory and items 3, 5, 7 and 9 on disk.
FIGURE_9_HISTORY = [3, 5, 7, 9, 2, 4]
FIGURE_9_JOBS = [
    *(Job(item) for item in FIGURE_9_HISTORY),
    *(Job(item, waiting=9 - item) for item in range(1, 10)),
]
JOB_1 = len(FIGURE_9_HISTORY)


def eviction_order(policy):
    """All items of the tier, in the order in which the policy evicts them."""
    order = []
    while (item := policy.victim()) is not None:
        policy.removed(item)
        order.append(item)
    return order


def holding(policy_class, items, upcoming=()):
    policy = policy_class()
    for item in items:
        policy.added(item)
    policy.expect(upcoming)
    return policy


def page_faults(policy, references, places):
    """The references that a cache with so many places does not hold."""
    held, faults = set(), 0
    for item in references:
        if item in held:
            policy.used(item)
            continue
        faults += 1
        if len(held) == places:
            victim = policy.victim()
            policy.removed(victim)
            held.remove(victim)
        policy.added(item)
        held.add(item)
    return faults


@pytest.mark.parametrize(("policy_class", "faults"), [(Lru, 12), (Fifo, 15)])
def test_textbook_reference_string_has_the_textbook_faults(policy_class, faults):
    # Silberschatz, Galvin and Gagne, Operating System Concepts, section on page replacement: three frames.
    references = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
    assert page_faults(policy_class(), references, places=3) == faults


@pytest.mark.parametrize(("places", "faults"), [(3, 9), (4, 10)])
def test_fifo_shows_beladys_anomaly(places, faults):
    assert page_faults(Fifo(), [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5], places) == faults


@pytest.mark.parametrize("upcoming", ["", "a"], ids=["no queue", "a queue that both ignore"])
def test_a_use_makes_an_item_young_for_lru_only(upcoming):
    lru, fifo = (holding(policy, "abc", upcoming) for policy in (Lru, Fifo))
    for policy in (lru, fifo):
        policy.used("a")
    assert eviction_order(lru) == ["b", "c", "a"]
    assert eviction_order(fifo) == ["a", "b", "c"]


@pytest.mark.parametrize("policy_class", EVICTION.values())
@pytest.mark.parametrize("upcoming", ["", "ba"])
def test_an_unknown_item_is_refused_and_a_known_one_is_added_once(policy_class, upcoming):
    policy, again = (holding(policy_class, "abc", upcoming) for _ in range(2))
    for call in (again.used, again.removed):
        with pytest.raises(KeyError):
            call("d")
    again.added("a")
    assert eviction_order(again) == eviction_order(policy)


class ListModel:
    """Look-ahead by its definition: one list in order of age, searched from one end to the other."""

    def __init__(self):
        self.oldest_first, self.window = [], []

    def added(self, item):
        if item not in self.oldest_first:
            self.oldest_first.append(item)

    def used(self, item):
        self.oldest_first.remove(item)
        self.oldest_first.append(item)

    def removed(self, item):
        self.oldest_first.remove(item)

    def expect(self, upcoming):
        soonest_first = list(dict.fromkeys(self.window))
        for item in reversed(soonest_first):
            if item in self.oldest_first and item not in upcoming:
                self.used(item)
        self.window = upcoming

    def victim(self, pinned):
        free = [item for item in self.oldest_first if item not in pinned]
        outside = [item for item in free if item not in self.window]
        return outside[0] if outside else max(free, key=self.window.index, default=None)


items = st.integers(0, 7)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["added", "used", "removed"]), items),
        st.tuples(st.just("expect"), st.lists(items, max_size=8)),
        st.tuples(st.just("victim"), st.sets(items)),
    ),
    max_size=60,
)


@given(steps)
def test_look_ahead_agrees_with_its_definition(steps):
    policy, model = LookAhead(), ListModel()
    for name, value in steps:
        if name in ("used", "removed") and value not in model.oldest_first:
            continue
        assert getattr(policy, name)(value) == getattr(model, name)(value)
    assert [policy.victim(pinned) for pinned in ((), {0, 1, 2, 3})] == [
        model.victim(pinned) for pinned in ((), {0, 1, 2, 3})
    ]


@pytest.mark.parametrize("policy_class", EVICTION.values())
@given(held=st.sets(items), upcoming=st.lists(items), pinned=st.sets(items))
def test_a_victim_is_held_and_not_pinned(policy_class, held, upcoming, pinned):
    victim = holding(policy_class, held, upcoming).victim(pinned)
    assert victim in held - pinned if held - pinned else victim is None


@pytest.mark.parametrize("eviction_window", [6, 8], ids=["job-9-outside", "job-9-at-the-tail"])
def test_figure_9_fetches_job_3_and_gives_job_4_the_place_of_job_9(eviction_window):
    result = replay(FIGURE_9_JOBS, 2, 4, LookAhead, prefetch_window=2, eviction_window=eviction_window)
    events = [event for event in result.events if event.job == JOB_1]
    assert events == [
        Event(JOB_1, Action.FETCH, 3),
        Event(JOB_1, Action.DEMOTE, 4),
        Event(JOB_1, Action.DROP, 9),
        # Job 1 ends. Items 2 and 3 keep their places in memory, and item 1 takes the one that 3 left on disk.
        Event(JOB_1, Action.DEMOTE, 1),
    ]


def test_figure_9_finds_the_items_of_the_next_jobs_in_memory_and_lru_on_disk():
    until_job_4 = FIGURE_9_JOBS[: JOB_1 + 4]
    result = replay(until_job_4, 2, 4, LookAhead, prefetch_window=2, eviction_window=6)
    assert (result.memory_hits, result.disk_hits, result.misses) == (3, 0, JOB_1 + 1)
    result = replay(until_job_4, 2, 4, Lru, prefetch_window=0, eviction_window=0)
    # Job 1 moves item 2 to the full disk, and item 3, the oldest item there, leaves the store.
    assert Event(JOB_1, Action.DROP, 3) in result.events
    assert (result.memory_hits, result.disk_hits, result.misses) == (0, 2, JOB_1 + 2)


def test_a_fetch_in_advance_spares_the_items_of_sooner_jobs():
    # Item 0 is on disk. Memory has one place, and job 1 needs it before job 0.
    jobs = [Job(0), Job(1), Job(1, waiting=2), Job(1, waiting=1), Job(0)]
    result = replay(jobs, 1, 2, LookAhead, prefetch_window=2, eviction_window=3)
    assert [event for event in result.events if event.action is Action.FETCH] == [Event(4, Action.FETCH, 0)]


@pytest.mark.parametrize(("policy", "demoted"), [(Lru, 1), (Fifo, 0)])
def test_a_hit_in_memory_is_a_use(policy, demoted):
    jobs = [Job(0), Job(1), Job(0), Job(2)]
    result = replay(jobs, 2, 1, policy, prefetch_window=0, eviction_window=0)
    assert result.events == (Event(3, Action.DEMOTE, demoted),)


def test_a_store_without_a_disk_drops_what_leaves_memory():
    result = replay([Job(0), Job(1)], 1, 0, Lru, prefetch_window=0, eviction_window=0)
    assert result.events == (Event(1, Action.DEMOTE, 0), Event(1, Action.DROP, 0))
    assert result.memory == {1}


@pytest.mark.parametrize(("memory_items", "disk_items"), [(0, 4), (1, -1)])
def test_a_store_without_memory_is_refused(memory_items, disk_items):
    with pytest.raises(ValueError, match="memory_items >= 1"):
        replay([], memory_items, disk_items, Lru, prefetch_window=0, eviction_window=0)


@given(
    jobs=st.lists(st.builds(Job, item=items, waiting=st.integers(0, 6)), max_size=40),
    memory_items=st.integers(1, 4),
    disk_items=st.integers(0, 4),
    policy=st.sampled_from(list(EVICTION.values())),
    windows=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_every_item_that_enters_the_store_is_in_one_tier_or_was_dropped(
    jobs, memory_items, disk_items, policy, windows
):
    prefetch_window, eviction_window = windows
    result = replay(
        jobs,
        memory_items,
        disk_items,
        policy,
        prefetch_window=prefetch_window,
        eviction_window=eviction_window,
    )
    assert result.hits + result.misses == len(jobs)
    assert len(result.memory) <= memory_items
    assert len(result.disk) <= disk_items
    assert not result.memory & result.disk
    assert result.misses == len(result.memory) + len(result.disk) + result.count(Action.DROP)


def session_trace(seed, service_seconds):
    """Poisson sessions at 1/s, with 5.75 turns on average; one server answers in the order of arrival."""
    source = random.Random(seed)
    arrivals, session_start = [], 0.0
    for session in range(40):
        session_start += source.expovariate(1.0)
        turn = session_start
        arrivals.append((turn, session))
        while source.random() > 1 / 5.75:
            turn += source.expovariate(1 / 8)  # 8 s between two turns
            arrivals.append((turn, session))
    arrivals.sort()
    times, free, jobs = [time for time, _ in arrivals], 0.0, []
    for index, (time, session) in enumerate(arrivals):
        start = max(time, free)
        free = start + source.expovariate(1 / service_seconds)
        jobs.append(Job(session, waiting=bisect_right(times, start) - index - 1))
    return jobs


def replay_with_paper_windows(jobs, name, eviction_window=9):
    prefetch_window = 3 if name == "look-ahead" else 0
    return replay(
        jobs, 3, 6, EVICTION[name], prefetch_window=prefetch_window, eviction_window=eviction_window
    )


def test_look_ahead_hits_more_often_on_session_traces_and_more_of_it_in_memory():
    traces = [session_trace(seed, service_seconds=0.3) for seed in range(20)]
    hits, memory_share = {}, {}
    for name in EVICTION:
        results = [replay_with_paper_windows(jobs, name) for jobs in traces]
        hits[name] = sum(result.hits for result in results)
        memory_share[name] = sum(result.memory_hits for result in results) / hits[name]
    for baseline in ("lru", "fifo"):
        assert hits["look-ahead"] > hits[baseline]
        assert memory_share["look-ahead"] > memory_share[baseline]


@pytest.mark.parametrize("seed", range(10))
def test_look_ahead_with_the_whole_future_hits_most_often_on_every_session_trace(seed):
    trace = session_trace(seed, service_seconds=0.3)
    jobs = [Job(job.item, waiting=len(trace) - index - 1) for index, job in enumerate(trace)]
    hits = {name: replay_with_paper_windows(jobs, name, eviction_window=len(jobs)).hits for name in EVICTION}
    assert hits["look-ahead"] >= max(hits["lru"], hits["fifo"])
