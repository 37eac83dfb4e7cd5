"""A renewal builds, measures and publishes the next generation, or says why the present one serves on."""

import json
import os
import shutil
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from core_models import random_text, tighten
from full_disk import largest_file
from hypothesis import given
from hypothesis import strategies as st

from attncache_core.build import renewal
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.build.renewal import renew_database
from attncache_core.calibration import trial
from attncache_core.calibration.savings import Savings
from attncache_core.corpus import sample as corpus_sample
from attncache_core.corpus.sample import TextSampler, sample_folder
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed, DatabaseRefused, InvalidInput
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps import publishing
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.generations import Result, kept_generations, read_renewals
from attncache_core.reuse.maps.policy import Budget

pytestmark = pytest.mark.usefixtures("fixed_costs", "same_savings")
OPTIONS = {"training_steps": 10, "prototypes": 4, "min_text_cosine": 0.0, "min_cosine": 0.5}


@pytest.fixture(scope="module")
def same_savings():
    """A trial with fixed savings, so that its decision is always the same."""
    with pytest.MonkeyPatch.context() as patch:
        savings = Savings(per_hit=lambda lengths, heads: lengths * heads / 10, search=lambda _: 1.0)
        patch.setattr(trial, "measure_savings", lambda *_: savings)
        patch.setattr(trial, "search_cost", lambda *_: 1.0)
        yield


@pytest.fixture(scope="module")
def texts():
    """300 distinct texts of 4 to 7 words that no other test records."""
    random = np.random.default_rng(99)
    return list(dict.fromkeys(random_text(random, words) for words in np.repeat(np.arange(4, 8), 80)))[:300]


@pytest.fixture(scope="module")
def load(tiny_checkpoint):
    return loader(tiny_checkpoint)


def loader(checkpoint):
    return lambda database: PrefillEngine.load(checkpoint, database=database, dtype="float32")


