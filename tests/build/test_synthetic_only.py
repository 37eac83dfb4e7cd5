"""A database of synthetic records reveals no text, and serves a text of its corpus like any other text."""

import secrets
from dataclasses import replace

import numpy as np
import pytest
from core_models import contents_of, prefill, random_text

from attncache_core.build import builder
from attncache_core.build.builder import build_database, partial_folder
from attncache_core.build.options import BuildOptions
from attncache_core.build.sentences import split
from attncache_core.corpus import CorpusSentence
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import BuildFailed, InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase

pytestmark = pytest.mark.usefixtures("fixed_costs")


def build(engine, corpus, folder, progress=lambda *_: None, **options) -> AttentionDatabase:
    defaults = {"training_steps": 10, "prototypes": 4, "min_text_cosine": 0.0, "synthetic_only": True}
    build_database(engine, corpus, folder, BuildOptions(**{**defaults, **options}), progress)
    return AttentionDatabase.open(folder)


@pytest.fixture(scope="module")
def database(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    return build(tiny_engine, tiny_corpus, tmp_path_factory.mktemp("synthetic") / "a.db", min_cosine=0.9)


def digests_in(database: AttentionDatabase, sequences) -> int:
    """Return how many of the token sequences have their digest in a file of the database's folder."""
    files = b"".join(path.read_bytes() for path in database.folder.rglob("*") if path.is_file())
    digests = [database.search.store.seal.token_digest(ids) for ids in sequences]
    return sum(digest in files or digest.hex().encode() in files for digest in digests)


def test_no_digest_of_a_text_stands_in_the_folder(tiny_engine, tiny_corpus, database, tmp_path):
    sequences = tiny_engine.tokenize([sentence.text for sentence in tiny_corpus])
    assert digests_in(database, sequences) == 0
    recorded = build(tiny_engine, tiny_corpus, tmp_path / "a.db", heads="6", synthetic_only=False)
    assert digests_in(recorded, sequences) == 240


def test_database_is_whole_and_holds_means_alone(database):
    assert database.verify() == []
    names = sorted(path.name for path in database.folder.iterdir())
    assert [name for name in names if not name.startswith("familiarity-")] == [
        *("key", "manifest.json", "maps", "projector.safetensors", "prototypes.safetensors")
    ]
    assert database.manifest.records == {}
    assert database.manifest.prototypes.keys() == database.search.store.segments.keys()
    for length, segment in database.search.store.segments.items():
        assert segment.kinds.tolist() == [2] + [1] * (database.manifest.prototypes[length] - 1)
    assert sorted(path.name for path in database.folder.parent.iterdir()) == [".a.db.lock", "a.db"]


def test_nothing_is_searched_and_means_serve_and_distances_to_the_texts_are_reported(database):
    groups = database.search.policy.groups
    assert not any(group.searched for group in groups)
    assert any(group.mean_serves for group in groups)
    quality = database.manifest.quality
    assert quality["hit_rate"] == quality["prototype_hit_rate"] > 0
    assert 0 < quality["map_distance"]["best"] <= quality["map_distance"]["chosen"]


def test_recorded_text_has_the_outcome_of_any_other_text_of_its_length(
    tiny_checkpoint, tiny_corpus, database
):
    familiar = replace(database.search, policy=replace(database.search.policy, limit=None))
    engine = PrefillEngine.load(tiny_checkpoint, database=replace(database, search=familiar), dtype="float32")
    random = np.random.default_rng(1)
    texts = [sentence.text for sentence in tiny_corpus]
    others = [random_text(random, len(text.split())) for text in texts]
    assert not set(texts) & set(others)
    found = [prefill(engine, engine.tokenize(side)) for side in (texts, others)]
    assert found[0].outcomes == found[1].outcomes
    assert "prototype_hit" in found[0].outcomes
    assert all(np.isnan(result.similarities).all() for result in found)


def test_stopped_build_resumes(tiny_engine, tiny_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", bytes)

    def stop_at(*step):
        def stop(stage, done, _):
            if (stage, done) == step:
                raise KeyboardInterrupt

        return stop

    for stop in (stop_at("writing records", 100), stop_at("training the projector", 5)):
        with pytest.raises(KeyboardInterrupt):
            build(tiny_engine, tiny_corpus, tmp_path / "a.db", stop, heads="6")
        assert (partial_folder(tmp_path / "a.db") / "recorded").is_dir()
    contents = [
        contents_of(build(tiny_engine, tiny_corpus, tmp_path / name, heads="6").folder)
        for name in ("a.db", "b.db")
    ]
    assert contents[0] == contents[1]


def test_lengths_with_too_few_texts_have_no_record(tiny_engine, tiny_corpus, tmp_path):
    few = [sentence for sentence in tiny_corpus if len(sentence.text.split()) < 8][:165]
    database = build(tiny_engine, few, tmp_path / "a.db", threshold=1.0)
    assert set(database.manifest.prototypes) == {5, 6, 7, 8}
    with pytest.raises(BuildFailed, match="at least eight"):
        build(tiny_engine, few[:7], tmp_path / "b.db")


def test_held_out_texts_may_be_longer_than_all_records(tiny_engine, tiny_corpus, tmp_path, monkeypatch):
    long_texts = [CorpusSentence(f"{'card ' * words}bank", "long") for words in range(20, 26)]

    def split_so_that_long_texts_are_held_out(*arguments):
        sentences = split(*arguments)
        return replace(
            sentences, held_out=sentences.held_out | [len(ids) > 20 for ids in sentences.sequences]
        )

    monkeypatch.setattr(builder, "split", split_so_that_long_texts_are_held_out)
    texts = [sentence for sentence in tiny_corpus if len(sentence.text.split()) < 12]
    database = build(tiny_engine, [*texts, *long_texts], tmp_path / "a.db", min_cosine=0.5)
    assert max(database.manifest.prototypes) < 20
    engine = PrefillEngine.load(tiny_engine.checkpoint, database=database, dtype="float32")
    assert not prefill(engine, engine.tokenize([long_texts[-1].text])).outcomes[0].is_hit


def test_synthetic_records_need_prototypes(tiny_engine, tiny_corpus, tmp_path):
    with pytest.raises(InvalidInput, match="set prototypes to 1 or more") as refused:
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", prototypes=0)
    assert refused.value.field == "prototypes"
