"""Run several servers around the fake engine: `python serve_fakes.py FOLDER`.

FOLDER/servers.json: name -> [manner, settings], as serve_fake.py takes them. Each server is a fork of this
process, so that only one process imports everything. Its log is in NAME.log, its process id in NAME.pid, and
its exit code, once it has ended, in NAME.code. Its temporary files are in FOLDER/NAME.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from serve_fake import serve


def run(folder: Path, name: str, manner: str, settings: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    tempfile.tempdir = str(folder / name)
    code = 1
    try:
        serve(manner, settings)
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path) -> None:
    names: dict[int, str] = {}
    for name, (manner, settings) in json.loads((folder / "servers.json").read_text()).items():
        (folder / name).mkdir()
        process = os.fork()
        if process == 0:
            run(folder, name, manner, settings)
        names[process] = name
        write(folder / f"{name}.pid", process)
    while names:
        process, status = os.wait()
        write(folder / f"{names.pop(process)}.code", os.waitstatus_to_exitcode(status))


def write(path: Path, number: int) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(str(number))
    beside.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
