"""The documentation: its examples run, and the commands, options, metrics, errors and links in it exist."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from prometheus_client import generate_latest
from raw_http import served

import attncache_core
from attncache_core import AttnCacheError, PrefillEngine
from benchmarks.__main__ import Module
from benchmarks.__main__ import main as benchmarks
from service.app import create_app
from service.cli import main
from service.observability.metrics import Metrics
from service.settings import GROUPS, Settings

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Options of other programs that the pages name.
FOREIGN_OPTIONS = {"--find-links", "--extra-index-url", "--no-index", "--build", "--help"}


def page_id(path: Path) -> str:
    return path.name


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of all code blocks, indented or fenced; a line that ends with a backslash is joined."""
    fenced, joined = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            joined += line.strip()
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            yield joined
            joined = ""


def without_fenced_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_fenced_code(text))]


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return []  # not a command line


def calls(text: str) -> Iterator[tuple[click.Group, list[str]]]:
    """Yield the program and the arguments of each call of attncache or of the benchmarks in a page's code."""
    for line in [*code_lines(text), *inline_code(text)]:
        words = words_of(line)
        for index, word in enumerate(words[:-1]):
            if word.rsplit("/", 1)[-1] == "attncache" and words[index + 1] in subcommands(main):
                yield main, words[index + 1 :]
            if words[index : index + 2] == ["-m", "benchmarks"] and words[index + 2 :]:
                yield benchmarks, words[index + 2 :]


def visible_options(command: click.Command) -> set[str]:
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return {"--help", *(name for option in options for name in (*option.opts, *option.secondary_opts))}


def subcommands(group: click.Group) -> dict[str, click.Command]:
    """Return the commands of a group by name; a group may import a command when it is asked for it."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command}


def all_commands(group: click.Group) -> Iterator[click.Command]:
    for command in subcommands(group).values():
        yield command
        if isinstance(command, click.Group):
            yield from all_commands(command)


def table_after(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, without its head."""
    section = text.split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(^\|.*\n)+", section, re.MULTILINE)
    assert rows, heading
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows[0].splitlines()[2:]
    ]


def named_in(cells: list[str]) -> list[str]:
    """Return what stands in backticks in these table cells."""
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "python.md"], ids=page_id)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.timeout(900)  # it builds databases with the default model
def test_python_examples_of_the_documentation_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace: dict[str, object] = {}
    for block in blocks:
        # Empty lines in front, so that a traceback names the line of the page.
        above = "\n" * text[: block.start(1)].count("\n")
        exec(compile(above + block[1], page.name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_in_code_exist(page):
    for program, arguments in calls(page.read_text(encoding="utf-8")):
        command: click.Command = program
        for argument in arguments:
            if not isinstance(command, click.Group) or argument.startswith("-"):
                break
            assert argument in subcommands(command), arguments
            command = subcommands(command)[argument]
        used = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
        if isinstance(command, Module):
            source = Path(sys.modules[command.main_of.__module__].__file__).read_text(encoding="utf-8")
            assert all(f'"{option}"' in source for option in used), arguments
        else:
            assert used <= visible_options(command), arguments


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_named_in_prose_exist(page):
    known = FOREIGN_OPTIONS.union(*map(visible_options, [*all_commands(main), *all_commands(benchmarks)]))
    text = page.read_text(encoding="utf-8")
    named = {option for code in inline_code(text) for option in re.findall(r"^--[a-z][a-z-]*", code)}
    assert named <= known


def test_tables_of_serve_options_list_every_option_of_each_group_with_its_default():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    section = text.split("\n## Options\n", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^### (.*)$", section, re.MULTILINE) == [group.title for group in GROUPS]
    options = {option.name: option for option in subcommands(main)["serve"].params if not option.hidden}
    for group in GROUPS:
        documented = {
            option.strip("`"): default.strip("`")
            for option, default, _ in table_after(section, f"### {group.title}")
        }
        expected = [options[name] for name in group.model_fields if name in options]
        assert list(documented) == [option.opts[0] for option in expected]
        for option in expected:
            default = str(option.default).replace("\n", r"\n")
            shown = {"True": "on", "False": "off", "None": ""}.get(default, default)
            assert documented[option.opts[0]] == shown, option.name


def test_table_of_options_for_files_of_texts_lists_their_own_options():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = {row[0].strip("`"): row[1].strip("`") for row in table_after(text, "## Files of texts")}
    options = {}
    for command in ("embed", "classify"):
        for option in subcommands(main)[command].params:
            # click has a value of its own for "no default".
            options[option.opts[0]] = str(option.default) if isinstance(option.default, str | int) else ""
    assert set(documented) <= set(options)
    common = {
        "--input",
        "--output",
        "--column",
        "--format",
        "--batch-tokens",
        "--prompt-name",
        "--dimensions",
    }
    assert common | {"--classifier", "--max-tokens"} == set(documented)
    assert {name: options[name] for name in documented} == documented


def test_table_of_metrics_lists_every_metric():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = {
        re.sub(r"\{.*", "", name) for row in table_after(text, "## Metrics") for name in named_in(row[:1])
    }
    metrics = Metrics()
    exposed = re.findall(r"^# TYPE attncache_(\w+)", generate_latest(metrics.registry).decode(), re.MULTILINE)
    assert documented >= set(exposed)
    folder = ROOT / "service" / "observability"
    source = "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("metrics.py", "engine_numbers.py")
    )
    # Some metrics appear only once a database is loaded.
    assert all(name.removesuffix("_total") in source for name in documented)


def test_table_of_errors_names_every_class_of_the_library_with_its_code():
    rows = table_after((ROOT / "docs" / "python.md").read_text(encoding="utf-8"), "## Errors")
    documented = [(*named_in(row[:1]), *named_in([row[1]])) for row in rows]
    kinds = [
        kind
        for kind in vars(attncache_core.errors).values()
        if isinstance(kind, type) and issubclass(kind, AttnCacheError) and kind is not AttnCacheError
    ]
    assert sorted(documented) == sorted((kind.__name__, kind.code) for kind in kinds)


def test_design_page_lists_every_room():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = text.split("\n## The rooms\n", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"\w+", rooms))
    packages = [
        path.parent.name
        for name in ("attncache_core", "service")
        for path in (ROOT / name).glob("*/__init__.py")
    ]
    assert set(packages) - named - {"page"} == set()


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fenced_code(page.read_text(encoding="utf-8"))):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tests_named_on_a_page_exist(page):
    for name in re.findall(r"`([\w/]+\.py::\w+)`", page.read_text(encoding="utf-8")):
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert function in {node.name for node in functions}, name


