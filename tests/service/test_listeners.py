"""TCP, TLS and Unix sockets, and what the admin port serves."""

import re
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, serving
from raw_http import EMBED, HEALTH, READY, make_certificate, served, wait_until

from service.app import create_app
from service.errors import AddressUnavailable, InvalidSettings
from service.settings import Settings
from service.web.listeners import (
    BACKLOG,
    OPERATORS_PATHS,
    Certificate,
    Listener,
    bind,
    bind_unix,
    is_for_operators,
    open_listeners,
)
from service.workers.server import Server, reload_all
from service.workers.supervisor import Supervisor

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.skipif(not Path("/proc/sys/net/core/somaxconn").exists(), reason="needs Linux")
def test_system_keeps_many_connections_until_they_are_accepted():
    with served() as server:
        (listener,) = server.server._listeners
        # struct tcp_info: of a socket that listens, tcpi_sacked is the most connections that wait.
        (most,) = struct.unpack_from(
            "I", listener.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32), 28
        )
    assert most == min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))


# Unix sockets.


def test_unix_socket_is_served_and_removed(tmp_path):
    path = tmp_path / "attncache.sock"
    with served(unix_socket=path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert server.ask(EMBED).status == 200
    assert not path.exists()


def test_socket_of_a_server_that_has_ended_is_replaced(tmp_path):
    path = tmp_path / "attncache.sock"
    bind_unix(path).close()
    assert path.is_socket()
    with bind_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_path_that_cannot_be_bound_is_refused_and_left_alone(tmp_path):
    path, notes = tmp_path / "attncache.sock", tmp_path / "notes.txt"
    with bind_unix(path), pytest.raises(AddressUnavailable, match="another server listens"):
        bind_unix(path)
    assert path.is_socket()
    notes.write_text("mine")
    with pytest.raises(AddressUnavailable, match="not a socket"):
        bind_unix(notes)
    assert notes.read_text() == "mine"
    with pytest.raises(AddressUnavailable, match=r"absent/a\.sock: no such file"):
        bind_unix(tmp_path / "absent" / "a.sock")


def test_start_that_failed_leaves_no_socket(tmp_path):
    path = tmp_path / "attncache.sock"
    with bind("127.0.0.1", 0) as other:
        settings = Settings(unix_socket=path, admin=True, admin_port=other.getsockname()[1])
        with pytest.raises(AddressUnavailable, match="address already in use"):
            open_listeners(settings)
    assert not path.exists()


# The admin port.


@pytest.fixture(scope="module")
def with_admin_port():
    with served(admin_port=0, admin=True) as server:
        yield server


@pytest.mark.parametrize("path", [*OPERATORS_PATHS, "/cache/stats", "/docs/oauth2-redirect"])
def test_routes_for_operators_are_served_on_the_admin_port_only(with_admin_port, path):
    request = HEALTH.replace(b"/health", path.encode())
    public, admin = (with_admin_port.ask(request, listener) for listener in (0, 1))
    assert (public.status, public.code) == (404, "not_found")
    assert b"--admin-port" in public.body
    assert b"--admin-port" not in admin.body


def test_key_without_the_right_admin_is_told_where_the_routes_for_operators_are(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("reports reports-key-0123456789\n")
    with served(admin_port=0, admin=True, api_keys=keys) as server:
        for path in (b"/metrics", b"/cache/stats", b"/explain"):
            request = HEALTH.replace(b"/health", path)
            assert server.ask(request).status == 401
            with_key = request.replace(b"\r\n", b"\r\nX-API-Key: reports-key-0123456789\r\n", 1)
            public = server.ask(with_key)
            assert (public.status, public.code) == (404, "not_found")
            assert b"--admin-port" in public.body


@pytest.mark.parametrize("path", ["/metrics", "/info", "/openapi.json", "/docs", "/cache", "/explain"])
def test_line_break_behind_a_path_opens_no_route(with_admin_port, path):
    request = HEALTH.replace(b"/health", path.encode() + b"%0A")
    for method in (b"GET", b"POST", b"DELETE"):
        answer = with_admin_port.ask(request.replace(b"GET", method), listener=0)
        assert (answer.status, answer.code) == (404, "not_found")


def test_both_listeners_serve_health_and_inference(with_admin_port):
    for listener in (0, 1):
        for request in (HEALTH, READY, EMBED):
            assert with_admin_port.ask(request, listener).status == 200


def test_metrics_count_the_connections_of_each_listener(with_admin_port):
    with with_admin_port.connect() as client:
        client.sendall(HEALTH)
        client.recv(1)
        assert with_admin_port.metric('connections{listener="public"}') >= 1
        assert with_admin_port.metric('connections{listener="admin"}') == 1


def test_paths_that_begin_alike_are_not_for_operators():
    assert not any(map(is_for_operators, ("/information", "/cached", "/embed", "/docs2")))


# TLS.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder: first.pem and .key (ECDSA), second.pem and .key (RSA), an encrypted.key of first.pem."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder, "first")
    make_certificate(folder, "second", kind=["rsa:2048"])
    encrypt = ["ec", "-in", folder / "first.key", "-out", folder / "encrypted.key", "-aes128"]
    subprocess.run(["openssl", *encrypt, "-passout", "pass:Sesam"], check=True, capture_output=True)
    return folder


def common_name(server, trusted):
    """Return the name in the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=trusted)
    with server.connect() as client, context.wrap_socket(client, server_hostname="127.0.0.1") as encrypted:
        encrypted.sendall(HEALTH)
        assert encrypted.recv(12) == b"HTTP/1.1 200"
        return dict(pairs[0] for pairs in encrypted.getpeercert()["subject"])["commonName"]


def test_https_is_served_and_the_certificate_read_again(certificates, tmp_path, caplog):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(certificates / "first.pem", cert)
    shutil.copy(certificates / "first.key", key)
    with served(tls_cert=cert, tls_key=key) as server:
        assert common_name(server, certificates / "first.pem") == "first"
        shutil.copy(certificates / "second.pem", cert)
        reload_all(server.server._state.reloads)
        assert "is not the key of" in caplog.text
        assert common_name(server, certificates / "first.pem") == "first"
        shutil.copy(certificates / "second.key", key)
        server.server.handle_hangup(signal.SIGHUP, None)
        wait_until(lambda: not server.server._hangup)
        assert common_name(server, certificates / "second.pem") == "second"
        with server.connect() as plain:
            plain.sendall(HEALTH)
            assert b"200" not in plain.recv(64)


def served_certificate(context):
    """Return the certificate that a context shows, as DER."""
    ours, theirs = socket.socketpair()
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.set_alpn_protocols(["h2", "http/1.1"])
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(context.wrap_socket, ours, server_side=True)
        with client.wrap_socket(theirs) as connected, accepted.result():
            assert connected.selected_alpn_protocol() == "http/1.1"
            return connected.getpeercert(binary_form=True)


def test_worker_that_begins_later_shows_the_certificate_of_today(certificates, tmp_path, caplog):
    """The supervisor has made the context, and the files were replaced since."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = (
        ssl.PEM_cert_to_DER_cert((certificates / f"{name}.pem").read_text()) for name in ("first", "second")
    )
    shutil.copy(certificates / "first.pem", cert)
    shutil.copy(certificates / "first.key", key)
    settings, certificate = Settings(tls_cert=cert, tls_key=key), Certificate(cert, key)
    app = create_app(settings, lambda: iter([FakeEngine()]))
    with socket.socket() as unbound:
        listener = Listener("public", unbound, "", certificate)
        inherited = certificate.context
        Server(app, settings, [listener], is_alone=False)
        assert certificate.context is inherited  # in which clients resume sessions of other workers
        shutil.copy(certificates / "second.pem", cert)
        Server(app, settings, [listener], is_alone=False)
        assert "is not the key of" in caplog.text  # half of the pair
        assert served_certificate(certificate.context) == first
        shutil.copy(certificates / "second.key", key)
        Server(app, settings, [listener], is_alone=False)
        assert served_certificate(certificate.context) == second
        # If the files are damaged by then, the certificate that the supervisor has read at the last SIGHUP.
        supervisor = Supervisor(settings, 1, None, [listener], tmp_path)
        shutil.copy(certificates / "first.pem", cert)
        for name in ("first", "second"):
            shutil.copy(certificates / f"{name}.key", key)
            supervisor._signals.append(signal.SIGHUP)
            supervisor._act_on_signals()
            assert served_certificate(certificate.context) == first


def test_hangup_ends_no_server_under_nohup(monkeypatch):
    monkeypatch.setattr("service.workers.server.IGNORES_HANGUP", True)
    with served() as server:
        server.server.handle_hangup(signal.SIGHUP, None)
        assert not server.server._state.draining


@pytest.mark.parametrize("host", ["my..host", "a" * 64 + ".example"])
def test_name_that_no_host_can_have_is_refused(host):
    with pytest.raises(AddressUnavailable, match=f"cannot listen on {host} port 0"):
        bind(host, 0)


def test_responses_over_tls_close_and_drain(certificates):
    cert, key = certificates / "first.pem", certificates / "first.key"
    with served(tls_cert=cert, tls_key=key, header_seconds=0.3) as server:
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            url = f"https://127.0.0.1:{server.addresses[0][1]}"
            wait_until(lambda: client.get(f"{url}/ready").status_code == 200)
            large = {"inputs": [str(number) for number in range(256)]}
            assert len(client.post(f"{url}/embed", json=large).json()) == 256
        # Neither a handshake that does not end nor headers that do not end are waited for.
        with server.connect() as silent:
            assert silent.recv(1) == b""
        context = ssl.create_default_context(cafile=cert)
        with server.connect() as slow, context.wrap_socket(slow, server_hostname="127.0.0.1") as encrypted:
            encrypted.sendall(b"GET /")
            assert encrypted.recv(12) == b"HTTP/1.1 408"


@pytest.mark.parametrize(
    ("cert", "key", "says"),
    [
        ("absent.pem", "first.key", r"--tls-cert .*absent\.pem cannot be read: no such file"),
        ("first.pem", "absent.key", r"--tls-key .*absent\.key cannot be read: no such file"),
        ("first.pem", "second.key", r"second\.key is not the key of .*first\.pem"),
        ("first.pem", "encrypted.key", "not encrypted"),
        ("first.key", "first.key", "in PEM"),
        ("first.pem", "first.pem", "in PEM"),
    ],
)
def test_certificate_that_cannot_be_used_is_refused_with_its_file(certificates, cert, key, says):
    with pytest.raises(InvalidSettings, match=says):
        Certificate(certificates / cert, certificates / key)


# Browsers and compression.


ORIGIN = {"Origin": "https://app.example"}


async def test_cors_is_off_by_default():
    async with serving() as client:
        response = await client.post("/embed", json={"inputs": "a"}, headers=ORIGIN)
        assert not [name for name in response.headers if name.startswith("access-control")]
        preflight = {**ORIGIN, "Access-Control-Request-Method": "POST"}
        assert (await client.options("/embed", headers=preflight)).status_code == 405


async def test_pages_of_allowed_origins_may_ask():
    async with serving(cors_origin="https://other.example, https://app.example") as client:
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await client.options("/embed", headers={**ORIGIN, **wanted})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        response = await client.post("/embed", json={"inputs": "a"}, headers=ORIGIN)
        assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        exposed = set(response.headers["access-control-expose-headers"].split(", "))
        documented = set(re.findall(r"`(X-AttnCache-[A-Za-z-]+)", API_PAGE.read_text()))
        assert documented - exposed == {
            *(f"X-AttnCache-{asks}" for asks in ("Require-Model", "Reuse", "Timeout"))
        }
        refused = await client.post("/embed", json={}, headers=ORIGIN)
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        other = await client.post("/embed", json={"inputs": "a"}, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("gzip", "accepted", "texts", "encoding"),
    [
        (True, "gzip", 64, "gzip"),
        (True, "identity", 64, None),
        (True, "br, gzip;q=0.5", 64, "gzip"),
        (True, "gzip;q=0", 64, None),
        (True, "gzip; q=0.0, identity", 64, None),
        (True, "gzip", 1, None),
        (False, "gzip", 64, None),
    ],
)
async def test_only_large_responses_are_compressed_for_clients_that_ask(gzip, accepted, texts, encoding):
    inputs = [f"text {number}" for number in range(texts)]
    async with serving(gzip=gzip) as client:
        response = await client.post("/embed", json={"inputs": inputs}, headers={"Accept-Encoding": accepted})
        assert response.headers.get("content-encoding") == encoding
        assert len(response.json()) == texts
