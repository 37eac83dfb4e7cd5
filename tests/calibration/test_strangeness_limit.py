"""The strangeness limit: the budget that it must keep, and the unfamiliar texts that it is chosen on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from attncache_core.calibration import strangeness_limit
from attncache_core.calibration.policy_selection import Calibrated, Terms, calibrated, could_prove, policy_for
from attncache_core.calibration.probes import Measured, Probes
from attncache_core.calibration.savings import Savings
from attncache_core.calibration.strangeness_limit import (
    UnfamiliarProbes,
    _left_out_figures,
    choose_limit,
    find_unfamiliar,
    hits_by_kind,
    keeps_budget,
    too_short,
)
from attncache_core.calibration.thresholds import share_bound, share_bound_over
from attncache_core.corpus import UnfamiliarText
from attncache_core.heads.comparator import Measure
from attncache_core.reuse.maps.policy import Budget, uniform_policy
from attncache_core.reuse.mask import mildest_mask, natural_rank
from attncache_core.reuse.storage.layout import RecordKind

FLOOR = Budget(Measure.COSINE, 0.98, 0.95)


def given(fidelity, misses: int = 0, budget: Budget = FLOOR) -> Calibrated:
    """Return results of a policy: hits with these fidelities, and a number of misses."""
    values = np.concatenate([np.array(fidelity, dtype=np.float64), np.full(misses, np.nan)])
    served = np.isfinite(values)
    kinds = np.zeros(len(values), dtype=np.int64)
    mask = mildest_mask(natural_rank(3, 4), 6)
    return Calibrated(mask, uniform_policy(budget, 0.5), kinds, served, values, 1 - values)


@pytest.mark.parametrize(("count", "of"), [(0, 1), (0, 299), (2, 640), (3, 640), (7, 7), (0, 0)])
def test_bound_of_a_share_is_clopper_pearson(count, of):
    expected = stats.binomtest(count, of, alternative="less").proportion_ci(0.95).high if of else 1.0
    assert share_bound(count, of) == pytest.approx(expected)


def test_299_probes_can_prove_a_floor_and_298_cannot():
    assert [could_prove(FLOOR, probes) for probes in (298, 299)] == [False, True]
    assert could_prove(Budget(Measure.COSINE, 0.98), 1)
    agreement = Budget(Measure.AGREEMENT, 0.98)
    assert [could_prove(agreement, probes) for probes in (148, 149)] == [False, True]
    assert could_prove(Budget(Measure.AGREEMENT, 0.0), 1)


@pytest.mark.parametrize(
    ("like", "keeps"),
    [
        ([0.99] * 299, True),
        ([0.99] * 298, False),
        ([0.99] * 299 + [0.94], False),
        ([0.99] * 472 + [0.94], True),
    ],
)
def test_few_enough_hits_of_texts_like_the_corpus_must_be_harmed(like, keeps):
    assert keeps_budget(FLOOR, given(like, misses=90), {"news": np.array([0.99] * 30)}) is keeps


GOOD = {f"kind {number}": [0.99] * 40 for number in range(20)}


@pytest.mark.parametrize(
    ("of_kinds", "keeps"),
    [
        ({}, True),
        ({"news": [0.985] * 40, "odd": []}, True),
        # Every kind keeps the mean by itself, however good the others are.
        ({"news": [0.975] * 40}, False),
        # The mean keeps the budget with 95 % confidence: a mean of 0.9805 may be luck if the hits vary.
        ({"news": [0.971, 0.99] * 20}, False),
        ({"news": [0.980, 0.981] * 20}, True),
        # One harmed hit may be chance. Two of 40 are not, and 20 kinds without harm do not pay for them.
        ({"news": [0.99] * 39 + [0.94]}, True),
        ({"news": [0.99] * 38 + [0.94] * 2}, False),
        # Kinds of fewer than 20 hits are judged together.
        ({"news": [0.96] * 19, "film": [0.999] * 19}, False),
        ({"news": [0.97] * 19, "film": [0.999] * 19}, True),
        ({"news": [0.97] * 19, "film": [0.999] * 20}, False),
        # One harmed hit in every fourth kind is more than 1 % over kinds.
        ({f"other {number}": [0.99] * 39 + [0.94] for number in range(7)}, False),
    ],
)
def test_every_kind_of_unfamiliar_text_keeps_the_budget_by_itself(of_kinds, keeps):
    left_out = {kind: np.array(hits) for kind, hits in (GOOD | of_kinds).items()}
    assert keeps_budget(FLOOR, given([0.99] * 299), left_out) is keeps


@pytest.mark.parametrize(
    ("hits", "keeps"),
    [
        ([0.975] * 30, False),
        ([0.985] * 30, True),
        ([0.971, 0.99] * 20, False),
        ([0.975] * 3, False),
        ([], True),
    ],
)
def test_every_length_group_keeps_the_mean_over_all_kinds(hits, keeps):
    left_out = {kind: np.array(fidelities) for kind, fidelities in GOOD.items()}
    groups = [np.array([0.99] * 500), np.array(hits)]
    assert keeps_budget(FLOOR, given([0.99] * 299), left_out, groups) is keeps


@pytest.mark.parametrize(
    ("hits", "short"),
    [
        ([], None),
        ([(5, 0.96)] * 25 + [(6, 0.99)] * 500, 5),
        # As many short hits as show whether the mean is kept: 3 of them count with the next ones.
        ([(5, 0.97)] * 3 + [(6, 0.99)] * 17 + [(7, 0.9)] * 500, None),
        ([(5, 0.99)] * 3 + [(6, 0.97)] * 17, 5),
        ([(6, 0.97)] * 17, 6),
        # Hits of one length are judged together.
        ([(5, 0.99)] * 21 + [(5, 0.5)] * 10, 5),
        # One harmed hit may be chance.
        ([(8, 0.999)] * 30 + [(8, 0.94)], None),
        ([(8, 0.999)] * 30 + [(8, 0.94)] * 2, 8),
    ],
)
def test_the_shortest_hits_keep_the_budget_by_themselves(hits, short):
    lengths, fidelity = np.array(hits).reshape(-1, 2).T
    order = np.random.default_rng(0).permutation(len(hits))
    assert too_short(FLOOR, lengths.astype(np.int64)[order], fidelity[order]) == short


def served_by_means(lengths, damage):
    """Return probes that the means of their lengths serve with this damage, and the effect of the means."""
    similarities = {
        kind: np.full(len(lengths), -1.0 if kind is RecordKind.MEAN else -np.inf) for kind in RecordKind
    }
    records = {kind: np.where(np.isfinite(values), 3, -1) for kind, values in similarities.items()}
    measured = {kind: Measured(np.array(damage), 1 - np.array(damage)) for kind in RecordKind}
    return Probes([[2] * length for length in lengths], records, similarities), measured


@pytest.mark.parametrize(
    ("hits", "strangeness", "longest", "least_rate"),
    [
        # Of each length: the hits on unfamiliar texts, and how many of them are harmed. Others are strange.
        ({4: (25, 0), 5: (25, 0), 6: (25, 0), 7: (25, 0)}, 0.2, 0, 1.0),
        ({4: (25, 3), 5: (25, 0), 6: (25, 0), 7: (25, 0)}, 0.2, 4, 0.9),
        # A remainder of a length group, such as 7 tokens alone, is judged with the other lengths first.
        ({4: (25, 3), 5: (25, 3), 6: (25, 3), 7: (25, 3)}, 0.2, 7, 0.8),
        # A limit below the harmed texts would let all lengths hit, but is not tried, because it may be luck.
        (dict.fromkeys(range(4, 20), (25, 2)), 0.985, 19, 0.2),
        # The budget is not kept with the short texts, so a smaller mask is taken.
        ({4: (1000, 600)}, 0.2, None, 0),
        # Nor is it proved without them, if too few probes are left.
        (dict.fromkeys(range(4, 21), (25, 2)), 0.2, None, 0),
    ],
)
def test_texts_that_are_too_short_do_not_hit(monkeypatch, hits, strangeness, longest, least_rate):
    lengths = np.repeat(np.arange(4, 24), 99)
    probes, measured = served_by_means(lengths, np.full(len(lengths), 0.005))
    unlike = np.repeat(np.arange(4, 24), 2000)
    harmed, strange = np.zeros(len(unlike), bool), np.full(len(unlike), 0.2)
    for length, (count, of_them) in hits.items():
        of_length = np.flatnonzero(unlike == length)
        strange[of_length[count:]] = 9.0
        harmed[of_length[:of_them]], strange[of_length[:of_them]] = True, strangeness
    kinds = np.arange(len(unlike)) % 60
    kinds[harmed] = np.arange(harmed.sum()) % 60
    unfamiliar, effect = served_by_means(unlike, np.where(harmed, 0.06, 0.003))
    savings = Savings(per_hit=lambda lengths, heads: 2.0 * lengths * heads, search=lambda _: 7.0)
    terms = Terms.of(probes, FLOOR, savings, shortest=4, may_search=False)
    mask = mildest_mask(natural_rank(3, 4), 6)
    option = calibrated(terms, measured, mask, policy_for(terms, measured, mask))
    scores = np.concatenate([np.random.default_rng(0).permutation(np.linspace(0, 1, len(lengths))), strange])
    monkeypatch.setattr(strangeness_limit, "fit_familiarity", lambda *_: (None, scores))
    found = choose_limit(
        option, terms, measured, UnfamiliarProbes(unfamiliar, list(map(str, kinds))), effect, None
    )
    if longest is None:
        assert found is None
        return
    first, *others = found.calibrated.policy.groups
    assert (0 if first.approximates else first.longest) == longest
    assert all(group.approximates for group in others)
    assert found.calibrated.served.mean() >= least_rate


def test_hits_are_grouped_by_kind_and_nan_is_harmed():
    found = hits_by_kind(given([0.99, 0.98, 0.97], misses=1), ["news", "film", "news", "film"])
    assert {kind: hits.tolist() for kind, hits in found.items()} == {"news": [0.99, 0.97], "film": [0.98]}
    assert FLOOR.harmed(np.array([0.95, 0.9499, np.nan])).tolist() == [False, True, True]


def test_changed_decisions_are_harmed_in_a_budget_of_agreement():
    budget = Budget(Measure.AGREEMENT, 0.98)
    like = given([1.0] * 149, budget=budget)
    good = {kind: np.ones(40) for kind in GOOD}
    assert keeps_budget(budget, like, good | {"news": np.array([1.0] * 39 + [0.0])})
    assert not keeps_budget(budget, like, good | {"news": np.array([1.0] * 38 + [0.0] * 2)})


def test_bound_over_corpora_is_students_t_bound_of_their_shares():
    # With as many texts in each corpus, the bound is that of the mean of the shares.
    shares = np.array([0.0, 0.0, 0.02, 0.01, 0.0])
    expected = shares.mean() + stats.t.ppf(0.95, 4) * stats.sem(shares)
    assert share_bound_over((shares * 100).tolist(), [100] * 5) == pytest.approx(expected)
    assert share_bound_over([0, 0], [30, 0]) == 0
    assert share_bound_over([1], [30]) == 1


def test_kinds_without_hits_do_not_make_a_bound_over_kinds_more_certain():
    left_out = {"news": np.array([0.99] * 248 + [0.94] * 2), "film": np.array([0.99] * 250)}
    empty = {f"odd {number}": np.empty(0) for number in range(58)}
    found = [keeps_budget(FLOOR, given([0.99] * 299), hits) for hits in (left_out, left_out | empty)]
    assert found == [False, False]


def test_reported_bound_is_never_below_that_of_independent_hits():
    budget = Budget(Measure.COSINE, 0.985)
    none_harmed = {kind: np.ones(5) for kind in "abcde"}
    assert _left_out_figures(budget, none_harmed)["harmed_at_most"] == pytest.approx(share_bound(0, 25))
    some = {kind: np.array([0.9] + [1.0] * 9) for kind in "ab"} | {kind: np.ones(10) for kind in "cdef"}
    assert _left_out_figures(budget, some)["harmed_at_most"] > 0.03


def test_unfamiliar_texts_are_cut_to_lengths_that_have_records(tiny_engine, recorded):
    # Records have 5 to 9 tokens; with the two special ones, the texts have 4, 8 and 22.
    texts = [
        UnfamiliarText(text, f"{word} {len(text.split())}", True)
        for word in ("card", "bank", "help", "money")
        for text in (f"{word} {word}", " ".join([word] * 6), " ".join(["my", word] * 10))
    ]
    found = find_unfamiliar(tiny_engine, recorded.search, texts, fitted=True)
    assert set(found.probes.lengths.tolist()) <= set(recorded.search.store.segments)
    assert sorted(found.kinds) == sorted(text.kind for text in texts if not text.kind.endswith(" 2"))
    last = tiny_engine.tokenize(["card"])[0][-1]
    assert {ids[-1] for ids in found.probes.sequences} == {last}
    # Texts of the other side are skipped.
    words = ("help", "money", "lost", "late", "why")
    texts = [UnfamiliarText(f"{word} card my bank", word, word < "m") for word in words]
    found = find_unfamiliar(tiny_engine, recorded.search, texts, fitted=True)
    assert set(found.kinds) == {"help", "lost", "late"}
