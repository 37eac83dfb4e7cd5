"""The image is built without a Docker engine, and runs under the restrictions of docker-compose.yml.

These tests take minutes, so `make test` leaves them out: `make image-test` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml
from oci import Container

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("buildah", "debootstrap", "runc")
READY_SECONDS = 1800  # the first start builds a database

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600)]


class Image(NamedTuple):
    rootfs: Path
    config: dict[str, Any]  # User, Env, Entrypoint, ...


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Iterator[Image]:
    """The image, built by docker/build.sh from a copy of the repository."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if os.geteuid() != 0:
        pytest.skip("buildah and debootstrap need root here")
    folder = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(storage_in(folder)))
        patch.setenv("STORAGE_DRIVER", "vfs")
        patch.setenv("PYTHON", sys.executable)
        # Without an answer from Docker, the script uses buildah.
        patch.setenv("DOCKER_HOST", f"unix://{folder}/no-engine")
        subprocess.run(["docker/build.sh"], cwd=copied_tree(folder / "tree"), check=True)
        container = output_of("buildah", "from", "--pull-never", "localhost/attncache")
        inspected = json.loads(output_of("buildah", "inspect", "--type", "image", "localhost/attncache"))
        yield Image(Path(output_of("buildah", "mount", container)), inspected["Docker"]["config"])
        for command in ("umount", "rm", "rmi"):
            output_of("buildah", command, "--all")
    shutil.rmtree(folder)  # gigabytes


def storage_in(folder: Path) -> Path:
    """Write a configuration that keeps buildah's images in this folder."""
    path = folder / "storage.conf"
    path.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n',
        encoding="utf-8",
    )
    return path


def copied_tree(target: Path) -> Path:
    """Copy what git knows or does not ignore, so that the build leaves nothing in the repository."""
    listed = output_of("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def output_of(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def container(image, port, tmp_path_factory) -> Iterator[Container]:
    """The running server, ready."""
    bundle = tmp_path_factory.mktemp("bundle")
    with Container(bundle, image.rootfs, image.config, compose_service(), port) as running:
        wait_until_ready(running, f"http://127.0.0.1:{port}/ready")
        yield running


def compose_service() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["attncache"]


def wait_until_ready(container: Container, url: str) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        try:
            with urlopen(url, timeout=10):
                return
        except URLError:  # also for status 503
            assert container.runs, container.log
            time.sleep(0.5)
    raise AssertionError(container.log)


def embeddings(port: int, *texts: str) -> np.ndarray:
    body = json.dumps({"inputs": texts}).encode()
    with urlopen(Request(f"http://127.0.0.1:{port}/embed", body), timeout=60) as response:
        return np.array(json.load(response))


@pytest.mark.usefixtures("container")
def test_server_in_the_image_embeds_texts_by_their_meaning(port):
    parcel, package, weather = embeddings(
        port, "Where is my parcel?", "When does my package arrive?", "It rains in Rome."
    )
    assert parcel.shape == (384,)
    assert np.linalg.norm(parcel) == pytest.approx(1, abs=1e-4)
    assert parcel @ package > parcel @ weather + 0.2


@pytest.mark.usefixtures("container")
def test_server_in_the_image_computes_with_the_compiled_kernel(port):
    with urlopen(f"http://127.0.0.1:{port}/info", timeout=60) as response:
        assert json.load(response)["attention"] != "torch"


def test_container_writes_nowhere_but_to_its_volumes_and_temporary_files(container):
    for path in ("/x", "/opt/attncache/x", "/home/attncache/x", "/etc/x"):
        refused = container.run("touch", path)
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stderr
    for path in ("/tmp/x", "/models/x", "/databases/x"):
        assert container.run("touch", path).returncode == 0, path


def test_server_has_no_capability_and_can_gain_none(container):
    status = container.run("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split() == ["10001"] * 4


def test_server_needs_less_than_half_of_the_processes_that_it_may_start(container):
    threads = int(re.search(r"^Threads:\s+(\d+)", container.run("cat", "/proc/1/status").stdout, re.M)[1])
    assert 2 * threads < compose_service()["pids_limit"]


def test_healthcheck_of_the_image_passes_inside_the_container(container, image):
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    checked = container.run(*command)
    assert checked.returncode == 0, checked.stderr


def test_image_holds_no_build_tool(container):
    for tool in ("pip", "ziglang", "cyclonedx_py"):
        assert container.run("python", "-c", f"import {tool}").returncode != 0, tool


def test_bill_of_materials_lists_every_installed_package_in_its_version(container):
    program = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    installed = json.loads(container.run("python", "-c", program).stdout)
    bill = json.loads(container.run("cat", "/opt/attncache/sbom.cdx.json").stdout)
    assert bill["bomFormat"] == "CycloneDX"
    listed = {part["name"]: part["version"] for part in [*bill["components"], bill["metadata"]["component"]]}
    assert listed == installed
    assert "torch" in listed


# The last test: it ends the server.
def test_server_ends_with_status_0_when_it_is_asked_to(container):
    assert container.stop("TERM") == 0, container.log
