"""Run a bulk command that kills its own process while a chunk is half written.

python run_killed.py ROWS_PER_CHUNK CHUNK ARGUMENTS...
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from service.bulk import chunks, spool
from service.cli import main

chunks.CHUNK_ROWS, last = map(int, sys.argv[1:3])
append, saved = spool.Spool.append, 0


def append_until_killed(self, numbers, done):
    global saved
    saved += 1
    if saved == last:
        self._file.seek(self._end)
        self._file.write(numbers[: len(numbers) // 2].tobytes())
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, numbers, done)


spool.Spool.append = append_until_killed
main(sys.argv[3:])