@pytest.fixture(scope="module")
def plain(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    """A database of few texts, so that a renewal has something to gain. Do not change it."""
    folder = tmp_path_factory.mktemp("plain") / "a.db"
    build_database(tiny_engine, tiny_corpus[::3], folder, BuildOptions(**OPTIONS, heads="3"))
    return folder


@pytest.fixture
def root(plain, tmp_path):
    return Path(shutil.copytree(plain, tmp_path / "a.db"))


def numbers(root):
    return [generation.number for generation in kept_generations(root)]


def stopped_before_the_decision(load, root, texts=None):
    """Renew, and fail when the next generation is built and measured. Returns the id of what was built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal, "why_refused", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            renew_database(load, root, texts, min_gain=0)
    assert AttentionDatabase.open(root).verify() == []
    return AttentionDatabase.open(root / ".renewal" / "000001").manifest.id


@pytest.fixture(scope="module")
def stopped_once(plain, load, texts, tmp_path_factory, same_savings):  # noqa: ARG001 - sets the measured costs
    folder = Path(shutil.copytree(plain, tmp_path_factory.mktemp("stopped") / "a.db"))
    tighten(folder)
    return folder, stopped_before_the_decision(load, folder, texts)


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A database whose renewal from `texts` was stopped, and the id of the next generation."""
    folder, built = stopped_once
    return Path(shutil.copytree(folder, tmp_path / "stopped.db")), built


def test_next_generation_has_the_budget_of_the_last_calibration(root, load, texts):
    budget = Budget(Measure.COSINE, 0.6, 0.0)
    manifest = AttentionDatabase.open(root).manifest
    assert manifest.policy.budget != budget
    replace(manifest, policy=replace(manifest.policy, budget=budget)).write(root)
    tighten(root)
    renewed = renew_database(load, root, texts, min_gain=0)
    assert (renewed.result, renewed.generation) == (Result.PUBLISHED, 1)
    assert AttentionDatabase.open(root).manifest.policy.budget == budget


def test_database_of_decisions_is_built_served_and_renewed_with_the_same_labels(
    tiny_checkpoint, tiny_corpus, load, texts, tmp_path
):
    root, labels = tmp_path / "labels.db", ("card", "money")
    labelled = loader(tiny_checkpoint.adapted(labels=labels))
    options = BuildOptions(training_steps=10, prototypes=4, min_agreement=0.5, heads="3")
    build_database(labelled(None), tiny_corpus[::3], root, options)
    database = AttentionDatabase.open(root)
    assert database.manifest.policy.budget == Budget(Measure.AGREEMENT, 0.5)
    assert (database.decisions.labels, database.verify()) == (labels, [])
    assert labelled(database).decisions.labels == labels
    with pytest.raises(DatabaseRefused, match="only with the classifier or labels"):
        loader(tiny_checkpoint.adapted(labels=("card", "help")))(database)
    with pytest.raises(DatabaseRefused, match="only with the task"):
        database.require_use(replace(tiny_checkpoint, task="label-logits"))
    manifest, files = database.manifest, database.keep_decisions(None)
    with pytest.raises(DatabaseRefused, match="built by an earlier version"):
        labelled(replace(database, manifest=replace(manifest, files=files)))
    of_classifier = replace(database)
    vars(of_classifier)["decisions"] = replace(database.decisions, fitted={"texts": 100})
    with pytest.raises(InvalidInput, match="decisions of a classifier, which renew cannot build for"):
        renewal._options_like(of_classifier, False)
    with pytest.raises(InvalidInput, match="the labels card, money; give --labels with them"):
        renew_database(load, root, texts, min_gain=0)
    tighten(root)
    stopped_before_the_decision(labelled, root, texts)
    # A calibration for other labels keeps the id.
    others = loader(tiny_checkpoint.adapted(labels=("card", "help")))
    files = database.keep_decisions(others(None).classifier)
    replace(database.manifest, files=files).write(root)
    assert renew_database(others, root, texts, min_gain=0).result is Result.PUBLISHED
    assert others(AttentionDatabase.open(root)).decisions.labels == ("card", "help")


def test_tightened_database_is_renewed_and_a_generation_that_is_not_better_is_removed(
    root, load, texts, tiny_engine
):
    tighten(root)
    before = AttentionDatabase.open(root).manifest
    renewed = renew_database(load, root, texts, min_gain=0)
    assert (renewed.result, renewed.generation) == (Result.PUBLISHED, 1)
    database = AttentionDatabase.open(root)
    assert database.info().generation == 1
    assert database.verify() == []
    assert numbers(root) == [0, 1]
    assert renewed.measured["present"]["hit_rate"] == 0
    assert renewed.measured["new"]["hit_rate"] > 0.5
    assert holds_any(database, tiny_engine.tokenize(texts[:-30]))
    # The options of the build before.
    assert database.manifest.build["heads"] == "3"
    assert database.manifest.policy.budget.least == 0.5
    # The projector goes on from the one before, with a quarter of the steps.
    assert database.manifest.build["start_from"] == before.id

    again = renew_database(load, root, texts, min_gain=0)
    assert again.result is Result.REFUSED
    assert "at least 1 % more is needed" in again.reason
    assert numbers(root) == [0, 1]
    assert not (root / ".renewal").exists()
    info = AttentionDatabase.open(root).info()
    assert info.renewals == {"published": 1, "refused": 1, "no_gain": 0, "rolled_back": 0}
    assert info.last_renewal["reason"] == again.reason

    # What is kept holds no text and no token.
    lines = (root / "renewals.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        kept = json.loads(line)
        assert {*kept} == {"time", "result", "before", "generation", "reason", "measured"}
        assert {*kept["measured"]} == {"request", "texts", "held_out", "near_duplicates", "present", "new"}
        assert not any(text in line for text in texts)


def holds_any(database, sequences) -> bool:
    return any(database.search.store.record_of(ids) is not None for ids in sequences)


def test_planted_duplicates_of_the_newest_tenth_are_not_trained_on_and_raise_no_figure(
    root, plain, tmp_path, load, texts, monkeypatch
):
    trained = []

    def build_noted(engine, corpus, *rest, **options):
        trained.append([sentence.text for sentence in corpus])
        build_database(engine, corpus, *rest, **options)

    monkeypatch.setattr(renewal, "build_database", build_noted)
    newest = texts[-30:]
    planted = [f"{text} today" for text in newest[:9]]
    with_planted = renew_database(load, root, [*planted, *texts], min_gain=0)
    another = Path(shutil.copytree(plain, tmp_path / "b.db"))
    without = renew_database(load, another, texts, min_gain=0)
    assert trained[0] == trained[1]
    assert not {*planted, *newest} & {*trained[0]}
    assert with_planted.measured["near_duplicates"] == without.measured["near_duplicates"] + 9
    assert with_planted.measured["held_out"] == without.measured["held_out"] == 30
    assert with_planted.measured["new"] == without.measured["new"]


def test_generation_that_is_to_be_synthetic_holds_no_record_of_a_single_text(root, load, texts, tiny_engine):
    tighten(root)
    before = AttentionDatabase.open(root).manifest
    renewed = renew_database(load, root, texts, min_gain=0, synthetic_only=True)
    assert renewed.result is Result.PUBLISHED
    database = AttentionDatabase.open(root)
    assert database.manifest.records == {}
    assert not holds_any(database, tiny_engine.tokenize(texts[:-30]))
    assert database.manifest.build["start_from"] == before.id


def test_model_for_which_reuse_does_not_pay_builds_nothing(root, load, texts, monkeypatch):
    monkeypatch.setattr(renewal, "could_pay", lambda *_: False)
    monkeypatch.setattr(renewal, "build_database", None)
    renewed = renew_database(load, root, texts, min_gain=0.05)
    assert renewed.result is Result.NO_GAIN
    assert "--min-gain" in renewed.reason
    assert {*renewed.measured} == {"request"}
    assert numbers(root) == [0]
    assert read_renewals(root) == (renewed,)


def test_stopped_renewal_goes_on_with_what_was_built(stopped, load, texts):
    root, built = stopped
    assert renew_database(load, root, texts, min_gain=0).result is Result.PUBLISHED
    assert AttentionDatabase.open(root).manifest.id == built


def test_renewal_that_was_stopped_after_its_decision_returns_it_for_the_same_texts_and_options_alone(
    stopped, load, texts, monkeypatch
):
    root, built = stopped
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            renew_database(load, root, texts, min_gain=0)
    other, synthetic, gaining, removed = (
        Path(shutil.copytree(root, root.with_name(name)))
        for name in ("other.db", "synthetic.db", "gaining.db", "removed.db")
    )
    decided = renew_database(load, root, texts, min_gain=0)
    assert (decided.result, decided.generation, numbers(root)) == (Result.PUBLISHED, 1, [0, 1])
    assert AttentionDatabase.open(root).manifest.id == built
    assert read_renewals(root) == (decided,)
    assert renew_database(load, other, texts[1:], min_gain=0).generation == 2
    assert len(read_renewals(other)) == 2
    renew_database(load, synthetic, texts, min_gain=0, synthetic_only=True)
    assert read_renewals(synthetic)[-1].generation == 2
    monkeypatch.setattr(renewal, "could_pay", lambda *_: False)
    assert renew_database(load, gaining, texts, min_gain=0.05).result is Result.NO_GAIN
    monkeypatch.undo()
    shutil.rmtree(removed / ".renewal" / "000001")
    assert renew_database(load, removed, texts, min_gain=0).generation == 2


def test_renewal_from_a_sample_follows_a_rollback_that_was_killed(stopped_from_a_sample, load, tmp_path):
    folder, _ = stopped_from_a_sample
    root = Path(shutil.copytree(folder, tmp_path / "a.db"))
    assert renew_database(load, root, min_gain=0).generation == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "_finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publishing.roll_back(root)
    assert renew_database(load, root, min_gain=0).generation == 2
    assert [line.result for line in read_renewals(root)][1] is Result.ROLLED_BACK


def test_build_that_was_half_removed_is_built_again(stopped, load, texts):
    root, _ = stopped
    (root / ".renewal" / "000001" / "key").unlink()
    assert renew_database(load, root, texts, min_gain=0).result is Result.PUBLISHED
    assert AttentionDatabase.open(root).verify() == []


def test_renewal_from_other_texts_does_not_go_on(stopped, load, texts):
    root, built = stopped
    renew_database(load, root, texts[1:], min_gain=0)
    assert AttentionDatabase.open(root).manifest.id != built


def test_disk_that_is_full_changes_nothing_and_the_renewal_goes_on_later(root, load, texts):
    tighten(root)
    with largest_file(6000), pytest.raises(BuildFailed, match="cannot be written"):
        renew_database(load, root, texts, min_gain=0)
    assert numbers(root) == [0]
    assert AttentionDatabase.open(root).verify() == []
    assert renew_database(load, root, texts, min_gain=0).result is Result.PUBLISHED


def test_texts_that_the_present_generation_has_recorded_are_not_measured(root, load, texts, tiny_corpus):
    recorded = [sentence.text for sentence in tiny_corpus[::3]][:10]
    renewed = renew_database(load, root, [*texts[:-10], *recorded, *texts[-20:]], min_gain=0)
    assert renewed.measured["held_out"] == 20


def test_database_without_a_budget_is_refused_until_a_calibration_sets_one(
    load, texts, tiny_database, tmp_path
):
    root = Path(shutil.copytree(tiny_database, tmp_path / "a.db"))
    with pytest.raises(InvalidInput, match="keeps no quality budget"):
        renew_database(load, root, texts, min_gain=0)
    database = AttentionDatabase.open(root)
    assert database.manifest.build["threshold"] is not None
    budget = Budget(Measure.COSINE, 0.5, 0.25)
    policy = replace(database.manifest.policy, budget=budget)
    options = renewal._options_like(
        replace(database, manifest=replace(database.manifest, policy=policy)), False
    )
    assert (options.threshold, options.min_cosine, options.min_text_cosine) == (None, 0.5, 0.25)


def test_what_cannot_be_renewed_is_refused_before_anything_is_built(
    root, load, texts, tiny_checkpoint, tiny_classifier_checkpoint, monkeypatch
):
    monkeypatch.setattr(renewal, "build_database", None)
    other_pooling = tiny_checkpoint.adapted(pooling="max")
    for loading, renewed_from, error, words in (
        (load, texts[:190], InvalidInput, "renew from at least 200 texts"),
        (load, None, InvalidInput, "start the server with --sample, or give --corpus FILE"),
        (loader(tiny_classifier_checkpoint), texts, DatabaseRefused, "fingerprint"),
        (loader(other_pooling), texts, DatabaseRefused, "keeps its budget only with the pooling"),
    ):
        with pytest.raises(error, match=words):
            renew_database(loading, root, renewed_from, min_gain=0)
    assert numbers(root) == [0]


def sample(root, sequences, client=None, asked_at=0):
    """Sample sequences of token ids, each 10 minutes after the one before."""
    sampler = TextSampler.open(root, max_texts=20_000, half_life_hours=168)
    for number, ids in enumerate(sequences):
        sampler.offer(ids, client, asked_at + number * 600)
    sampler.sync()
    sampler.close()


def test_database_is_renewed_from_a_sample_as_from_a_corpus_but_holds_no_sampled_text(
    root, plain, tmp_path, load, texts, tiny_engine
):
    tighten(root)
    another = Path(shutil.copytree(plain, tmp_path / "b.db"))
    tighten(another)
    sequences = tiny_engine.tokenize(texts)
    sample(root, sequences, client="tickets")
    renewed = renew_database(load, root, min_gain=0)
    of_corpus = renew_database(load, another, texts, min_gain=0, synthetic_only=True)
    assert renewed.result is Result.PUBLISHED
    of_corpus.measured.pop("request")
    assert renewed.measured == of_corpus.measured
    database = AttentionDatabase.open(root)
    assert database.manifest.records == {}
    assert not holds_any(database, sequences)
    assert database.verify() == []


def _unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_noise_of_one_api_key_changes_nothing_for_the_others(
    root, plain, tmp_path, load, tiny_engine, monkeypatch
):
    held_out: list[Counter[bytes]] = []

    def noted(engine, sequences, clients, *measured, real=renewal.try_generation):
        held_out.append(Counter(clients))
        return real(engine, sequences, clients, *measured)

    monkeypatch.setattr(renewal, "try_generation", noted)
    random = np.random.default_rng(3)
    texts = [random_text(random, words) for words in np.repeat(np.arange(4, 8), 160)]
    sequences = tiny_engine.tokenize(list(dict.fromkeys(texts))[:600])
    words, (first, *_, last) = list({*chain(*sequences)}), sequences[0]
    noise = [[first, *random.choice(words, 5).tolist(), last] for _ in range(5400)]
    outcomes = []
    for folder, noisy in [(root, True), (Path(shutil.copytree(plain, tmp_path / "b.db")), False)]:
        tighten(folder)
        sample_folder(folder).mkdir()
        (sample_folder(folder) / "key").write_bytes(bytes(32))  # texts of equal times are in the same order
        sample(folder, sequences[::2], client="a")
        sample(folder, sequences[1::2], client="b")
        if noisy:
            sample(folder, noise, client="noise")
        renewed = renew_database(load, folder, min_gain=0)
        assert renewed.result is Result.PUBLISHED
        # The noise is no more than the texts of one of the others.
        assert renewed.measured["texts"] + renewed.measured["held_out"] <= 900
        assert max(held_out[-1].values()) == 30
        others = load(AttentionDatabase.open(folder))
        result = others.run(others.requests(sequences))
        exact = tiny_engine.run(tiny_engine.requests(sequences)).outputs
        cosines = np.einsum("td,td->t", _unit(result.outputs), _unit(exact))
        outcomes.append((np.mean([outcome.is_hit for outcome in result.outcomes]), cosines.mean()))
    (hits, cosine), (hits_without, cosine_without) = outcomes
    assert hits_without > 0.5
    assert hits >= hits_without - 0.05
    assert cosine >= cosine_without - 0.005


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=300), st.integers(0, 9))
def test_a_tenth_of_each_client_is_held_out(clients, few):
    order = [b"few"] * few + clients
    is_newest = renewal._newest_tenth(order)
    for client, count in Counter(order).items():
        held = [index for index, other in enumerate(order) if other == client and is_newest[index]]
        if count >= 10:
            assert held == [index for index, other in enumerate(order) if other == client][-(count // 10) :]
    assert is_newest.sum() >= len(order) // 10 - 4


@pytest.fixture(scope="module")
def stopped_from_a_sample(plain, load, texts, tiny_engine, tmp_path_factory, same_savings):  # noqa: ARG001 - sets the measured costs
    folder = Path(shutil.copytree(plain, tmp_path_factory.mktemp("sampled") / "a.db"))
    tighten(folder)
    sample(folder, tiny_engine.tokenize(texts))
    return folder, stopped_before_the_decision(load, folder)


@pytest.mark.parametrize(
    "texts_are", ["as they were", "later than the clock", "damaged", "days old", "of tomorrow"]
)
def test_stopped_renewal_goes_on_with_the_texts_of_its_sample_unless_they_are_damaged_or_days_old(
    stopped_from_a_sample, load, texts, tiny_engine, tmp_path, texts_are, monkeypatch
):
    folder, built = stopped_from_a_sample
    root = Path(shutil.copytree(folder, tmp_path / "a.db"))
    path = root / ".renewal" / "sampled.log"
    if texts_are == "damaged":
        path.write_bytes(path.read_bytes()[:-100])
    elif texts_are == "days old":
        os.utime(path, (0, 0))
    elif texts_are == "of tomorrow":
        os.utime(path, (time.time() + 86_400,) * 2)
    elif texts_are == "later than the clock":
        monkeypatch.setattr(corpus_sample, "_latest", lambda: -1)
    sample(root, tiny_engine.tokenize(texts)[:9], asked_at=10**6)
    renewed = renew_database(load, root, min_gain=0)
    assert texts_are in ("days old", "of tomorrow") or renewed.result is Result.PUBLISHED
    goes_on = texts_are in ("as they were", "later than the clock")
    assert (AttentionDatabase.open(root).manifest.id == built) == goes_on


def test_sample_of_another_model_is_refused(root, load):
    sample(root, [[1, 10**6, 2]] * 300)
    with pytest.raises(InvalidInput, match="texts of another model; remove this folder"):
        renew_database(load, root, min_gain=0)
