"""The wheels in dist/ are complete, and one serves outside the checkout (`make wheels`)."""

import ast
import os
import platform
import re
import site
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("aarch64", "x86_64")
MACHINE_OF_ELF = {62: "x86_64", 183: "aarch64"}  # e_machine

pytestmark = pytest.mark.wheels


def wheel(machine):
    [found] = (ROOT / "dist").glob(f"attncache-*-py3-none-manylinux_2_28_{machine}.whl")
    return found


def libraries(machine):
    for statement in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "LIBRARIES":
            return {f"attncache_core/native/{name}.so" for name in ast.literal_eval(statement.value)[machine]}
    raise LookupError("setup.py has no table LIBRARIES")


@pytest.mark.parametrize("machine", MACHINES)
def test_wheel_has_every_library_of_its_platform_and_no_source_of_them(machine):
    with zipfile.ZipFile(wheel(machine)) as archive:
        names = {name for name in archive.namelist() if name.startswith("attncache_core/native/")}
        assert {name for name in names if not name.endswith(".py")} == libraries(machine)
        for name in libraries(machine):
            content = archive.read(name)
            assert content[:4] == b"\x7fELF"
            assert MACHINE_OF_ELF[int.from_bytes(content[18:20], "little")] == machine


@pytest.mark.parametrize("machine", MACHINES)
def test_libraries_of_a_wheel_need_no_newer_glibc_than_its_tag_says(machine):
    with zipfile.ZipFile(wheel(machine)) as archive:
        for name in libraries(machine):
            for version in re.findall(rb"GLIBC_2\.(\d+)", archive.read(name)):
                assert int(version) <= 28


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="there is no wheel for this processor")
def test_installed_wheel_serves_outside_the_checkout(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["ATTNCACHE_CACHE_DIR"] = str(tmp_path / "cache")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    # The .pth files of that folder are not run: one of them leads to the checkout.
    Path(packages, "dependencies.pth").write_text(site.getsitepackages()[0] + "\n", encoding="utf-8")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--ignore-installed"]
    install += ["--no-deps", "--no-index", wheel(platform.machine())]
    subprocess.run(install, check=True, env=environment)
    show = "import attncache_core; print(attncache_core.__file__)"
    folder = tmp_path / "empty"
    folder.mkdir()
    found = subprocess.check_output([python, "-c", show], cwd=folder, env=environment, text=True)
    assert found.startswith(str(tmp_path))
    command = [tmp_path / "venv/bin/attncache", "serve", "--port", "0", "--min-gain", "0.99"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(found[1] for line in server.stderr if (found := re.search(r"(http://[\d.:]+)", line)))
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.05)
            answer = httpx.post(f"{url}/embed", json={"inputs": "Where is my parcel?"}, timeout=60)
            assert len(answer.json()[0]) == 384
            assert httpx.get(f"{url}/info").json()["attention"] != "torch"
        finally:
            server.kill()
