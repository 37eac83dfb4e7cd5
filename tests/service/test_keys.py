"""API keys: the file, who gets in, what is kept apart, and quotas."""

import asyncio
import gc
import logging
import os
import resource
from types import SimpleNamespace

import pytest
from fake_engine import FAILING, NOT_FINITE, FakeEngine, begun, serving, texts_of
from hypothesis import given
from hypothesis import strategies as st
from queueing import queued
from running import FILE, ONE, OPS, TWO, Clock, bearer, keys_file, samples

from attncache_core import KeyValueOptions, PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from service.access import quotas
from service.access.keys import KeyRing
from service.access.quotas import Quotas, QuotaUse
from service.errors import Forbidden, InvalidSettings, QuotaExceeded, StoreUnavailable, Unauthorized
from service.loading.warm_file import read_warm_file, warm
from service.settings import gather_settings, read_settings
from service.store import LocalStore
from service.web.call import MODEL_HEADER
from service.web.front import check_admin, is_open
from service.workers.server import reload_all


def headers(**named):
    return {name.replace("_", "-").encode(): value.encode() for name, value in named.items()}


def ring(text=None, file=None):
    return KeyRing(file, text, LocalStore(), max_seconds=600.0)


@pytest.fixture(autouse=True)
def quotas_stand_still(monkeypatch):
    """A quota that is used up stays so, however slow the machine is, unless a test gives a clock."""
    monkeypatch.setattr(quotas, "time", SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 1e9))


@pytest.fixture
def file(tmp_path):
    return keys_file(tmp_path)


@pytest.fixture
def keys(file):
    return ring(file=file)


# The file.


def test_file_names_the_holders_and_what_they_may_do(keys):
    assert keys.names == ["one", "ops", "two"]
    operator = keys.holder(headers(x_api_key=OPS))
    assert (operator.name, operator.is_admin, operator.quotas) == ("ops", True, Quotas(6, 600, 2))
    client = keys.holder(headers(authorization=f"bearer  {ONE} "))
    assert (client.name, client.is_admin, client.quotas) == ("one", False, Quotas())
    assert client.namespace != keys.holder(headers(x_api_key=TWO)).namespace


@pytest.mark.parametrize("given", [{}, headers(authorization=f"Basic {ONE}"), headers(x_request_id=ONE)])
def test_request_without_a_key_is_told_how_to_send_one(keys, given):
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY") as raised:
        keys.holder(given)
    assert raised.value.challenge == 'Bearer realm="attncache"'


@pytest.mark.parametrize("key", ["", ONE[:-1], ONE + "0", ONE.upper(), "ö" * 20, "x" * 100_000, "one"])
def test_unknown_key_is_refused_and_not_repeated(keys, key):
    with pytest.raises(Unauthorized) as raised:
        keys.holder(headers(x_api_key=key))
    assert str(raised.value) == "the API key is not known to this server"
    assert "invalid_token" in raised.value.challenge


def test_keys_are_found_by_salted_digests_and_not_kept(file):
    keys, other = ring(f"own {TWO}-of-variable", file), ring(file=file)
    assert all(len(digest) == 32 for digest in keys._holders)
    assert not set(keys._holders) & set(other._holders)
    reachable, seen = [keys], set()
    while reachable:
        thing = reachable.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, str | bytes) or ONE not in str(thing)
        assert not isinstance(thing, str | bytes) or TWO not in str(thing)
        if hasattr(thing, "__dict__") or isinstance(thing, dict | list | tuple):
            reachable += [
                referent for referent in gc.get_referents(thing) if not hasattr(referent, "__globals__")
            ]
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one\n", "line 1 must be a name, a key"),
        (f"\n# two\n{ONE}\n", "line 3 must be a name, a key"),
        ("one Short-Secret\n", "line 1: the key must have 16 to 256"),
        (f"one {ONE}!\n", "line 1: the key must have"),
        (f"one {ONE}#W9 requests_per_minute=6\n", "line 1: the key must have"),
        (f"one {'x' * 257}\n", "line 1: the key must have"),
        (f"-one {ONE}\n", "line 1: the name must"),
        (f"{'n' * 65} {ONE}\n", "line 1: the name must"),
        (f"one {ONE}\ntwo {ONE}\n", "line 2: the key is the same as that of an earlier line"),
        (f"one {ONE}\none {TWO} admin\n", "line 2: all lines of one name must have the same words"),
        (f"one {ONE} Secret-Word\n", "line 1: after the key, accepted are admin, requests_per_minute=NUMBER"),
        (f"one {ONE} in_flight=0\n", "line 1: after the key, accepted are"),
        (f"one {ONE} in_flight=2 in_flight=3\n", "each at most once; NUMBER is a whole number from 1 on"),
        ("# nobody\n", "has no key"),
    ],
)
def test_malformed_file_is_refused_with_the_line_and_without_its_content(tmp_path, text, says):
    with pytest.raises(InvalidSettings) as raised:
        ring(file=keys_file(tmp_path, text))
    assert says in str(raised.value)
    assert str(tmp_path / "keys") in str(raised.value)
    assert not any(secret in str(raised.value) for secret in (ONE, TWO, "Secret", "x" * 100))


