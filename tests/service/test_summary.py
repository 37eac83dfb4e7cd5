"""The summary that a server logs once it is loaded."""

from pathlib import Path

import pytest
from command_line import model_arguments, run, succeeded

from attncache_core import AttentionDatabase, KeyValueOptions, PrefillEngine, native, require_gain
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.reuse.maps.gain import Gain, MeasuredGain
from service.loading.summary import slowness, summary
from service.settings import read_settings

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
