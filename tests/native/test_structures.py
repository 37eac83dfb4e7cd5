"""Each structure of the bindings is laid out like the C structure that its docstring names."""

import ctypes
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attncache_core import native

FOLDER = Path(native.__file__).parent
MODULES = [importlib.import_module(f"{native.__name__}.{path.stem}") for path in sorted(FOLDER.glob("*.py"))]
STRUCTURES = {
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
}
# Fields of products._Product that lie in its field `end`. `padding` has no field in C.
FINISH = ("out", "residual", "out_row", "residual_row", "activation", "multiply")


def c_field(structure, field):
    """Return what C calls a field of a structure; None if C has only a gap there."""
    name, _, part = field.rpartition("_")
    if hasattr(structure, f"{field}_token"):
        return f"{field}.data"
    if part in ("token", "head"):
        return f"{name}.{part}"
    if structure.__name__ == "_Product":
        named = {"out_type": "end.type", "padding": None, **{field: f"end.{field}" for field in FINISH}}
        return named.get(field, field)
    return field.rstrip("_")  # pass_, because Python has a word `pass`


def test_structures_are_laid_out_as_in_c(tmp_path):
    pytest.importorskip("ziglang")
    lines = ['#include "attention.c"', "#include <stddef.h>"]
    for structure in STRUCTURES:
        name = re.match(r"The structure `(\w+)` of", structure.__doc__)[1]
        facts = {f"sizeof({name})": ctypes.sizeof(structure)}
        for field, kind in structure._fields_:
            if in_c := c_field(structure, field):
                facts[f"offsetof({name}, {in_c})"] = getattr(structure, field).offset
                facts[f"sizeof((({name} *)0)->{in_c})"] = ctypes.sizeof(kind)
        lines += [f'_Static_assert({fact} == {value}, "");' for fact, value in facts.items()]
    assert len(lines) > 300
    source = tmp_path / "structures.c"
    source.write_text("\n".join(lines), encoding="utf-8")
    compiler = [sys.executable, "-m", "ziglang", "cc", "-std=c11", "-c", f"-I{FOLDER}"]
    command = [*compiler, str(source), "-o", str(tmp_path / "structures.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
