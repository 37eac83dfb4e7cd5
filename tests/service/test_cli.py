from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from service.cli import main
from service.settings import GROUPS


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def assert_one_line(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("attncache: ")
    for word in words:
        assert word in line


def test_help_shows_options_variables_and_defaults() -> None:
    text = run("serve", "--help").stdout
    for shown in ("--max-batch-tokens", "ATTNCACHE_MAX_BATCH_TOKENS", "1024", "--reuse / --no-reuse", "θ"):
        assert shown in text
    assert "AUTO]" not in text  # the name of an enum member


def test_help_lists_the_options_by_group() -> None:
    text = run("serve", "--help").stdout
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [*(f"{group.title}:" for group in GROUPS), "Other options:"]
    for option, group in (
        ("--port", "Network"),
        ("--threshold", "Reuse of attention maps"),
        ("--config", "Other options"),
    ):
        start = text.index(f"\n{group}:")
        assert f"\n  {option} " in text[start:].split("\n\n")[0]


@pytest.mark.parametrize("by", ["option", "variable"])
def test_mistake_in_a_file_of_settings_is_one_line(tmp_path: Path, by: str) -> None:
    config = tmp_path / "attncache.toml"
    config.write_text("prot = 1\n", encoding="utf-8")
    if by == "option":
        result = run("serve", "--config", str(config))
    else:
        result = run("serve", ATTNCACHE_CONFIG=str(config))
    assert_one_line(result, str(config), "key prot", "port")


def test_missing_file_of_settings_is_one_line(tmp_path: Path) -> None:
    assert_one_line(run("serve", "--config", str(tmp_path / "absent.toml")), "absent.toml", "No such file")


def test_bad_option_is_one_line() -> None:
    assert_one_line(run("serve", "--port", "70000"), "--port", "70000", "65535")


def test_bad_variable_is_one_line() -> None:
    assert_one_line(run("serve", ATTNCACHE_THREADS="many"), "ATTNCACHE_THREADS", "many", "a whole number")


def test_bad_switch_in_the_environment_is_one_line() -> None:
    assert_one_line(run("serve", ATTNCACHE_REUSE="perhaps"), "ATTNCACHE_REUSE", "perhaps", "true or false")


def test_unknown_variable_is_one_line() -> None:
    assert_one_line(run("serve", ATTNCACHE_PROT="1"), "ATTNCACHE_PROT", "ATTNCACHE_PORT")


def test_unknown_option_is_one_line_with_a_suggestion() -> None:
    assert_one_line(run("serve", "--thread", "2"), "--thread", "--threads")


@pytest.mark.parametrize("preset", ["moderate", "no preset"])
def test_removed_option_is_one_line_with_what_to_use_instead(preset: str) -> None:
    assert_one_line(run("serve", "--policy", preset), "--policy was removed", "0.99 (moderate)")


def test_variable_of_a_removed_option_is_one_line_with_what_to_use_instead() -> None:
    assert_one_line(run("serve", ATTNCACHE_POLICY="moderate"), "ATTNCACHE_POLICY was removed", "--threshold")


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        ("serve", ("--policy", "--fetch")),
        ("build", ("--maps", "--without")),
        ("calibrate", ("--without",)),
        ("prune", ("--importance",)),
    ],
)
def test_help_shows_no_removed_option_no_former_name_and_no_baseline(
    command: str, hidden: tuple[str, ...]
) -> None:
    text = run(command, "--help").stdout
    for option in hidden:
        assert option not in text


def test_unknown_command_is_one_line() -> None:
    assert_one_line(run("sevre"), "sevre")


def test_option_takes_precedence_over_its_variable() -> None:
    # Both values are wrong, so the message shows which value was read.
    assert_one_line(run("serve", "--port", "70001", ATTNCACHE_PORT="70002"), "70001")


def test_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    result = run("serve", "--model", str(tmp_path / "absent"), ATTNCACHE_PORT="", ATTNCACHE_DATABASE="")
    assert_one_line(result, "absent")


def test_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert_one_line(run("serve", "--model", str(tmp_path / "absent")), "absent", "not found")


def test_address_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(run("serve", "--port", port), "127.0.0.1", port, "in use")


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_address_that_is_not_ours_is_one_line(host: str) -> None:
    assert_one_line(run("serve", "--host", host, "--port", "0"), host, "cannot listen")
