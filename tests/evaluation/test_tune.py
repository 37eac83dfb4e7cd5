"""A tuning measures real engines on held-out texts, keeps what it measured, and survives ways that fail."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from core_models import random_text, tighten, write_model

from attncache_core import (
    AttentionDatabase,
    BuildOptions,
    DatabaseRefused,
    InvalidInput,
    PrefillEngine,
    Quantization,
    UnsupportedModel,
    fit_classifier,
)
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.evaluation.tuning import databases, tune
from attncache_core.evaluation.tuning.measuring import MeasuredWay, Subject, service_batches
from attncache_core.evaluation.tuning.tune import Texts, TuneEvents, TuneOptions, Tuning, split
from attncache_core.evaluation.tuning.ways import Way
from attncache_core.heads.comparator import Measure
from attncache_core.heads.vectors import cosines
from attncache_core.reuse.maps.generations import Generation
from attncache_core.reuse.maps.manifest import Manifest
from attncache_core.reuse.maps.policy import Budget
from attncache_core.runtime.memory import tensor_bytes

WEIGHTS = Way(quantization=Quantization.INT8_WEIGHT_ONLY)
INT4 = Way(quantization=Quantization.INT4)
# The speeds that ways are given, because a test cannot know how fast a machine is.
SPEEDS = {"int8-weight-only": 1.5, "int4": 1.4, "maps": 1.3}


@pytest.fixture(autouse=True)
def measured_ways(monkeypatch) -> list[str]:
    """The names of the ways that were measured, which all have the speeds above."""
    names, real = [], tune.measure

    def measure(way, *arguments, **options):
        names.append(way.name)
        measured = real(way, *arguments, **options)
        return replace(measured, speed=SPEEDS.get(way.name, 1.0), speed_alone=1.0)

    monkeypatch.setattr(tune, "measure", measure)
    # Counting the bytes of all tensors of a large test process takes longer than everything else.
    monkeypatch.setattr(tune, "tensor_bytes", lambda: 0)
    return names


@pytest.fixture
def options(tiny_checkpoint, tiny_corpus, tmp_path) -> TuneOptions:
    """120 texts, of which 60 measure; a budget that only 8-bit weights keep."""
    return TuneOptions(
        tiny_checkpoint,
        Texts([sentence.text for sentence in tiny_corpus][::2], None),
        min_cosine=0.99,
        min_text_cosine=0.0,
        min_agreement=0.9,
        results=tmp_path / "tuned.json",
        databases=tmp_path / "databases",
        dtype="float32",
        ways=("int8-weight-only", "int4"),
        rounds=1,
    )


def tuned(options: TuneOptions, **events):
    tuning = Tuning(options, TuneEvents(**events))
    return tuning, tuning.run()


def label_of(text: str) -> str:
    return "card" if "card" in text else "other"


def test_quality_is_the_cosine_to_float32_on_held_out_texts(
    options, tiny_checkpoint, tiny_engine, monkeypatch
):
    monkeypatch.setattr(tune, "tensor_bytes", tensor_bytes)
    tuning, report = tuned(options)
    assert (report.choosing, report.measuring) == (60, 60)
    assert not {*tuning.choosing.texts} & {*tuning.measuring.texts}
    expected = tiny_engine.embed(tuning.measuring.texts)
    for measured in report.measured:
        engine = PrefillEngine.load(measured.way.variant_of(tiny_checkpoint), dtype="float32")
        found = cosines(engine.embed(tuning.measuring.texts), expected).mean()
        assert measured.quality.mean == pytest.approx(found, abs=1e-5)
    assert [measured.way for measured in report.measured] == [Way(), WEIGHTS, INT4]
    assert report.measured[2].quality.mean < 0.99 < report.measured[1].quality.mean
    assert report.chosen.way == WEIGHTS
    weights = [measured.weight_bytes for measured in report.measured]
    assert weights[0] > weights[1] > weights[2] > 0


def test_stopped_tuning_continues_with_the_next_way_and_another_budget_uses_the_same_figures(
    options, measured_ways
):
    def stop(measured, _):
        if measured.way == WEIGHTS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(options, measured=stop)
    assert measured_ways == ["exact", "int8-weight-only"]
    told = []
    tuning, continued = tuned(options, measured=lambda way, was_kept: told.append((way.way.name, was_kept)))
    assert told == [("exact", True), ("int8-weight-only", True), ("int4", False)]
    assert measured_ways == ["exact", "int8-weight-only", "int4"]
    assert tuning.results.changed == ()
    again = tuned(options)[1]
    strict = tuned(replace(options, min_cosine=0.9999999))[1]
    assert measured_ways == ["exact", "int8-weight-only", "int4"]
    assert again == continued
    assert (continued.chosen.way, strict.chosen.way) == (WEIGHTS, Way())


def test_changed_inputs_begin_anew_and_are_named(options, measured_ways, tmp_path):
    tuned(replace(options, ways=("int4",)))
    for number, (changed, names) in enumerate(
        [
            ({"rounds": 2}, ("rounds",)),
            ({"sample": 59}, ("texts",)),
            # Texts that are cut to two words are fewer different texts.
            ({"max_tokens": 4}, ("fingerprint", "texts")),
        ]
    ):
        results = Path(shutil.copy(options.results, tmp_path / f"{number}.json"))
        measured_ways.clear()
        tuning, _ = tuned(replace(options, ways=(), results=results, **changed))
        assert tuning.results.changed == names
        assert measured_ways == ["exact"]
        assert tuning.results.measured == 1


def test_way_that_cannot_be_loaded_is_reported_and_tried_again_by_the_next_tuning(
    options, measured_ways, monkeypatch
):
    real = PrefillEngine.load

    def load(checkpoint, **arguments):
        if checkpoint.quantization is Quantization.INT8_WEIGHT_ONLY:
            raise UnsupportedModel("no such weights")
        return real(checkpoint, **arguments)

    failed = []
    with monkeypatch.context() as patch:
        patch.setattr(PrefillEngine, "load", load)
        _, report = tuned(options, failed=lambda name, reason: failed.append((name, reason)))
    assert failed == [("int8-weight-only", "no such weights")]
    assert report.failed == {"int8-weight-only": "no such weights"}
    assert [measured.way for measured in report.measured] == [Way(), INT4]
    assert report.chosen.way == Way()
    assert tuned(options)[1].chosen.way == WEIGHTS
    assert measured_ways == ["exact", "int4", "int8-weight-only"]


def test_layers_are_dropped_in_the_order_of_their_importance_on_choosing_texts(options):
    tuning, report = tuned(replace(options, ways=("attention", "blocks"), min_cosine=0.0))
    kept = [tuning.results.least_important(kind, dict) for kind in ("attention", "blocks")]
    assert [sorted(order) for order in kept] == [[0, 1, 2], [0, 1, 2]]
    ways = [measured.way for measured in report.measured[1:]]
    assert ways == [
        Way(drop_attention=(kept[0][0],)),
        Way(drop_attention=tuple(sorted(kept[0][:2]))),
        Way(drop_blocks=(kept[1][0],)),
        Way(drop_blocks=tuple(sorted(kept[1][:2]))),
    ]


def test_operators_database_is_measured_without_the_records_of_measuring_texts(
    options, tiny_database, monkeypatch
):
    monkeypatch.setitem(SPEEDS, "int8-weight-only + maps", 2.0)
    changed = replace(options, database=tiny_database, ways=("int8-weight-only", "maps"), min_cosine=0.0)
    tuning, report = tuned(changed)
    # A database serves the exact model only, so there is no combination with it.
    exact, _, maps = report.measured
    assert [measured.way for measured in report.measured] == [Way(), WEIGHTS, Way(maps=True)]
    assert (exact.hit_rate, maps.hit_rate) == (0.0, 1.0)
    assert maps.quality.mean < 0.9999  # a text with its own record would be exact
    assert tuning._folder_of(maps.way) == tiny_database
    # A server finds later generations only in the folder of all of them.
    tuning.database = replace(tuning.database, generation=Generation(tiny_database.parent, 7))
    assert tuning._folder_of(maps.way) == tiny_database.parent
    assert tuned(replace(changed, ways=("maps",)))[1].database == tiny_database


def test_database_that_servers_have_tightened_is_measured_anew(options, tiny_database, tmp_path):
    folder = shutil.copytree(tiny_database, tmp_path / "database")
    manifest = Manifest.read(folder)
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(folder)
    changed = replace(options, database=folder, ways=("maps",), min_cosine=0.0)
    assert tuned(changed)[1].measured[1].hit_rate == 1
    tighten(folder)
    tuning, report = tuned(changed)
    assert tuning.results.changed == ("policy",)
    assert report.measured[1].hit_rate == 0


def test_database_of_another_model_is_refused_at_the_start(options, tiny_database, tmp_path):
    other = read_checkpoint(write_model(tmp_path / "other", seed=1))
    with pytest.raises(DatabaseRefused):
        Tuning(replace(options, checkpoint=other, database=tiny_database), TuneEvents())


def test_database_is_built_once_for_what_is_left_of_the_budget(options, monkeypatch):
    budgets, real = [], databases.build_database
    monkeypatch.setattr(databases, "BuildOptions", partial(BuildOptions, training_steps=20))
    monkeypatch.setattr(
        databases,
        "build_database",
        lambda *arguments, **how: budgets.append(arguments[3].min_cosine) or real(*arguments, **how),
    )
    monkeypatch.setitem(SPEEDS, "int8-weight-only + maps", 2.0)
    # Databases that are trained so little serve nothing.
    monkeypatch.setattr(MeasuredWay, "can_pay", True)
    changed = replace(options, ways=("int8-weight-only", "maps"), databases=options.databases / "new")
    _, report = tuned(changed)
    assert [measured.way.name for measured in report.measured][2:] == ["maps", "int8-weight-only + maps"]
    loss = 1 - report.measured[1].quality.mean
    assert budgets == pytest.approx([0.99, 0.99 + loss], abs=1e-6)
    assert report.chosen.way == replace(WEIGHTS, maps=True)
    manifest = AttentionDatabase.open(report.database).manifest
    assert manifest.build["variant"] == {"quantization": "int8-weight-only"}
    again = tuned(changed)[1]
    assert (again.database, len(budgets)) == (report.database, 2)

    def measured_anew():
        told = []
        tuned(changed, measured=lambda measured, was_kept: told.append((measured.way.name, was_kept)))
        return [name for name, was_kept in told if not was_kept]

    # The figures are of a database that is not there any more.
    replace(manifest, policy=replace(manifest.policy, budget=Budget(Measure.COSINE, 0.5))).write(
        report.database
    )
    assert measured_anew() == ["int8-weight-only + maps"]
    tighten(report.database)
    assert measured_anew() == ["int8-weight-only + maps"]
    shutil.rmtree(changed.databases)
    assert (measured_anew(), len(budgets)) == (["maps", "int8-weight-only + maps"], 4)
    assert measured_anew() == []


def test_decisions_are_kept_by_a_model_with_classes(options, tiny_classifier_checkpoint):
    labels = ["transfer" if "transfer" in text else "card" for text in options.texts.texts]
    changed = replace(
        options,
        checkpoint=tiny_classifier_checkpoint,
        texts=Texts(options.texts.texts, labels),
        min_agreement=0.9,
    )
    tuning, report = tuned(changed)
    exact = PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")
    for measured in report.measured:
        engine = PrefillEngine.load(measured.way.variant_of(tiny_classifier_checkpoint), dtype="float32")
        decided = [
            loaded.decisions.class_logits(
                loaded.run(loaded.requests(loaded.tokenize(tuning.measuring.texts), reuse=False)).outputs
            ).argmax(axis=1)
            for loaded in (engine, exact)
        ]
        assert measured.quality.mean == np.equal(*decided).mean()
        names = [engine.decisions.labels[row] for row in decided[0]]
        assert measured.accuracy == np.mean(np.array(names) == np.array(tuning.measuring.labels))
    assert str(report.budget.measure) == "agreement"
    with pytest.raises(InvalidInput, match="labels of the texts are none of the model's 3 classes"):
        Tuning(replace(changed, texts=Texts(options.texts.texts, ["none"] * 120)), TuneEvents())


@pytest.fixture
def fitted(options, tiny_engine, tiny_checkpoint):
    texts = options.texts.texts
    return fit_classifier(
        tiny_engine.embed(texts),
        list(map(label_of, texts)),
        fingerprint=tiny_checkpoint.embedding_fingerprint(),
        model="tiny",
    )


def test_database_keeps_the_decisions_of_the_classifier_that_it_was_built_for(options, fitted, monkeypatch):
    monkeypatch.setattr(databases, "BuildOptions", partial(BuildOptions, training_steps=20))
    tuning, _ = tuned(replace(options, classifier=fitted, ways=("maps",)))
    assert tuning.failed == {
        "maps": "a build holds out 6 of the 60 texts that choose, and at least 29 are needed to show that "
        "the decisions are kept; give more texts"
    }
    assert not options.databases.exists()
    tuning, _ = tuned(replace(options, classifier=fitted, ways=("maps",), min_agreement=0.5))
    assert tuning.failed == {}
    assert AttentionDatabase.open(tuning._folder_of(Way(maps=True))).decisions.decides_as(fitted)


def test_fitted_classifier_decides_on_the_embeddings_of_every_variant(
    options, fitted, tiny_engine, tiny_checkpoint
):
    tuning, report = tuned(replace(options, classifier=fitted))
    variant = WEIGHTS.variant_of(tiny_checkpoint)
    assert report.classifier.fingerprint == variant.embedding_fingerprint() != fitted.fingerprint
    engine = PrefillEngine.load(variant, dtype="float32", classifier=report.classifier)
    held_out = tuning.measuring.texts
    same = np.array(fitted.predict(engine.embed(held_out))) == np.array(
        fitted.predict(tiny_engine.embed(held_out))
    )
    assert report.chosen.quality.mean == same.mean()
    assert report.chosen.accuracy is None


def test_accuracy_without_classes_is_of_a_classifier_that_was_fitted_on_choosing_texts(options):
    labels = list(map(label_of, options.texts.texts))
    tuning, report = tuned(replace(options, ways=(), texts=Texts(options.texts.texts, labels)))
    engine, choosing = tuning.exact.engine, tuning.choosing
    fitted = fit_classifier(engine.embed(choosing.texts), choosing.labels, fingerprint="", model="")
    right = np.array(fitted.predict(engine.embed(tuning.measuring.texts))) == tuning.measuring.labels
    assert report.measured[0].accuracy == pytest.approx(right.mean())


def test_what_another_tuning_has_measured_meanwhile_is_kept(options, measured_ways):
    late = Tuning(options, TuneEvents())
    tuned(options)
    content, before = options.results.read_bytes(), len(measured_ways)
    late.run()
    assert len(measured_ways) == before
    assert options.results.read_bytes() == content


def test_model_that_scores_pairs_is_refused(options, tmp_path):
    checkpoint = read_checkpoint(write_model(tmp_path / "pairs", labels=["score"]))
    with pytest.raises(InvalidInput, match="single texts"):
        Tuning(replace(options, checkpoint=checkpoint), TuneEvents())


def test_file_that_is_no_results_file_is_refused_and_kept(options):
    options.results.write_text('{"machine": {}}', encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"tuned\.json is not a results file of tune"):
        Tuning(options, TuneEvents())
    assert options.results.read_text(encoding="utf-8") == '{"machine": {}}'


def test_split_uses_each_different_text_once():
    texts = [f"text {number}" for number in range(50)]
    repeated = Texts([*texts, *texts], [*["first"] * 50, *["second"] * 50])
    sequences = [[1, int(text.split()[1])] for text in repeated.texts]
    choosing, measuring = split(repeated, [*sequences[:99], []], 20, 1000)
    assert sorted(choosing.texts + measuring.texts) == sorted(texts)
    assert len(measuring.texts) == 25
    assert {*choosing.labels, *measuring.labels} == {"first"}
    choosing, fewer = split(repeated, sequences, 20, 20)
    assert (len(choosing.texts), fewer.texts) == (30, measuring.texts[:20])
    for needed, most, field in ((26, 1000, "texts"), (20, 19, "sample")):
        with pytest.raises(InvalidInput) as refused:
            split(repeated, sequences, needed, most)
        assert refused.value.field == field
    # A budget that needs the fewest texts there can be has no remedy but more texts.
    for needed, has_remedy in ((20, False), (299, True)):
        with pytest.raises(InvalidInput) as refused:
            split(repeated, sequences[:30], needed, 1000)
        assert ("needs fewer" in str(refused.value)) == has_remedy


def test_batches_are_full_and_in_order(tiny_engine):
    random = np.random.default_rng(5)
    texts = [random_text(random, words) for words in random.integers(1, 120, 150)]
    of_texts = [[request] for request in tiny_engine.requests(tiny_engine.tokenize(texts))]
    batches = service_batches(of_texts, shares_prefixes=False)
    assert [request for batch in batches for request in batch] == [request for (request,) in of_texts]
    sizes = [sum(len(request.ids) for request in batch) for batch in batches]
    assert max(sizes) <= 1024
    # No batch has room for the first text of the next batch.
    following = [len(batch[0].ids) for batch in batches[1:]]
    assert all(size + first > 1024 for size, first in zip(sizes, following, strict=False))
    shortest = min(of_texts, key=lambda requests: len(requests[0].ids))
    short = service_batches([shortest] * 130, shares_prefixes=False)
    assert [len(batch) for batch in short] == [64, 64, 2]


def test_long_text_is_a_batch_of_its_own_and_a_shared_prefix_counts_once(tiny_engine):
    def requests(*lengths):
        return [[request] for request in tiny_engine.requests([list(range(length)) for length in lengths])]

    assert [len(batch) for batch in service_batches(requests(9, 2000, 9), False)] == [1, 1, 1]
    alike = requests(600, 601, 602)
    assert [len(batch) for batch in service_batches(alike, True)] == [3]
    assert [len(batch) for batch in service_batches(alike, False)] == [1, 1, 1]


def test_answers_do_not_depend_on_batches(tiny_engine, tiny_corpus):
    texts = [sentence.text for sentence in tiny_corpus]
    subject = Subject(tiny_engine, texts)
    found = tiny_engine.embeddings(subject.answers(subject.run()[1]))
    np.testing.assert_allclose(found, tiny_engine.embed(texts), atol=1e-5)


def test_maps_are_taken_where_a_server_takes_them(tiny_engine, tiny_classifier_checkpoint, monkeypatch):
    """A budget of decisions covers no embeddings."""
    read = []
    monkeypatch.setattr(PrefillEngine, "may_reuse", lambda *given: read.append(given[-1]))
    for engine in (tiny_engine, PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")):
        Subject(engine, ["a text"])
    assert read == [Measure.COSINE, Measure.AGREEMENT]
