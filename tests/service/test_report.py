"""Tables of benchmarks and evaluations."""

import pytest

from service.commands.report import show_table


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_words_of_a_table_stay_whole_on_every_screen(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    show_table(
        "title", ["method", "mean cosine", "bound"], [["prefix caching", "0.9999", "0.9998"], ["", 1, 2]]
    )
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(lines)
    for word in ("method", "prefix", "caching", "mean", "cosine", "bound", "0.9999", "0.9998"):
        assert word in shown
    assert ("prefix caching" in shown) == ("mean cosine" in shown) == (columns > 20)
    assert lines[-1].endswith("┘")
