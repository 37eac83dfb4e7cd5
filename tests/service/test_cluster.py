"""Real servers behind real Envoys, with one Valkey. All are killed, frozen or added while 64 clients ask.

One of each event in `make test`, and CLUSTER_EVENTS of each in `make cluster`.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter

import aiohttp
import pytest
from core_models import write_sentence_transformer
from entrance import NameServer, entrances, post
from ports import free_port
from raw_http import wait_until
from valkeys import running_valkey

CLIENTS = 64
TALKING = 8  # of the clients: they hold conversations
TURNS = 4
TIMES = int(os.environ.get("CLUSTER_EVENTS", "1"))
TEXTS = [f"my {word} was {number}" for word in ("card", "bank", "transfer") for number in range(40)]
HOSTS = ["127.0.1.1", "127.0.1.2", "127.0.1.3"]
DELAY = 0.6


def turns_of(number):
    """The turns of every conversation of a client."""
    return [f"{TEXTS[number * TURNS + turn]}, " for turn in range(TURNS)]


class Cluster:
    """Servers by address, their name server, the entrances in front of them, and the store behind them."""

    def __init__(self, start, folder, port, names, doors, store):
        self._start, self._folder, self.port, self.names, self.doors = start, folder, port, names, doors
        self.store = store
        self.running = {}

    def add(self, *hosts):
        """Start servers, and name them once they are ready."""
        for host in hosts:
            self.running[host] = self._started(host)
        for host in hosts:
            self.running[host].wait_until_ready()
        self.names.addresses = [*self.names.addresses, *hosts]

    def _started(self, host):
        arguments = ["serve", "--model", "model", "--host", host, "--port", str(self.port), "--threads", "1"]
        arguments += ["--no-maps", "--dtype", "float32", "--result-memory-bytes", "0"]
        arguments += ["--trusted-proxies", "127.0.0.1", "--drain-delay-seconds", str(DELAY)]
        arguments += ["--shared", self.store.url]
        return self._start("command", folder=str(self._folder), arguments=arguments, patience=30)

    def remove(self, host):
        self.names.addresses = [address for address in self.names.addresses if address != host]
        return self.running.pop(host)

    def wait_until_healthy(self):
        wait_until(
            lambda: all(
                door.healthy(cluster) == len(self.running)
                for door in self.doors
                for cluster in ("by_key", "by_requests")
            )
        )

    def answered(self, host):
        """Return how many requests this server has answered."""
        return self.running[host].metric('requests_total{route="/embed",status="200"}')


class Load:
    """Clients that ask without a pause, in a thread. Afterwards: what they got."""

    def __init__(self, urls, expected):
        self.statuses = Counter()
        self.errors = Counter()
        self.moves = 0  # from an entrance that did not answer to the other one
        self.appended = 0  # turns
        self.refused = 0  # of them, because the store was away
        self._urls, self._expected = urls, expected
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        self.wait_for(CLIENTS)
        return self

    def __exit__(self, *_):
        self._is_over = True
        self._thread.join()

    def wait_for(self, count):
        """Wait until so many more requests are answered."""
        before = self.statuses.total()
        wait_until(lambda: self.statuses.total() >= before + count)

    async def _run(self):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(240)) as session:
            clients = [self._talk] * TALKING + [self._ask] * (CLIENTS - TALKING)
            asked = (client(session, number) for number, client in enumerate(clients))
            await asyncio.gather(*asked)

    async def _ask(self, session, number):
        turn = number
        while not self._is_over:
            turn += 1
            text = TEXTS[turn * 7 % len(TEXTS)]
            body = {"inputs": [text, *(["my card"] * (turn % 2))]}
            headers = {} if number % 3 else {"X-AttnCache-Affinity": str(turn % 9)}
            status, content, _ = await self._post(session, number, body, headers)
            self._note(status, content, text)

    async def _talk(self, session, number):
        """Hold one conversation after the other: send the turn alone, where the history of before is kept."""
        conversations = 0
        while not self._is_over:
            conversations += 1
            name, is_kept = f"{id(self)}/{number}/{conversations}", False
            for turn in range(1, TURNS + 1):
                said = turns_of(number)[:turn]
                is_kept = await self._say(session, number, name, said, is_kept)

    async def _say(self, session, number, name, said, is_appended):
        """Send a turn until it is answered. Returns whether the history was kept."""
        body = {"session_id": name, **({"append": said[-1]} if is_appended else {"transcript": said})}
        headers = {"X-Request-Id": f"{name}/{len(said)}"}
        while True:
            status, content, answered = await self._post(session, number, body, headers)
            if status == 503 and is_appended and b'"shared_unavailable"' in content:
                self.refused += 1
                if not self._is_over:
                    await asyncio.sleep(0.05)
                    continue
                return False
            self._note(status, content, "".join(said))
            if status == 404:
                body, is_appended = {"session_id": name, "transcript": said}, False
            elif status != 429:
                self.appended += status == 200 and is_appended
                return status == 200 and "X-AttnCache-Session" not in answered

    async def _post(self, session, number, body, headers):
        """Return status, content and headers of the answer of the first entrance that gives one."""
        for url in self._urls[number % 2 :] + self._urls[: number % 2]:
            try:
                async with session.post(f"{url}/embed", json=body, headers=headers) as answer:
                    return answer.status, await answer.read(), answer.headers
            except aiohttp.ClientError as error:
                self.moves += 1
                last = type(error).__name__
        self.errors[last] += 1
        return 0, b"", {}

    def _note(self, status, content, text):
        self.statuses[status] += 1
        if status == 200 and json.loads(content)[0] != self._expected[text]:
            self.errors["wrong vector"] += 1


@pytest.fixture(scope="module")
def cluster(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    write_sentence_transformer(folder / "model")
    port = free_port(HOSTS[0])
    with (
        # A store that is killed has older histories after its next start. No append is answered about them.
        running_valkey(folder, "--appendonly", "yes") as store,
        NameServer() as names,
        entrances(["on", "off"], names, port, folder / "doors", per_try_timeout=2) as doors,
    ):
        made = Cluster(start, folder, port, names, doors, store)
        made.add(*HOSTS)
        made.wait_until_healthy()
        yield made


@pytest.fixture(scope="module")
def expected(cluster):
    """The vector of each text and of each conversation, by one server."""

    def computed(**body):
        return post(f"http://{HOSTS[0]}:{cluster.port}/embed", json=body, timeout=240).json()

    found = dict(zip(TEXTS, computed(inputs=TEXTS), strict=True))
    for number in range(TALKING):
        for end in range(1, TURNS + 1):
            said = turns_of(number)[:end]
            (found["".join(said)],) = computed(session_id=f"{number}/{end}", transcript=said)
    return found


def terminate(cluster, load, host):
    """Let a server end after its delay, and start another one in its place."""
    cluster.running[host].send(signal.SIGTERM)
    replace_after(cluster, load, host, 0, CLIENTS)


def terminate_at_once(cluster, load, host):
    """Let a server drain before the entrances know of it."""
    server = cluster.running[host]
    server.send(signal.SIGTERM)
    time.sleep(0.05)
    server.send(signal.SIGTERM)
    replace_after(cluster, load, host, 0, CLIENTS)


def kill(cluster, load, host):
    cluster.running[host].send(signal.SIGKILL)
    load.wait_for(4 * CLIENTS)
    replace_after(cluster, load, host, -signal.SIGKILL, 0)


def replace_after(cluster, load, host, code, requests):
    """Wait for the end of a server and for some requests, and start another server in its place."""
    assert cluster.running[host].number("code") == code
    cluster.remove(host)
    load.wait_for(requests)
    cluster.add(host)


def freeze(cluster, load, host):
    server = cluster.running[host]
    server.send(signal.SIGSTOP)
    wait_until(lambda: cluster.doors[0].healthy() == len(HOSTS) - 1)
    load.wait_for(4 * CLIENTS)
    server.send(signal.SIGCONT)


def add(cluster, _load, host):
    """Take a server out by its name, and start another one there: it gets requests."""
    cluster.running[host].send(signal.SIGTERM)
    assert cluster.remove(host).number("code") == 0
    wait_until(lambda: cluster.doors[0].healthy() == len(HOSTS) - 1)
    cluster.add(host)
    wait_until(lambda: cluster.answered(host) > CLIENTS)


def kill_entrance(cluster, load, _host):
    cluster.doors[0].kill()
    load.wait_for(2 * CLIENTS)
    cluster.doors[0].start()
    load.wait_for(2 * CLIENTS)


def kill_store(cluster, load, _host):
    url, session = f"{cluster.doors[0].url}/embed", {"session_id": "kept"}
    assert post(url, json={**session, "transcript": "my card"}).status_code == 200
    cluster.store.kill()
    load.wait_for(2 * CLIENTS)
    wait_until(lambda: post(url, json={**session, "append": " was lost"}).status_code == 503)
    cluster.store.start()
    appended = load.appended
    wait_until(lambda: load.appended > appended + TALKING)


EVENTS = [terminate, terminate_at_once, kill, freeze, add, kill_entrance, kill_store]


@pytest.mark.parametrize("event", EVENTS)
def test_no_request_fails_and_every_vector_is_as_one_server_computes_it(cluster, expected, event):
    urls = [door.url for door in cluster.doors]
    cut_before = sum(door.cut_answers() for door in cluster.doors)
    with Load(urls, expected) as load:
        for number in range(TIMES):
            host = HOSTS[number % len(HOSTS)]
            event(cluster, load, host)
            cluster.wait_until_healthy()
            wait_until(lambda host=host: cluster.answered(host) > 0)
    print(
        f"{event.__name__}: {TIMES} times, {dict(load.statuses)}, {load.moves} asked again, "
        f"{load.appended} turns appended, {load.refused} refused"
    )
    assert load.errors == {}
    assert load.appended > TALKING
    assert event is kill_store or load.refused == 0
    if event is not kill_entrance:
        assert load.moves <= sum(door.cut_answers() for door in cluster.doors) - cut_before
    for server in cluster.running.values():
        assert "a request failed" not in server.log, server.log
    assert set(load.statuses) <= {200, 429, *([404] if event is kill_store else [])}
    assert load.statuses[200] > load.statuses[429]