def test_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot be read: no such file"):
        ring(file=tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"one \xe4\xe4\xe4")
    with pytest.raises(InvalidSettings, match="is not UTF-8"):
        ring(file=tmp_path / "latin")


def test_variable_holds_one_key_of_the_operator_or_lines_of_the_file():
    alone = ring(ONE).holder(headers(x_api_key=ONE))
    assert (alone.name, alone.is_admin) == ("default", True)
    several = ring(f"one {ONE}; two {TWO} admin")
    assert several.names == ["one", "two"]
    assert not several.holder(headers(x_api_key=ONE)).is_admin
    # Two keys of one name are one holder, while a key is replaced.
    replaced = ring(f"one {ONE}; one {TWO}")
    assert replaced.holder(headers(x_api_key=ONE)) is replaced.holder(headers(x_api_key=TWO))
    for malformed, says in ((" ; ", "has no key"), (f"one {ONE};two", "entry 2 must be a name")):
        with pytest.raises(InvalidSettings, match=says):
            ring(malformed)


def test_no_error_and_no_description_of_the_settings_shows_a_key(monkeypatch):
    monkeypatch.setenv("ATTNCACHE_API_KEY", ONE)
    settings = gather_settings({})
    assert settings.api_key.get_secret_value() == ONE
    assert ONE not in f"{settings!r} {settings.model_dump_json()}"
    with pytest.raises(InvalidSettings) as raised:
        read_settings({"api_key": 1234567890123456})
    assert "--api-key (ATTNCACHE_API_KEY, or api_key in the file) cannot be this value" in str(raised.value)


def test_reload_takes_new_keys_drops_old_ones_and_keeps_what_was_used(file, keys):
    use = keys.holder(headers(x_api_key=OPS)).use
    keys_file(file.parent, FILE.replace(ONE, "new-key-of-one-0123456789") + "three third-key-0123456789\n")
    keys.reload()
    assert keys.names == ["one", "ops", "three", "two"]
    assert keys.holder(headers(x_api_key="new-key-of-one-0123456789")).name == "one"
    assert keys.holder(headers(x_api_key=OPS)).use is use
    with pytest.raises(Unauthorized):
        keys.holder(headers(x_api_key=ONE))
    keys_file(file.parent, FILE.replace("in_flight=2", "in_flight=3"))
    keys.reload()
    assert keys.holder(headers(x_api_key=OPS)).use is not use


def test_only_health_the_page_and_metrics_of_the_admin_listener_are_open(keys):
    for method, path in (("GET", "/health"), ("HEAD", "/ready"), ("GET", "/"), ("GET", "/page/page.js")):
        assert is_open(method, path, "public")
    for path in ("/metrics", "/docs", "/openapi.json", "/info", "/embed", "/page", "/health/", "//health"):
        assert not is_open("GET", path, "public")
    assert is_open("GET", "/metrics", "admin")
    assert not is_open("POST", "/", "public")
    assert not is_open("GET", "/info", "admin")
    client, operator = (keys.holder(headers(x_api_key=key)) for key in (ONE, OPS))
    for path in ("/cache", "/cache/warm", "/metrics", "/explain"):
        check_admin(path, operator)
        with pytest.raises(Forbidden):
            check_admin(path, client)
    check_admin("/info", client)


# Quotas.


async def refused(use):
    with pytest.raises(QuotaExceeded) as raised:
        await use.begin()
    return raised.value.quota, raised.value.retry_after_seconds


async def begin(use, requests):
    for _ in range(requests):
        assert await use.begin()


def use_of(quotas, clock, store=None):
    return QuotaUse("client", quotas, store or LocalStore(), max_seconds=100, clock=clock)


