"""Reports on methods have the right numbers, for fake methods and for real engines."""

import math
from dataclasses import replace

import numpy as np
import pytest
from core_models import prefill, random_sequences
from scipy.spatial.distance import cosine

from attncache_core.engine.prefill import PrefillEngine
from attncache_core.engine.result import BatchReport, Compared, PrefillResult
from attncache_core.evaluation import comparison
from attncache_core.evaluation.comparison import compare, gamma, share_interval
from attncache_core.evaluation.tasks import AgreementTask, ClassificationTask, RatedPairs, SimilarityTask
from attncache_core.heads.comparator import Measure, OutputComparator
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import KindPolicy, LengthGroup, ReusePolicy
from attncache_core.reuse.plan import Outcome
from attncache_core.reuse.storage.layout import RecordKind
from benchmarks.papers.shared_maps import lazyformer_blocks, shared_maps_engine

COSINE = OutputComparator(Measure.COSINE, None)
AGREEMENT = OutputComparator(Measure.AGREEMENT, lambda outputs: outputs)
SEQUENCES = [[number] for number in range(8)]
FULL = np.eye(8, 3, dtype=np.float32) + np.array([[1, 2, 3]], dtype=np.float32)


class Fake:
    """A method with given outputs, outcomes and durations. The only token of a sequence is its index."""

    def __init__(self, outputs=FULL, hits=(), prototype_hits=(), seconds=(1.0,), kind=Outcome.NOT_SEARCHED):
        self.outputs, self.seconds = np.asarray(outputs, dtype=np.float32), list(seconds)
        self.outcomes = [kind] * len(SEQUENCES)
        for indices, outcome in ((hits, Outcome.HIT), (prototype_hits, Outcome.PROTOTYPE_HIT)):
            for index in indices:
                self.outcomes[index] = outcome
        self.similarities = np.full(len(SEQUENCES), np.nan, dtype=np.float32)
        self.calls = []

    def __call__(self, sequences):
        indices = [number for (number,) in sequences]
        self.calls.append(indices)
        share = len(indices) / len(SEQUENCES)
        seconds = self.seconds[0] * share
        return PrefillResult(
            outputs=self.outputs[indices],
            finite=np.isfinite(self.outputs[indices]).all(axis=1),
            outcomes=tuple(self.outcomes[index] for index in indices),
            asked_tokens=np.ones(len(indices), np.int64),
            cached_tokens=np.zeros(len(indices), np.int64),
            report=BatchReport(len(indices), seconds / 2, seconds / 4, seconds / 8),
            compared=Compared(self.similarities[indices], np.full(len(indices), np.nan, np.float32)),
        )


