"""docker/envoy.yaml and docker/haproxy.cfg, by real proxies in front of servers that do what a test says."""

import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import httpx
import pytest
from entrance import DOCKER, OFTEN, NameServer, Stub, answers, entrances, envoy_path, get, post
from ports import free_port
from raw_http import wait_until

from service.settings import Settings

TEXT = {"inputs": "a"}
BY_KEY = {"X-AttnCache-Affinity": "one"}
# Servers that answer late, because the machine is busy, are healthy.
PATIENT = {**OFTEN, "- timeout: 2s": "- timeout: 240s"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Envoy, another one that soon asks a second server for a slow answer, their names, and three servers."""
    port, folder = free_port("127.0.1.1"), tmp_path_factory.mktemp("envoy")
    stubs = [Stub(f"127.0.1.{number}", port) for number in (1, 2, 3)]
    with (
        NameServer() as names,
        entrances(["on"], names, port, folder / "usual", PATIENT, per_try_timeout=240) as (entrance,),
        entrances(["on"], names, port, folder / "hasty", PATIENT, per_try_timeout=0.5) as (hasty,),
    ):
        yield entrance, hasty, names, stubs
    for stub in stubs:
        stub.close()


@pytest.fixture
def entrance(places):
    return places[0]


@pytest.fixture
def hasty(places):
    return places[1]


@pytest.fixture
def stubs(places):
    """The servers, as if new: all are named, are ready and answer 200 with their address."""
    *doors, names, stubs = places
    for stub in stubs:
        stub.is_ready, stub.answer = True, lambda *_, host=stub.host: (200, {}, host)
    names.addresses = [stub.host for stub in stubs]
    wait_until(
        lambda: all(door.healthy(cluster) == 3 for door in doors for cluster in ("by_key", "by_requests"))
    )
    for stub in stubs:
        stub.requests.clear()
    return stubs


def ask(entrance, content=TEXT, **headers):
    return post(f"{entrance.url}/embed", json=content, headers=headers, timeout=240)


def answer_first(stubs, *answer):
    """Let the server that is asked first answer so, and the others 200."""
    asked = []

    def respond(*_):
        asked.append(1)
        return answer if len(asked) == 1 else (200, {}, "second")

    for stub in stubs:
        stub.answer = respond


def count(stubs):
    return sum(len(stub.requests) for stub in stubs)


def test_configuration_is_valid_and_follows_the_settings_of_the_servers(tmp_path):
    text = (DOCKER / "envoy.yaml").read_text(encoding="utf-8")
    (tmp_path / "envoy.yaml").write_text(text.replace("/etc/envoy/", f"{DOCKER}/"))
    command = [envoy_path(), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "[warning]" not in done.stderr
    settings = Settings()
    assert text.count(f" {settings.max_body_bytes}\n") == 2
    assert f"timeout: {2 * settings.request_seconds:g}s" in text
    assert f"per_try_timeout: {settings.request_seconds / 4:g}s" in text
    assert settings.keep_alive_seconds > 60
    assert "idle_timeout: 60s" in text


@pytest.mark.parametrize("code", ["not_ready", "shutting_down", None])
@pytest.mark.parametrize("key", [{}, BY_KEY])
def test_another_server_answers_for_one_that_takes_no_requests_or_is_lost(entrance, stubs, code, key):
    # Without a code, the server closes the connection.
    answer_first(stubs, *((503, {"X-AttnCache-Error": code}, "") if code else (None, {}, "")))
    body = {"inputs": "a" * 1_900_000}
    answered = ask(entrance, body, **key)
    assert (answered.status_code, answered.text) == (200, "second")
    assert [json.loads(body) for stub in stubs for *_, body in stub.requests] == [body] * 2
    ids = {headers["x-request-id"] for stub in stubs for _, headers, _ in stub.requests}
    assert len(ids) == 1
    assert max(len(stub.requests) for stub in stubs) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_input"),
        (413, "body_too_large"),
        (429, "queue_full"),
        (500, "internal_error"),
        (503, "too_many_connections"),
        (503, "store_unavailable"),
        (503, "stuck"),
        (503, None),
        (504, "deadline_exceeded"),
    ],
)
def test_every_other_answer_is_passed_on_and_no_request_repeated(entrance, stubs, status, code):
    answer_first(stubs, status, {"X-AttnCache-Error": code, "Retry-After": "7"} if code else {}, "sentence")
    answered = ask(entrance)
    assert (answered.status_code, answered.text) == (status, "sentence")
    assert answered.headers.get("x-attncache-error") == code
    assert count(stubs) == 1


def test_frozen_server_keeps_no_client_waiting_and_slow_servers_answer(hasty, stubs):
    home = next(stub for stub in stubs if stub.host == ask(hasty, **BY_KEY).text)
    thawed = threading.Event()
    home.answer = lambda *_: (200, {}, "frozen" if thawed.wait(240) else "")
    assert ask(hasty, **BY_KEY).text in {stub.host for stub in stubs} - {home.host}
    thawed.set()
    for stub in stubs:
        stub.answer = lambda *_: (200, {}, "slow" if not time.sleep(1) else "")
    assert ask(hasty, **BY_KEY).text == "slow"


def test_slow_answers_are_asked_of_three_servers_at_most(hasty, stubs):

    def slow(*_):
        time.sleep(2)  # four times per_try_timeout
        return 200, {}, ""

    for stub in stubs:
        stub.answer = slow
    with ThreadPoolExecutor(12) as clients:
        answered = list(clients.map(lambda number: ask(hasty, {"inputs": f"{number}"}), range(12)))
    assert {answer.status_code for answer in answered} == {200}
    assert 12 < count(stubs) <= 3 * 12
    wait_until(lambda: hasty.healthy() == hasty.healthy("by_requests") == 3)


def test_equal_keys_reach_one_server_and_different_keys_all(entrance, stubs):
    # The ring has the servers at random places, so few keys may miss one of them.
    for number, times in [(number, 3 if number < 30 else 1) for number in range(90)]:
        found = {ask(entrance, {"session_id": f"s{number}", "append": str(n)}).text for n in range(times)}
        assert len(found) == 1
    assert min(len(stub.requests) for stub in stubs) >= 9
    assert all("x-attncache-affinity" in headers for stub in stubs for _, headers, _ in stub.requests)


def test_server_that_fails_at_everything_leaves_and_comes_back(entrance, stubs):
    stubs[0].answer = lambda *_: (500, {}, "")
    # All servers answer so while their store is away, and none of them would be better.
    stubs[1].answer = lambda *_: (503, {"X-AttnCache-Error": "shared_unavailable"}, "")

    def statuses():
        found = {ask(entrance, {"inputs": f"{number}"}).status_code for number in range(30)}
        assert 503 in found
        return found

    assert statuses() == {200, 500, 503}
    wait_until(lambda: statuses() == {200, 503})
    stubs[0].answer = stubs[2].answer
    wait_until(lambda: statuses() == {200, 503} and entrance.healthy() == 3)


def test_servers_come_and_go_by_name_and_without_any_the_answer_is_503_at_once(entrance, places, stubs):
    *_, names, _ = places
    names.addresses = ["127.0.1.1"]
    for stub in stubs[1:]:
        stub.is_ready = False
    wait_until(lambda: entrance.healthy() == 1)
    assert {ask(entrance).text for _ in range(6)} == {"127.0.1.1"}
    stubs[0].is_ready = False
    wait_until(lambda: entrance.healthy() == entrance.healthy("by_requests") == 0)
    for key in ({}, BY_KEY):
        answered = ask(entrance, **key)
        assert (answered.status_code, answered.json()["error"]["code"]) == (503, "no_server")
        assert answered.json()["error"]["field"] is None
        assert (answered.headers["retry-after"], answered.headers["x-attncache-error"]) == ("1", "no_server")
    assert entrance.process.poll() is None


def test_body_that_is_too_large_is_refused_as_the_servers_refuse_it(entrance, stubs):
    largest = b'{"inputs": "' + b"a" * (2**21 - 14) + b'"}'
    assert len(largest) == 2**21
    assert post(f"{entrance.url}/embed", content=largest, timeout=240).status_code == 200
    refused = post(f"{entrance.url}/embed", content=largest + b" ", timeout=240)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert count(stubs) == 1


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        (["GARBAGE"], 400, "malformed_request"),
        (["GET /health HTTP/1.1"], 400, "malformed_request"),
        (["GET /health HTTP/1.1", "Host: a", "Connection: Upgrade", "Upgrade: websocket"], 403, "forbidden"),
        (["GET /health HTTP/1.1", "Host: a", f"X-A: {'a' * 70_000}"], 431, "headers_too_large"),
    ],
)
def test_what_envoy_refuses_is_refused_in_json(entrance, lines, status, code):
    url = httpx.URL(entrance.url)
    with socket.create_connection((url.host, url.port), timeout=240) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == status
        assert answer.headers["x-attncache-error"] == json.loads(answer.read())["error"]["code"] == code


def test_servers_learn_the_address_of_the_client_and_nothing_that_the_client_invents(entrance, stubs):
    invented = {"X-Forwarded-For": "198.51.100.1", "X-Request-Id": "mine"}
    commands = {"X-Envoy-Upstream-Rq-Timeout-Ms": "1", "X-Envoy-Retry-On": "5xx", "X-Envoy-Max-Retries": "9"}
    answer_first(stubs, 500, {}, "")
    assert ask(entrance, **invented, **commands).status_code == 500
    ((_, headers, _),) = [request for stub in stubs for request in stub.requests]
    # Envoy gives its own address for a client of the same machine.
    assert ip_address(headers["x-forwarded-for"]) != ip_address("198.51.100.1")
    assert headers["x-request-id"] == "mine"
    assert headers.keys().isdisjoint(name.lower() for name in commands)


def test_slow_client_costs_no_server_anything(entrance, stubs):
    host, port = entrance.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /embed HTTP/1.1\r\nHost: test\r\nContent-Length: 14\r\n\r\n{")
        assert ask(entrance).status_code == 200
        time.sleep(0.2)
        assert count(stubs) == 1
        client.sendall(b'"inputs":"a" }')
        client.settimeout(240)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_operators_port_shows_numbers_and_stops_nothing(entrance):
    for path in ("/quitquitquit", "/config_dump", "/"):
        assert post(f"{entrance.operators}{path}").status_code == 404
    assert "envoy_cluster_membership_healthy" in get(f"{entrance.operators}/stats/prometheus").text


# HAProxy.

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


@pytest.fixture
def haproxy(tmp_path):
    """The URL of HAProxy, and three servers."""
    if HAPROXY is None:
        pytest.skip("haproxy is not installed")
    port, own = free_port("127.0.1.1"), free_port()
    stubs = [Stub(f"127.0.1.{number}", port) for number in (1, 2, 3)]
    with NameServer() as names:
        names.addresses = [stub.host for stub in stubs]
        text = (DOCKER / "haproxy.cfg").read_text(encoding="utf-8")
        for shipped, here in (
            ("parse-resolv-conf", f"nameserver test 127.0.0.1:{names.port}"),
            ("attncache:8080", f"attncache:{port}"),
            ("bind :8080", f"bind 127.0.0.1:{own}"),
            ("maxconn 8000", "maxconn 100"),
        ):
            assert text.count(shipped) == 1
            text = text.replace(shipped, here)
        (tmp_path / "haproxy.cfg").write_text(text)
        url = f"http://127.0.0.1:{own}"
        with subprocess.Popen([HAPROXY, "-q", "-f", str(tmp_path / "haproxy.cfg")]) as process:
            try:
                wait_until(lambda: answers(f"{url}/ready"))
                yield url, stubs
            finally:
                process.kill()
    for stub in stubs:
        stub.close()


def ask_haproxy(url, key=None, text="a"):
    headers = {"X-Forwarded-For": "198.51.100.1", **({"X-AttnCache-Affinity": key} if key else {})}
    return post(f"{url}/embed", json={"inputs": text}, headers=headers, timeout=240)


def test_haproxy_hashes_the_header_and_repeats_what_a_lost_server_did_not_answer(haproxy):
    url, stubs = haproxy
    wait_until(lambda: len({ask_haproxy(url).text for _ in range(9)}) == 3)
    homes = {str(number): ask_haproxy(url, str(number)).text for number in range(12)}
    assert len(set(homes.values())) == 3
    assert {key: ask_haproxy(url, key).text for key in homes} == homes
    assert {headers["x-forwarded-for"] for stub in stubs for _, headers, _ in stub.requests} == {"127.0.0.1"}
    for stub in stubs:
        stub.requests.clear()
    for failure in ((None, {}, ""), (503, {"X-AttnCache-Error": "shutting_down"}, "")):  # None: closes
        stubs[0].answer = lambda *_, failure=failure: failure
        # As large as it is repeated.
        answered = [ask_haproxy(url, key, "a" * 50_000).text for key in homes]
        assert set(answered) == {stub.host for stub in stubs[1:]}
    ids = [{headers["x-request-id"] for _, headers, _ in stub.requests} for stub in stubs]
    assert ids[0]
    assert ids[0] <= ids[1] | ids[2]
    assert len(ids[1] | ids[2]) == 2 * len(homes)
    stubs[2].answer = lambda *_: (429, {"Retry-After": "7"}, "sentence")
    for stub in stubs[:2]:
        stub.is_ready = False
    wait_until(lambda: {ask_haproxy(url).status_code for _ in range(4)} == {429})
    before = len(stubs[2].requests)
    assert (ask_haproxy(url).status_code, len(stubs[2].requests)) == (429, before + 1)
    assert f"timeout server {2 * Settings().request_seconds:g}s" in (DOCKER / "haproxy.cfg").read_text()