async def test_requests_are_refused_beyond_a_minute_s_worth_until_the_bucket_refills():
    clock = Clock()
    use = use_of(Quotas(requests_per_minute=6), clock)
    await begin(use, 6)
    assert await refused(use) == ("requests_per_minute", 10)
    clock.seconds = 4.5
    quota, seconds = await refused(use)
    assert seconds == 6
    clock.seconds += seconds
    await use.begin()
    clock.seconds += 3600  # the bucket holds a minute's worth and no more
    await begin(use, 6)
    assert (await refused(use))[0] == quota


async def test_tokens_are_charged_when_known_and_a_debt_is_paid_before_the_next_request():
    clock = Clock()
    use = use_of(Quotas(tokens_per_minute=60), clock)
    await begin(use, 2)
    await use.end(100)
    await use.end(20)
    quota, seconds = await refused(use)
    assert (quota, seconds) == ("tokens_per_minute", 61)
    clock.seconds += seconds
    await use.begin()
    await use.end(0)


async def test_requests_at_once_exceed_the_quota_of_tokens_by_little():
    """Until they end, requests count by a guess, and then by what they had."""
    clock = Clock()
    use = use_of(Quotas(tokens_per_minute=1000), clock)
    await begin(use, 4)
    assert [await use.take(400) for _ in range(3)] == [400, 400, 200]
    with pytest.raises(QuotaExceeded):
        await use.take(400)
    assert await refused(use) == ("tokens_per_minute", 1)
    for tokens, taken in ((400, 400), (0, 400), (100, 200), (0, 0)):
        await use.end(tokens, taken=taken)
    assert await use.take(10**9) == 500
    assert await use_of(Quotas(in_flight=1), clock).take(10**9) == 0


async def test_request_that_a_guess_refuses_counts_as_none():
    use = use_of(Quotas(requests_per_minute=3, tokens_per_minute=100), Clock())
    await begin(use, 2)
    assert await use.take(100) == 100
    with pytest.raises(QuotaExceeded):
        await use.take(100)
    await use.end(0)
    await use.end(0, taken=100)
    await begin(use, 2)
    assert (await refused(use))[0] == "requests_per_minute"


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        (Quotas(in_flight=1), "has 1 request in flight, which is all"),
        (Quotas(in_flight=2), "has 2 requests in flight, which is all"),
        (Quotas(requests_per_minute=2), "may ask for 2 requests per minute"),
        (Quotas(tokens_per_minute=2), "may ask for 2 tokens per minute"),
    ],
)
async def test_refusal_names_the_quota_that_another_process_has_used_up(quota, words):
    store = LocalStore()
    use, other = (use_of(quota, Clock(), store) for _ in range(2))
    for _ in range(2 if quota.in_flight is None else quota.in_flight):
        await other.begin()
        if quota.in_flight is None:
            await other.end(1)
    with pytest.raises(QuotaExceeded, match=f"the key {words}"):
        await use.begin()


async def test_quotas_that_change_and_change_back_count_all_that_is_in_flight():
    store = LocalStore()
    for _ in range(2):
        use = QuotaUse("k", Quotas(in_flight=2), store, max_seconds=100, process="one")
        await store.put("alive/one", b"")
        await use.begin()
    assert await refused(use) == ("in_flight", 1)


@pytest.mark.parametrize("end", ["killed", "alive"])
async def test_process_that_was_killed_has_nothing_in_flight(end):
    store = LocalStore()
    of_workers = [
        QuotaUse("k", Quotas(in_flight=1), store, max_seconds=100, process=name) for name in ("one", "two")
    ]
    await store.put("alive/one", b"")
    await of_workers[0].begin()
    if end == "killed":
        await store.put("alive/one", None)
        assert await of_workers[1].begin()
    assert await refused(of_workers[1]) == ("in_flight", 1)


async def test_requests_that_a_clock_far_ahead_has_counted_are_not_in_flight_for_long():
    store, clock, ahead = LocalStore(), Clock(), Clock()
    use, near, far = (use_of(Quotas(in_flight=2), time, store) for time in (clock, ahead, lambda: 1e5))
    await far.begin()
    ahead.seconds = 50
    await near.begin()
    assert await use.begin()
    assert await refused(use) == ("in_flight", 1)


