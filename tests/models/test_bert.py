"""A packed BERT model equals Hugging Face's, for any order of heads and any number of reused heads."""

import re

import pytest
import torch
from core_models import last_hidden, random_sequences, write_json, write_model
from core_reference import FLOAT32
from family_reference import FamilyReference
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, BertModel

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import UnsupportedModel
from attncache_core.models import load_model, model_shape


def assert_is_reference(model, reference, sequences):
    for found, ids in zip(last_hidden(model, sequences), sequences, strict=True):
        torch.testing.assert_close(found, reference.hidden(ids), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_model_has_the_activation_of_its_checkpoint(tmp_path, activation):
    folder = write_model(tmp_path, hidden_act=activation)
    model = load_model(read_checkpoint(folder), torch.float32)
    assert_is_reference(model, FamilyReference(folder), random_sequences([3, 12, 30]))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_attention_heads": 1},
        {"num_attention_heads": 8},
        {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 100},
        {"layer_norm_eps": 0.5},
    ],
    ids=str,
)
def test_sizes_are_read_from_the_checkpoint(tmp_path, changes):
    folder = write_model(tmp_path, **changes)
    checkpoint = read_checkpoint(folder)
    model = load_model(checkpoint, torch.float32)
    assert model_shape(checkpoint) == (len(model.layers), model.layers[0].heads)
    assert_is_reference(model, FamilyReference(folder), random_sequences([2, 9, 33]))


def without_weights(folder, part):
    """Remove the weights with `part` in their name from the folder's file, and return the checkpoint."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, path, metadata={"format": "pt"})
    return read_checkpoint(folder)


def test_embedding_model_needs_no_pooler(tmp_path):
    folder = write_model(tmp_path)
    model = load_model(without_weights(folder, "pooler."), torch.float32)
    assert_is_reference(model, FamilyReference(folder), random_sequences([4, 9]))


def in_shards(folder):
    BertModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def with_a_head(folder):
    BertForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    assert "bert.embeddings.LayerNorm.weight" in load_file(folder / "model.safetensors")


def as_tensorflow_named_them(folder):
    path = folder / "model.safetensors"
    former = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {
        re.sub(r"LayerNorm\.\w+", lambda name: former[name[0]], name): weight
        for name, weight in load_file(path).items()
    }
    assert "embeddings.LayerNorm.gamma" in weights
    save_file(weights, path, metadata={"format": "pt"})


def in_half_precision(folder):
    BertModel.from_pretrained(folder, dtype=torch.float16).save_pretrained(folder)


@pytest.mark.parametrize("saved", [in_shards, with_a_head, as_tensorflow_named_them, in_half_precision])
def test_weights_are_read_in_every_form_in_which_checkpoints_have_them(tmp_path, saved):
    folder = write_model(tmp_path)
    saved(folder)
    model = load_model(read_checkpoint(folder), torch.float32)
    assert_is_reference(model, FamilyReference(folder), random_sequences([3, 12, 30]))


def test_weights_of_another_shape_than_the_configuration_says_are_refused_with_a_name(tmp_path):
    folder = write_model(tmp_path)
    config = read_checkpoint(folder).config
    write_json(folder / "config.json", config | {"intermediate_size": config["intermediate_size"] + 1})
    with pytest.raises(
        UnsupportedModel, match=r"layer\.0\.intermediate\.dense\.bias .* has the shape \[\d+\]"
    ):
        load_model(read_checkpoint(folder), torch.float32)


def test_weights_that_transformers_would_read_otherwise_are_refused(tmp_path):
    folder = write_model(tmp_path, labels=["a", "b"])
    path, name = folder / "model.safetensors", "bert.encoder.layer.0.output.dense.weight"
    weights = load_file(path)
    for changed, message in (
        ({name.removeprefix("bert."): weights[name] + 1}, "under two names"),
        ({name: weights[name].to(torch.int8)}, "has the type torch.int8"),
        ({"classifier.weight": torch.ones(3, 32)}, "name all classes in id2label"),
    ):
        save_file(weights | changed, path, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=message):
            load_model(read_checkpoint(folder), torch.float32)


@pytest.mark.parametrize("file", ["../other.safetensors", "/other.safetensors", "weights.st"])
def test_an_index_that_names_other_files_is_refused(tmp_path, file):
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"embeddings.x": file}})
    with pytest.raises(UnsupportedModel, match=r"names '.*', and weights are read only from"):
        read_checkpoint(folder).weight_files()


def test_weights_in_a_folder_of_their_own_are_in_the_fingerprint(tmp_path):
    folder = write_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "shards").mkdir()
    write_json(
        folder / "model.safetensors.index.json",
        {"weight_map": dict.fromkeys(weights, "shards/a.safetensors")},
    )
    fingerprints = set()
    for factor in (1, 2):
        changed = {name: weight * factor for name, weight in weights.items()}
        save_file(changed, folder / "shards" / "a.safetensors", metadata={"format": "pt"})
        fingerprints.add(read_checkpoint(folder).fingerprint())
        load_model(read_checkpoint(folder), torch.float32)
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("labels", "part"),
    [(None, "layer.1.attention.self.query"), (["a", "b"], "classifier."), (["a"], "pooler.")],
)
def test_model_without_all_its_weights_is_refused_with_the_first_name(tmp_path, labels, part):
    checkpoint = without_weights(write_model(tmp_path, labels=labels), part)
    with pytest.raises(UnsupportedModel, match=rf"has no weights for \S*{part}"):
        load_model(checkpoint, torch.float32)


OTHER_FAMILY = r"other-model is of the family .*; served are: .*\bbert\b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "sparrow"}, OTHER_FAMILY),
        ({"model_type": None}, OTHER_FAMILY),
        ({"model_type": ["bert"]}, OTHER_FAMILY),
        ({"is_decoder": True}, r"other-model is an encoder that was trained to decode \(is_decoder in"),
        ({"is_causal": True}, r"other-model is an encoder that was trained to decode \(is_causal in"),
    ],
    ids=str,
)
def test_other_families_and_encoders_that_decode_are_refused_with_the_reason(
    tmp_path, tiny_checkpoint, change, message
):
    folder = write_model(tmp_path / "other-model")
    write_json(folder / "config.json", tiny_checkpoint.config | change)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        load_model(read_checkpoint(folder), torch.float32)
    assert caught.value.field == "model"