class Clock:
    """A clock that the rounds of fake methods advance by the durations of the fakes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def timing(self, fake: Fake):
        """Return the fake as a method that advances this clock by the next of its `seconds` in each round."""

        def run(sequences):
            result = fake(sequences)
            self.now += fake.seconds[0] * len(sequences) / len(SEQUENCES)
            if sequences[-1] == SEQUENCES[-1]:
                fake.seconds.append(fake.seconds.pop(0))
            return result

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(comparison, "time", clock)
    return clock


def turned(outputs: np.ndarray, indices, angle: float) -> np.ndarray:
    """Return the outputs with the rows at `indices` rotated by this angle, in radians."""
    changed = outputs.astype(np.float64)
    for index in indices:
        row = changed[index]
        across = np.cross(row, [1.0, 0.5, -2.0])
        across *= np.linalg.norm(row) / np.linalg.norm(across)
        changed[index] = math.cos(angle) * row + math.sin(angle) * across
    return changed.astype(np.float32)


def agreement_task(comparator: OutputComparator = COSINE) -> AgreementTask:
    return AgreementTask("texts", comparator, SEQUENCES, FULL)


def fakes(clock: Clock, **methods: Fake):
    return {name.replace("_", "-"): clock.timing(fake) for name, fake in methods.items()}


def test_reports_come_in_the_order_of_the_methods(clock):
    methods = fakes(clock, san=Fake(), full=Fake(), attncache_f=Fake(), attncache=Fake())
    reports = compare(methods, agreement_task(), COSINE)
    assert [report.method for report in reports] == ["san", "full", "attncache-f", "attncache"]
    del methods["full"]
    with pytest.raises(ValueError, match="no method 'full'"):
        compare(methods, agreement_task(), COSINE)


def test_hits_are_counted_by_length():
    sequences = [[number] * (1 + number % 3) for number in range(8)]
    fake = Fake(hits=[0, 1, 4, 7], prototype_hits=[3], kind=Outcome.MISS)

    def reusing(batch):
        return fake([ids[:1] for ids in batch])

    task = AgreementTask("texts", COSINE, sequences, FULL)
    (report,) = compare({"full": reusing}, task, COSINE, batch_size=3)
    assert report.hit_lengths == {1: 2, 2: 3}


def test_score_is_the_mean_over_the_sets(clock):
    sides = [([[0], [1]], [[2], [3]], [1.0, 0.0]), ([[4], [5]], [[6], [7]], [0.0, 1.0])]
    sets = {name: RatedPairs(*parts) for name, parts in zip(("one", "two"), sides, strict=True)}
    outputs = np.random.default_rng(1).normal(size=(8, 3))
    (report,) = compare(fakes(clock, full=Fake(outputs)), SimilarityTask(sets), COSINE)
    assert set(report.scores) == {"one", "two"}
    assert report.score == pytest.approx((report.scores["one"] + report.scores["two"]) / 2)
    assert report.difference_interval is None


def test_agreement_is_measured_on_the_decisions_of_hits(clock):
    outputs = FULL.copy()
    outputs[[1, 4, 6], 0] = 99  # other decisions; row 6 is a miss
    reusing = Fake(outputs, hits=[0, 1, 2], prototype_hits=[4, 5], kind=Outcome.MISS)
    task = agreement_task(AGREEMENT)
    full, report = compare(fakes(clock, full=Fake(), attncache=reusing), task, COSINE, AGREEMENT)
    assert report.agreement == 3 / 5
    assert report.score == 5 / 8
    assert np.isnan(full.agreement)


def test_full_model_has_no_difference_to_itself(clock):
    (report,) = compare(fakes(clock, full=Fake()), agreement_task(), COSINE)
    assert report.difference_interval == (0, 0)
    assert (report.speedup, report.attention_speedup, report.gamma) == (1, 1, None)


def test_mean_of_one_text_has_no_interval(clock):
    one_text = AgreementTask("texts", COSINE, [[7]], FULL[7:])
    _, report = compare(fakes(clock, full=Fake(), attncache=Fake(turned(FULL, [7], 0.1))), one_text, COSINE)
    assert report.difference_interval is None


def decided(lost: int, won: int, texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what is right with a method, and with the full model, float64 [texts] each."""
    numbers = np.arange(texts)
    right_with_full = numbers >= won
    return (numbers < texts - lost).astype(np.float64), right_with_full.astype(np.float64)


@pytest.mark.parametrize(
    ("lost", "won", "texts", "published"),
    [
        pytest.param(7, 1, 21, (-0.517, -0.026), id="airway hyper-responsiveness"),
        pytest.param(1, 0, 44, (-0.118, 0.059), id="soft contact lenses"),
    ],
)
def test_interval_of_shares_equals_published_intervals(lost, won, texts, published):
    assert share_interval(*decided(lost, won, texts)) == pytest.approx(published, abs=5.1e-4)


@pytest.mark.parametrize("texts", [1, 20, 90, 5000])
def test_without_a_changed_decision_shares_can_differ_by_few_texts_still(texts):
    low, high = share_interval(*decided(0, 0, texts))
    assert high == -low == pytest.approx(1.96**2 / (texts + 1.96**2), abs=1e-7)


@pytest.mark.parametrize(("lost", "won", "texts"), [(0, 3, 40), (5, 2, 40), (40, 0, 40), (17, 17, 300)])
def test_interval_of_shares_is_mirrored_if_the_methods_are_exchanged(lost, won, texts):
    low, high = share_interval(*decided(lost, won, texts))
    assert share_interval(*decided(won, lost, texts)) == (-high, -low)
    assert -1 <= low < (won - lost) / texts + 1e-9
    assert (won - lost) / texts < high <= 1


@pytest.mark.parametrize("texts", [20, 90, 300])
@pytest.mark.parametrize(("losing", "winning"), [(0.03, 0), (0.02, 0.005), (0.1, 0.05), (0.3, 0.1)])
def test_interval_of_shares_holds_the_true_difference_for_95_of_100_samples(texts, losing, winning):
    shares = [losing, winning, 1 - losing - winning]
    samples = np.random.default_rng(3).multinomial(texts, shares, size=2000)
    distinct, counts = np.unique(samples, axis=0, return_counts=True)
    held = 0
    for (lost, won, _), count in zip(distinct, counts, strict=True):
        low, high = share_interval(*decided(lost, won, texts))
        held += count * (low <= winning - losing <= high)
    assert held / len(samples) >= 0.935


