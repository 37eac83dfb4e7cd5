"""docker/pair: an embedder and a reranker behind one address, by the shipped files."""

import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from core_models import write_model, write_sentence_transformer
from entrance import answers
from ports import free_port
from raw_http import serving_model, wait_until

from service.settings import Settings

FOLDER = Path(__file__).parents[2] / "docker" / "pair"
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
DOCUMENTS = {"query": "my card", "texts": ["the bank was closed", "my new card"]}


def configuration(embedder, reranker, port, folder):
    """Return the shipped configuration with other addresses and another folder for temporary files."""
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    for name, url in (("embedder", embedder), ("reranker", reranker)):
        text = text.replace(f"server {name}:8080;", f"server {url.removeprefix('http://')};")
    # Workers of root would be nobody, who may not write to the test's folder.
    text = "user root;\n" * (os.geteuid() == 0) + text
    return text.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace("/tmp/", f"{folder}/")


@contextmanager
def nginx(embedder, reranker, folder):
    """Run nginx in front of two servers, and yield its URL once it passes requests to the embedder."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    port, file = free_port(), folder / "nginx.conf"
    file.write_text(configuration(embedder, reranker, port, folder))
    with subprocess.Popen([NGINX, "-c", str(file), "-p", str(folder), "-g", "daemon off;"]) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: process.poll() is not None or answers(f"{url}/health"))
            assert process.poll() is None, "nginx has ended"
            yield url
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """The URLs of the proxy, of the embedder and of the reranker."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        serving_model(write_sentence_transformer(folder / "embedder")) as embedder,
        serving_model(write_model(folder / "reranker", ["relevance"])) as reranker,
        nginx(embedder, reranker, folder) as url,
    ):
        yield url, embedder, reranker


def test_each_path_reaches_the_server_that_answers_it(proxy):
    url, embedder, reranker = proxy
    embedded = httpx.post(f"{url}/embed", json={"inputs": "my card"}, headers={"X-Request-Id": "a1"})
    assert embedded.json() == httpx.post(f"{embedder}/embed", json={"inputs": "my card"}).json()
    assert embedded.headers["x-attncache-hits"] == "0/1"
    assert embedded.headers["x-request-id"] == "a1"
    ranked = httpx.post(f"{url}/rerank", json=DOCUMENTS)
    assert ranked.status_code == 200
    assert ranked.json() == httpx.post(f"{reranker}/rerank", json=DOCUMENTS).json()
    model, other = (
        httpx.get(f"{url}/{name}/info").json()["fingerprint"] for name in ("embedder", "reranker")
    )
    assert model != other
    assert embedded.headers["x-attncache-model"] == model
    assert 'route="/rerank",status="200"} 2.0' in httpx.get(f"{url}/reranker/metrics").text


def test_errors_and_large_bodies_are_the_servers_own(proxy):
    url, *_ = proxy
    refused = httpx.post(f"{url}/rerank", json={"query": 1})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Validation")
    texts = ["card " * 60] * 200  # 60 KB, which nginx keeps in a file
    assert len(httpx.post(f"{url}/embed", json={"inputs": texts}).json()) == 200
    large = httpx.post(f"{url}/embed", content=b" " * (2**21 + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


def test_pair_is_ready_if_both_servers_are(proxy, tmp_path):
    url, embedder, _ = proxy
    assert httpx.get(f"{url}/ready").status_code == 200
    with nginx(embedder, "http://127.0.0.1:9", tmp_path) as alone:  # nobody listens on port 9
        assert httpx.post(f"{alone}/embed", json={"inputs": "my card"}).status_code == 200
        assert httpx.get(f"{alone}/ready").status_code in (502, 503)


def test_services_are_what_the_proxy_and_the_settings_name():
    services = yaml.safe_load((FOLDER / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    upstreams = re.findall(r"^        server (\w+):(\d+);", text, re.MULTILINE)
    exposed = re.search(r"^EXPOSE (\d+)$", (FOLDER.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert exposed
    assert upstreams == [("embedder", exposed[1]), ("reranker", exposed[1])]
    assert set(services) == {"embedder", "reranker", "proxy"}
    assert services["proxy"]["ports"] == ["8080:8080"]
    assert re.search(r"^        listen 8080;$", text, re.MULTILINE)
    connections = re.search(r"worker_connections (\d+);", text)
    assert connections
    # Each request takes a connection of the client and one of a server.
    assert int(connections[1]) >= 2 * len(upstreams) * Settings().max_connections
    source, target, mode = services["proxy"]["volumes"][0].split(":")
    assert (FOLDER / source).is_file()
    assert (target, mode) == ("/etc/nginx/nginx.conf", "ro")
    for name in ("embedder", "reranker"):
        fields = [key.removeprefix("ATTNCACHE_").lower() for key in services[name]["environment"]]
        assert set(fields) <= set(Settings.model_fields)
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
    assert re.search(r":\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", services["proxy"]["image"])
