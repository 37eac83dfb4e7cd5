"""Renew databases in forks of one process that are killed: `python killed_renewals.py`.

Each line of the standard input is a JSON list [FUNCTION, ARGUMENTS, CALLS]. The function renews or rolls
back, and its process is killed after this number of calls that change files. The answer, one line, is its
exit code. The forks are made of a process that has run nothing, because OpenMP does not survive a fork.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generations import renew

from attncache_core.reuse.maps.generations import Result
from attncache_core.reuse.maps.publishing import roll_back

CHANGING = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


class Killed:
    """Kills this process after a number of calls."""

    def __init__(self, after):
        self.left = after
        for name in CHANGING:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, call):
        def counting(*arguments, **options):
            done = call(*arguments, **options)
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return counting


def main():
    for line in sys.stdin:
        function, arguments, calls = json.loads(line)
        process = os.fork()
        if process == 0:
            Killed(calls)
            if function == "renew":
                root, built, result = arguments
                renew(Path(root), Path(built), Result(result))
            else:
                roll_back(Path(*arguments))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
