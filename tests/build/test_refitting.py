"""Refitted weights bring hits nearer to the full model, and a database holds them under its digests."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import random_sequences

from attncache_core.build import refitting
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions
from attncache_core.build.refitting import Refitting
from attncache_core.calibration.database import calibrate_database
from attncache_core.calibration.probes import find_probes, measure
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import CorruptDatabase
from attncache_core.heads.comparator import Measure
from attncache_core.models.refitted import (
    REFITTED,
    last_products,
    read_refitted,
    refitted_layers,
    write_refitted,
)
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import Budget
from attncache_core.reuse.mask import mildest_mask
from attncache_core.reuse.storage.layout import RecordKind

pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture(scope="module")
def mask(recorded):
    return mildest_mask(recorded.rank, 8)


@pytest.fixture(scope="module")
def refit(tiny_engine, recorded):
    """Fits weights to the recorded sentences that are not held out."""
    training = recorded.sentences.of_side(held_out=False)
    return Refitting(tiny_engine, recorded.search, training, np.random.default_rng(0))


def damage(engine, recorded, mask, products, held_out):
    """Return the mean damage to sentences that the mean maps of their lengths serve."""
    sentences = [ids for ids in recorded.sentences.of_side(held_out=held_out) if len(ids) < 9]
    probes = find_probes(engine.model, recorded.search, sentences)
    model = replace(engine.model, layers=refitted_layers(engine.model, products, None)) if products else None
    comparator, kinds = engine.decisions.comparator(Measure.COSINE), (RecordKind.MEAN,)
    (found,) = measure(engine.model, recorded.store, probes, [mask], comparator, kinds=kinds, hit_model=model)
    return found[RecordKind.MEAN].damage.mean()


@pytest.mark.parametrize(("held_out", "most"), [(False, 0.5), (True, 1)])
def test_refitted_weights_halve_the_damage_to_their_sentences_and_lessen_that_to_others(
    tiny_engine, recorded, mask, refit, held_out, most
):
    plain, refitted = (
        damage(tiny_engine, recorded, mask, products, held_out) for products in (None, refit.products(mask))
    )
    assert refitted < plain * most


def test_a_mask_without_heads_leaves_the_weights_as_they_are(tiny_engine, recorded, refit):
    nothing = replace(mildest_mask(recorded.rank, 1), reused=(0, 0, 0))
    layers = tiny_engine.model.layers
    for layer, found in zip(layers, refit.products(nothing), strict=True):
        for held, product in zip(last_products(layer), found, strict=True):
            torch.testing.assert_close(product.weight, held.weight.bfloat16(), atol=0.01, rtol=0.02)
            torch.testing.assert_close(product.bias, held.bias.bfloat16(), atol=0.01, rtol=0.02)


def test_the_first_fit_is_the_ridge_regression_of_least_squares(monkeypatch, tiny_engine, mask, refit):
    """The oracle solves the same problem by least squares, with the shrinkage as further rows."""
    added = []
    add = refitting._Ridge.add
    monkeypatch.setattr(refitting._Ridge, "add", lambda self, *rows: (added.append(rows), add(self, *rows)))
    found = refit.products(mask)[0].output
    x, y = (part.double().numpy() for part in added[0])  # the batch of the first layer's output projection
    held = last_products(tiny_engine.model.layers[0]).output
    weights = np.concatenate([held.weight.double(), held.bias.double()[:, None]], axis=1).T
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    scale = np.sqrt(refitting._SHRINKAGE * np.square(x).sum(axis=0).mean())
    shrunk = np.diag([*[scale] * x.shape[1], scale * np.sqrt(1e-3)])
    solved = np.linalg.lstsq(
        np.concatenate([rows, shrunk]), np.concatenate([y, shrunk @ weights]), rcond=None
    )[0]
    np.testing.assert_allclose(found.weight.float().numpy(), solved[:-1].T, rtol=0.01, atol=0.005)
    np.testing.assert_allclose(found.bias.float().numpy(), solved[-1], rtol=0.01, atol=0.005)


def test_too_few_sentences_are_not_fitted_to(tiny_engine, recorded, mask):
    few = recorded.sentences.of_side(held_out=False)[:5]
    assert Refitting(tiny_engine, recorded.search, few, np.random.default_rng(0)).products(mask) is None


def test_weights_are_read_as_they_were_written(tmp_path, mask, refit):
    products = refit.products(mask)
    write_refitted(tmp_path, products)
    for one, other in zip(products, read_refitted(tmp_path / REFITTED), strict=True):
        for product, read in zip(one, other, strict=True):
            assert torch.equal(product.weight, read.weight)
            assert torch.equal(product.bias, read.bias)
    write_refitted(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def built(tiny_engine, tiny_corpus, tmp_path_factory):
    """A database with the operator's mask, and a budget that holds for any text."""
    folder = tmp_path_factory.mktemp("built") / "refitted.db"
    options = BuildOptions(heads="8", refit=True, min_cosine=0.0, min_text_cosine=0.0, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    return folder


def test_built_database_serves_hits_with_its_weights(built, tiny_checkpoint):
    database = AttentionDatabase.open(built)
    assert database.info().refitted
    assert REFITTED in database.manifest.files
    assert PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32").model.refitted
    assert database.verify() == []


@pytest.mark.parametrize("override", [{"heads": "5"}, {"threshold": 0.5}])
def test_an_operators_mask_or_threshold_takes_the_models_weights(built, tiny_checkpoint, override):
    database = AttentionDatabase.open(built, **override)
    assert not database.info().refitted
    assert PrefillEngine.load(tiny_checkpoint, database=database, dtype="float32").model.refitted is None


@pytest.mark.parametrize("harm", ["changed", "cut", "removed"])
def test_damaged_weights_are_refused(built, harm):
    path = built / REFITTED
    content = path.read_bytes()
    try:
        match harm:
            case "changed":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            case "cut":
                path.write_bytes(content[:-9])
            case "removed":
                path.unlink()
        with pytest.raises(CorruptDatabase, match=r"refitted\.safetensors .* build it again"):
            AttentionDatabase.open(built)
    finally:
        path.write_bytes(content)


def test_database_of_the_version_before_has_no_refitted_weights_and_is_read(tiny_database, tmp_path):
    manifest = json.loads((tiny_database / "manifest.json").read_text(encoding="utf-8"))
    folder = tmp_path / "old.db"
    folder.mkdir()
    for path in tiny_database.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 3}), encoding="utf-8")
    assert not AttentionDatabase.open(folder).info().refitted


@pytest.mark.parametrize("heads", ["8", "layers:0-1"])
def test_calibration_keeps_refitted_weights_with_their_mask_alone(
    tiny_engine, tiny_corpus, tiny_checkpoint, tmp_path, heads
):
    """Records of all heads allow a larger mask without the weights, and records of two layers do not."""
    folder = tmp_path / "refitted.db"
    options = BuildOptions(heads=heads, refit=True, min_cosine=0.0, min_text_cosine=0.0, training_steps=20)
    build_database(tiny_engine, tiny_corpus, folder, options)
    database = AttentionDatabase.open(folder)
    assert database.info().refitted
    texts = random_sequences(np.repeat(range(5, 11), 20), seed=9)
    calibrate_database(tiny_engine, database, texts, [], Budget(Measure.COSINE, 0.0))
    again = AttentionDatabase.open(folder)
    assert again.info().refitted == (heads == "layers:0-1")
    assert (folder / REFITTED).exists() == again.info().refitted
    if again.info().refitted:
        assert again.mask == database.mask
    assert again.verify() == []
    assert PrefillEngine.load(tiny_checkpoint, database=again, dtype="float32").map_reuse.database is again
