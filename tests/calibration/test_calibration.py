"""Calibration of an existing database: the measured texts, the written files, and the kept budget."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from core_models import prefill, random_sequences, write_sentence_transformer
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions, default_budget
from attncache_core.calibration import calibrate as calibration
from attncache_core.calibration import strangeness_limit
from attncache_core.calibration.calibrate import calibrate, candidate_masks
from attncache_core.calibration.database import calibrate_database
from attncache_core.calibration.familiarity_fit import fit_familiarity
from attncache_core.calibration.probes import find_probes
from attncache_core.calibration.savings import measure_savings
from attncache_core.calibration.strangeness_limit import choose_limit
from attncache_core.calibration.thresholds import MIN_PROBES
from attncache_core.calibration.trial import savings_of
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.corpus import UnfamiliarText
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import DatabaseRefused, InvalidInput
from attncache_core.heads.classifier import nearest_label
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import Budget, uniform_policy
from attncache_core.reuse.mask import head_order, mildest_mask, parse_heads
from attncache_core.reuse.storage.layout import RecordKind
from attncache_core.runtime.files import left_unfinished
from service.loading.summary import why_exact

pytestmark = pytest.mark.usefixtures("fixed_costs")

# The random sentences of the tiny model are not alike, so the budget is loose.
BUDGET = Budget(Measure.COSINE, 0.8)


@pytest.fixture(scope="module")
def built(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    folder = tmp_path_factory.mktemp("databases") / "built.db"
    options = BuildOptions(heads="6", prototypes=4, training_steps=20, min_text_cosine=0)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder


@pytest.fixture(scope="module")
def texts():
    """120 sequences of 5 to 10 tokens that no database records."""
    return random_sequences(list(range(5, 11)) * 20, seed=31)


@pytest.fixture(scope="module")
def steps():
    """The progress (stage, done, total) of the calibration of `calibrated`."""
    return []


@pytest.fixture(scope="module")
def calibrated(tiny_engine, built, texts, steps, tmp_path_factory):
    """The folder of the calibrated database, and the report."""
    folder = Path(shutil.copytree(built, tmp_path_factory.mktemp("calibrated") / "a.db"))
    database = AttentionDatabase.open(folder)
    report = calibrate_database(tiny_engine, database, texts, (), BUDGET, lambda *step: steps.append(step))
    return folder, report


@pytest.fixture
def folder(built, tmp_path):
    """A copy of the built database, for a test to calibrate."""
    return Path(shutil.copytree(built, tmp_path / "a.db"))


def counts(engine: PrefillEngine) -> np.ndarray:
    """Return token counts in which every token of the vocabulary occurs once."""
    return np.ones(engine.tokenizer.vocabulary, dtype=np.int64)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file but the lock of the process that calibrates."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files.pop(".renewal.lock", None)
    return files


def manifest_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def test_calibration_changes_only_mask_policy_and_figures_and_adds_digests_of_the_texts(built, calibrated):
    before, after = contents(built), contents(calibrated[0])
    new, gone = after.keys() - before.keys(), before.keys() - after.keys()
    assert {name.partition("-")[0] for name in new} == {"calibrated_on.json", "familiarity"}
    assert [name.partition("-")[0] for name in gone] == ["familiarity"]
    assert {name for name in before.keys() - gone if before[name] != after[name]} == {"manifest.json"}
    before, after = manifest_of(built), manifest_of(calibrated[0])
    changed = {name for name in before if before[name] != after[name]}
    assert {"damage", "policy", "quality"} <= changed
    assert changed <= {"damage", "rank", "reused_heads", "policy", "quality", "files"}
    # Heads keep the order of the records in each layer.
    ranks = np.array(before["rank"]), np.array(after["rank"])
    assert head_order(ranks[1]) == head_order(ranks[0])
    assert sorted(ranks[1].flat) == list(range(12))


def test_report_equals_the_manifests_quality_and_keeps_the_budget(calibrated, texts):
    folder, report = calibrated
    database = AttentionDatabase.open(folder)
    assert database.verify() == []
    assert database.manifest.quality == report
    assert database.search.policy.budget == BUDGET
    assert report["measured"] == len(texts)
    assert report["left_out"] == 0
    assert report["heads"] == database.mask.total
    assert report["hit_rate"] > 0
    assert report["mean"] >= report["lower_bound"] >= BUDGET.least


def test_texts_that_are_too_few_of_their_length_prove_no_floor(tiny_engine, folder):
    texts = random_sequences([5] * 4 + list(range(6, 10)) * 74, seed=5)
    budget, database = replace(BUDGET, floor=0.5), AttentionDatabase.open(folder)
    with pytest.raises(InvalidInput, match="296 of the texts are not in the database and have a length"):
        calibrate_database(tiny_engine, database, texts, (), budget)
    # A build has no more texts, and says what it misses.
    probes, rank = find_probes(tiny_engine.model, database.search, texts), np.array(database.manifest.rank)
    chosen = calibrate(tiny_engine, database.search, probes, (), counts(tiny_engine), rank, budget)
    report = chosen.quality
    assert (report["measured"], report["may_hit"], report["hit_rate"]) == (300, 296, 0)
    built = replace(database.manifest, policy=chosen.policy, quality=report)
    assert "296 held-out texts cannot prove that 99 of 100 hits keep cosine 0.5" in why_exact(built)
    deciding = replace(chosen.policy, budget=Budget(Measure.AGREEMENT, 0.995))
    said = why_exact(replace(built, policy=deciding))
    assert "cannot prove that 0.995 of the hits keep their decision" in said
    too_few = replace(built, policy=uniform_policy(BUDGET, 1.0), quality={"measured": 0})
    assert "0 held-out texts are too few to measure" in why_exact(too_few)


def test_familiarity_is_fitted_to_texts_that_are_long_enough_to_hit(tiny_engine, built, monkeypatch):
    fitted = []

    def fit(tokens, sequences, *rest):
        fitted.append(sequences)
        return fit_familiarity(tokens, sequences, *rest)

    monkeypatch.setattr(strangeness_limit, "fit_familiarity", fit)
    database, texts = AttentionDatabase.open(built), random_sequences([5] * 2 + [6, 7, 8, 9] * 30, seed=5)
    probes, rank = find_probes(tiny_engine.model, database.search, texts), np.array(database.manifest.rank)
    unfamiliar = [UnfamiliarText("my card " * words, "repeated", True) for words in (1, 2, 3)]
    calibrate(tiny_engine, database.search, probes, unfamiliar, counts(tiny_engine), rank, BUDGET)
    assert {len(ids) for sequences in fitted for ids in sequences} == {6, 7, 8, 9}


def test_calibrated_database_has_the_hit_rate_and_fidelity_of_the_report(
    tiny_checkpoint, tiny_engine, calibrated, texts
):
    folder, report = calibrated
    engine = PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")
    reused, full = (prefill(each, texts) for each in (engine, tiny_engine))
    hits = np.array([outcome.is_hit for outcome in reused.outcomes])
    assert hits.mean() == pytest.approx(report["hit_rate"])
    cosines = engine.decisions.comparator(Measure.COSINE).fidelity(reused.outputs, full.outputs)[hits]
    # Calibration simulates the mask on the full model, and both sides store maps in 16 bits.
    assert cosines.mean() == pytest.approx(report["mean"], abs=2e-3)


def test_recorded_repeated_and_unservable_sequences_are_left_out(
    tiny_engine, tiny_corpus, folder, texts, calibrated
):
    recorded = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus[::10]])
    others = [*recorded, *texts[:7], *random_sequences([4, 11, 30])]
    report = calibrate_database(tiny_engine, AttentionDatabase.open(folder), [*others, *texts], (), BUDGET)
    assert report["left_out"] == len(others)
    assert report["measured"] == len(texts)
    before, after = (AttentionDatabase.open(path).manifest for path in (calibrated[0], folder))
    assert after.rank == before.rank
    assert after.reused_heads == before.reused_heads


def test_calibrating_again_gives_the_same_manifest(tiny_engine, texts, calibrated, tmp_path):
    folder = Path(shutil.copytree(calibrated[0], tmp_path / "a.db"))
    of_a_server = folder / ".tightened.json.0.unfinished"
    of_a_calibration = folder / ".manifest.json.0.unfinished"  # that was killed
    for path in (of_a_server, of_a_calibration):
        path.touch()
    calibrate_database(tiny_engine, AttentionDatabase.open(folder), texts, (), BUDGET)
    assert manifest_of(folder) == manifest_of(calibrated[0])
    assert left_unfinished(folder) == [of_a_server]


@pytest.mark.parametrize("count", [0, MIN_PROBES - 1])
def test_too_few_texts_are_refused_and_nothing_is_written(tiny_engine, tiny_corpus, folder, texts, count):
    before = contents(folder)
    recorded = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    seen = []
    database, sequences = AttentionDatabase.open(folder), [*recorded, *texts[:count] * 2]
    with pytest.raises(InvalidInput, match=f"^{count} of the texts are not in the database") as refused:
        calibrate_database(tiny_engine, database, sequences, (), BUDGET, lambda *step: seen.append(step))
    assert refused.value.field == "texts"
    assert seen == []
    assert contents(folder) == before


def test_stopped_calibration_leaves_the_database_unchanged(tiny_engine, folder, texts):
    before = contents(folder)

    def stop(stage, *_):
        if stage == "measuring masks":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_database(tiny_engine, AttentionDatabase.open(folder), texts, (), BUDGET, stop)
    assert contents(folder) == before


@pytest.mark.usefixtures("calibrated")
def test_progress_of_both_stages_reaches_its_end(steps):
    stages = list(dict.fromkeys(stage for stage, *_ in steps))
    assert stages == ["measuring heads", "measuring masks"]
    for stage in stages:
        of_stage = [(done, total) for name, done, total in steps if name == stage]
        assert of_stage == [(done, len(of_stage)) for done in range(1, len(of_stage) + 1)]


def test_database_of_another_model_is_refused(built, texts, tmp_path):
    other = PrefillEngine.load(
        read_checkpoint(write_sentence_transformer(tmp_path / "other", seed=1)), dtype="float32"
    )
    with pytest.raises(DatabaseRefused, match="was built for"):
        calibrate_database(other, AttentionDatabase.open(built), texts, (), BUDGET)


def test_mask_never_holds_heads_that_the_records_lack(
    tiny_checkpoint, tiny_engine, tiny_corpus, texts, tmp_path
):
    folder = tmp_path / "a.db"
    options = BuildOptions(heads="layers:0,2", prototypes=2, training_steps=5, min_text_cosine=0)
    build_database(tiny_engine, tiny_corpus, folder, options)
    before = AttentionDatabase.open(folder).manifest
    # Every mask keeps this budget, so the largest mask is chosen.
    report = calibrate_database(
        tiny_engine, AttentionDatabase.open(folder), texts, (), Budget(Measure.COSINE, 0.0)
    )
    database = AttentionDatabase.open(folder)
    assert report["heads"] == 8
    assert database.mask.reused == before.stored_heads == (4, 0, 4)
    assert [row["heads"] for row in report["candidates"]] == list(range(1, 9))
    # Heads that no record holds are not measured.
    assert database.manifest.damage[1] == before.damage[1]
    assert min(database.manifest.rank[1]) == 8
    engine = PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32")
    assert all(outcome.is_hit for outcome in prefill(engine, texts).outcomes)


def test_decisions_of_a_classifier_stay_within_the_budget(
    classifier, tiny_classifier_checkpoint, tiny_corpus, tmp_path
):
    folder = tmp_path / "a.db"
    options = BuildOptions(heads="6", prototypes=4, training_steps=20, min_agreement=0.7)
    build_database(classifier, tiny_corpus, folder, options)
    assert AttentionDatabase.open(folder).search.policy.budget == Budget(Measure.AGREEMENT, 0.7)
    texts = random_sequences(list(range(5, 11)) * 30, seed=41)
    budget = Budget(Measure.AGREEMENT, 0.85)
    report = calibrate_database(classifier, AttentionDatabase.open(folder), texts, (), budget)
    database = AttentionDatabase.open(folder)
    assert database.verify() == []
    assert database.search.policy.budget == budget
    assert report["mean"] >= report["lower_bound"] >= 0.85
    engine = PrefillEngine.load(tiny_classifier_checkpoint, database=database, dtype="float32")
    reused, full = (prefill(each, texts) for each in (engine, classifier))
    hits = np.array([outcome.is_hit for outcome in reused.outcomes])
    # The report scores each probe by a familiarity test without this probe, and the engine by the whole test.
    assert hits.mean() == pytest.approx(report["hit_rate"], abs=0.02)
    same = reused.outputs.argmax(axis=1) == full.outputs.argmax(axis=1)
    assert same[hits].mean() == pytest.approx(report["mean"], abs=0.02)
    assert same[~hits].all()


def test_budget_is_agreement_where_there_are_classes(tiny_engine, classifier):
    options = BuildOptions(min_cosine=0.9, min_text_cosine=0.7, min_agreement=0.8)
    assert default_budget(tiny_engine, options) == Budget(Measure.COSINE, 0.9, 0.7)
    assert default_budget(classifier, options) == Budget(Measure.AGREEMENT, 0.8)
    decided = nearest_label(("a", "b"), np.eye(2, 32), fingerprint="", model="")
    fitted = replace(tiny_engine, classifier=decided)
    assert default_budget(fitted, options) == Budget(Measure.AGREEMENT, 0.8)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_candidate_masks_grow_to_all_heads_and_are_the_mildest(layers, heads, data):
    size = layers * heads
    rank = np.array(data.draw(st.permutations(range(size)))).reshape(layers, heads)
    max_heads = data.draw(st.integers(1, size))
    for masks, largest in (
        (candidate_masks(rank), size),
        (candidate_masks(rank, max_heads=max_heads), max_heads),
    ):
        totals = [mask.total for mask in masks]
        assert totals == sorted(set(totals))
        assert (totals[-1], len(totals)) == (largest, min(12, largest))
        assert masks == [mildest_mask(rank, total) for total in totals]
    # An operator's heads are the only candidate.
    assert candidate_masks(rank, "layers:0") == [parse_heads("layers:0", rank)]


def chosen_on(engine, recorded, sequences, budget=BUDGET, **options):
    """Calibrate what was recorded on these sequences."""
    probes = find_probes(engine.model, recorded.search, sequences)
    return calibrate(engine, recorded.search, probes, (), counts(engine), recorded.rank, budget, **options)


def test_too_few_probes_measure_nothing_and_take_the_largest_mask(tiny_engine, recorded):
    for threshold in (None, 0.5):
        chosen = chosen_on(tiny_engine, recorded, recorded.held_out[: MIN_PROBES - 1], threshold=threshold)
        assert chosen.mask.total == 12
        assert chosen.quality == {"measured": 0}
        assert chosen.familiarity is None
        (group,) = chosen.policy.groups
        assert {kind.threshold for kind in group.kinds.values()} == {threshold or 1.0}
        assert set(group.kinds) == set(RecordKind)


def test_chosen_mask_and_policy_match_the_report(tiny_engine, recorded):
    chosen = chosen_on(tiny_engine, recorded, [ids for ids in recorded.held_out if len(ids) < 9])
    mask, policy, report = chosen.mask, chosen.policy, chosen.quality
    assert mask.order == head_order(recorded.rank)
    assert report["heads"] == mask.total
    assert [row["heads"] for row in report["candidates"]] == list(range(1, 13))
    assert [group["lengths"] for group in report["groups"]] == policy.names()
    saved = [row["saved_microseconds"] for row in report["candidates"]]
    assert report["saved_microseconds"] <= max(saved)
    json.dumps([report, asdict(policy)], allow_nan=False)


def test_sizes_between_the_chosen_mask_and_the_next_refused_one_are_tried(tiny_engine, recorded, monkeypatch):
    def only_small(option, *rest):
        return choose_limit(option, *rest) if option.mask.total <= 4 else None

    monkeypatch.setattr(
        calibration, "candidate_masks", lambda rank, *_: [mildest_mask(rank, size) for size in (3, 12)]
    )
    monkeypatch.setattr(calibration, "choose_limit", only_small)
    chosen = chosen_on(tiny_engine, recorded, recorded.held_out, Budget(Measure.COSINE, 0.1))
    assert [row["heads"] for row in chosen.quality["candidates"]] == [3, 12, 6, 9, 4, 5]


def test_masks_larger_than_a_refused_one_are_not_tried_with_a_limit(tiny_engine, recorded, monkeypatch):
    tried = []

    def none_over_four(option, *rest):
        tried.append(option.mask.total)
        return choose_limit(option, *rest) if option.mask.total <= 4 else None

    def by_falling_refusals(option):
        return (True, -abs(option.mask.total - 8), 0.0, option.mask.total)

    monkeypatch.setattr(calibration, "choose_limit", none_over_four)
    monkeypatch.setattr(calibration, "by_time_saved", by_falling_refusals)
    chosen = chosen_on(tiny_engine, recorded, recorded.held_out, Budget(Measure.COSINE, 0.1))
    # Without a limit, 8 heads save the most, then 9 and 7, 10 and 6, ...
    assert tried == [8, 7, 6, 5, 4]
    assert chosen.mask.total == 4


def test_savings_are_measured_with_the_heads_that_records_hold(tiny_engine, recorded):
    probes = find_probes(tiny_engine.model, recorded.search, recorded.held_out)
    for stored in ((4, 4, 4), (0, 0, 4)):
        layout = replace(recorded.store.layout, stored_heads=stored)
        recorded.store.layout, before = layout, recorded.store.layout
        try:
            savings = measure_savings(tiny_engine, recorded.search, probes, head_order(recorded.rank))
        finally:
            recorded.store.layout = before
        saved = savings.per_hit(np.array([5, 7, 500]), 4)
        assert np.isfinite(saved).all()
        assert saved[2] >= saved[1] >= saved[0]
        assert (savings.per_hit(np.array([5, 7, 500]), 8) >= saved).all()
        assert savings.search({5, 7}) > 0


def test_sequences_of_lengths_without_records_save_nothing(tiny_engine, recorded):
    lengths = np.array([5, 500])
    long = savings_of(tiny_engine, recorded.search, [[0] * 40])
    assert (long.per_hit(lengths, 4).tolist(), long.search({5, 40})) == ([0.0, 0.0], 0.0)
    some = savings_of(tiny_engine, recorded.search, [[0] * 40, [0] * 5, [0] * 90])
    assert np.isfinite(some.per_hit(lengths, 4)).all()
    assert some.search({5}) > 0
