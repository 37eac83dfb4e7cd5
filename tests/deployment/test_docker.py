"""The container files agree with each other and keep their promises, as far as no engine is needed."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from entrance import Stub
from raw_http import make_certificate

ROOT = Path(__file__).resolve().parents[2]
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


def test_foreign_images_are_pinned_by_version_and_digest():
    [base] = re.findall(r"^ARG BASE=(.*)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    foreign = [service["image"] for service in compose()["services"].values() if "build" not in service]
    for image in (base, *foreign):
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", image), image


@pytest.mark.parametrize("name", compose()["services"])
def test_container_cannot_write_gain_privileges_or_grow_without_end(name):
    service = compose()["services"][name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    assert [mount.split(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    for volume in service["volumes"]:
        if volume.startswith("."):
            source, _, mode = volume.split(":")
            assert (ROOT / source).exists()
            assert mode == "ro"
    # Only the server is open to other machines.
    assert name == "attncache" or all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_grafana_finds_prometheus_and_the_dashboard_where_compose_puts_them():
    def provisioned(path):
        return yaml.safe_load((ROOT / "docker/grafana" / path).read_text(encoding="utf-8"))

    [source] = provisioned("datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [folder] = provisioned("dashboards/provider.yml")["providers"]
    grafana = compose()["services"]["grafana"]
    [mounted] = [
        volume.split(":")[1] for volume in grafana["volumes"] if volume.startswith("./docker/grafana:")
    ]
    assert folder["options"]["path"] == f"{mounted}/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "docker/grafana" / Path(home).relative_to(mounted)).is_file()


def test_server_runs_without_a_shell_and_not_as_root_and_listens_on_all_addresses():
    assert json.loads(argument("ENTRYPOINT")) == ["attncache", "serve"]
    assert argument("STOPSIGNAL") == "SIGTERM"
    user, _ = argument("USER").split(":")
    assert int(user) >= 1000
    assert environment()["ATTNCACHE_HOST"] == "0.0.0.0"


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
        top, _, _ = source.replace("wheel[s]", "wheels").partition("/")
        assert f"!{source}" in rules or f"!{top}" in rules, source


def test_healthcheck_asks_a_server_with_a_certificate_by_tls(tmp_path):
    make_certificate(tmp_path, "own", address="DNS:attncache")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    stub = Stub("127.0.0.1", tls=tls)
    variables = {"ATTNCACHE_PORT": str(stub.port), "ATTNCACHE_TLS_CERT": "/run/secrets/tls.crt"}
    done = subprocess.run([sys.executable, *healthcheck()[1:]], env={**os.environ, **variables}, timeout=240)
    stub.close()
    assert done.returncode == 0


@pytest.mark.parametrize("is_healthy", [True, False])
def test_healthcheck_follows_the_status_of_health_and_asks_no_proxy(is_healthy):
    command = healthcheck()
    assert command[0] == "python"
    assert "'/health'" in command[-1]
    stub = Stub("127.0.0.1")
    stub.is_ready = is_healthy
    variables = {**os.environ, "ATTNCACHE_PORT": str(stub.port), "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, *command[1:]], env=variables, capture_output=True, timeout=240)
    stub.close()
    assert (done.returncode == 0) == is_healthy


@pytest.fixture
def docker(tmp_path):
    """Run build.sh with these arguments and a Docker engine that writes down its own arguments."""
    engine = tmp_path / "docker"
    engine.write_text('#!/bin/sh\n[ "$1" = info ] || echo "$@"\n', encoding="utf-8")
    engine.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def build(*arguments):
        command = [ROOT / "docker/build.sh", *arguments]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=240, check=False
        )

    return build


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_image_is_built_for_the_platform_that_is_asked_for(docker, platform):
    for arguments in (["--platform", platform], [f"--platform={platform}"]):
        done = docker(*arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"build --platform {platform} ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--platform", "linux/riscv64"], "unknown platform: linux/riscv64"),
        (["--platform"], "--platform needs"),
        (["--arm"], "unknown argument --arm"),
    ],
)
def test_unknown_platform_or_argument_is_refused_with_what_is_accepted(docker, arguments, said):
    done = docker(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "linux/amd64 or " in done.stderr
    assert "linux/arm64" in done.stderr


def test_image_installs_the_lock_of_its_own_machine():
    installed = " ".join(arguments for name, arguments in instructions(0) if name == "RUN")
    assert "requirements.$(uname -m).lock" in installed
    assert {f"requirements.{machine}.lock" for machine in ("x86_64", "aarch64")} <= {
        path.name for path in (ROOT / "docker").glob("*.lock")
    }


def test_docker_compose_accepts_its_file():
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    command = ["docker-compose", "--file", "docker-compose.yml", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_build_of_the_image_fails_if_a_library_was_not_compiled(tmp_path):
    package = tmp_path / "attncache_core"
    shutil.copytree(ROOT / "attncache_core", package)
    libraries = sorted((package / "native").glob("*.so"))
    if not libraries:
        pytest.skip("nothing was compiled here")

    def check():
        command = [sys.executable, ROOT / "docker/check_libraries.py", ROOT / "setup.py"]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)

    whole = check()
    assert whole.returncode == 0, whole.stderr
    libraries[0].unlink()
    broken = check()
    assert broken.returncode != 0
    assert libraries[0].name in broken.stderr
