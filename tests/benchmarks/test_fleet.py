"""`benchmarks fleet` simulates servers behind entrances: laws that hold for every route."""

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from aiohttp import web
from command_line import assert_one_line, run, succeeded
from hypothesis import given
from hypothesis import strategies as st

from attncache_core import InvalidInput
from benchmarks.__main__ import main
from benchmarks.measuring.fleet import ROUTES, Ring, Simulation, Traffic, draw_requests, simulate
from benchmarks.measuring.fleet_replay import Cluster, measured_fleet, replay
from benchmarks.measuring.fleet_servers import Event, EventKind, Fleet, Request, Server, Store, Tier

TRAFFIC = Traffic(seconds=60, load=0.6, few_shot=0.4, conversations=0.4, think_seconds=3, seed=3)
FLEET = Fleet(servers=6, entrances=2, memory_tokens=20_000, disk_tokens=60_000, has_store=True)


@pytest.mark.parametrize("route", ROUTES)
def test_every_request_is_answered_once_whatever_happens_to_servers(route):
    events = (Event(20, EventKind.LOST, 2), Event(25, EventKind.ADDED, 1), Event(30, EventKind.SLOW, 1))
    fleet = Fleet(servers=6, entrances=2, has_store=True, events=events)
    requests = draw_requests(TRAFFIC, fleet)
    simulation = Simulation(fleet)
    simulation.run(route, requests)
    answered = Counter(arrival for arrival, _ in simulation._latencies)
    assert answered == Counter(request.arrival for request in requests)
    assert all(seconds >= 0 for _, seconds in simulation._latencies)
    assert not any(entrance.total for entrance in simulation.entrances)
    assert [server.number for server in simulation.servers if server.is_lost] == [0, 1]
    assert len(simulation.alive) == 5


def test_work_of_a_shared_store_is_what_is_computed_once():
    """With everything kept for ever, work is the load that was asked for, and first visits of prefixes."""
    fleet = Fleet(servers=6, memory_tokens=10**9, has_store=True, store_tokens_per_second=1e9)
    traffic = Traffic(seconds=150, load=0.6, prefixes=5, think_seconds=3)
    for report in simulate(ROUTES, traffic, fleet):
        assert report.busy == pytest.approx(0.6, rel=0.15)
        assert report.memory_hit_rate + report.store_hit_rate > 0.97


def test_routes_are_equal_on_one_server():
    found = list(simulate(ROUTES, TRAFFIC, Fleet(servers=1, memory_tokens=5000, disk_tokens=10**6)))
    assert len({(r.memory_hit_rate, r.disk_hit_rate, r.busy, r.p50_seconds) for r in found}) == 1
    assert found[0].disk_hit_rate > 0


def test_lost_server_moves_few_keys_of_others():
    """As in Envoy, the places of a server on the ring depend a little on the number of servers."""
    servers = [Server(number, FLEET, None) for number in range(10)]
    before, after = Ring(servers), Ring([server for server in servers if server.number != 4])
    owners = {key: before.number(key) for key in range(2000)}
    others = [key for key, owner in owners.items() if owner != 4]
    assert sum(after.number(key) != owners[key] for key in others) < 0.15 * len(others)
    assert 4 not in {after.number(key) for key in owners}
    assert min(Counter(owners.values()).values()) > 100


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_tier_keeps_the_most_recently_used_prefixes_that_fit(puts):
    tier, used = Tier(100), []
    longest = Counter()
    for key, tokens in puts:
        tier.put(key, tokens, 0.0)
        used = [other for other in used if other != key] + [key]
        longest[key] = max(longest[key], tokens)
        while sum(longest[other] for other in used) > 100:
            del longest[used.pop(0)]
    assert [tier.find(key, 0.0) for key in range(6)] == [longest[key] for key in range(6)]


