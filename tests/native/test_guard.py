"""The guard of mapped files: a lost page reads as zeros and is reported; all other faults are unaffected.

Each case runs in its own process, because a signal ends the process if the guard fails.
"""

import platform
import signal
import sys
from pathlib import Path

import pytest
from kernel_formulas import run_script

from attncache_core.native import guard

SCRIPT = Path(__file__).with_name("file_faults.py")

guarded = pytest.mark.skipif(guard.guard() is None, reason="the guard was not compiled")


def test_the_guard_exists_on_every_supported_platform():
    can_be = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    assert (guard.guard() is not None) == can_be


def run(case: str) -> tuple[int, str]:
    """Run a case and return its exit status and standard error."""
    return run_script(SCRIPT, str(Path(guard.__file__)), case)


@guarded
@pytest.mark.parametrize(
    "case",
    [
        "reads_zeros_behind_the_cut",
        "marks_the_range_that_faulted_alone",
        "reads_while_others_watch_and_forget",
        "sent_signal_with_a_handler_of_python",
    ],
)
def test_truncated_file_does_not_end_the_process(case):
    assert run(case) == (0, "")


@guarded
@pytest.mark.parametrize(
    "case", ["foreign_fault", "fault_of_a_forgotten_range", "sent_signal", "is_installed_once"]
)
def test_every_other_fault_ends_the_process(case):
    assert run(case) == (-signal.SIGBUS, "")


@guarded
def test_foreign_fault_reaches_the_previous_handler():
    status, told = run("foreign_fault_with_a_handler_of_python")
    assert status == -signal.SIGBUS
    assert told.startswith("Fatal Python error: Bus error")
    assert "in foreign_fault" in told
