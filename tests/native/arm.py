"""Run the kernel's tests on an emulated aarch64 processor: `make arm`.

    python tests/native/arm.py [ARGUMENTS OF PYTEST]    by default tests/native

The package's compiler compiles the libraries for aarch64 into copies of the package in build/arm. The tests
run there under qemu-user, in Debian's Python of aarch64, with the wheels of docker/requirements.aarch64.lock.
Needs Debian's packages qemu-user and mmdebstrap. Nothing is installed outside build/arm.

Emulated, importing the whole package takes minutes. So two processes run at once. One imports the native code
alone and runs the kernel's tests, with fewer random examples. The other one imports the whole package and
compares the default model's answers with the reference (test_levels.py).
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "arm"
SYSROOT, ENVIRONMENT = FOLDER / "sysroot", FOLDER / "venv"
PYTHON = ENVIRONMENT / "bin" / "python"
LOCK = ROOT / "docker" / "requirements.aarch64.lock"
TOOLS = {"qemu-aarch64": "qemu-user", "mmdebstrap": "mmdebstrap"}  # command -> Debian package
# What the tests import, beside the package's own dependencies.
TEST_PACKAGES = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "setuptools")
# What the native code and its tests consist of.
NATIVE = (
    "attncache_core/native",
    "attncache_core/heads/running.py",
    "attncache_core/models/prepacked.py",
    "attncache_core/text/prefix_tree.py",
    "tests/native",
    "setup.py",
    "pyproject.toml",
)
WHOLE = ("attncache_core", "service", "benchmarks", "tests", "setup.py", "pyproject.toml")
FEW_EXAMPLES = """
from hypothesis import settings

settings.register_profile("emulated", deadline=None, derandomize=True, database=None, max_examples=5)
settings.load_profile("emulated")
"""
# They need the whole package; and qemu-user does not ask the system for large pages.
LEVELS, LARGE_PAGES = "tests/native/test_levels.py", "tests/native/test_large_pages.py"
KERNELS = ("tests/native", "--ignore", LEVELS, "--ignore", LARGE_PAGES)
# qemu-user stops with an assertion of its own when the fork of a process with threads starts a thread.
FORKS = "tests/native/test_stack.py::test_process_survives_forks_and_helpers_that_lose_their_processor"
# torch's products of bfloat16 without oneDNN's kernels take 25 minutes, emulated.
SLOW = "not (bfloat16 and plain)"


def require_tools() -> None:
    """Exit with what is missing, and how to get it."""
    if sys.version_info[:2] != (3, 11):
        sys.exit("make arm needs Python 3.11, as the locked wheels do")
    missing = [package for command, package in TOOLS.items() if shutil.which(command) is None]
    if missing:
        sys.exit(f"make arm emulates aarch64 with Debian's packages: apt-get install {' '.join(missing)}")


def unpack_debian() -> None:
    """Unpack Debian's Python of aarch64 and the libraries that the wheels need. Runs none of it."""
    if SYSROOT.exists():
        return
    unfinished = FOLDER / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["mmdebstrap", "--quiet", "--variant=extract", "--architectures=arm64"]
    run(*command, "--include=python3,libstdc++6", "bookworm", str(unfinished))
    unfinished.rename(SYSROOT)


def install_wheels() -> None:
    """Install the locked wheels of aarch64 and the tests' own, in the layout of a virtual environment."""
    installed = FOLDER / "installed.lock"
    if installed.exists() and installed.read_bytes() == LOCK.read_bytes():
        return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    target = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
    options = ["--quiet", "--target", str(target), "--python-version", "3.11", "--only-binary", ":all:"]
    platform = ("--python-platform", "aarch64-manylinux_2_28")
    uv = [sys.executable, "-m", "uv", "pip", "install", *options, *platform]
    run(*uv, "--no-deps", "--require-hashes", "--requirement", str(LOCK))
    run(*uv, "--constraint", str(ROOT / "constraints.txt"), *TEST_PACKAGES)
    # Emulated, compiling the modules would take minutes. The byte code is the same on all processors.
    for folder in (target, SYSROOT / "usr" / "lib" / "python3.11"):
        subprocess.run([sys.executable, "-m", "compileall", "-qq", str(folder)], check=False)
    PYTHON.parent.mkdir(parents=True, exist_ok=True)
    # Its own path as argument 0 lets Python find the environment, and tests start it again as sys.executable.
    emulated = f"qemu-aarch64 -L '{SYSROOT}' -0 \"$0\" '{SYSROOT}/usr/bin/python3.11'"
    PYTHON.write_text(f'#!/bin/sh\nexec {emulated} "$@"\n', encoding="utf-8")
    PYTHON.chmod(0o755)
    (ENVIRONMENT / "pyvenv.cfg").write_text(f"home = {SYSROOT}/usr/bin\n", encoding="utf-8")
    shutil.copy(LOCK, installed)


def copied(name: str, parts: tuple[str, ...]) -> Path:
    """Copy these parts of the repository, with libraries compiled for aarch64; return the copy's folder."""
    copy = FOLDER / name
    shutil.rmtree(copy, ignore_errors=True)
    for part in parts:
        (copy / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    for library in libraries():
        shutil.copy(library, copy / "attncache_core" / "native")
    return copy


def copied_native() -> Path:
    """Copy the native code and its tests."""
    copy = copied("native", NATIVE)
    (copy / "tests" / "conftest.py").write_text(FEW_EXAMPLES, encoding="utf-8")
    return copy


def libraries() -> list[Path]:
    return sorted((FOLDER / "libraries").iterdir())


def compile_libraries() -> None:
    """Compile every library of setup.py for aarch64, with the flags of setup.py."""
    with patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    shutil.rmtree(FOLDER / "libraries", ignore_errors=True)
    (FOLDER / "libraries").mkdir()
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28", *setup["FLAGS"]]
    for name, (source, processor) in setup["LIBRARIES"]["aarch64"].items():
        output = FOLDER / "libraries" / f"{name}.so"
        path = ROOT / "attncache_core" / "native" / source
        run(*compiler, f"-mcpu={processor}", str(path), "-o", str(output))


def started(copy: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start pytest on the emulated processor."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(copy)}
    command = [str(PYTHON), "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "1800", "-q", *arguments]
    return subprocess.Popen(command, cwd=copy, env=variables)


def run_tests(arguments: list[str]) -> int:
    """Run the tests; return the first exit status of pytest that is not 0."""
    whole = copied("whole", WHOLE)
    if arguments:
        return started(whole, *arguments).wait()
    kernels = started(copied_native(), *KERNELS, "--deselect", FORKS)
    running = [kernels, started(whole, LEVELS, "-k", SLOW)]
    return max(process.wait() for process in running)


def run(*command: str) -> None:
    """Run a command; exit if it fails, because it has said why."""
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"{Path(command[0]).name} failed with status {status}")


if __name__ == "__main__":
    require_tools()
    unpack_debian()
    install_wheels()
    compile_libraries()
    sys.exit(run_tests(sys.argv[1:]))
