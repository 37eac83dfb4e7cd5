"""The image installs what constraints.txt pins: the locks were made again after the last change."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
RUNTIME, BUILD = "requirements.lock", "build.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned(path: Path) -> dict[str, str]:
    """Name -> version of each pin of a file; a local version such as +cpu is left out."""
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


def required(name: str) -> list[Requirement]:
    project = PROJECT["project"]
    listed = {
        RUNTIME: [*project["dependencies"], *project["optional-dependencies"]["otel"]],
        BUILD: PROJECT["dependency-groups"]["image"],
    }
    return [Requirement(text) for text in listed[name]]


@pytest.mark.parametrize("lock", [RUNTIME, BUILD])
def test_lock_has_the_versions_of_the_constraints(lock):
    locked, constraints = pinned(ROOT / "docker" / lock), pinned(ROOT / "constraints.txt")
    differing = {name: version for name, version in locked.items() if constraints.get(name) != version}
    assert not differing, "pin these packages in constraints.txt, and run `make lock`"


@pytest.mark.parametrize("lock", [RUNTIME, BUILD])
def test_lock_has_every_requirement_of_the_project(lock):
    locked = pinned(ROOT / "docker" / lock)
    for requirement in required(lock):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"run `make lock`: {name} is missing"
        assert Version(locked[name]) in requirement.specifier, name


@pytest.mark.parametrize("lock", [RUNTIME, BUILD])
def test_every_package_of_a_lock_has_a_hash_and_no_address(lock):
    text = (ROOT / "docker" / lock).read_text(encoding="utf-8")
    assert "://" not in text
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_build_tools_of_the_package_are_locked():
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["build-system"]["requires"]}
    assert names <= set(pinned(ROOT / "docker" / BUILD))
