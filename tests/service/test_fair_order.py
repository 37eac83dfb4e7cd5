from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batching.fair_order import FairOrder


def served(order):
    """Serve the next item: a name, which begins with its flow, and a cost. Returns the name."""
    name, cost = item = order.head()
    order.charge(cost)
    order.remove(item, (name.split()[0],))
    return name


def test_flows_take_turns_by_cost():
    order = FairOrder()
    for kind, cost in (("long", 10), ("short", 5)):
        for number in range(4):
            order.add((f"{kind} {number}", cost), (kind,))
    names = [served(order) for _ in range(8)]
    assert names == [*("long 0", "short 0", "short 1", "long 1", "short 2", "short 3", "long 2", "long 3")]
    assert order.head() is None


def test_flow_that_sends_one_item_after_the_other_is_not_always_new():
    order = FairOrder()
    for number in range(50):
        order.add((f"many {number}", 10), ("many",))
    names = []
    for number in range(10):
        order.add((f"eager {number}", 10), ("eager",))
        names.append(served(order).split()[0])
    assert 4 <= names.count("many") <= 6


@given(
    items=st.lists(
        st.tuples(st.integers(1, 25), st.sampled_from("xyz"), st.sampled_from("pq")), min_size=1, max_size=60
    )
)
def test_everything_is_served_once_and_no_flow_gets_far_ahead(items):
    order = FairOrder()
    left = Counter(key for _, key, _ in items)
    costs = Counter()
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
            # A flow is ahead by its last item, and by that of the other before it.
            assert costs[key] - min(waiting) <= 2 * 25
    assert sorted(seen) == list(range(len(items)))


flows = st.tuples(st.sampled_from("xyz"), st.sampled_from("pq"))


def serve(order, where):
    """Serve the next item. Each item costs 1."""
    item = order.head()
    order.charge(1)
    order.remove(item, where[item])
    order.count(where[item], -1)


def charged_before(order, item, where):
    """Serve until this item is next. Returns what was charged."""
    charged = 0
    while order.head() != item:
        serve(order, where)
        charged += 1
    return charged


def filled(added, served_before):
    """Return an order after some of its items were served."""
    order = FairOrder(1)
    where = dict(enumerate(added))
    for number, flow in where.items():
        order.add(number, flow)
        order.count(flow, 1)
    for _ in range(min(served_before, len(added))):
        serve(order, where)
    return order, where


@given(added=st.lists(flows, max_size=150), served_before=st.integers(0, 150), flow=flows)
def test_no_more_than_what_is_ahead_is_served_before_an_item_that_is_added(added, served_before, flow):
    order, where = filled([*added], served_before)
    ahead = order.ahead(flow)
    order.add(len(added), flow)
    order.count(flow, 1)
    assert charged_before(order, len(added), where) <= ahead <= max(0, len(added) - served_before)


@given(
    added=st.lists(st.sampled_from("xyz"), max_size=150),
    served_before=st.integers(0, 150),
    flow=st.sampled_from("xyz"),
)
def test_what_is_ahead_is_too_much_by_at_most_one_item_of_each_other_flow(added, served_before, flow):
    order, where = filled([(name,) for name in added], served_before)
    ahead = order.ahead((flow,))
    order.add(len(added), (flow,))
    order.count((flow,), 1)
    assert charged_before(order, len(added), where) >= ahead - 2


def test_ahead_of_a_flow_that_is_new_is_what_began_to_wait_before_it_and_was_not_served():
    order, _ = filled([("many",)] * 100, served_before=15)
    assert order.ahead(("new",)) == 0
    assert order.ahead(("many",)) == 85
    order.add(200, ("few",))
    order.count(("few",), 1)
    assert order.ahead(("new",)) == 1
    assert order.ahead(("many",)) == 86


@pytest.mark.parametrize(("left", "next_item"), [(6, "parts"), (7, "other")])
@pytest.mark.parametrize("flow", [("flow",), ("key", "connection")])
def test_item_keeps_its_turn_as_long_as_it_is_charged_no_more_than_allowed(left, next_item, flow):
    order = FairOrder(10)
    order.add("parts", flow)
    order.add("other", ("other",))
    assert order.head() == "parts"
    order.charge(4, left)
    assert order.head() == next_item
    order.charge(left if next_item == "parts" else 1)
    order.remove(next_item, flow if next_item == "parts" else ("other",))
    assert order.head() == ("other" if next_item == "parts" else "parts")


def test_flow_pays_for_a_turn_whose_item_is_withdrawn():
    order = FairOrder(10)
    order.add("parts", ("flow",))
    order.head()
    order.charge(4, 6)
    order.remove("parts", ("flow",))
    order.add("again", ("flow",))
    order.add("other", ("other",))
    assert order.head() == "other"


def test_flows_that_come_later_keep_no_earlier_one_waiting():
    order = FairOrder()
    order.add(("old one", 10), ("old",))
    served(order)
    order.add(("old one that waits", 10), ("old",))
    names = []
    for number in range(3):
        order.add((f"{number}", 10), (f"{number}",))
        names.append(served(order))
    assert "old one that waits" in names


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), flows, st.integers(1, 40)),
            st.tuples(st.sampled_from(["serve", "withdraw"]), st.none(), st.integers(0, 5)),
            st.tuples(st.just("ask"), st.one_of(flows, st.just(("w", "p"))), st.integers(0, 150)),
        ),
        max_size=60,
    )
)
def test_whether_too_much_is_ahead_is_the_same_as_if_it_were_counted_anew(steps):
    order, counting = FairOrder[tuple[int, int]](20), FairOrder[tuple[int, int]](20)
    waiting = {}
    for number, (step, flow, amount) in enumerate(steps):
        if step == "add":
            item = number, amount
            waiting[item] = flow
        elif step == "ask":
            too_much = counting.ahead(flow) > amount
            assert (order.ahead(flow, amount) > amount) == too_much
            continue
        elif not waiting:
            continue
        elif step == "withdraw":
            item = list(waiting)[amount % len(waiting)]
        for tested in (order, counting):
            if step == "add":
                tested.add(item, flow)
                tested.count(flow, amount)
                continue
            if step == "serve":
                item = tested.head()
                tested.charge(item[1])
            tested.count(waiting[item], -item[1])
            tested.remove(item, waiting[item])
        if step != "add":
            del waiting[item]
    assert order.cost == sum(cost for _, cost in waiting)
