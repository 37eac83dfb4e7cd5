"""The container files agree with each other and keep their promises, as far as no engine is needed."""

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PORT = "8080"


def instructions(stage):
    """(name, arguments) of the instructions of a stage, counted from the first FROM."""
    text = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [
        line.strip() for line in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:][stage].splitlines()
    ]
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def argument(name):
    """The arguments of the last such instruction of the image that is served."""
    return [arguments for found, arguments in instructions(-1) if found == name][-1]


def environment():
    return dict(pair.split("=", 1) for pair in shlex.split(argument("ENV")))


def compose():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


def healthcheck():
    return json.loads(argument("HEALTHCHECK").split("CMD", 1)[1])


def test_prometheus_scrapes_the_compose_service_on_the_port_it_listens_on():
    config = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    service, port = job["static_configs"][0]["targets"][0].split(":")
    assert service in compose()["services"]
    assert port == argument("EXPOSE") == environment()["ATTNCACHE_PORT"] == PORT
    assert [mapping.split(":")[-1] for mapping in compose()["services"][service]["ports"]] == [PORT]


def test_prometheus_version_is_pinned_and_its_config_is_an_existing_file_mounted_read_only():
    prometheus = compose()["services"]["prometheus"]
    assert re.search(r":v\d+\.\d+\.\d+$", prometheus["image"])
    [config] = [volume for volume in prometheus["volumes"] if volume.startswith("./")]
    source, _, mode = config.split(":")
    assert (ROOT / source).is_file()
    assert mode == "ro"


def test_server_does_not_run_as_root_and_listens_on_all_addresses():
    user, _ = argument("USER").split(":")
    assert int(user) >= 1000
    assert environment()["ATTNCACHE_HOST"] == "0.0.0.0"


def test_entrypoint_is_the_command_itself_without_a_shell():
    assert json.loads(argument("ENTRYPOINT")) == ["attncache", "serve"]
    assert argument("STOPSIGNAL") == "SIGTERM"


def test_models_and_databases_lie_in_volumes_that_compose_keeps():
    kept = {volume.split(":")[1] for volume in compose()["services"]["attncache"]["volumes"]}
    assert (
        kept
        == set(json.loads(argument("VOLUME")))
        == {environment()["HF_HOME"], environment()["ATTNCACHE_CACHE_DIR"]}
    )
    for service in compose()["services"].values():
        named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith(".")}
        assert named <= set(compose()["volumes"])


def test_thread_counts_are_left_to_the_server():
    for text in ("docker/Dockerfile", "docker-compose.yml"):
        assert not re.search(r"(OMP|MKL|OPENBLAS)_\w+\s*[=:]", (ROOT / text).read_text(encoding="utf-8"))


def test_every_copied_file_passes_dockerignore():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in rules
    copied = [source for name, text in instructions(0) if name == "COPY" for source in text.split()[:-1]]
    assert "attncache_core" in copied
    for source in copied:
        assert "!" + re.sub(r"/.*|[\[\]]", "", source) in rules, source


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
def test_healthcheck_follows_the_status_of_health_and_asks_no_proxy(status, healthy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    command = healthcheck()
    assert command[0] == "python"
    assert "curl" not in " ".join(command)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {
            **os.environ,
            "ATTNCACHE_PORT": str(server.server_address[1]),
            "http_proxy": "http://127.0.0.1:9",
        }
        done = subprocess.run([sys.executable, *command[1:]], env=variables, capture_output=True, timeout=30)
        server.shutdown()
    assert (done.returncode == 0) == healthy


@pytest.mark.parametrize(
    "command",
    [
        ["docker-compose", "--file", "docker-compose.yml", "config", "--quiet"],
        ["promtool", "check", "config", "docker/prometheus.yml"],
    ],
    ids=lambda command: command[0],
)
def test_its_own_tool_accepts_the_file(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
