"""Each method can be made by its name, gives the right outputs, and reports missing requirements."""

from dataclasses import replace

import faiss
import numpy as np
import pytest
from core_models import prefill, random_sequences, write_sentence_transformer
from core_reference import FLOAT32, SIXTEEN_BITS

from attncache_core import Outcome
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput
from attncache_core.evaluation.methods import parse_methods
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.index import FeatureIndex, index_path
from attncache_core.reuse.maps.projector import FeatureProjector
from benchmarks.papers.methods import PAPER_METHODS, PaperMethods, Preset
from benchmarks.papers.per_layer_search import train_layerwise_search
from benchmarks.papers.shared_maps import layer_divergences, lazyformer_blocks, san_blocks, shared_maps_engine

SEQUENCES = random_sequences([5, 6, 7, 8, 9, 10] * 4, seed=51)


@pytest.fixture(scope="module")
def corpus(tiny_engine, tiny_corpus):
    return tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])


@pytest.fixture
def methods(tiny_engine, tiny_checkpoint, tiny_database, corpus):
    return PaperMethods(
        tiny_engine, tiny_checkpoint, AttentionDatabase.open(tiny_database), corpus, dtype="float32"
    )


@pytest.fixture
def few_steps(monkeypatch):
    """Train the projectors of AttnCache-f with few steps."""
    monkeypatch.setitem(train_layerwise_search.__kwdefaults__, "steps", 5)


def test_parsed_names_are_known_and_unique_with_the_full_model_first():
    assert parse_methods("san,full,lazyformer", PAPER_METHODS) == ["full", "san", "lazyformer"]
    found = parse_methods(" attncache-f , attncache:moderate,attncache-f,full", PAPER_METHODS)
    assert found == ["full", "attncache-f", "attncache:moderate"]
    for name in ("attncach", "attncache:mild", "FULL", ""):
        with pytest.raises(InvalidInput, match=r"attncache:moderate, .*san") as refused:
            parse_methods(f"full,{name}", PAPER_METHODS)
        assert refused.value.field == "methods"
        assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", PAPER_METHODS)
@pytest.mark.usefixtures("few_steps")
def test_every_method_returns_outputs_in_order(methods, name):
    method = methods.make(name)
    result = method(SEQUENCES)
    assert result.outputs.shape == (len(SEQUENCES), 32)
    assert len(result.outcomes) == len(result.similarities) == len(SEQUENCES)
    backwards = method(SEQUENCES[::-1])
    np.testing.assert_allclose(backwards.outputs[::-1], result.outputs, atol=SIXTEEN_BITS)


