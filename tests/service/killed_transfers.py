"""Transfers of databases and bulk commands in a process that is killed."""

import os
import signal

from service import objects
from service.bulk import rows, spool
from service.cli import main
from service.loading import pushing, remote


def kill_at_call(kind, name, calls):
    """Let this process kill itself at the call of a method that follows this number of calls."""
    method, left = getattr(kind, name), [calls]

    def counted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments)

    setattr(kind, name, counted)


def push_until_killed(root, url, files):
    kill_at_call(objects.ObjectFolder, "put", files)
    pushing.push(root, url, lambda *_: None)


def download_until_killed(url, cache, checkpoint, ranges):
    objects.RANGE_BYTES = remote.RANGE_BYTES = 4096
    kill_at_call(objects.ObjectFolder, "read_range", ranges)
    list(remote.RemoteDatabase(url, cache, checkpoint).fetch(waits=True))


def run_until_killed(rows_per_chunk, chunk, arguments):
    """Run a bulk command that kills its own process while a chunk is half written."""
    rows.CHUNK_ROWS = rows_per_chunk
    append, saved = spool.Spool.append, [0]

    def append_until_killed(self, numbers, done):
        saved[0] += 1
        if saved[0] == chunk:
            self._file.seek(self._end)
            self._file.write(numbers[: len(numbers) // 2].tobytes())
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, numbers, done)

    spool.Spool.append = append_until_killed
    main(arguments)
