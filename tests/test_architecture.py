"""The direction of imports between the rooms of library and service, as pyproject.toml declares it."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_rooms_import_only_the_rooms_below_them():
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "10 kept, 0 broken" in linted.stdout


def test_an_import_of_a_room_above_is_found(tmp_path):
    for package in ("attncache_core", "service"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for room in ("engine", "models"):
        (tmp_path / "attncache_core" / f"{room}.py").touch()
    (tmp_path / "attncache_core/models.py").write_text("import attncache_core.engine\n", encoding="utf-8")
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_packages =\n    attncache_core\n    service\n\n"
        "[importlinter:contract:rooms]\nname = rooms\ntype = layers\n"
        "containers = attncache_core\nlayers =\n    engine\n    models\n",
        encoding="utf-8",
    )
    linted = lint(tmp_path)
    assert linted.returncode == 1
    assert "attncache_core.models is not allowed to import attncache_core.engine" in linted.stdout


def test_no_test_imports_a_test():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], path