def test_looking_at_a_server_changes_nothing():
    server = Server(0, Fleet(servers=1, memory_tokens=200), None)
    looked_at, other, last = (Request(0.0, key, 100, 100, 100) for key in range(3))
    server.serve(looked_at, 0.0)
    server.serve(other, 1.0)
    assert server.look_up(looked_at, 2.0).memory == 100
    server.serve(last, 2.0)
    assert [server.look_up(request, 9.0).memory for request in (looked_at, other)] == [0, 100]


def test_server_that_is_slow_from_the_start_works_longer():
    usual, slow = (
        next(simulate(["bounded ring hash"], TRAFFIC, replace(FLEET, events=events)))
        for events in ((), (Event(0, EventKind.SLOW, 3),))
    )
    assert slow.busy > 1.3 * usual.busy


def test_bounded_load_keeps_up_where_one_server_is_always_busy():
    """Half of the requests have one prefix, and are more than its server can do."""
    hot, plain = Request(0.0, 0, 90, 90, 100), Request(0.0, None, 0, 0, 10)
    requests = [(hot, plain)[number % 2]._replace(arrival=number / 5) for number in range(1200)]
    fleet = Fleet(servers=4, tokens_per_second=20.0, store_tokens_per_second=1e9, has_store=True)
    alone, bounded = (Simulation(fleet).run(route, requests) for route in ("ring hash", "bounded ring hash"))
    assert [report.is_steady for report in (alone, bounded)] == [False, True]
    assert bounded.busy * bounded.greatest >= 1


def test_requests_arrive_in_order_at_the_load_asked_for():
    requests = draw_requests(TRAFFIC, FLEET)
    assert all(before.arrival <= after.arrival for before, after in pairwise(requests))
    requests = [request for request in requests if request.arrival >= 0]
    new = sum(request.tokens - request.prefix for request in requests)
    assert new / TRAFFIC.seconds / 6 / 800 == pytest.approx(0.6, rel=0.2)
    plain = [request for request in requests if request.key is None]
    assert len(plain) / len(requests) == pytest.approx(0.2, abs=0.05)


def test_command_prints_tables_and_writes_plot_and_report(tmp_path):
    file = tmp_path / "report.json"
    options = ("--servers", 2, "--servers", 4, "--seconds", 30, "--load", 0.2, "--disk-gb", 1)
    options += ("--event", "20:lost:1")
    shown = succeeded(run("fleet", *options, "--json", file, "--output", tmp_path, program=main))
    assert shown.count("shared store") == 4
    tables = json.loads(file.read_text("utf-8"))["tables"]
    found = [(table["servers"], table["store"]) for table in tables]
    assert found == [(servers, store) for servers in (2, 4) for store in (False, True)]
    assert (tmp_path / "fleet.png").stat().st_size > 1000


def test_events_that_cannot_happen_and_what_a_replay_does_not_follow_are_refused():
    for event in ("20:gone:1", "lost", "20:lost:0", "-1:lost:1", "nan:lost:1", "1:lost:64"):
        assert_one_line(run("fleet", "--event", event, program=main), "--event")
    replayed = ("--replay", "http://127.0.0.1:9", "--replay-server", "http://127.0.0.1:9")
    for option, value in (("--event", "20:lost:1"), ("--entrances", 2), ("--output", "plots")):
        assert_one_line(run("fleet", *replayed, option, value, program=main), option, "--replay")