async def test_changed_time_of_day_changes_no_quota_of_one_machine(monkeypatch):
    of_day, since_start = Clock(), Clock()
    monkeypatch.setattr(quotas, "time", SimpleNamespace(time=of_day, monotonic=since_start))
    alone, of_machines = (
        QuotaUse("k", Quotas(requests_per_minute=2), *stores, max_seconds=100)
        for stores in ([LocalStore()], [LocalStore(), LocalStore()])
    )
    for use in (alone, of_machines):
        await begin(use, 2)
    of_day.seconds = 3600.0
    assert await refused(alone) == ("requests_per_minute", 30)
    await begin(of_machines, 2)
    since_start.seconds = 60.0
    await begin(alone, 2)
    assert await refused(of_machines) == ("requests_per_minute", 30)


async def test_retry_after_is_right_when_the_clock_goes_back():
    clock = Clock()
    use = use_of(Quotas(requests_per_minute=60), clock)
    await begin(use, 60)
    clock.seconds -= 45
    quota, seconds = await refused(use)
    assert (quota, seconds) == ("requests_per_minute", 46)
    clock.seconds += seconds
    assert await use.begin()


async def test_key_is_not_refused_for_long_when_the_clock_goes_back_by_hours():
    clock = Clock()
    use = use_of(Quotas(requests_per_minute=2), clock)
    clock.seconds += 7200
    await begin(use, 2)
    await refused(use)
    clock.seconds -= 7200
    await begin(use, 2)
    _, seconds = await refused(use)
    clock.seconds += seconds
    assert await use.begin()
    of_tokens = use_of(Quotas(tokens_per_minute=60), clock)
    await of_tokens.begin()
    await of_tokens.end(300, taken=0)
    await refused(of_tokens)
    clock.seconds -= 7200
    assert await of_tokens.begin()


async def test_requests_in_flight_are_limited_and_a_refusal_uses_up_nothing():
    clock = Clock()
    use = use_of(Quotas(requests_per_minute=3, in_flight=1), clock)
    await use.begin()
    for _ in range(5):
        assert await refused(use) == ("in_flight", 1)
    for _ in range(2):
        await use.end(0)
        await use.begin()
    await use.end(0)
    assert (await refused(use))[0] == "requests_per_minute"


@pytest.mark.parametrize("error", [None, StoreUnavailable("locked", retry_after_seconds=1)])
async def test_request_that_could_not_be_counted_in_flight_leaves_the_others_counted(error, caplog):
    class Failing(LocalStore):
        fails = False

        async def compare_and_set(self, *values):
            if self.fails and error:
                raise error
            return not self.fails and await super().compare_and_set(*values)

    store = Failing()
    use = use_of(Quotas(in_flight=2, tokens_per_minute=60), Clock(), store)
    assert await use.begin()
    store.fails = True
    assert not await use.begin()
    assert ("requests of key client are not counted" in caplog.text) == (error is None)
    store.fails = False
    await use.end(1, taken=None)
    assert await use.begin()
    assert (await refused(use))[0] == "in_flight"
    await use.end(100, taken=None)
    for _ in range(2):
        await use.end(0)
    assert (await refused(use))[0] == "tokens_per_minute"
    # A request whose end could not be counted is in flight no longer.
    other = use_of(Quotas(in_flight=1), Clock(), store)
    assert await other.begin()
    store.fails = True
    await other.end(0)
    store.fails = False
    assert await other.begin()


@pytest.mark.parametrize("refuses", ["get", "compare_and_set"])
async def test_another_store_counts_alone_while_the_first_one_refuses(refuses):
    """A full store, or a replica, can be read and takes no writes: its content says nothing to another."""

    class Refusing(LocalStore):
        refuses = ""

        async def get(self, *values):
            if self.refuses == "get":
                raise StoreUnavailable("away", retry_after_seconds=1)
            return await super().get(*values)

        async def compare_and_set(self, *values):
            if self.refuses:
                raise StoreUnavailable("full", retry_after_seconds=1)
            return await super().compare_and_set(*values)

    first, second = Refusing(), LocalStore()
    clock = Clock()
    quotas = Quotas(requests_per_minute=2, in_flight=5)
    use, other = (QuotaUse("k", quotas, first, second, max_seconds=100, clock=clock) for _ in range(2))
    assert await use.begin()
    first.refuses = refuses
    await begin(use, 2)
    assert (await refused(use))[0] == "requests_per_minute"
    first.refuses = ""
    # Three are in flight here, whichever store has counted them; one more may begin, and nothing is lost.
    assert await use.begin()
    clock.seconds += 60
    assert await other.begin()
    assert (await refused(other))[0] == "in_flight"
    for _ in range(4):
        await use.end(0)
    assert await other.begin()
    assert await second.count() == 1


# The server.


