"""`python -m benchmarks` runs every measurement by its name, and `attncache bench` says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from command_line import assert_one_line, run

from benchmarks.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_beside_the_command_line_is_a_measurement_with_a_name() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "__main__", "plots"}
    assert {name.replace("-", "_") for name in main.commands} >= modules


def test_module_reads_its_own_arguments() -> None:
    command = [sys.executable, "-m", "benchmarks", "products", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        [str(inputs), "x", str(outputs)]
        for inputs, outputs in ((384, 1152), (384, 384), (384, 1536), (1536, 384))
        for _ in range(4)
    ]


def test_former_command_names_the_new_one_in_one_line() -> None:
    assert_one_line(run("bench", "engine", "--rounds", "1"), "python -m benchmarks NAME")
