"""Renew databases in forks of one process that are killed: `python killed_renewals.py`.

Each line of the standard input is a JSON list [FUNCTION, ARGUMENTS, CALLS]. The function renews, rolls back
or samples, and its process is killed after this number of calls that change files. The answer, one line, is
its exit code. The forks are made of a process that has run nothing, because OpenMP does not survive a fork.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generations import renew

from attncache_core.build.renewal import renew_database
from attncache_core.calibration import calibrate, trial
from attncache_core.calibration.savings import Savings
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus.reservoir import TIME_STEP_SECONDS
from attncache_core.corpus.sample import TextSampler
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.reuse.maps.generations import Result
from attncache_core.reuse.maps.publishing import roll_back

CHANGING = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "mkdir")


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


def build_and_renew(root, model, corpus):
    """Renew by a build, with fixed savings instead of measured ones, so that the trial decides alike."""
    savings = Savings(per_hit=lambda lengths, heads: lengths * heads / 10, search=lambda _: 1.0)
    trial.measure_savings = calibrate.measure_savings = lambda *_: savings
    trial.search_cost = lambda *_: 1.0
    checkpoint = read_checkpoint(model)

    def load(database):
        return PrefillEngine.load(checkpoint, database=database, dtype="float32")

    renew_database(load, root, corpus.read_text(encoding="utf-8").splitlines(), min_gain=0)


def sample(root, synced):
    """Sample texts for ever, and note how many are synced. Texts come again, so that the log is rewritten."""
    sampler = TextSampler.open(Path(root), max_texts=100_000, half_life_hours=168)
    number = int(Path(synced).read_text(encoding="utf-8"))
    while True:
        for text in range(number, number + 500):
            sampler.offer([text % 2500], None, text // 2500 * TIME_STEP_SECONDS)
        sampler.sync()
        number += 500
        Path(synced).write_text(str(number), encoding="utf-8")


def main():
    for line in sys.stdin:
        function, arguments, calls = json.loads(line)
        process = os.fork()
        if process == 0:
            Killed(calls)
            if function == "renew":
                root, built, result = arguments
                renew(Path(root), Path(built), Result(result))
            elif function == "sample":
                sample(*arguments)
            elif function == "build_and_renew":
                build_and_renew(*map(Path, arguments))
            else:
                roll_back(Path(*arguments))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