def ask(client, key, text="a", **body):
    body = body or {"inputs": text}
    return client.post("/embed", json=body, headers=bearer(key))


def documented(client):
    """The responses of each documented route, by method and path."""
    paths = client._transport.app.openapi()["paths"].items()
    return {(method, path): at["responses"] for path, methods in paths for method, at in methods.items()}


@pytest.mark.parametrize("admin", [False, True])
async def test_every_route_but_health_ready_and_the_page_is_closed(file, admin):
    async with serving(api_keys=file, admin=admin) as client:
        routes = documented(client)
        paths = {*routes} | {("get", path) for path in ("/docs", "/openapi.json", "/nowhere", "/embed/")}
        paths |= {("options", "/embed"), ("post", "/"), ("delete", "/cache")}
        is_open = {}
        for method, path in paths:
            response = await client.request(method, path)
            is_open[method, path] = response.status_code != 401
            if response.status_code == 401:
                assert response.headers["WWW-Authenticate"] == 'Bearer realm="attncache"'
                assert len(response.headers.get_list("X-Request-Id")) == 1
        opened = {path for path, is_opened in is_open.items() if is_opened}
        assert opened == {("get", "/health"), ("get", "/ready")}
        assert opened == {path for path, responses in routes.items() if "401" not in responses}
        assert (await client.get("/")).status_code != 401
        for (method, path), responses in routes.items():
            response = await client.request(method, path, headers=bearer(ONE))
            assert (response.status_code == 403) == ("403" in responses)
            if response.status_code == 200:
                names = responses["200"].get("headers", {})
                assert (MODEL_HEADER in response.headers) == (MODEL_HEADER in names)


async def test_key_opens_routes_and_the_operators_routes_need_an_admin_key(file):
    async with serving(api_keys=file, admin=True) as client:
        for headers in (bearer(ONE), {"X-API-Key": ONE}, {**bearer("other"), "X-API-Key": ONE}):
            assert (await client.post("/embed", json={"inputs": "a"}, headers=headers)).status_code == 200
        wrong = await client.post("/embed", json={"inputs": "a"}, headers=bearer(ONE + "0"))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "unauthorized")
        assert "invalid_token" in wrong.headers["WWW-Authenticate"]
        for path in ("/info", "/openapi.json", "/docs"):
            assert (await client.get(path, headers=bearer(ONE))).status_code == 200
        for path in ("/metrics", "/cache/stats"):
            forbidden = await client.get(path, headers=bearer(ONE))
            assert (forbidden.status_code, forbidden.json()["error"]["code"]) == (403, "forbidden")
        for method, path in (("GET", "/metrics"), ("DELETE", "/cache"), ("POST", "/explain")):
            broken = await client.request(method, f"{path}%0A", headers=bearer(ONE))
            assert (broken.status_code, broken.json()["error"]["code"]) == (404, "not_found")
        assert (await client.get("/metrics", headers=bearer(OPS))).status_code == 200
        allowed = await client.get("/cache/stats", headers=bearer(OPS))
        assert allowed.json()["error"]["code"] == "no_key_values"
        for path in ("/v1/embeddings", "/v1/unknown"):
            assert (await client.post(path)).json()["error"]["type"] == "authentication_error"


async def test_keys_are_in_no_log_no_metric_and_no_description(file, caplog):
    caplog.set_level("ERROR", logger="httpx")
    caplog.set_level("DEBUG")
    async with serving(api_keys=file, access_log=True) as client:
        unknown = "never-known-0123456789"
        shown = [(await ask(client, key)).text for key in (ONE, OPS, unknown)]
        for path in ("/info", "/metrics", "/openapi.json"):
            shown.append((await client.get(path, headers=bearer(OPS))).text)
    assert 'attncache_key_requests_total{key="one"} 1.0' in shown[4]
    assert 'attncache_key_tokens_total{key="one"} 1.0' in shown[4]
    assert "service.access" in caplog.text
    for secret in (ONE, TWO, OPS, unknown):
        assert secret not in "".join([*shown, caplog.text])


