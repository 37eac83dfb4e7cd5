"""The wall between engine and service, and the names that a user may rely on."""

import ast
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import versions

import attncache_core
from attncache_core import errors

ROOT = Path(__file__).parent.parent


def test_importing_the_engine_loads_nothing_of_the_service():
    program = (
        "import sys; from attncache_core import *;"
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'service')])"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "3000 None"), ({"GOMP_SPINCOUNT": "7"}, "7 None"), ({"OMP_WAIT_POLICY": "active"}, "None active")],
    ids=["nothing-set", "count-set", "policy-set"],
)
def test_waiting_threads_sleep_soon_unless_the_operator_says_otherwise(given, expected):
    # One variable is read by OpenMP when torch loads it, so it must be there before torch is.
    program = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))\n"
        "            raise SystemExit\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from attncache_core import PrefillEngine"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    output = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)
    assert output.strip() == expected


@pytest.mark.parametrize("name", attncache_core.__all__)
def test_public_name_is_there_and_documented(name):
    value = getattr(attncache_core, name)
    assert isinstance(value, str) or callable(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


def test_public_names_are_known_to_a_reader_of_types_and_nothing_is_imported_before_it_is_used():
    of_types = re.findall(
        r"^    from (\S+) import (\w+) as \2$", inspect.getsource(attncache_core), re.MULTILINE
    )
    assert {
        name: module.removeprefix("attncache_core.") for module, name in of_types
    } == attncache_core._MODULES
    program = (
        "import sys, attncache_core as core;"
        "print(set(core.__all__) <= set(dir(core)), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "True False False"
    with pytest.raises(ImportError, match="no_such_name"):
        from attncache_core import no_such_name  # noqa: F401


def test_public_names_are_sorted_constants_before_classes_before_functions():
    def place(name):
        return (not name.isupper(), not name[0].isupper(), name)

    assert attncache_core.__all__ == sorted(set(attncache_core.__all__), key=place)


def test_every_error_is_public_of_one_family_and_has_a_code_of_its_own_a_status_and_a_sentence():
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert issubclass(kind, attncache_core.AttnCacheError)
        assert kind.__name__ in attncache_core.__all__
        assert 400 <= kind.status < 600
        assert kind.__doc__.strip().endswith(".")
        error = kind("a message", field="model")
        assert (str(error), error.field) == ("a message", "model")


def test_files_that_are_not_code_are_installed_with_their_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    code = {".py", ".pyc", ".so", ".c", ".h"}
    for package, patterns in data.items():
        installed = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
        files = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix not in code}
        assert files <= installed


def test_installing_on_windows_fails_with_one_sentence():
    program = (
        "import runpy, setuptools.command.build_ext, sys; sys.platform = 'win32'; runpy.run_path('setup.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("AttnCache does not run on Windows: ")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="nothing is compiled for this machine",
)
def test_compilation_that_fails_is_noticed_when_the_package_is_used(tmp_path):
    """Install with a compiler that fails: the build goes on, and the package says why it is slow."""
    for name in ("attncache_core", "service"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "ziglang.py").write_text("raise SystemExit('the compiler is broken')", encoding="utf-8")

    def python(*arguments):
        command = [sys.executable, *arguments]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=True
        )

    built = python("setup.py", "--quiet", "build_ext", "--inplace")
    assert "the compiler is broken" in built.stderr
    assert "warning: attncache_core.native.sigbus was not compiled" in built.stderr
    used = python("-c", "from attncache_core import native; print(native.level(), native.compiled_off())")
    assert used.stdout.startswith("None it was not compiled at installation")


def private_uses():
    """Yield the package of each private name that the code imports or reads from another package."""
    packages = {"attncache_core", "service"}
    for path in sorted(file for package in packages for file in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules, classes = {}, {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    bound = name.asname or name.name.partition(".")[0]
                    modules[bound] = name.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
                package = node.module.partition(".")[0]
                for name in node.names:
                    classes[name.asname or name.name] = package
                    if is_private(f"{node.module}.{name.name}") and package not in packages:
                        yield package
        imported = modules | classes
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                root = ast.unparse(node).partition(".")[0]
                if imported.get(root, "service") not in packages:
                    yield imported[root]
            elif isinstance(node, ast.ClassDef):
                # super()._name is a private method of a base class.
                bases = {imported.get(ast.unparse(base).partition(".")[0]) for base in node.bases}
                if re.search(r"super\(\)\._[a-z]", ast.unparse(node)):
                    yield from (base for base in bases if base and base not in packages)


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_packages_whose_private_names_are_used_have_an_upper_bound_and_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["cluster"]
    ranges = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in lines)
    used = set(private_uses()) - set(sys.stdlib_module_names)
    assert used == {"torch", "uvicorn", "valkey"}  # the table in docs/design.md says where and why
    for package in used:
        assert "<" in ranges[package], f"{package} has no upper bound"


def test_copies_that_other_processors_test_hold_all_that_is_imported(tmp_path, monkeypatch):
    """`make arm` tests copies of parts of the repository."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "native")
    import arm

    assert {"tests", *(path.parent.name for path in ROOT.glob("*/__init__.py"))} <= {*arm.WHOLE}
    monkeypatch.setattr(arm, "FOLDER", tmp_path)
    (tmp_path / "libraries").mkdir()
    copy = arm.copied_native()
    # What is not in the copy would be found here, because the package is installed from here.
    program = (
        "import sys, pytest; status = pytest.main(sys.argv[2:]);"
        "files = [getattr(module, '__file__', None) or '' for module in sys.modules.values()];"
        "sys.exit(status or ' '.join(file for file in files if file.startswith(sys.argv[1])) or None)"
    )
    command = [sys.executable, "-c", program, str(ROOT / "attncache_core"), "--collect-only", *arm.KERNELS]
    variables = {**os.environ, "PYTHONPATH": str(copy)}
    found = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr


def test_tests_that_the_makefile_runs_exist_and_each_dependency_has_an_oldest_version():
    """`make versions` tests the oldest versions."""
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for name in (*named, *versions.OF_ALL, *versions.OF_UVICORN):
        assert (ROOT / name).exists(), name
    assert named
    assert all(">=" in line for line in versions.dependencies())
