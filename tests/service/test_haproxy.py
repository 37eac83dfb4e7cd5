"""docker/haproxy.cfg, by a real HAProxy in front of servers that do what a test says."""

import shutil
import subprocess

import pytest
from entrance import DOCKER, NameServer, Stub, answers, free_port, post
from raw_http import wait_until

from service.settings import Settings

HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


@pytest.fixture
def cluster(tmp_path):
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


def ask(url, key=None, text="a"):
    headers = {"X-Forwarded-For": "198.51.100.1", **({"X-AttnCache-Affinity": key} if key else {})}
    return post(f"{url}/embed", json={"inputs": text}, headers=headers, timeout=30)


def test_haproxy_hashes_the_header_and_repeats_what_a_lost_server_did_not_answer(cluster):
    url, stubs = cluster
    wait_until(lambda: len({ask(url).text for _ in range(9)}) == 3)
    homes = {str(number): ask(url, str(number)).text for number in range(12)}
    assert len(set(homes.values())) == 3
    assert {key: ask(url, key).text for key in homes} == homes
    assert {headers["x-forwarded-for"] for stub in stubs for _, headers, _ in stub.requests} == {"127.0.0.1"}
    for stub in stubs:
        stub.requests.clear()
    for failure in ((None, {}, ""), (503, {"X-AttnCache-Error": "shutting_down"}, "")):  # None: closes
        stubs[0].answer = lambda *_, failure=failure: failure
        # As large as it is repeated.
        answered = [ask(url, key, "a" * 50_000).text for key in homes]
        assert set(answered) == {stub.host for stub in stubs[1:]}
    ids = [{headers["x-request-id"] for _, headers, _ in stub.requests} for stub in stubs]
    assert ids[0]
    assert ids[0] <= ids[1] | ids[2]
    assert len(ids[1] | ids[2]) == 2 * len(homes)
    stubs[2].answer = lambda *_: (429, {"Retry-After": "7"}, "sentence")
    for stub in stubs[:2]:
        stub.is_ready = False
    wait_until(lambda: {ask(url).status_code for _ in range(4)} == {429})
    before = len(stubs[2].requests)
    assert (ask(url).status_code, len(stubs[2].requests)) == (429, before + 1)
    assert f"timeout server {2 * Settings().request_seconds:g}s" in (DOCKER / "haproxy.cfg").read_text()
