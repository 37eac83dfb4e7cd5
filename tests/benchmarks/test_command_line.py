"""`python -m benchmarks` runs every measurement by its name, and `attncache bench` says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import assert_one_line, run, succeeded

from benchmarks.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_beside_the_command_line_is_a_measurement_with_a_name() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "__main__", "plots"}
    assert {name.replace("-", "_") for name in main.commands} >= modules


def test_module_reads_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module changes both for its own process.
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    shown = succeeded(run("products", "--rounds", "1", program=main))
    assert [line.split()[:3] for line in shown.splitlines()[1:]] == [
        [str(inputs), "x", str(outputs)]
        for inputs, outputs in ((384, 1152), (384, 384), (384, 1536), (1536, 384))
        for _ in range(6)
    ]


def test_measurement_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "benchmarks.first_starts", raising=False)
    assert "Needs httpx" in succeeded(run("--help", program=main))
    assert_one_line(run("first-starts", program=main), "first-starts: Needs httpx: pip install")


def test_former_commands_name_the_new_ones_in_one_line() -> None:
    assert_one_line(run("bench", "engine", "--rounds", "1"), "python -m benchmarks NAME")
    assert_one_line(run("prune", "--texts", "asked.txt"), "python -m benchmarks importance")
