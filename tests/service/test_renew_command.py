"""`attncache renew` as a user runs it: what it prints, and its exit codes."""

import pytest
from command_line import PRIVATE, assert_one_line, model_arguments, run, succeeded, without_progress
from following import publish

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.generations import Renewal, Result, read_renewals
from attncache_core.reuse.maps.publishing import renewing
from service.commands import renew as command


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text(f"{PRIVATE}\n" * 300, encoding="utf-8")
    return path


def test_rollback_lets_the_generation_before_serve_again_and_needs_no_model(root, tiny_prototypes_database):
    publish(root, tiny_prototypes_database)
    printed = succeeded(run("renew", root, "--rollback", "--model", "no-such-model"))
    assert printed == "generation 0 serves again, instead of generation 1\n"
    assert AttentionDatabase.open(root).info().generation == 0
    assert_one_line(run("renew", root, "--rollback"), "no generation before generation 0")
    assert_one_line(run("renew", root, "--rollback", "--corpus", "asked.txt"), "give --corpus or --rollback")


def test_folder_without_a_sample_needs_a_corpus(tmp_path, tiny_engine, tiny_corpus, tiny_checkpoint):
    root = tmp_path / "a.db"
    options = BuildOptions(heads="3", min_cosine=0.5, min_text_cosine=0.0, prototypes=4, training_steps=10)
    build_database(tiny_engine, tiny_corpus, root, options)
    result = run("renew", root, *model_arguments(tiny_checkpoint))
    assert_one_line(result, "holds no sample of texts that were asked before now; start the server with")


def test_what_cannot_be_renewed_is_an_error_of_one_line_and_stays_as_it_is(
    root, tmp_path, tiny_checkpoint, corpus
):
    empty = tmp_path / "empty"
    empty.mkdir()

    def renew(folder):
        return run("renew", folder, "--corpus", corpus, *model_arguments(tiny_checkpoint))

    assert_one_line(renew(root), "keeps no quality budget")
    assert read_renewals(root) == ()
    with renewing(root):
        assert_one_line(renew(root), "process", "renews")
    assert_one_line(renew(empty), "there is no database")
    assert_one_line(run("renew", tmp_path / "none", "--rollback"), "there is no database")
    assert [*empty.iterdir()] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("result", "code", "printed"),
    [
        (Result.PUBLISHED, 0, "generation 4 is published: why"),
        (Result.REFUSED, 3, "generation 4 is removed, and generation 3 serves on: why"),
        (Result.NO_GAIN, 3, "generation 3 serves on: why"),
    ],
)
def test_exit_code_says_whether_a_generation_was_published(
    root, tiny_checkpoint, corpus, monkeypatch, result, code, printed
):
    decided = Renewal("2026-11-25T03:00:00Z", result, 3, 4, "why")
    monkeypatch.setattr(command, "renew_database", lambda *_, **__: decided)
    ran = run("renew", root, "--corpus", corpus, *model_arguments(tiny_checkpoint))
    assert (ran.exit_code, ran.stdout) == (code, f"{printed}\n")
    assert without_progress(ran.stderr) == []


def test_inspect_and_verify_take_a_renewed_database(root, tiny_prototypes_database):
    publish(root, tiny_prototypes_database)
    assert "generations/000001" in succeeded(run("inspect", root)).replace("\n", "")
    manifest = (tiny_prototypes_database / "manifest.json").read_text(encoding="utf-8")
    assert succeeded(run("inspect", root, "--json")) == manifest
    printed = succeeded(run("verify", root)).splitlines()
    assert [line.split(":")[0] for line in printed] == ["generation 0", "generation 1"]
    assert all(line.endswith("records and prototypes, all sound") for line in printed)
    (root / "current").write_bytes(b"\x00")
    damaged = run("verify", root)
    assert damaged.exit_code == 1
    assert "current is damaged" in damaged.stdout
    assert damaged.stdout.count("all sound") == 2