def test_interval_of_decisions_is_that_of_shares(clock):
    outputs = FULL.copy()
    outputs[[1, 4, 6], 0] = 99  # other decisions
    methods = fakes(clock, full=Fake(), attncache=Fake(outputs, hits=range(8)))
    full, report = compare(methods, agreement_task(AGREEMENT), COSINE)
    assert full.difference_interval == (0, 0)
    assert report.difference_interval == share_interval(*decided(3, 0, 8))


@pytest.mark.parametrize("kind", [Outcome.MISS, Outcome.NOT_SEARCHED, Outcome.SKIPPED_BY_COST])
def test_without_hits_there_is_no_cosine_and_no_agreement(clock, kind):
    never = Fake(turned(FULL, [2], 1e-3), kind=kind)
    _, report = compare(fakes(clock, full=Fake(), attncache=never), agreement_task(), COSINE, AGREEMENT)
    assert report.hit_rate == 0
    for value in (report.cosine, report.cosine_5th_percentile, report.agreement):
        assert np.isnan(value)


def test_speed_ups_are_medians_over_rounds_of_the_ratios(clock):
    # The first round is slow and not timed; a disturbance in the last round affects both methods.
    full = Fake(seconds=[50, 4, 6, 40])
    reusing = Fake(seconds=[90, 2, 2, 25], hits=[0], kind=Outcome.MISS)
    one, other = compare(fakes(clock, full=full, attncache=reusing), agreement_task(), COSINE, rounds=3)
    assert (one.seconds, other.seconds) == (6, 2)
    assert other.speedup == 2  # the median of 4 / 2, 6 / 2 and 40 / 25
    assert other.attention_speedup == 2
    assert other.attention_seconds == pytest.approx(2 * (1 / 8 + 1 / 4))
    assert other.search_seconds == pytest.approx(2 / 8)


@pytest.mark.parametrize("seconds", [0.99, 1.0, 2.0])
def test_there_is_no_gamma_below_a_speed_up_of_two_percent(clock, seconds):
    methods = fakes(clock, full=Fake(), attncache=Fake(turned(FULL, [0], 0.5), [0], seconds=[seconds]))
    assert compare(methods, agreement_task(), COSINE)[1].gamma is None


def test_gamma_is_the_loss_of_quality_per_unit_of_speed_up(clock):
    reusing = Fake(turned(FULL, [0], 0.5), hits=[0], seconds=[0.8])
    report = compare(fakes(clock, full=Fake(), attncache=reusing), agreement_task(), COSINE)[1]
    assert report.speedup == pytest.approx(1.25)
    assert report.gamma == pytest.approx((1 - math.cos(0.5)) / 8 / 0.25, rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "speedup", "published"),
    [
        pytest.param(0.3034, 1.45, 0.85, id="SAN"),
        pytest.param(0.3448, 1.39, 0.87, id="LazyFormer"),
        pytest.param(0.6775, 1.19, 0.04, id="AttnCache"),
    ],
)
def test_gamma_equals_the_published_ratios_of_llama_2_7b(metric, speedup, published):
    assert round(gamma(0.6860, metric, speedup), 2) == published


def test_gamma_begins_at_two_percent_and_is_negative_for_a_better_method():
    assert gamma(0.7, 0.6, 1.019) is None
    assert gamma(0.75, 0.5, 1.02) == pytest.approx(0.25 / 0.02)
    assert gamma(0.5, 0.75, 1.5) == -0.5


def test_methods_alternate_on_the_same_batches_in_the_order_of_the_data(clock):
    turns, steps = [], []

    def noted(name, method):
        def run(sequences):
            turns.append((name, [number for (number,) in sequences]))
            return method(sequences)

        return run

    methods = {name: noted(name, each) for name, each in fakes(clock, full=Fake(), san=Fake()).items()}
    compare(
        methods, agreement_task(), COSINE, batch_size=3, rounds=2, on_step=lambda *step: steps.append(step)
    )
    assert steps == [(step, 6) for step in range(1, 7)]
    batches = [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert turns == [(name, batch) for name in ["full", "san"] * 3 for batch in batches]


def test_batch_size_does_not_change_the_quality(clock):
    reusing = Fake(turned(FULL, [0, 3], 0.4), hits=[0, 3], kind=Outcome.MISS)
    methods = fakes(clock, full=Fake(), attncache=reusing)
    of_one, of_all = (
        compare(methods, agreement_task(), COSINE, AGREEMENT, batch_size=size)[1] for size in (1, 64)
    )
    for name in ("scores", "difference_interval", "hit_rate", "cosine", "agreement"):
        assert getattr(of_one, name) == getattr(of_all, name)


# With real models and databases.


@pytest.fixture(scope="module")
def sequences(tiny_engine, tiny_corpus):
    """Recorded sequences, and sequences that are not recorded."""
    recorded = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus[::20]])
    return [*recorded, *random_sequences([5, 6, 7, 8, 9, 10] * 6, seed=41)]


