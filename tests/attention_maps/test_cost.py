"""The cost model: what it says from its figures, that it is kept, and what the engine makes of it."""

import json
import shutil

import pytest
from core_models import random_sequences

from attncache_core.attention_maps.cost import CostModel, cost_model
from attncache_core.attention_maps.database import AttentionDatabase
from attncache_core.attention_maps.search import Outcome
from attncache_core.engine import PrefillEngine

UNEQUAL = '{"circumstances": {}, "costs": {"lengths": [8], "search": [], "fetch": [], "compute": []}}'
# At 8 tokens a hit saves 10 - 2 and a search costs 9; at 32 it saves 40 - 8 and costs 12.
FIGURES = CostModel(lengths=(8, 32), search=(9.0, 12.0), fetch=(2.0, 8.0), compute=(10.0, 40.0))


@pytest.fixture
def engine(tiny_checkpoint, tiny_database, tmp_path):
    """An engine on a database of its own."""
    folder = tmp_path / "database"
    shutil.copytree(tiny_database, folder)
    return PrefillEngine.load(tiny_checkpoint, database=AttentionDatabase.open(folder), dtype="float32")


def test_reuse_pays_where_a_hit_saves_more_than_a_search_costs():
    assert [FIGURES.pays(length) for length in (1, 8, 32, 500)] == [False, False, True, True]
    # The gain is -1 at 8 tokens and 20 at 32: it is zero a little above 9.
    assert [FIGURES.pays(length) for length in (9, 10)] == [False, True]
    assert FIGURES.info()["can_pay"] == [False, True]


def test_measured_costs_are_those_of_the_databases_lengths(engine):
    engine.weigh_costs()
    lengths = engine.costs.lengths
    assert 1 < len(lengths) <= 8
    assert list(lengths) == sorted(set(lengths) & set(engine.database.search.store.segments))
    for figures in (engine.costs.search, engine.costs.fetch, engine.costs.compute):
        assert len(figures) == len(lengths)
        assert min(figures) > 0


def test_costs_are_kept_until_the_circumstances_change(engine):
    engine.weigh_costs()
    measured, path = engine.costs, engine.database.folder / "cost.json"
    kept = json.loads(path.read_text())
    engine.weigh_costs()
    assert engine.costs == measured
    kept["circumstances"]["threads"] += 1
    path.write_text(json.dumps(kept))
    engine.weigh_costs()
    assert json.loads(path.read_text())["circumstances"]["threads"] == engine.threads


@pytest.mark.parametrize(
    "figures",
    [
        ((), (), (), ()),
        ((8,), (1.0, 2.0), (1.0,), (1.0,)),
        ((8, 8), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),
        ((8,), (float("nan"),), (1.0,), (1.0,)),
    ],
)
def test_figures_that_do_not_fit_each_other_are_refused(figures):
    with pytest.raises(ValueError, match=r"figure|lengths"):
        CostModel(*figures)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"circumstances": {}, "costs": {"lengths": "x"}}', UNEQUAL]
)
def test_a_damaged_file_of_costs_is_measured_anew(engine, content):
    path = engine.database.folder / "cost.json"
    path.write_text(content)
    engine.weigh_costs()
    assert json.loads(path.read_text())["costs"]["lengths"] == list(engine.costs.lengths)


def test_a_folder_that_cannot_be_written_is_measured_all_the_same(engine, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("attncache_core.attention_maps.cost.write_whole", refuse)
    database = engine.database
    assert cost_model(engine.model, database.search, database.folder, {}).lengths
    assert not (database.folder / "cost.json").exists()


def test_a_database_with_its_costs_is_still_whole(engine):
    engine.weigh_costs()
    assert AttentionDatabase.open(engine.database.folder).verify() == []


def test_the_engine_searches_only_where_reuse_can_pay(engine, tiny_corpus):
    texts = [sentence.text for sentence in tiny_corpus]
    recorded = [ids for ids in engine.tokenize(texts) if len(ids) in engine.database.search.store.segments]
    assert set(engine.run(recorded, [True] * len(recorded)).outcomes) == {Outcome.HIT}
    shortest = min(map(len, recorded))
    longest = max(map(len, recorded))
    engine.costs = CostModel((shortest, longest), search=(2.0, 0.0), fetch=(0.0, 0.0), compute=(0.0, 2.0))
    outcomes = engine.run(recorded, [True] * len(recorded)).outcomes
    for ids, outcome in zip(recorded, outcomes, strict=True):
        middle = (shortest + longest) / 2
        assert outcome == (Outcome.HIT if len(ids) > middle else Outcome.CANNOT_PAY)
    foreign = random_sequences([longest + 50])
    assert engine.run(foreign, [True]).outcomes == (Outcome.NOT_SEARCHED,)
