"""`benchmarks figures` writes figures into pages, continues, and changes no page when a command fails."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.commands import figures as product
from benchmarks.commands.figures import FIGURES, Figure, Folders, write_figures

DOCS = Path(__file__).resolve().parents[2] / "docs"
TINY = Figure("page.md", "tiny", "index --vectors 500 --dimensions 8 --queries 2 --rounds 1", product.index)
PAGE = "# A page\n\n<!-- figure tiny -->\nas before\n<!-- end -->\n\nmore\n"


@pytest.fixture
def folders(tmp_path) -> Folders:
    (tmp_path / "page.md").write_text(PAGE, "utf-8")
    return Folders(tmp_path, tmp_path / "results")


@pytest.fixture
def in_process(monkeypatch):
    """Run the commands of figures in this process, which has imported everything."""

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "benchmarks"]
        done = CliRunner().invoke(main, command[3:])
        return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout)

    monkeypatch.setattr(product, "subprocess", SimpleNamespace(run=run, PIPE=None))


def page(folders: Folders) -> str:
    return (folders.pages / "page.md").read_text("utf-8")


@pytest.mark.usefixtures("in_process")
def test_figure_stands_in_its_block_beside_its_command_and_is_not_measured_again_unless_asked(
    folders, monkeypatch
):
    assert write_figures([TINY], folders, again=False)
    text = page(folders)
    assert text.startswith("# A page\n\n<!-- figure tiny -->\n    python -m benchmarks index --vectors 500")
    assert text.endswith("\n<!-- end -->\n\nmore\n")
    assert "| 500 | random |" in text
    assert re.search(
        r"^Measured on \d{4}-\d\d-\d\d: processor .*, threads \d+, python 3.*, torch 2", text, re.M
    )
    assert "as before" not in text

    (folders.pages / "page.md").write_text(PAGE, "utf-8")
    monkeypatch.setattr(product, "measured", lambda *_: None)  # a command that fails
    assert write_figures([TINY], folders, again=False)
    assert page(folders) == text
    assert not write_figures([TINY], folders, again=True)
    other = Figure("page.md", "tiny", "index --vectors 400", product.index)
    assert not write_figures([other], folders, again=False)


def test_figure_that_fails_or_lacks_its_data_leaves_the_page_and_is_named(folders, capsys):
    assert not write_figures([Figure("page.md", "tiny", "nothing", product.index)], folders, again=False)
    assert "tiny failed with exit code 2; page.md is unchanged" in capsys.readouterr().out
    assert list(folders.results.iterdir()) == []
    assert write_figures([Figure("page.md", "tiny", "index --file {data}/a.tsv")], folders, again=False)
    assert "tiny is left out: it needs --data or --models" in capsys.readouterr().out
    assert page(folders) == PAGE


def test_every_block_of_the_documentation_has_a_figure_and_every_figure_a_block():
    blocks = [
        (path.name, name)
        for path in DOCS.glob("*.md")
        for name in re.findall(r"^<!-- figure ([\w-]+) -->$", path.read_text("utf-8"), re.M)
    ]
    assert sorted(blocks) == sorted((figure.page, figure.name) for figure in FIGURES)


def test_list_shows_the_command_of_every_figure():
    listed = CliRunner().invoke(main, ["figures", "--list"])
    assert [line.split()[0] for line in listed.output.splitlines()] == [figure.name for figure in FIGURES]