def test_every_row_of_the_papers_names_existing_routes_and_a_test_or_none():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    paths = create_app(Settings(admin=True), lambda: iter([])).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {code for code in inline_code(text) if re.match(r"[A-Z]+ /", code)} <= routes
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections
    for section in sections:
        for row in table_after(text, f"## {section}"):
            assert re.fullmatch(r"-|`[\w/]+\.py::test_\w+`", row[-1]), row


@pytest.fixture(scope="module")
def server_url(default_checkpoint) -> Iterator[str]:
    """The address of the real server on a free port, with the default model and no database."""
    with served(PrefillEngine.load(default_checkpoint, dtype="float32")) as server:
        host, port = server.addresses[0][:2]
        yield f"http://{host}:{port}"


def run_example(name: str, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_examples_are_short_and_begin_with_the_command_that_runs_them():
    assert EXAMPLES
    for path in EXAMPLES:
        source = path.read_text(encoding="utf-8")
        compile(source, path.name, "exec")
        assert len(source.splitlines()) < 40, path.name
        assert f"python examples/{path.name}" in source.split('"""')[1]


def test_every_example_is_run_by_a_test():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f'run_example("{path.name}"' not in source] == []


def test_example_embeds_over_http(server_url, monkeypatch, capsys):
    run_example("embed.py", monkeypatch, server_url)
    shown = capsys.readouterr().out
    assert "reused attention maps 0/2" in shown
    assert "384 dimensions" in shown


def test_example_classifies_over_http(server_url, monkeypatch, capsys):
    run_example("classify.py", monkeypatch, server_url)
    best = [line.partition(": ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert best == ["delivery", "login", "refund"]


def test_example_finds_the_article_that_answers_the_question(server_url, monkeypatch, capsys):
    run_example("search.py", monkeypatch, "I can't get into my account", server_url)
    assert "forgotten password" in capsys.readouterr().out.splitlines()[0]


def test_example_embeds_and_classifies_without_a_server(monkeypatch, capsys):
    run_example("library_embed.py", monkeypatch)
    assert capsys.readouterr().out.splitlines()[1].startswith("login")


@pytest.mark.usefixtures("fixed_costs")
def test_example_reuses_the_maps_of_the_database_that_it_built(tmp_path, monkeypatch, capsys):
    run_example("library_reuse.py", monkeypatch, tmp_path / "orders.db")
    outcomes = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert (outcomes[0], outcomes[2]) == ("hit", "not_searched")
    assert outcomes[1].endswith("hit")
