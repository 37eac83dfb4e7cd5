"""The image installs what constraints.txt pins: the locks were made again after the last change."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = {machine: f"requirements.{machine}.lock" for machine in ("x86_64", "aarch64")}
BUILD = "build.lock"
LOCKS = [*RUNTIME.values(), BUILD]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned(path: Path, machine: str = "x86_64") -> dict[str, str]:
    """Name -> version of each pin of a file on a machine; a local version such as +cpu is left out."""
    pins = re.findall(
        r"^([\w.-]+)==([\w.]+)[^;\n]*(?:; *(.*))?$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    on_machine = {"platform_machine": machine, "sys_platform": "linux"}
    return {
        canonicalize_name(name): version
        for name, version, marker in pins
        if not marker or Marker(marker).evaluate(on_machine)
    }


def machine_of(lock: str) -> str:
    return next((machine for machine, name in RUNTIME.items() if name == lock), "x86_64")


def required(name: str) -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    runtime = [*project["dependencies"], *extras["otel"], *extras["cluster"]]
    listed = PROJECT["dependency-groups"]["image"] if name == BUILD else runtime
    return [Requirement(text) for text in listed]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_the_versions_of_the_constraints(lock):
    locked = pinned(ROOT / "docker" / lock)
    constraints = pinned(ROOT / "constraints.txt", machine_of(lock))
    differing = {name: version for name, version in locked.items() if constraints.get(name) != version}
    assert not differing, "pin these packages in constraints.txt, and run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_every_requirement_of_the_project(lock):
    locked = pinned(ROOT / "docker" / lock)
    for requirement in required(lock):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"run `make lock`: {name} is missing"
        assert Version(locked[name]) in requirement.specifier, name


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_a_hash_and_no_address(lock):
    text = (ROOT / "docker" / lock).read_text(encoding="utf-8")
    assert "://" not in text
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_both_platforms_install_the_same_versions_of_all_but_torch():
    x86, arm = (pinned(ROOT / "docker" / lock) for lock in RUNTIME.values())
    # torch 2.13 needs setuptools.
    differing = {name for name in {*x86, *arm} if x86.get(name) != arm.get(name)}
    assert differing <= {"torch", "setuptools"}
    # Builds for CUDA would bring gigabytes of libraries.
    assert not [name for name in {*x86, *arm} if name.startswith(("nvidia-", "cuda-"))]


def test_build_tools_of_the_package_are_locked():
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["build-system"]["requires"]}
    assert names <= set(pinned(ROOT / "docker" / BUILD))
