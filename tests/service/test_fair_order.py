from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from service.batching.fair_order import FairOrder

QUANTUM = 10


def served(order: FairOrder[tuple[str, int]], flows: dict[tuple[str, int], tuple[str, ...]]) -> list[str]:
    """Serve everything; an item is (name, cost). Returns the names in the order of service."""
    names = []
    while (item := order.head()) is not None:
        order.charge(item[1])
        order.remove(item, flows[item])
        names.append(item[0])
    return names


def order_of(*items: tuple[str, int, tuple[str, ...]]) -> list[str]:
    order: FairOrder[tuple[str, int]] = FairOrder(QUANTUM)
    flows = {}
    for name, cost, flow in items:
        flows[name, cost] = flow
        order.add((name, cost), flow)
    return served(order, flows)


def test_items_of_one_flow_are_served_in_their_order() -> None:
    assert order_of(*((name, 7, ("x",)) for name in "abcde")) == list("abcde")


def test_items_without_a_flow_are_served_in_their_order() -> None:
    assert order_of(*((name, 7, ()) for name in "abc")) == list("abc")


def test_flows_take_turns_by_cost() -> None:
    long = [(f"long {number}", 10, ("long",)) for number in range(4)]
    short = [(f"short {number}", 5, ("short",)) for number in range(4)]
    assert order_of(*long, *short) == [
        *("long 0", "short 0", "short 1", "long 1", "short 2", "short 3", "long 2", "long 3")
    ]


def test_new_flow_goes_before_flows_that_were_served() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder(QUANTUM)
    for number in range(100):
        order.add((f"many {number}", 10), ("many",))
    for _ in range(3):
        item = order.head()
        assert item is not None
        order.charge(item[1])
        order.remove(item, ("many",))
    order.add(("one", 10), ("other",))
    assert order.head() == ("one", 10)


def test_flow_that_sends_one_item_after_the_other_is_not_always_new() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder(QUANTUM)
    for number in range(50):
        order.add((f"many {number}", 10), ("many",))
    names = []
    for number in range(10):
        order.add((f"eager {number}", 10), ("eager",))
        item = order.head()
        assert item is not None
        order.charge(item[1])
        order.remove(item, ("many",) if item[0].startswith("many") else ("eager",))
        names.append(item[0].split()[0])
    assert 4 <= names.count("many") <= 6


def test_turn_that_is_ended_is_not_continued() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder(QUANTUM)
    for name in ("first", "second"):
        for number in range(3):
            order.add((f"{name} {number}", 1), (name, "connection"))
    assert order.head() == ("first 0", 1)
    order.end_turn()
    assert order.head() == ("second 0", 1)


def test_keys_take_turns_whatever_number_of_connections_they_have() -> None:
    greedy = [(f"greedy {number}", 10, ("greedy", str(number))) for number in range(8)]
    modest = [(f"modest {number}", 10, ("modest", "only")) for number in range(3)]
    first = order_of(*greedy, *modest)[:6]
    assert Counter(name.split()[0] for name in first) == {"greedy": 3, "modest": 3}


@given(
    items=st.lists(
        st.tuples(st.integers(1, 25), st.sampled_from("xyz"), st.sampled_from("pq")), min_size=1, max_size=60
    )
)
def test_everything_is_served_once_and_no_flow_gets_far_ahead(items: list[tuple[int, str, str]]) -> None:
    order: FairOrder[tuple[int, int, str, str]] = FairOrder(QUANTUM)
    left = Counter(key for _, key, _ in items)
    costs: Counter[str] = Counter()
    for number, (cost, key, connection) in enumerate(items):
        order.add((number, cost, key, connection), (key, connection))
    assert len(list(order)) == len(items)
    seen = []
    while (item := order.head()) is not None:
        number, cost, key, connection = item
        order.charge(cost)
        order.remove(item, (key, connection))
        seen.append(number)
        left[key] -= 1
        costs[key] += cost
        waiting = [costs[other] for other in left if left[other]]
        if waiting and left[key]:
            # A flow is ahead by its own turn, the turn of the other, and the item that ended each turn.
            assert costs[key] - min(waiting) <= 2 * (QUANTUM + 25)
    assert sorted(seen) == list(range(len(items)))
