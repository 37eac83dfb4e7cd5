"""Help, mistakes and interruptions of commands, and what `serve` imports."""

import importlib.util
import socket
import subprocess
import sys

import click
import pytest
from command_line import assert_one_line, run

from service.cli import main
from service.settings import GROUPS


def test_help_names_every_command_and_imports_none():
    program = (
        "import contextlib, sys; from service.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'service.commands'))])"
    )
    lines = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert lines[-1] == "[]"
    commands = lines[lines.index("Commands:") + 1 : -1]
    assert [line.split()[0] for line in commands] == sorted(main.commands)
    assert all(line.endswith(".") for line in commands)


def test_help_lists_the_options_by_group_with_variables_and_defaults():
    text = run("serve", "--help").stdout
    for shown in ("--max-batch-tokens", "ATTNCACHE_MAX_BATCH_TOKENS", "1024", "--reuse / --no-reuse", "θ"):
        assert shown in text
    assert "AUTO]" not in text  # the name of an enum member
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [*(f"{group.title}:" for group in GROUPS), "Other options:"]
    for option, group in (
        ("--port", "Network"),
        ("--threshold", "Reuse of attention maps"),
        ("--config", "Other options"),
    ):
        start = text.index(f"\n{group}:")
        assert f"\n  {option} " in text[start:].split("\n\n")[0]


def test_terminal_whose_encoding_lacks_a_character_gets_the_rest(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    shown = subprocess.check_output([sys.executable, "-m", "service.cli", "serve", "--help"], text=True)
    assert "similarity \\u03b8 of a hit" in shown


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ("sevre", {}, ("sevre",)),
        ("serve --config absent.toml", {}, ("absent.toml", "No such file")),
        ("serve --config attncache.toml", {}, ("--config attncache.toml", "key prot", "port")),
        ("serve", {"CONFIG": "attncache.toml"}, ("--config attncache.toml", "key prot", "port")),
        ("serve --port 70000", {}, ("--port", "70000", "65535")),
        # Both values are wrong, so the message shows which value was read.
        ("serve --port 70001", {"PORT": "70002"}, ("70001",)),
        ("serve", {"THREADS": "many"}, ("ATTNCACHE_THREADS", "many", "a whole number")),
        ("serve", {"REUSE": "perhaps"}, ("ATTNCACHE_REUSE", "perhaps", "true or false")),
        ("serve", {"PROT": "1"}, ("ATTNCACHE_PROT", "ATTNCACHE_PORT")),
        ("serve --thread 2", {}, ("--thread", "--threads")),
        ("serve --policy moderate", {}, ("--policy was removed", "0.99 (moderate)")),
        ("serve --search-always", {}, ("--search-always was removed", "--min-gain 0")),
        ("serve --search-always --port 0", {}, ("--search-always was removed", "--min-gain 0")),
        ("serve", {"POLICY": "moderate"}, ("ATTNCACHE_POLICY was removed", "--threshold")),
        ("serve --model absent", {}, ("absent", "not found")),
        # An empty variable counts as not set.
        ("serve --model absent", {"PORT": "", "DATABASE": ""}, ("absent", "not found")),
        ("build --corpus a.txt --database a.db --threshold 95", {}, ("--threshold", "x<=1")),
        ("serve --host 203.0.113.1 --port 0", {}, ("203.0.113.1", "cannot listen")),
        ("serve --host no.such.host.invalid --port 0", {}, ("no.such.host.invalid", "cannot listen")),
    ],
)
def test_mistake_is_one_line(tmp_path, monkeypatch, arguments, variables, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attncache.toml").write_text("prot = 1\n", encoding="utf-8")
    for name, value in variables.items():
        monkeypatch.setenv(f"ATTNCACHE_{name}", value)
    assert_one_line(run(*arguments.split()), *words)


@pytest.mark.parametrize(
    ("command", "hidden"),
    [("serve", ("--policy", "--fetch")), ("build", ("--maps", "--without")), ("calibrate", ("--without",))],
)
def test_help_shows_no_removed_option_no_former_name_and_no_baseline(command, hidden):
    text = run(command, "--help").stdout
    for option in hidden:
        assert option not in text


@pytest.mark.parametrize(
    ("command", "to_continue"),
    [
        ("build", "; run the same command again to continue"),
        ("calibrate", "; with --segments, run the same command again to continue"),
        ("classify", "; run the same command again to continue"),
        ("embed", "; run the same command again to continue"),
        ("evaluate", ""),
        ("fit-classifier", ""),
        ("renew", "; run the same command again to continue"),
    ],
)
def test_ctrl_c_is_one_line_that_says_whether_the_command_continues(monkeypatch, command, to_continue):
    def interrupted(*_):
        raise KeyboardInterrupt

    stopped = main.commands[command]
    monkeypatch.setattr(stopped, "invoke", interrupted)
    monkeypatch.setattr(stopped, "make_context", lambda *_, **__: click.Context(stopped))
    ended = run(command)
    assert (ended.exit_code, ended.stdout) == (130, "")
    assert ended.stderr == f"attncache: stopped{to_continue}\n"


def test_address_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(run("serve", "--port", port), "127.0.0.1", port, "in use")


# What `serve` imports: no torch for its options; no evaluation, code of models or clusters for a server.

OF_EVALUATION = (
    *("service.plots", "service.commands.evaluate", "service.commands.evaluation"),
    "attncache_core.evaluation",
)
# What transformers imports with the code of any model: seconds, and 120 MB.
OF_MODELS = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor")
# scipy imports its parts when they are used first. A server with a known gain uses none.
OF_CALIBRATION = ("scipy.special", "scipy.optimize")
OF_CLUSTERS = ("aiohttp", "service.shared", "valkey", "obstore", "ray")

# For a fresh interpreter: loads the options of `serve`, then the engine without serving.
PROGRAM = """
import contextlib
import sys
from service.cli import main

main.commands["serve"]
print("torch" in sys.modules)

from service.commands import serving

def load_only(settings, load_engines, listeners):
    for listener in listeners:
        listener.socket.close()
    next(load_engines(settings, 0))
    sys.exit(0)

serving.serve_with_workers = load_only
with contextlib.suppress(SystemExit):
    main(sys.argv[1:], standalone_mode=False)
print(*sys.modules)
"""


def test_server_imports_no_evaluation(tiny_checkpoint, tiny_database):
    arguments = [
        *("serve", "--model", str(tiny_checkpoint.folder), "--database", str(tiny_database), "--port", "0"),
        *("--dtype", "float32", "--min-gain", "0", "--verify-rate", "0"),
    ]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    options, imported = subprocess.check_output(command, text=True, timeout=240).splitlines()
    assert options == "False"
    assert {"torch", "service.loading.engines"} <= set(imported.split())
    assert all(map(importlib.util.find_spec, OF_EVALUATION))  # the modules still have these names
    assert set(imported.split()).isdisjoint((*OF_EVALUATION, *OF_MODELS, *OF_CALIBRATION, *OF_CLUSTERS))
