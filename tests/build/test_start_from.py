"""Training that goes on from the projector of an existing database."""

import numpy as np
import pytest
import torch
from core_models import random_text

from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.corpus import CorpusSentence
from attncache_core.errors import DatabaseRefused, InvalidInput
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.projector import FeatureProjector

pytestmark = pytest.mark.usefixtures("fixed_costs")


def build(engine, corpus, folder, progress=lambda *_: None, *, start_from=None, **options):
    defaults = {"training_steps": 40, "prototypes": 4, "heads": "6", "min_text_cosine": 0.0}
    build_database(
        engine, corpus, folder, BuildOptions(**{**defaults, **options}), progress, start_from=start_from
    )
    return AttentionDatabase.open(folder)


@pytest.fixture(scope="module")
def before(tiny_engine, tiny_corpus, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    """A database of the texts of up to seven words."""
    short = [sentence for sentence in tiny_corpus if len(sentence.text.split()) < 8]
    return build(tiny_engine, short, tmp_path_factory.mktemp("before") / "a.db")


@pytest.fixture(scope="module")
def new_corpus():
    random = np.random.default_rng(8)
    texts = [random_text(random, words) for words in np.repeat(np.arange(3, 9), 40)]
    return [CorpusSentence(text, text) for text in texts]


@pytest.fixture(scope="module")
def after(tiny_engine, new_corpus, before, tmp_path_factory, fixed_costs):  # noqa: ARG001 - sets the measured costs
    """A database of new texts, whose projector goes on from the one of `before`, and its training steps."""
    steps = []

    def progress(stage, _, total):
        if stage == "training the projector":
            steps.append(total)

    folder = tmp_path_factory.mktemp("after") / "a.db"
    return build(tiny_engine, new_corpus, folder, progress, start_from=before), steps


def weights(database: AttentionDatabase) -> torch.Tensor:
    return database.search.projector.token.weight


def test_training_takes_a_quarter_of_the_steps_and_begins_with_the_weights_of_the_other(
    tiny_engine, new_corpus, before, after, tmp_path
):
    database, steps = after
    assert steps == [10] * 10
    assert database.manifest.build["start_from"] == before.manifest.id
    anew = build(tiny_engine, new_corpus, tmp_path / "a.db", training_steps=10, seed=1)
    assert anew.manifest.build["start_from"] is None
    assert 0 < (weights(database) - weights(before)).norm() < (weights(anew) - weights(before)).norm() / 5
    # The report has the distances of both projectors.
    distances = database.manifest.quality["map_distance"]
    assert distances["best"] <= min(distances["chosen"], distances["chosen_before"])
    assert distances["chosen"] != distances["chosen_before"]


def test_extended_projector_has_the_same_features_and_takes_longer_sequences():
    torch.manual_seed(0)
    projector = FeatureProjector(8, 4, 16)
    extended, inputs = projector.extended(6), torch.randn(3, 6, 8)
    assert torch.equal(extended(inputs[:, :4]), projector(inputs[:, :4]))
    assert torch.equal(extended.position[4:], projector.position[[3, 3]])
    assert extended(inputs).isfinite().all()
    assert torch.equal(projector.extended(2)(inputs[:, :2]), projector(inputs[:, :2]))


def test_projector_of_another_model_or_with_other_dimensions_is_refused(
    tiny_engine, tiny_corpus, before, tmp_path, monkeypatch
):
    with pytest.raises(InvalidInput, match="set dimensions to 128") as refused:
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", start_from=before, dimensions=64)
    assert refused.value.field == "dimensions"
    monkeypatch.setattr(type(tiny_engine.checkpoint), "fingerprint", lambda _: "0" * 64)
    with pytest.raises(DatabaseRefused, match="was built for"):
        build(tiny_engine, tiny_corpus, tmp_path / "a.db", start_from=before)