async def test_quotas_hold_for_each_key_and_their_refusals_are_counted(tmp_path):
    text = f"few {ONE} requests_per_minute=2\nshort {TWO} tokens_per_minute=10\nops {OPS} admin\n"
    async with serving(api_keys=keys_file(tmp_path, text)) as client:
        for key, sent in ((ONE, ["a", "b"]), (TWO, ["c" * 30])):
            assert [(await ask(client, key, body)).status_code for body in sent] == [200] * len(sent)
            response = await ask(client, key)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "quota_exceeded")
            assert 1 <= int(response.headers["Retry-After"]) <= 126
            # Other routes compute nothing, and stay open.
            assert (await client.get("/info", headers=bearer(key))).status_code == 200
        assert (await ask(client, OPS)).status_code == 200
        found = samples((await client.get("/metrics", headers=bearer(OPS))).text)
    for name, quota in (("few", "requests_per_minute"), ("short", "tokens_per_minute")):
        assert found["attncache_quota_refusals_total", name, quota] == 1
    assert found["attncache_key_tokens_total", "short"] == 30


async def test_requests_at_once_take_tokens_by_their_texts_as_far_as_these_are_computed(tmp_path):
    """The model has 64 tokens at most, so a long text counts as 64 until it is answered."""
    engine = FakeEngine()
    async with serving(engine, api_keys=keys_file(tmp_path, f"one {ONE} tokens_per_minute=150\n")) as client:
        waiting = [await begun(engine, ask(client, ONE, "c" * 20_000))]
        waiting += [asyncio.create_task(ask(client, ONE, "d" * 20_000)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"
        engine.may_run.set()
        assert [(await each).status_code for each in waiting] == [200] * 3


async def test_requests_that_compute_twice_take_tokens_for_both(tmp_path):
    """Labels that are compared by their embeddings are computed before the texts."""
    engine, run = FakeEngine(), FakeEngine.run

    def hold_texts(requests):
        if "c" * 64 in texts_of(requests):
            engine.may_run.clear()
        return run(engine, requests)

    engine.run = hold_texts
    async with serving(engine, api_keys=keys_file(tmp_path, f"one {ONE} tokens_per_minute=60\n")) as client:

        def classify():
            body = {"inputs": ["c" * 200, "d" * 200], "labels": ["a" * 8, "b" * 8]}
            return client.post("/classify", json=body, headers=bearer(ONE))

        first = asyncio.create_task(classify())
        await asyncio.to_thread(engine.runs.acquire)
        # The first one has taken the tokens of its labels and all that were left, for its texts.
        found = await asyncio.gather(*(classify() for _ in range(3)))
        assert [response.json()["error"]["code"] for response in found] == ["quota_exceeded"] * 3
        engine.may_run.set()
        assert (await first).status_code == 200


async def test_request_that_computes_twice_is_not_refused_because_of_itself(tmp_path):
    """Its labels take all tokens that the key has left."""
    text = f"one {ONE} tokens_per_minute=60\nops {OPS} admin\n"
    async with serving(api_keys=keys_file(tmp_path, text)) as client:
        body = {"inputs": "c" * 40, "labels": ["a" * 2000, "b" * 2000]}
        response = await client.post("/classify", json=body, headers=bearer(ONE))
        assert response.status_code == 200, response.text
        found = samples((await client.get("/metrics", headers=bearer(OPS))).text)
        assert found["attncache_key_tokens_total", "one"] > 60
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"


async def test_requests_in_flight_of_a_key_end_also_when_they_fail_or_their_client_leaves(tmp_path):
    engine = FakeEngine()
    async with serving(engine, api_keys=keys_file(tmp_path, f"one {ONE} in_flight=1\n")) as client:
        for body in ({"inputs": []}, {"inputs": "a", "unknown": 1}):
            for _ in range(2):
                assert (await ask(client, ONE, **body)).status_code == 400
        first = await begun(engine, ask(client, ONE, "held"))
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"
        first.cancel()
        engine.may_run.set()
        await asyncio.gather(first, return_exceptions=True)
        assert (await ask(client, ONE)).status_code == 200


@pytest.mark.parametrize("way", ["leaves", "has too little time"])
async def test_tokens_are_charged_though_the_client_gets_no_answer(tmp_path, way, monkeypatch):
    engine, loop, passed = FakeEngine(), asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + passed)
    text = f"one {ONE} tokens_per_minute=10\ntwo {TWO}\nops {OPS} admin\n"
    async with serving(engine, api_keys=keys_file(tmp_path, text)) as client:
        body = {"inputs": "c" * 30}
        sent = await begun(engine, ask(client, ONE, **body))
        if way == "leaves":
            sent.cancel()
        while not sent.done():
            passed += 60.0  # to the event loop's timers
            await asyncio.sleep(0.001)
        assert way == "leaves" or sent.result().status_code == 504
        # What still waited is not charged.
        header = {"X-AttnCache-Timeout": "0.1"}
        waited = await client.post("/embed", json=body, headers={**bearer(TWO), **header})
        assert waited.status_code == 504
        engine.may_run.set()
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"
        found = samples((await client.get("/metrics", headers=bearer(OPS))).text)
    assert [found["attncache_key_tokens_total", key] for key in ("one", "two")] == [30, 0]


@pytest.mark.parametrize("text", [FAILING, NOT_FINITE])
async def test_tokens_are_charged_though_the_request_fails(tmp_path, text):
    async with serving(api_keys=keys_file(tmp_path, f"one {ONE} tokens_per_minute=10\n")) as client:
        assert (await ask(client, ONE, text)).status_code == 500
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"


async def test_request_that_was_not_counted_when_it_began_is_not_subtracted_when_it_ends(tmp_path):
    engine = FakeEngine()
    async with serving(engine, api_keys=keys_file(tmp_path, f"one {ONE} in_flight=1\n")) as client:
        use = client._transport.app.state.service.keys.holder(headers(x_api_key=ONE)).use
        held = await begun(engine, ask(client, ONE, "held"))
        (store,) = use._stores
        get = store.get

        async def fail_once(_key):
            store.get = get
            raise StoreUnavailable("locked", retry_after_seconds=1)

        store.get = fail_once
        assert (await ask(client, ONE, inputs=[])).status_code == 400
        assert (await ask(client, ONE)).json()["error"]["code"] == "quota_exceeded"
        engine.may_run.set()
        assert (await held).status_code == 200


async def test_metrics_show_the_keys_of_the_file_and_no_others(tmp_path):
    path = keys_file(tmp_path, f"one {ONE}\nops {OPS} admin\n")
    async with serving(api_keys=path) as client:
        await ask(client, ONE)
        keys_file(tmp_path, f"two {TWO}\nops {OPS} admin\n")
        state = client._transport.app.state.service
        reload_all(state.reloads)
        # Requests that began before.
        state.metrics.observe_key("one", 1)
        state.metrics.observe_refusal("one", "in_flight")
        shown = (await client.get("/metrics", headers=bearer(OPS))).text
    assert '{key="two"} 0.0' in shown
    assert 'key="one"' not in shown


async def test_flow_of_a_key_holds_the_flows_of_its_connections(file):
    """Many texts of one key delay a text of another key by at most a batch; see test_batcher."""
    engine = FakeEngine()
    async with serving(engine, api_keys=file, max_batch_tokens=16) as client:
        held = await begun(engine, ask(client, TWO, "held"))
        # The test's client has one address, so without keys all of these would be one flow.
        many = asyncio.create_task(ask(client, ONE, inputs=[f"many {number}" for number in range(40)]))
        batcher = client._transport.app.state.service.serving().batcher
        await queued(batcher, 40)
        single = asyncio.create_task(ask(client, TWO, "single"))
        await queued(batcher, 41)
        engine.may_run.set()
        assert [(await response).status_code for response in (held, many, single)] == [200] * 3
    assert any("single" in batch for batch in engine.batches[:4])


# What is kept is kept apart.


def deciding(folder, **settings):
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32", key_values=KeyValueOptions(2**24))
    return serving(engine, **settings)


TEXT = "the bank was closed today. " * 4 + "where is my card"
CACHED = "X-AttnCache-Cached-Tokens"


async def test_two_keys_share_no_stored_keys_and_values(folder, file):
    async with deciding(folder, api_keys=file, result_memory_bytes=0) as client:
        found = [(await ask(client, key, TEXT)).headers[CACHED] for key in (ONE, ONE, TWO, TWO)]
        tokens = found[0].removeprefix("0/")
        assert found == [f"0/{tokens}", f"{tokens}/{tokens}"] * 2
        salted = await ask(client, ONE, inputs=TEXT, cache_salt="two")
        assert salted.headers[CACHED] == f"0/{tokens}"


async def test_two_keys_share_no_results_and_no_session(file):
    engine = FakeEngine()
    async with serving(engine, api_keys=file, result_memory_bytes=2**20) as client:
        for key in (ONE, ONE, TWO, TWO):
            assert (await ask(client, key, "equal")).status_code == 200
        labels = {"inputs": "text", "labels": ["red", "blue"]}
        for key in (ONE, TWO):
            await client.post("/classify", json=labels, headers=bearer(key))
        assert (await ask(client, ONE, session_id="42", transcript="first")).status_code == 200
        turn = {"session_id": "42", "append": " second"}
        assert (await ask(client, TWO, **turn)).json()["error"]["code"] == "unknown_session"
        assert (await ask(client, ONE, **turn)).status_code == 200
    assert engine.batches.count(["equal"]) == 2
    assert engine.batches.count(["red", "blue"]) == 2


async def test_operator_warms_for_a_key(folder, file):
    async with deciding(folder, api_keys=file, admin=True) as client:
        body = {"texts": TEXT, "key": "two"}
        warmed = await client.post("/cache/warm", json=body, headers=bearer(OPS))
        assert warmed.json()["stored_tokens"] == warmed.json()["tokens"]
        cached = [int((await ask(client, key, TEXT)).headers[CACHED].split("/")[0]) for key in (ONE, TWO)]
        assert cached == [0, warmed.json()["tokens"]]
        unknown = await client.post("/cache/warm", json={"texts": "a", "key": "none"}, headers=bearer(OPS))
        assert (unknown.status_code, unknown.json()["error"]["field"]) == (400, "key")


async def test_lines_of_warm_name_a_key_if_there_are_keys_and_only_then(folder, file, tmp_path, caplog):
    named, unnamed = tmp_path / "named.jsonl", tmp_path / "unnamed.txt"
    unknown, broken = tmp_path / "unknown.jsonl", tmp_path / "broken"
    named.write_text('{"text": "the bank was closed today", "key": "two"}\n', encoding="utf-8")
    unnamed.write_text("the bank was closed today\n", encoding="utf-8")
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32", key_values=KeyValueOptions(2**24))
    for path, keys in ((named, {}), (unnamed, {"api_keys": file}), (unnamed, {"api_key": f"two {TWO}"})):
        with pytest.raises(InvalidSettings, match=r'line 1: (give|leave out) "key"'):
            warm(engine, read_warm_file(path), read_settings({"warm": path, **keys}))
    warm(engine, read_warm_file(named), read_settings({"warm": named, "api_keys": file}))
    assert "no API key" not in caplog.text
    more = '{"text": "the bank", "key": "too"}\n' * 2
    unknown.write_text(named.read_text("utf-8") + more, encoding="utf-8")
    broken.write_text("two\n", encoding="utf-8")
    for keys in (file, broken):
        warm(engine, read_warm_file(unknown), read_settings({"warm": unknown, "api_keys": keys}))
    assert [message[:7] for message in caplog.messages if "no API key" in message] == ["line 2 "]
    async with serving(engine, api_keys=file) as client:
        shown = [(await ask(client, key, "the bank was closed today")).headers[CACHED] for key in (ONE, TWO)]
    assert [int(usage.split("/")[0]) > 0 for usage in shown] == [False, True]


def test_reload_of_a_file_that_is_malformed_or_cannot_be_read_leaves_the_keys(file, keys, caplog):
    new = "rotated-key-0123456789"
    keys_file(file.parent, FILE.replace(ONE, new))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No descriptor is left: the lowest free one is the limit.
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        reload_all([keys.reload])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be read: too many open files; the server goes on with what it has" in caplog.text
    assert keys.holder(headers(x_api_key=ONE)).name == "one"
    reload_all([keys.reload])
    assert keys.holder(headers(x_api_key=new)).name == "one"
    keys_file(file.parent, "malformed\n")
    reload_all([keys.reload])
    (line,) = [line for line in caplog.records if "line 1 must be a name" in line.message]
    assert line.levelno == logging.ERROR
    assert keys.holder(headers(x_api_key=new)).name == "one"


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("a bug"), MemoryError()])
def test_whatever_a_reload_raises_the_others_follow(error, caplog):
    calls = []

    def failing():
        raise error

    with caplog.at_level(logging.INFO):
        reload_all([failing, lambda: calls.append(1)])
    assert calls == [1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.INFO]
    assert "the server goes on with what it has" in caplog.text


@given(
    st.integers(1, 10_000),
    st.floats(-3, 1) | st.floats(-1e5, 1),
    st.floats(0, quotas._FULL_SECONDS),
    st.floats(0, quotas._FULL_SECONDS),
)
def test_what_is_used_is_kept_until_the_bucket_is_full_also_by_a_clock_behind(
    per_minute, level, ahead, behind
):
    bucket = quotas._Bucket(per_minute, level * per_minute, 1000.0 + ahead)
    bucket.refill(1000.0 + bucket.seconds_until_full(1000.0) - behind)
    assert bucket.level == pytest.approx(per_minute)
