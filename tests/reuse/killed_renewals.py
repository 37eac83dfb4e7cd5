"""Renewals, rollbacks and samples in a process that is killed."""

import os
import signal

from attncache_core.build.renewal import renew_database
from attncache_core.calibration import calibrate, trial
from attncache_core.calibration.savings import Savings
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus import sample as corpus_sample
from attncache_core.corpus.reservoir import TIME_STEP_SECONDS
from attncache_core.corpus.sample import TextSampler
from attncache_core.engine.prefill import PrefillEngine

TEXTS, SYNCED_AT_ONCE = 300, 60  # of a sample
CHANGING = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "mkdir")


def killed_after(calls, function, *arguments):
    """Run a function in this process, and kill the process after a number of calls that change files."""
    Killed(calls)
    function(*arguments)


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
    corpus_sample._MIN_REWRITE = TEXTS * 28  # the bytes of these texts
    sampler = TextSampler.open(root, max_texts=100_000, half_life_hours=168)
    number = int(synced.read_text(encoding="utf-8"))
    while True:
        for text in range(number, number + SYNCED_AT_ONCE):
            sampler.offer([text % TEXTS], None, text // TEXTS * TIME_STEP_SECONDS)
        sampler.sync()
        number += SYNCED_AT_ONCE
        synced.write_text(str(number), encoding="utf-8")
