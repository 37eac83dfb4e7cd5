"""Load the engine that a server's settings describe, with a real database, and sum up what it does."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import model_arguments, run, succeeded
from core_models import prefill, tighten, write_model

from attncache_core import (
    AttentionDatabase,
    CorruptDatabase,
    KeyValueOptions,
    MachineBusy,
    Outcome,
    PrefillEngine,
    native,
    require_gain,
)
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.default import default_database_folder
from attncache_core.reuse.maps.gain import Gain, MeasuredGain
from attncache_core.reuse.maps.policy import Budget
from service.loading import engines as loading
from service.loading.engines import load_engine, load_engines
from service.loading.summary import expected_savings, slowness, summary
from service.settings import read_settings


@pytest.fixture(autouse=True)
def required_gains(monkeypatch):
    """Replace the measurement of gains, and return the gains that were required."""
    required = []
    monkeypatch.setattr(loading, "require_gain", lambda _, min_gain, **_how: required.append(min_gain))
    return required


def engine_of(checkpoint, database, **values):
    named = values if database is None else {"database": str(database), **values}
    return load_engine(read_settings({"dtype": "float32", **named}), checkpoint)


def test_more_tokens_than_the_model_takes_are_warned_of(tiny_checkpoint, caplog):
    most = engine_of(tiny_checkpoint, None, maps=False).tokenizer.max_tokens
    engine_of(tiny_checkpoint, None, maps=False, max_tokens=most)
    assert not caplog.records
    assert engine_of(tiny_checkpoint, None, maps=False, max_tokens=100_000).tokenizer.max_tokens == most
    assert "--max-tokens is 100000" in caplog.text


def test_options_without_effect_are_warned_of(tiny_checkpoint, tiny_llama, tmp_path, caplog):
    """Each once, with the reason; none of an option that has an effect, now or once a database is built."""
    of_maps = {"threshold": "0.9", "min_gain": "0.1", "verify_rate": "0.5"}
    engine_of(tiny_checkpoint, None, cache_dir=str(tmp_path), **of_maps)
    next(load_engines(read_settings({"cache_dir": str(tmp_path), **of_maps}), tiny_checkpoint))
    llama = read_checkpoint(tiny_llama)
    engine_of(llama, None, kv_dir=str(tmp_path / "kv"))
    assert "no effect" not in caplog.text
    engine_of(llama, None, **of_maps)
    for option in ("--threshold", "--min-gain", "--verify-rate"):
        assert caplog.text.count(f"{option} has no effect without --database: this model has no") == 1
    caplog.clear()
    # A bound of memory holds also if none is taken; --workers sets one.
    engine_of(tiny_checkpoint, None, kv_dir=str(tmp_path / "none"), kv_disk_bytes=1000, kv_memory_bytes=1000)
    assert "--kv-memory-bytes" not in caplog.text
    for option in ("--kv-dir", "--kv-disk-bytes"):
        assert caplog.text.count(f"{option} has no effect, no keys and values are stored: attention") == 1


def test_given_threshold_decides_what_hits_and_keeps_no_budget(tiny_checkpoint, tiny_database, tiny_corpus):
    texts = ["my card my card", "the bank was closed today", tiny_corpus[0].text]
    usual, strict = (
        engine_of(tiny_checkpoint, tiny_database, **values) for values in ({}, {"threshold": "0.995"})
    )
    sequences = usual.tokenize(texts)
    assert prefill(usual, sequences).outcomes == (Outcome.HIT,) * 3
    assert prefill(strict, sequences).outcomes == (Outcome.MISS, Outcome.MISS, Outcome.HIT)
    policy = strict.map_reuse.policy
    assert {kind.threshold for group in policy.groups for kind in group.kinds.values()} == {0.995}
    assert policy.budget.least == 0
    # Without the option, the database's own thresholds hold.
    assert usual.map_reuse.policy == AttentionDatabase.open(tiny_database).manifest.policy


def test_gain_is_required(tiny_checkpoint, tiny_database, required_gains):
    engine_of(tiny_checkpoint, tiny_database)
    assert required_gains == [0.05]
    engine_of(tiny_checkpoint, tiny_database, min_gain=0.2)
    assert required_gains[-1] == 0.2


def test_sound_database_gives_one_engine(tiny_checkpoint, tiny_database, tmp_path):
    shutil.copytree(tiny_database, default_database_folder(tiny_checkpoint, tmp_path))
    for values in ({"database": str(tiny_database)}, {"cache_dir": str(tmp_path)}, {"reuse": "off"}):
        settings = read_settings({"dtype": "float32", **values})
        (engine,) = load_engines(settings, tiny_checkpoint)
        assert (engine.map_reuse is not None) == settings.reuse
        assert engine.info().reuse_off == []


@pytest.mark.parametrize("given", [{}, {"threshold": "0.7"}], ids=str)
def test_engine_without_reuse_serves_first_where_the_default_database_is_damaged(
    tiny_checkpoint, tiny_database, tmp_path, given
):
    folder = default_database_folder(tiny_checkpoint, tmp_path)
    shutil.copytree(tiny_database, folder)
    next(folder.glob("maps/*.maps")).unlink()
    engine = next(first_start(tiny_checkpoint, tmp_path, **given))
    assert engine.map_reuse is None
    assert engine.info().reuse_off == [loading.DAMAGED]
    # The database stays unchanged until the first engine serves.
    assert folder.is_dir()


def test_damaged_database_of_the_option_ends_the_start_and_stays_unchanged(tiny_checkpoint, root):
    next(root.glob("maps/*.maps")).unlink()
    settings = read_settings({"dtype": "float32", "database": str(root)})
    with pytest.raises(CorruptDatabase, match=r"remove .* and build it again"):
        next(load_engines(settings, tiny_checkpoint))
    assert root.is_dir()


def test_cross_encoder_gets_no_default_database_because_pairs_take_no_maps(tmp_path):
    checkpoint = read_checkpoint(write_model(tmp_path / "reranker", ["relevance"]))
    (engine,) = first_start(checkpoint, tmp_path / "cache")
    assert (engine.map_reuse, engine.reuse_off) == (None, [])
    assert engine.decisions.scores_pairs
    assert not (tmp_path / "cache").exists()


def first_start(checkpoint, cache, **values):
    """Return what a first start loads: there is no default database yet."""
    return load_engines(read_settings({"dtype": "float32", "cache_dir": str(cache), **values}), checkpoint)


@pytest.fixture
def builds(monkeypatch, tiny_checkpoint, tiny_database):
    """Replace the building process by a copy of a database, and return what was built."""
    built = []

    def build(settings):
        yield "building: 50%"
        folder = default_database_folder(tiny_checkpoint, settings.cache_dir)
        shutil.copytree(tiny_database, folder)
        built.append(folder.name)

    monkeypatch.setattr(loading, "build_while_serving", build)
    return built


def test_first_start_serves_at_once_and_builds_the_database_behind_it(
    tiny_checkpoint, tmp_path, builds, monkeypatch
):
    monkeypatch.setattr(loading, "could_pay", lambda *_: True)
    loaded = first_start(tiny_checkpoint, tmp_path)
    first = next(loaded)
    assert (first.map_reuse, first.reuse_off, builds) == (None, [loading.NO_DATABASE_YET], [])
    *lines, second = loaded
    assert lines == [loading.MEASURING_PROSPECT, "building: 50%"]
    assert second.map_reuse is not None
    assert len(builds) == 1


def test_nothing_is_built_where_reuse_cannot_pay(tiny_checkpoint, tmp_path, builds, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loading, "could_pay", lambda *_: False)
    engine, line = first_start(tiny_checkpoint, tmp_path)
    assert (line, builds) == (loading.MEASURING_PROSPECT, [])
    assert engine.reuse_off == [loading.CANNOT_PAY]
    assert f"reuse     serving exactly: {loading.CANNOT_PAY}" in caplog.text


def test_operator_who_asks_for_reuse_at_any_speed_gets_a_database_without_a_measurement(
    tiny_checkpoint, tmp_path, builds, monkeypatch
):
    monkeypatch.setattr(loading, "could_pay", lambda *_: pytest.fail("measured"))
    loaded = list(first_start(tiny_checkpoint, tmp_path, min_gain="0"))
    assert len(builds) == 1
    assert len([engine for engine in loaded if isinstance(engine, PrefillEngine)]) == 2


def test_prospect_is_measured_later_and_later_while_the_machine_is_busy(
    tiny_checkpoint, tmp_path, builds, monkeypatch
):
    slept = []
    monkeypatch.setattr(loading.time, "sleep", slept.append)

    def could_pay(*_):
        if len(slept) < 8:
            raise MachineBusy("others compute")
        return True

    monkeypatch.setattr(loading, "could_pay", could_pay)
    _, *lines, _ = first_start(tiny_checkpoint, tmp_path)
    assert slept == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert lines[:2] == [
        loading.MEASURING_PROSPECT,
        "others compute: the server goes on without reuse, and measures again in 1 min",
    ]
    assert len(builds) == 1


# What verification has found out is kept with the database, or nothing is reused.


@pytest.fixture
def read_only(root):
    """A database with a budget in which every text hits, and in which no file can be written."""
    manifest = AttentionDatabase.open(root).manifest
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(root)
    # A folder at the path of the lock file, because permissions would not stop an administrator.
    (root / ".tightened.json.lock").mkdir()
    return root


def outcome(engine):
    return prefill(engine, engine.tokenize(["my card my card"])).outcomes[0]


@pytest.mark.parametrize("values", [{"verify_rate": 0}, {"threshold": 0.1}], ids=["unverified", "own θ"])
def test_folder_may_be_read_only_if_nothing_needs_to_be_kept(tiny_checkpoint, read_only, values):
    before = sorted(read_only.rglob("*"))
    engine = engine_of(tiny_checkpoint, read_only, **values)
    assert outcome(engine) is Outcome.HIT
    assert engine.reuse_off == []
    # The library reuses maps from a folder that it cannot write.
    database = AttentionDatabase.open(read_only)
    library = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    assert outcome(library) is Outcome.HIT
    assert sorted(read_only.rglob("*")) == before


def test_findings_are_kept_from_the_first_start_on_or_nothing_is_reused_and_inspect_shows_them(
    tiny_checkpoint, read_only, caplog
):
    caplog.set_level(logging.INFO)
    engine = engine_of(tiny_checkpoint, read_only)
    assert outcome(engine) is Outcome.NOT_SEARCHED
    (reason,) = engine.reuse_off
    assert reason.startswith("tightened.json cannot be written (Is a directory)")
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert told == [(logging.WARNING, f"attention maps are not reused: {reason}")]
    assert expected_savings(engine) == f"serving exactly: {reason}"
    (read_only / ".tightened.json.lock").rmdir()
    engine = engine_of(tiny_checkpoint, read_only)
    assert (read_only / "tightened.json").is_file()
    assert outcome(engine) is Outcome.HIT
    assert "reuse off" not in succeeded(run("inspect", read_only))
    engine.map_reuse.tighten(0)
    engine.map_reuse.keep_verified({})
    theta = next(iter(engine.map_reuse.policy.groups[0].kinds.values())).threshold
    assert f"{theta:.4f}" in succeeded(run("inspect", read_only))
    (read_only / "tightened.json").write_bytes(b"garbage")
    shown = " ".join(succeeded(run("inspect", read_only)).split())
    assert "reuse off tightened.json cannot be read" in shown


# The summary that a server logs once it is loaded.

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reusing(tiny_checkpoint, tiny_database):
    database = AttentionDatabase.open(tiny_database)
    return PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")


def lines_of(engine, **settings):
    """Return the lines of the summary by their first word."""
    lines = summary(engine, read_settings(settings), ["http://127.0.0.1:1", "unix:/run/a"])
    return {word: rest.strip() for word, _, rest in (line.partition(" ") for line in lines)}


def test_summary_names_model_processor_limits_and_address(tiny_engine):
    lines = lines_of(tiny_engine, max_batch_tokens=2048, max_body_bytes=2**19)
    assert lines["model"].startswith(f"tiny-bert (fingerprint {tiny_engine.fingerprint[:12]}): task embed")
    assert f"up to {tiny_engine.tokenizer.max_tokens} tokens" in lines["model"]
    assert lines["computes"].startswith(f"in float32 on cpu, {tiny_engine.threads} threads, by ")
    assert lines["database"] == "none"
    assert lines["reuse"] == "serving exactly: there is no database"
    assert "batch 2,048 tokens, 128 texts" in lines["limits"]
    assert "0.5 MiB" in lines["limits"]
    assert lines["serves"] == "http://127.0.0.1:1, unix:/run/a"


def test_summary_names_the_database_and_what_reuse_does(reusing, tiny_database):
    lines = lines_of(reusing)
    assert lines["database"] == f"{tiny_database} (240 records and 0 prototypes)"
    assert lines["reuse"].startswith("reusing attention maps whether it saves time here or not")


@pytest.mark.parametrize(
    ("of_build", "of_start", "tightened", "reason"),
    [
        (None, 1.0, False, "with the given threshold, only recorded texts hit"),
        (1.0, None, False, "no held-out text hits with the given threshold"),
        (None, None, True, "verified hits failed the budget, so at most recorded texts hit"),
    ],
    ids=["θ of the start", "θ of the build", "tightened"],
)
def test_summary_blames_no_mask_where_a_threshold_was_given_or_the_policy_was_tightened(
    tiny_checkpoint, root, of_build, of_start, tightened, reason
):
    manifest = AttentionDatabase.open(root).manifest
    policy = replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))
    replace(manifest, policy=policy if of_build is None else policy.with_threshold(of_build)).write(root)
    if tightened:
        tighten(root)
    engine = engine_of(tiny_checkpoint, root, threshold=of_start)
    assert lines_of(engine)["reuse"].startswith(f"serving exactly: {reason}")


FASTER = Gain(one_text=-0.27, one_text_bound=-0.3, full_batch=0.08, full_batch_bound=0.061)


@pytest.mark.parametrize(
    ("paying", "least_tokens", "begins"),
    [
        ((), 0, "serving exactly: reuse of attention maps would make full batches 8% faster"),
        (
            (0,),
            896,
            "reusing attention maps in batches of at least 896 tokens: it makes full batches 8% faster",
        ),
        ((0,), 0, "reusing attention maps: it makes full batches 8% faster"),
    ],
    ids=["none", "large", "all"],
)
def test_summary_says_what_reuse_saves_and_which_bound_was_compared_with_which_limit(
    reusing, paying, least_tokens, begins
):
    gain = MeasuredGain({}, 0.05, {0: FASTER}, paying, FASTER, 0.05, least_tokens)
    reusing.map_reuse.reuse_in(paying, gain)
    line = lines_of(reusing)["reuse"]
    assert line.startswith(begins)
    assert "full batches 8% faster and single texts 27% slower here" in line
    assert "full batches at least +6.1% with 95 % confidence; needed is +5.0%, by --min-gain 0.05" in line
    assert ("no length group reaches --min-gain alone" in line) == (not paying)
    reusing.map_reuse.reuse_in((), replace(gain, required=0.07))
    assert "no length group" not in lines_of(reusing)["reuse"]


def test_summary_says_that_no_gain_is_known_yet(reusing):
    require_gain(reusing, 0.05, measure=False)
    assert lines_of(reusing)["reuse"] == (
        "serving exactly until it is measured whether reuse of attention maps saves time here"
    )


def test_warning_that_nothing_compiled_computes_says_why_what_it_costs_and_what_to_read(
    tiny_engine, monkeypatch
):
    monkeypatch.setattr(native, "compiled_off", lambda: None)
    assert slowness(tiny_engine.info()) is None
    monkeypatch.setattr(native, "compiled_off", lambda: "the reason; the remedy")
    warning = slowness(tiny_engine.info())
    assert "times the processor time" in warning
    assert warning.endswith("the reason; the remedy")
    page, _, anchor = warning.partition("(")[2].partition(")")[0].partition("#")
    assert f"\n## {anchor.replace('-', ' ').capitalize()}\n" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.usefixtures("loaded")
def test_start_without_compiled_code_logs_a_warning_that_names_the_cause(
    tiny_checkpoint, monkeypatch, caplog
):
    monkeypatch.setattr(native, "compiled_off", lambda: "the reason; the remedy")
    succeeded(run("serve", "--port", "0", "--no-maps", *model_arguments(tiny_checkpoint)))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the plain executor serves" in warning
    assert warning.endswith("the reason; the remedy")


@pytest.mark.parametrize("on_disk", [False, True])
def test_summary_says_how_many_keys_and_values_are_stored(folder, tmp_path, on_disk):
    options = KeyValueOptions(2**22, folder=tmp_path if on_disk else None)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32", key_values=options)
    lines = lines_of(engine)
    assert lines["reuse"].startswith("storing keys and values in up to 4 MiB of memory")
    assert ("on disk" in lines["reuse"]) is on_disk
    engine.close()
