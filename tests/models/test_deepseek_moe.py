"""DeepSeek-MoE as published: its files, blocks of experts and heads, and options that are refused."""

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from core_decoders import VOCABULARY_SIZE, write_decoder_tokenizer
from core_models import prefill, random_sequences, update_json, write_json
from families import DECODERS
from plain_deepseek import PlainDeepseek
from safetensors.torch import save_file
from tokenizers import Tokenizer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import UnsupportedModel
from attncache_core.models import load_model, model_shape
from attncache_core.models.linear import PackedLinear

HIDDEN, DENSE, EXPERT, EXPERTS, SHARED, CHOSEN, LAYERS = 32, 48, 12, 8, 2, 3, 3

# The config.json of deepseek-ai/deepseek-moe-16b-base, with smaller sizes.
PUBLISHED = (
    {"architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0}
    | {
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekConfig",
            "AutoModel": "modeling_deepseek.DeepseekModel",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
        }
    }
    | {"aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1}
    | {"hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": DENSE}
    | {"max_position_embeddings": 512, "model_type": "deepseek", "moe_intermediate_size": EXPERT}
    | {"moe_layer_freq": 1, "n_routed_experts": EXPERTS, "n_shared_experts": SHARED, "norm_topk_prob": False}
    | {"num_attention_heads": 4, "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS}
    | {"num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None}
    | {"rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False}
    | {"torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True}
    | {"vocab_size": VOCABULARY_SIZE}
)


def published_shapes():
    """Return the names and shapes of the published tensors."""
    shapes = {"model.embed_tokens": (VOCABULARY_SIZE, HIDDEN), "lm_head": (VOCABULARY_SIZE, HIDDEN)}
    shapes["model.norm"] = (HIDDEN,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
        networks = {f"{name}.mlp": DENSE}
        if layer >= PUBLISHED["first_k_dense_replace"]:
            shapes[f"{name}.mlp.gate"] = (EXPERTS, HIDDEN)
            networks = {f"{name}.mlp.experts.{number}": EXPERT for number in range(EXPERTS)}
            networks[f"{name}.mlp.shared_experts"] = SHARED * EXPERT
        for network, width in networks.items():
            shapes |= {f"{network}.{part}_proj": (width, HIDDEN) for part in ("gate", "up")}
            shapes[f"{network}.down_proj"] = (HIDDEN, width)
    return {f"{name}.weight": shape for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder like the published one, with Python code that must not run."""
    folder = tmp_path_factory.mktemp("deepseek-moe")
    torch.manual_seed(0)
    weights = {
        name: torch.randn(shape) * (0.25 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in published_shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_decoder_tokenizer(folder)
    update_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    write_json(folder / "config.json", PUBLISHED)
    for file in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / file).write_text("raise SystemExit('code of the checkpoint was run')")
    return folder


def test_published_files_are_served_without_running_their_code_and_without_warnings(
    published, monkeypatch, caplog, capfd
):
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    engine = PrefillEngine.load(read_checkpoint(published), dtype="float32")
    sequences = engine.tokenize(["my card is lost", "bank", "where is my money today"])
    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    assert sequences[0] == tokenizer.encode("my card is lost").ids
    plain = PlainDeepseek(published)
    expected = [plain.hidden(ids).mean(dim=0).numpy() for ids in sequences]
    np.testing.assert_allclose(prefill(engine, sequences, reuse=False).outputs, expected, atol=1e-5)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


def test_a_program_that_never_heard_of_the_family_serves_it(published):
    # This process knows the family: the tests import its configuration.
    program = (
        "import sys; from attncache_core import PrefillEngine, find_checkpoint\n"
        "print(PrefillEngine.load(find_checkpoint(sys.argv[1])).embed(['bank']).shape)"
    )
    shown = subprocess.check_output([sys.executable, "-c", program, published], text=True)
    assert shown == f"(1, {HIDDEN})\n"


def test_every_published_tensor_is_needed(published, tmp_path):
    write_json(tmp_path / "config.json", PUBLISHED)
    plain = PlainDeepseek(published)
    for name in ("model.layers.2.mlp.experts.7.down_proj", "model.layers.1.mlp.gate", "model.norm"):
        rest = {other: tensor for other, tensor in plain.weights.items() if other != f"{name}.weight"}
        save_file(rest, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=f"no weights for .*{name.removeprefix('model.')}"):
            load_model(read_checkpoint(tmp_path), torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_labels_have_the_logits_of_their_tokens(published, tmp_path, tied):
    write_decoder_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", PUBLISHED | {"tie_word_embeddings": tied})
    weights = PlainDeepseek(published).weights
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    labels = ("bank", "card", "lost")
    checkpoint = read_checkpoint(tmp_path).adapted(label_logits=True, labels=labels)
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    asked = engine.decisions.labels_in(None, labels)
    assert asked.one_token_each
    sequences = engine.tokenize(["my money is", "where is the"], prompt=asked.prompt)
    result = prefill(
        engine, sequences, reuse=False, plans=[asked.prompt.sequence_plan(index) for index in range(2)]
    )
    found = engine.decisions.label_logits(asked, result.outputs, result.log_probabilities)
    plain = PlainDeepseek(tmp_path)
    tokens = [tokens[0] for tokens in asked.tokens]
    expected = np.stack([plain.token_logits(ids)[-1, tokens].numpy() for ids in sequences])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_expert_runs_once_for_all_tokens_routed_to_it(published, monkeypatch):
    layer = load_model(read_checkpoint(published), torch.float32).layers[1]
    products = []

    def multiplied(self, x, residual=None):
        products.append((len(x), self.inputs, self.outputs))
        return multiply(self, x, residual)

    multiply = PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", multiplied)
    tokens = 50
    layer.feed_forward(torch.randn(tokens, HIDDEN))
    for shape in ((HIDDEN, EXPERT), (EXPERT, HIDDEN)):
        sent = [rows for rows, *sizes in products if tuple(sizes) == shape]
        networks = 2 if shape == (HIDDEN, EXPERT) else 1  # gate and up, or down
        assert sum(sent) == networks * tokens * CHOSEN
        assert 0 < len(sent) <= networks * EXPERTS
    assert products.count((tokens, HIDDEN, SHARED * EXPERT)) == 2
    assert products.count((tokens, SHARED * EXPERT, HIDDEN)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "'sigmoid' .scoring_func in config.json.*served is: softmax"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok in config.json must be 1 to 8.*is 9"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok in config.json must be 1 to 8.*is None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*served are: default, linear"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(published, tmp_path, changes, message):
    write_json(tmp_path / "config.json", PUBLISHED | changes)
    (tmp_path / "model.safetensors").write_bytes((published / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModel, match=message) as refused:
        load_model(read_checkpoint(tmp_path), torch.float32)
    assert refused.value.field == "model"


def test_a_model_without_experts_is_dense(tmp_path):
    checkpoint = read_checkpoint(DECODERS["deepseek"].written(tmp_path, n_routed_experts=None))
    assert model_shape(checkpoint) == (3, 4)
    plain, sequences = PlainDeepseek(tmp_path), random_sequences([5, 9])
    assert not any("experts" in name for name in plain.weights)
    found = prefill(PrefillEngine.load(checkpoint, dtype="float32"), sequences, reuse=False).outputs
    expected = [plain.hidden(ids).mean(dim=0).numpy() for ids in sequences]
    np.testing.assert_allclose(found, expected, atol=1e-4)