async def _serve_prefixes(seen: set[tuple[int, ...]], status: int = 200) -> web.AppRunner:
    """Serve what the replay asks for. Tokens are cached that an earlier prompt begins with."""

    async def embed(request: web.Request) -> web.Response:
        [ids] = (await request.json())["inputs"]
        cached = next((size for size in range(len(ids), 0, -1) if tuple(ids[:size]) in seen), 0)
        seen.update(tuple(ids[:size]) for size in range(1, len(ids) + 1))
        headers = {"X-AttnCache-Cached-Tokens": f"{cached}/{len(ids)}"}
        return web.json_response([[0.0]], status=status, headers=headers)

    async def info(_: web.Request) -> web.Response:
        memory, given = {"most_bytes": 10**9}, {"memory": len(seen), "disk": 0}
        key_values = {"memory": memory, "block_tokens": 16, "block_bytes": 16, "given_blocks": given}
        return web.json_response({"key_values": key_values})

    app = web.Application()
    app.add_routes([web.post("/embed", embed), web.get("/info", info)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def _with_server(ask, status=200):
    """Return what `ask` returns for a cluster of one server, which is its own entrance."""
    runner = await _serve_prefixes(set(), status)
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        return await ask(Cluster(url, [url]))
    finally:
        await runner.cleanup()


def test_server_that_refuses_is_named_and_not_measured():
    request = Request(0.0, None, 0, 0, 10)
    for ask in (measured_fleet, partial(replay, requests=[request])):
        with pytest.raises(InvalidInput, match=r"http://127\.0\.0\.1:.*401"):
            asyncio.run(_with_server(ask, 401))


def test_replay_finds_the_hit_rate_of_the_simulation():
    fleet = Fleet(servers=1, tokens_per_second=2000.0)
    traffic = Traffic(2, 0.9, prefix_tokens=(20, 40), text_tokens=10, turn_tokens=20, think_seconds=0.2)
    requests = [request for request in draw_requests(traffic, fleet) if request.arrival >= 0]

    async def both(cluster):
        return await measured_fleet(cluster), await replay(cluster, requests)

    measured, found = asyncio.run(_with_server(both))
    simulated = Simulation(fleet).run("bounded ring hash", requests)
    assert measured.memory_tokens == 10**9
    assert found.statuses == {200: len(requests)}
    assert found.memory_hit_rate == pytest.approx(simulated.memory_hit_rate, abs=0.1)
    assert found.computed_tokens == pytest.approx(simulated.computed_tokens, rel=0.15)


def test_store_takes_what_was_computed_once():
    """Servers that keep nothing read every prefix, and write every new token. Nothing waits at the start."""
    fleet = Fleet(servers=6, memory_tokens=0, has_store=True, store_tokens_per_second=1e9)
    traffic = Traffic(seconds=400, load=0.6, prefixes=5)
    simulation = Simulation(fleet)
    report = simulation.run("least requests", draw_requests(traffic, fleet))
    assert simulation.store.written[0] < 4 * report.written_tokens_per_second
    assert report.written_tokens_per_second == pytest.approx(report.computed_tokens / 200, rel=0.02)
    assert report.written_tokens_per_second == pytest.approx(0.6 * 6 * 800, rel=0.15)


def test_server_that_is_far_behind_does_not_keep_others_from_the_store():
    fleet = Fleet(servers=2, memory_tokens=0, has_store=True, store_bandwidth=2000.0)
    store = Store(math.inf, fleet.store_bandwidth)
    behind, other = (Server(number, fleet, store) for number in range(2))
    behind.free_at = 500.0
    behind.serve(Request(0.0, 1, 100, 100, 100), 0.0)
    for second in range(20):
        other.serve(Request(second, None, 0, 0, 500), second)
    assert sum(store.written[second] for second in range(30)) == 20 * 500


def test_servers_read_and_write_no_more_than_the_store_gives_and_takes():
    fleet = Fleet(servers=6, entrances=2, memory_tokens=5000, has_store=True, store_bandwidth=2000.0)
    report = Simulation(fleet).run("bounded ring hash", draw_requests(TRAFFIC, fleet))
    assert min(report.read_tokens_per_second, report.written_tokens_per_second) > 0
    assert report.read_tokens_per_second + report.written_tokens_per_second < 1.1 * 2000


def test_store_that_is_too_small_forgets_prefixes():
    fleet = Fleet(servers=6, memory_tokens=5000, has_store=True)
    whole, small = (
        next(simulate(["bounded ring hash"], TRAFFIC, replace(fleet, store_tokens=tokens)))
        for tokens in (10**9, 20_000)
    )
    assert small.store_hit_rate < 0.7 * whole.store_hit_rate
    assert small.busy > 1.1 * whole.busy
