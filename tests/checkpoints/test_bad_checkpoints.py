"""A model folder with wrong content ends a command with exit code 2 and one line that says what is wrong."""

import json
import logging
import shutil

import pytest
import torch
from command_line import assert_one_line, run
from core_decoders import write_llama
from core_models import update_json, write_json, write_model
from families import write_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, DeepseekV3Config

from attncache_core import PrefillEngine
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import UnsupportedModel
from attncache_core.models import load_model, model_shape


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(sound, tmp_path):
    """A copy of a correct model, for a test to damage."""
    return shutil.copytree(sound, tmp_path / "spoilt")


def configured(folder, config):
    """Add these entries to config.json and return the folder."""
    update_json(folder / "config.json", **config)
    return folder


def weighted(folder, more):
    """Add these weights to the folder's weights and return the folder."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    return folder


def built(folder, *options):
    texts = folder / "texts.txt"
    texts.write_text("my card is lost\n", encoding="utf-8")
    return run("build", "--model", folder, "--corpus", texts, "--database", folder / "a.db", *options)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": "eight"}, ("num_hidden_layers 'eight'", "weights of 3 layers")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers 0", "weights of 3 layers")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers -1", "weights of 3 layers")),
        ({"num_hidden_layers": 2}, ("num_hidden_layers 2", "weights of 3 layers")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers 1000000000", "weights of 3 layers")),
        ({"num_attention_heads": 0}, ("num_attention_heads 0",)),
        ({"num_attention_heads": 7}, ("weights of model", "cannot be read", "attention heads")),
        ({"num_attention_heads": "x"}, ("config.json of model", "cannot be read", "num_attention_heads")),
        ({"max_position_embeddings": "x"}, ("config.json of model", "cannot be read", "max_position")),
        ({"model_type": ["llama"]}, ("is of the family ['llama']",)),
        ({"architectures": 5}, ("architectures in config.json of model", "a list of names")),
        ({"architectures": "BertForSequenceClassification"}, ("architectures", "a list of names")),
        ({"model_type": "roberta", "pad_token_id": None}, ("pad_token_id in config.json of model",)),
        ({"model_type": "roberta", "pad_token_id": 9999}, ("leaves no position for a token", "9999")),
    ],
    ids=str,
)
def test_impossible_configuration_is_refused_in_one_line(folder, config, words):
    assert_one_line(built(configured(folder, config)), "spoilt", *words)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, ("spoilt has no tokenizer.json",)),
        ("config.json", "[]", ("config.json is not a JSON object",)),
        ("modules.json", "[5]", ("JSON file of model folder", "cannot be read")),
        ("tokenizer.json", "no JSON", ("the tokenizer of model", "cannot be read")),
        ("tokenizer.json", "{}", ("the tokenizer of model", "cannot be read")),
        ("model.safetensors", "", ("the weights of model", "cannot be read")),
        ("model.safetensors", "no weights", ("the weights of model", "cannot be read")),
        ("model.safetensors", "\0" * 100, ("the weights of model", "cannot be read")),
    ],
)
def test_file_with_wrong_content_is_refused_in_one_line(folder, file, content, words):
    if content is None:
        (folder / file).unlink()
        (folder / "tokenizer_config.json").unlink()
    else:
        (folder / file).write_text(content, encoding="utf-8")
    assert_one_line(built(folder), "spoilt", *words)


@pytest.mark.parametrize("option", ["--drop-attention", "--drop-block"])
@pytest.mark.parametrize("layers", ["9" * 5000, "9" * 5000 + "-2", "1-" + "9" * 5000])
def test_layers_of_thousands_of_digits_are_refused_in_one_line(folder, option, layers):
    assert_one_line(built(folder, option, layers), option[2:].replace("-", "_"))


def test_model_with_the_default_number_of_layers_of_its_family_is_not_cut_short_either(tmp_path):
    folder = write_model(tmp_path, num_hidden_layers=13)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["num_hidden_layers"]
    write_json(path, config)
    assert BertConfig().num_hidden_layers == 12
    with pytest.raises(UnsupportedModel, match=r"has weights for \S*layer\.12\."):
        load_model(read_checkpoint(folder), torch.float32)


@pytest.mark.parametrize(
    "name", ["encoder.layer.1.attention.self.distance_embedding.weight", "layers.7.a.weight"]
)
def test_surplus_weights_of_layers_are_refused(folder, name):
    with pytest.raises(UnsupportedModel, match="has weights"):
        load_model(read_checkpoint(weighted(folder, {name: torch.ones(2)})), torch.float32)


def test_surplus_weights_beside_the_layers_do_not_matter_and_are_logged(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    more = {"embeddings.position_ids": torch.arange(512)[None], "linear.weight": torch.ones(2, 2)}
    more |= {f"cls.{name}.bias": torch.ones(2) for name in "abcde"}
    model_shape(read_checkpoint(weighted(folder, more)))
    load_model(read_checkpoint(folder), torch.float32)
    unused = "cls.a, cls.b, cls.c, cls.d, cls.e and 1 more"
    assert caplog.messages == [f"model spoilt does not use the weights of {unused}"]
    llama = write_llama(tmp_path / "llama")
    angles = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load_model(read_checkpoint(weighted(llama, angles)), torch.float32)
    assert caplog.messages[1:] == ["model llama does not use the weights of lm_head"]


def test_integer_weights_are_refused_by_name_unless_they_are_not_read(tmp_path):
    folder, name = write_llama(tmp_path), "model.layers.0.mlp.up_proj.weight"
    load_model(read_checkpoint(weighted(folder, {"model.position_ids": torch.arange(9)})), torch.float32)
    weighted(folder, {name: torch.ones(64, 32, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=rf"{name} .* has the type I8, .* before they were quantised"):
        load_model(read_checkpoint(folder), torch.float32)


def test_layers_for_predicting_further_tokens_are_left_out(tmp_path):
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    latent = {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    config = DeepseekV3Config(**sizes, **latent, intermediate_size=48, first_k_dense_replace=2)
    folder = configured(
        write_family(tmp_path, config, saved_as=AutoModelForCausalLM), {"num_nextn_predict_layers": 1}
    )
    alone = PrefillEngine.load(read_checkpoint(folder), dtype="float32").embed(["my card"])
    weighted(folder, {"model.layers.2.eh_proj.weight": torch.ones(32, 64)})
    beside = PrefillEngine.load(read_checkpoint(folder), dtype="float32").embed(["my card"])
    assert (alone == beside).all()
    weighted(folder, {"model.layers.3.eh_proj.weight": torch.ones(32, 64)})
    with pytest.raises(UnsupportedModel, match="num_hidden_layers 2, and it has weights of 4 layers"):
        model_shape(read_checkpoint(folder))
