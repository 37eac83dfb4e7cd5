"""Fail unless every library that setup.py compiles is installed: `python check_libraries.py setup.py`.

The package also works without its libraries, but more slowly. A compiler that fails therefore does not fail
the installation. The image must have the libraries, so its build runs this script.
"""

import ast
import ctypes
import platform
import sys
from importlib.util import find_spec
from pathlib import Path


def compiled_libraries(setup: Path) -> list[str]:
    """Return the names of the libraries that setup.py compiles on this machine."""
    for statement in ast.parse(setup.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "LIBRARIES":
            return list(ast.literal_eval(statement.value).get(platform.machine(), {}))
    raise LookupError(f"{setup} has no table LIBRARIES")


def installed_folder() -> Path:
    """Return the folder of the installed libraries. The package is not imported, which would take seconds."""
    package = find_spec("attncache_core")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("attncache_core is not installed")
    return Path(package.origin).with_name("native")


names = compiled_libraries(Path(sys.argv[1]))
if not names:
    sys.exit(f"no library is compiled for {platform.machine()}")
for name in names:
    # A library of any processor level can be loaded: loading runs none of its code.
    ctypes.CDLL(str(installed_folder() / f"{name}.so"))
print("compiled:", ", ".join(names))