def test_full_method_reuses_nothing_and_attncache_equals_an_engine_with_the_database(
    methods, tiny_engine, tiny_checkpoint, tiny_database, corpus
):
    result = methods.make("full")(corpus)
    np.testing.assert_array_equal(result.outputs, prefill(tiny_engine, corpus, reuse=False).outputs)
    assert set(result.outcomes) == {Outcome.NOT_SEARCHED}
    database = AttentionDatabase.open(tiny_database)
    expected = prefill(PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32"), SEQUENCES)
    result = methods.make("attncache")(SEQUENCES)
    np.testing.assert_array_equal(result.outputs, expected.outputs)
    assert result.outcomes == expected.outcomes
    assert Outcome.HIT in result.outcomes


@pytest.fixture
def nearer_methods(methods, tiny_engine, tiny_checkpoint, tiny_database, monkeypatch):
    """Methods with scaled features, because random texts are so dissimilar that all presets would miss."""
    distances = 1 - methods.make("attncache")(SEQUENCES).similarities
    scale = 0.03 / float(np.median(distances))
    project = FeatureProjector.project
    monkeypatch.setattr(
        FeatureProjector, "project", lambda *arguments: [features * scale for features in project(*arguments)]
    )
    monkeypatch.setattr(FeatureProjector, "packed", None)  # compiled code does not call `project`
    database, index = AttentionDatabase.open(tiny_database), FeatureIndex()
    for length in database.manifest.records:
        vectors = faiss.read_index(str(index_path(tiny_database, length)))
        index.add(length, vectors.reconstruct_n(0, vectors.ntotal) * scale)
    database = replace(database, search=replace(database.search, index=index))
    return PaperMethods(tiny_engine, tiny_checkpoint, database, [], dtype="float32")


def test_preset_hits_exactly_from_its_threshold_on(nearer_methods):
    similarities, hits = nearer_methods.make("attncache")(SEQUENCES).similarities, {}
    for preset in Preset:
        outcomes = nearer_methods.make(f"attncache:{preset}")(SEQUENCES).outcomes
        assert [outcome.is_hit for outcome in outcomes] == (similarities >= preset.threshold).tolist()
        hits[preset] = sum(outcome.is_hit for outcome in outcomes)
    assert hits["conservative"] < hits["aggressive"]


def test_lazyformer_shares_pairs_of_layers(methods, tiny_checkpoint):
    expected = prefill(shared_maps_engine(tiny_checkpoint, lazyformer_blocks(3), dtype="float32"), SEQUENCES)
    np.testing.assert_array_equal(methods.make("lazyformer")(SEQUENCES).outputs, expected.outputs)


def san_takers(methods):
    """Return whether each layer takes the maps of the layer before it."""
    engine, _ = methods.make("san").args
    return [getattr(layer, "takes", False) for layer in engine.model.layers]


@pytest.mark.parametrize(("layers", "shared"), [(1, 0), (2, 1), (5, 2)])
def test_san_shares_half_of_the_layers_by_default(tmp_path, layers, shared):
    checkpoint = read_checkpoint(write_sentence_transformer(tmp_path, num_hidden_layers=layers))
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    takes = san_takers(PaperMethods(engine, checkpoint, None, SEQUENCES, dtype="float32"))
    divergences = layer_divergences(engine.model, SEQUENCES)
    joined = np.flatnonzero(takes).tolist()
    assert len(joined) == shared
    # The layers that share maps differ least from the previous layer.
    assert sorted(divergences[np.array(joined, dtype=int) - 1]) == sorted(divergences)[:shared]


@pytest.mark.parametrize("threshold", [0.05, 0.1])
def test_given_threshold_chooses_the_layers_of_san(tiny_engine, tiny_checkpoint, threshold):
    methods = PaperMethods(
        tiny_engine, tiny_checkpoint, None, SEQUENCES, dtype="float32", san_threshold=threshold
    )
    blocks = san_blocks(layer_divergences(tiny_engine.model, SEQUENCES), threshold)
    assert san_takers(methods) == [layer != block.start for block in blocks for layer in block]


def test_method_without_its_database_or_corpus_is_refused(
    tiny_engine, tiny_checkpoint, tiny_database, corpus
):
    database = AttentionDatabase.open(tiny_database)
    searching = [name for name in PAPER_METHODS if name.startswith("attncache")]
    cases = [
        *((name, None, corpus, "database", f"method {name} needs a database") for name in searching),
        ("san", database, [], "corpus", "method san .* corpus"),
        ("attncache-f", database, [], "corpus", "method attncache-f .* corpus"),
        ("attncache-f", database, SEQUENCES, "corpus", "texts that the database was built from"),
    ]
    for name, opened, texts, field, message in cases:
        with pytest.raises(InvalidInput, match=message) as refused:
            PaperMethods(tiny_engine, tiny_checkpoint, opened, texts).make(name)
        assert refused.value.field == field


@pytest.mark.usefixtures("few_steps")
def test_per_layer_search_hits_for_recorded_texts(methods, corpus):
    result = methods.make("attncache-f")(corpus[::9])
    assert set(result.outcomes) == {Outcome.HIT}
    assert (result.similarities > 1 - FLOAT32).all()


@pytest.mark.parametrize("searched", [True, False])
def test_excluded_text_is_not_served_by_its_own_record(
    tiny_engine, tiny_checkpoint, tiny_prototypes_database, corpus, searched
):
    def outcomes(threshold, change_group):
        database = AttentionDatabase.open(tiny_prototypes_database, threshold=threshold)
        (group,) = database.search.policy.groups
        policy = replace(database.search.policy, groups=(change_group(group),))
        database = replace(database, search=replace(database.search, policy=policy))
        without, gone = database.without(corpus[::3])
        assert gone == len(corpus[::3])
        methods = PaperMethods(tiny_engine, tiny_checkpoint, without, [], dtype="float32")
        return methods.make("attncache")(corpus)

    # Without a search, recorded texts are recognised by their tokens.
    result = outcomes(1.0, lambda group: group if searched else group.recorded_only())
    others = [index % 3 != 0 for index in range(len(corpus))]
    assert (result.similarities == 1).tolist() == others
    assert [outcome is Outcome.HIT for outcome in result.outcomes] == others
    if not searched:
        result = outcomes(None, lambda group: replace(group, searched=False))
        assert set(result.outcomes[::3]) == {Outcome.PROTOTYPE_HIT}
        assert {outcome for outcome, other in zip(result.outcomes, others, strict=True) if other} == {
            Outcome.HIT
        }
