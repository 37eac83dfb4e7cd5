"""Run tests against C libraries that are compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

    CC=clang-19 python tests/native/sanitize.py [ARGUMENTS OF PYTEST]    by default the tests that call C

The libraries are compiled by Clang, because the package's compiler is Clang too: another compiler contracts
floating-point operations in other places. The libraries are put into a copy of the package, build/sanitized.
The first finding ends the run. Python and torch are not instrumented, and leaks are not searched for.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent.parent
COPY = ROOT / "build" / "sanitized"
COMPILER = os.environ.get("CC", "clang")
FLAGS = [
    *("-std=c11", "-O1", "-g", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"),
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-shared-libasan",
    "-fno-omit-frame-pointer",
    "-Wno-psabi",
]
TESTS = [
    "tests/native",
    "tests/reuse/test_failing_storage.py",
    "tests/reuse/test_store.py",
    "tests/reuse/kv",
    "tests/models/test_compiled.py",
    "tests/models/test_families.py",
    "tests/models/test_quantized.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_not_finite.py",
    "tests/engine/test_parallel_runs.py",
    "tests/engine/test_reuse.py",
]


def copy_package() -> None:
    """Copy all that the tests import, without compiled libraries."""
    shutil.rmtree(COPY, ignore_errors=True)
    for name in ("attncache_core", "service", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, COPY / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, COPY)


def compile_libraries() -> None:
    """Compile every library of setup.py for this machine."""
    with patch("setuptools.setup"):
        libraries = runpy.run_path(str(ROOT / "setup.py"))["LIBRARIES"][platform.machine()]
    native = COPY / "attncache_core" / "native"
    for name, (source, processor) in libraries.items():
        output = native / f"{name}.so"
        subprocess.run(
            [COMPILER, *FLAGS, *target(processor), str(native / source), "-o", str(output)], check=True
        )


def target(processor: str) -> list[str]:
    """Return Clang's options for a processor as setup.py names it, such as x86_64_v4+avx512vnni."""
    name, *features = processor.replace("_", "-").split("+")
    architecture = "armv8-a" if name == "generic" else name
    return [f"-march={architecture}", *(f"-m{feature}" for feature in features)]


def run_tests(arguments: list[str]) -> int:
    """Run pytest in the copy, with the sanitizer's library in front of all others."""
    name = f"libclang_rt.asan-{platform.machine()}.so"
    library = subprocess.run(
        [COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        # The guard of mapped files, and the tests of it, handle these signals themselves.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_sigbus=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # Output is not captured, because a finding ends the process before pytest shows captured output.
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(command, cwd=COPY, env=environment, check=False).returncode


if __name__ == "__main__":
    copy_package()
    compile_libraries()
    sys.exit(run_tests(sys.argv[1:]))
