"""Run the server's tests with the oldest and the newest uvicorn of the range: `make versions`.

The arguments are passed to pip. torch is left out: on one platform, there is one version with a CPU build.
`make test` runs torch 2.13 on x86-64, and `make arm` torch 2.10 on an emulated aarch64.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("connections", "lifecycle", "listeners", "process", "shutdown", "workers")


def uvicorn_range() -> str:
    """Return the versions of uvicorn that pyproject.toml admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [found] = [line for line in project["dependencies"] if line.startswith("uvicorn")]
    return found.removeprefix("uvicorn")


def run(name: str, versions: str) -> int:
    """Install the newest of these versions into a folder of its own, and test with that folder first."""
    folder = ROOT / "build" / "versions" / name
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "--no-deps",
        "--target",
        str(folder),
    ]
    subprocess.run([*pip, *sys.argv[1:], f"uvicorn{versions}"], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    show = "import uvicorn; print('uvicorn', uvicorn.__version__, flush=True)"
    subprocess.run([sys.executable, "-c", show], env=environment, check=True)
    tests = [f"tests/service/test_{test}.py" for test in TESTS]
    return subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    versions = uvicorn_range()
    oldest = re.search(r">=([\d.]+)", versions)
    assert oldest is not None
    sys.exit(run("oldest", f"=={oldest[1]}") or run("newest", versions))