def reusing_engine(checkpoint, folder, sequences, kinds):
    """Return an engine with a θ that about half of the sequences reach with these kinds of record."""
    database = AttentionDatabase.open(folder)

    def engine_at(threshold: float) -> PrefillEngine:
        of_kinds = {kind: KindPolicy(threshold if kind in kinds else 2.0) for kind in RecordKind}
        policy = ReusePolicy(database.search.policy.budget, (LengthGroup(1, of_kinds),))
        changed = replace(database, search=replace(database.search, policy=policy))
        return PrefillEngine.load(checkpoint, database=changed, dtype="float32")

    similarities = prefill(engine_at(-100.0), sequences).similarities
    return engine_at(float(np.median(similarities[similarities < 1])) + 1e-6)


@pytest.mark.parametrize("kinds", [[RecordKind.STORED], list(RecordKind)], ids=["stored", "prototypes"])
def test_report_on_a_database_has_the_figures_of_the_engines_own_run(
    request, tiny_checkpoint, tiny_engine, sequences, kinds
):
    folder = request.getfixturevalue("tiny_database" if len(kinds) == 1 else "tiny_prototypes_database")
    engine = reusing_engine(tiny_checkpoint, folder, sequences, kinds)
    reused = prefill(engine, sequences)
    full = prefill(tiny_engine, sequences, reuse=False)
    task = AgreementTask("texts", COSINE, sequences, full.outputs)
    methods = {
        "full": lambda batch: prefill(tiny_engine, batch, reuse=False),
        "attncache": lambda batch: prefill(engine, batch),
    }
    _, report = compare(methods, task, COSINE, batch_size=10, rounds=1)
    names = [outcome.value for outcome in reused.outcomes]
    hits = np.array([name in ("hit", "prototype_hit") for name in names])
    of_all = np.array([1 - cosine(*pair) for pair in zip(reused.outputs, full.outputs, strict=True)])
    assert 0 < hits.sum() < len(hits)
    assert ("prototype_hit" in names) == (len(kinds) > 1)
    assert report.hit_rate == hits.mean()
    assert report.prototype_hit_rate == names.count("prototype_hit") / len(names)
    assert report.recorded == 12 == (reused.similarities == 1).sum()
    assert report.cosine == pytest.approx(of_all[hits].mean(), abs=1e-5)
    assert report.cosine_5th_percentile == pytest.approx(np.percentile(of_all[hits], 5), abs=1e-5)
    assert report.score == pytest.approx(of_all.mean(), abs=1e-5)
    half = 1.96 * (of_all - 1).std(ddof=1) / len(of_all) ** 0.5
    assert report.difference_interval == pytest.approx(
        (of_all.mean() - 1 - half, of_all.mean() - 1 + half), abs=1e-5
    )
    assert report.seconds >= report.attention_seconds > report.search_seconds > 0


def test_classes_of_a_baseline_are_compared_over_all_texts(tiny_classifier_checkpoint, sequences):
    full = PrefillEngine.load(tiny_classifier_checkpoint, dtype="float32")
    sharing = shared_maps_engine(tiny_classifier_checkpoint, lazyformer_blocks(3), dtype="float32")
    logits = prefill(full, sequences, reuse=False).outputs
    changed = prefill(sharing, sequences).outputs
    # Labels that are right for some texts.
    labels = [full.decisions.labels[row.argmax()] for row in logits[::-1]]
    methods = {
        "full": lambda batch: prefill(full, batch, reuse=False),
        "lazyformer": lambda batch: prefill(sharing, batch),
    }
    reference, report = compare(
        methods,
        ClassificationTask("data", full, sequences, labels),
        full.decisions.comparator(Measure.COSINE),
        full.decisions.comparator(Measure.AGREEMENT),
        changing_all=("lazyformer",),
        rounds=1,
    )
    truth = logits[::-1].argmax(axis=1)
    assert reference.scores == {"data": pytest.approx((logits.argmax(axis=1) == truth).mean())}
    assert report.scores == {"data": pytest.approx((changed.argmax(axis=1) == truth).mean())}
    assert report.agreement == (changed.argmax(axis=1) == logits.argmax(axis=1)).mean()
    probabilities = [np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True) for rows in (logits, changed)]
    roots = np.sqrt(probabilities[0] * probabilities[1]).sum(axis=1)
    assert report.cosine == pytest.approx(roots.mean(), abs=1e-5)
