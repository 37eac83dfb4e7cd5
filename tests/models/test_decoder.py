"""Decoders: settings that are refused, warnings and memory; and class scores, of encoders too."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_models import CLS, SEP, new_objects, prefill, random_sequences, update_json, write_json
from core_reference import reference_logits
from families import CASES, DECODERS, FAMILIES, SIZES, write_family
from transformers import AutoModel, LlamaConfig
from transformers.utils import logging as transformers_logging

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput, UnsupportedModel
from attncache_core.models import load_model
from attncache_core.native.products import PackedMatrix
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.text.tokenizer import TextTokenizer

ONE_OF_EACH = [name for name in FAMILIES if name in DECODERS]


@pytest.mark.parametrize("name", [*FAMILIES, "modernbert-local-global"])
def test_class_scores_in_a_batch_are_hugging_faces(tmp_path, name):
    case = CASES[name]
    engine = PrefillEngine.load(read_checkpoint(case.written(tmp_path, ["a", "b", "c"])), dtype="float32")
    sequences = random_sequences([9, 1, 30, 9, 66])
    assert engine.checkpoint.task == "classify"
    assert engine.decisions.labels == ("a", "b", "c")
    found = torch.from_numpy(prefill(engine, sequences, reuse=False).outputs)
    expected = torch.from_numpy(case.reference.class_scores(tmp_path, sequences))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_class_is_read_at_the_last_token_that_is_no_padding_as_in_hugging_face(tmp_path):
    """A decoder's tokenizer may end each text with its padding token, because the text's end has no other."""
    config = LlamaConfig(**SIZES | {"pad_token_id": SEP})
    engine = PrefillEngine.load(
        read_checkpoint(write_family(tmp_path, config, labels=["a", "b", "c"])),
        dtype="float32",
        key_values=KeyValueOptions(2**22),
    )
    sequences = [*random_sequences([4, 17, 40]), [CLS, SEP, 9, SEP, SEP], [SEP, SEP], [SEP]]
    expected = torch.from_numpy(reference_logits(tmp_path, sequences))
    for _ in range(2):  # the second time behind stored keys and values
        found = torch.from_numpy(engine.run(engine.requests(sequences)).outputs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_sequence_that_ends_in_padding_is_refused_where_tokens_depend_on_later_ones(tmp_path):
    config = LlamaConfig(**SIZES | {"pad_token_id": SEP}, is_causal=False)
    checkpoint = read_checkpoint(write_family(tmp_path, config, labels=["a", "b", "c"]))
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    with pytest.raises(InvalidInput, match="ends in the padding token") as caught:
        engine.requests([[CLS, 9], [CLS, 9, SEP]])
    assert caught.value.field == "inputs[1]"
    with pytest.raises(InvalidInput, match="ends in the padding token") as caught:
        engine.without_padding([[CLS, 9, SEP]], 64)
    assert caught.value.field == "inputs[64]"


LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
# Their angles depend on the batch.
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
LONG |= LINEAR | {"rope_type": "longrope"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "type 'dynamic' .*served are: default, linear"),
        ("llama", {"rope_parameters": LONG}, "type 'longrope' .*served are: default, linear"),
        ("llama", {"rope_parameters": LINEAR | {"partial_rotary_factor": 2}}, "16 dimensions, and rotate 8"),
        ("llama", {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "4 dimensions, and rotate 8"),
        ("gemma3", {"rope_parameters": LINEAR}, "ignores for the family gemma3_text; write"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not served"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not served"),
        ("llama", {"is_causal": None}, "is_causal in config.json is null"),
        ("modernbert-local-global", {"head_dim": 16}, "head_dim or partial_rotary_factor"),
        ("deepseek-v3", {"head_dim": 16}, "16 dimensions, and rotate 4 of a head"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "'noaux_tc'; served are: greedy, group_limited_greedy"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types .*full_attention, and sliding"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping .* must be positive"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping .* must be positive"),
        ("mixtral", {"num_experts_per_tok": 99}, "must be 1 to 4.*is 99"),
        ("qwen3-moe-sparse-steps", {"num_experts_per_tok": 0}, "must be 1 to 4.*is 0"),
        ("deepseek-v3", {"num_experts_per_tok": None}, "num_experts_per_tok .*is None"),
        ("deepseek-v3", {"n_group": None}, "n_group and topk_group in config.json are None"),
        ("deepseek-v3", {"n_group": 3, "topk_group": 1}, "must divide the 8 routed experts"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 1}, "into groups of two or more"),
        ("deepseek-v3", {"n_group": 2, "topk_group": 3}, "topk_group must be 1 to n_group"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": None}, "n_group .* are None"),
        ("modernbert-local-global", {"local_attention": -1}, "local_attention in config.json is -1"),
        ("deberta-absolute", {"attention_head_size": 32}, "heads of a layer give 128 .* takes 32"),
        ("deberta-absolute", {"attention_head_size": 4}, "heads of a layer give 16 .* takes 32"),
    ],
    ids=str,
)
def test_settings_that_transformers_cannot_run_or_that_give_no_answers_are_refused(
    tmp_path, name, changes, words
):
    if name == "deberta-absolute":  # whose weights have the other width
        CASES[name].written(tmp_path, **changes)
    else:
        update_json(CASES[name].written(tmp_path) / "config.json", **changes)
    checkpoint = replace(read_checkpoint(tmp_path), task="label-logits" if "final" in words else "embed")
    with pytest.raises(UnsupportedModel, match=words) as refused:
        load_model(checkpoint, torch.float32)
    assert refused.value.field == "model"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek-v3", {"n_shared_experts": 0}),
        ("qwen2-moe-dense-layer", {"shared_expert_intermediate_size": 0}),
        ("bert", {"intermediate_size": 0}),
    ],
)
def test_networks_without_width_are_refused(tmp_path, name, changes):
    checkpoint = read_checkpoint(CASES[name].written(tmp_path, **changes))
    with pytest.raises(UnsupportedModel, match=r"gives the weight .* a width of 0"):
        load_model(checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("deepseek", {"topk_method": "group_limited_greedy"}),
        ("bert", {"num_experts": 8}),
        ("llama", {"num_local_experts": 4, "num_experts_per_tok": 0}),
        ("qwen3", {"n_routed_experts": 8}),
        ("nomic-bert", {"num_experts": 8, "moe_top_k": 2}),
    ],
    ids=str,
)
def test_names_that_the_family_does_not_have_are_ignored(tmp_path, name, entry):
    update_json(CASES[name].written(tmp_path) / "config.json", **entry)
    load_model(read_checkpoint(tmp_path), torch.float32)


@pytest.mark.parametrize("name", ["modernbert-local-global", "deberta-absolute", "bert", "llama"])
def test_what_config_json_says_about_attention_code_and_absent_types_changes_nothing(tmp_path, name):
    folder, sequences = CASES[name].written(tmp_path), random_sequences([3, 9])
    expected = prefill(PrefillEngine.load(read_checkpoint(folder), dtype="float32"), sequences).outputs
    path = folder / "config.json"
    written = json.loads(path.read_bytes())
    for option in ("attn_implementation", "_attn_implementation"):
        changes = {option: "flash_attention_2"}
        if name in ("modernbert-local-global", "llama"):
            changes["type_vocab_size"] = None
        write_json(path, written | changes)
        found = prefill(PrefillEngine.load(read_checkpoint(folder), dtype="float32"), sequences).outputs
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        (None, {"intermediate_size": 65}, r"layers\.0\.mlp\.down_proj\.weight of .* by config\.json$"),
        (["a", "b", "c"], {"id2label": {"0": "a", "1": "b"}}, r"score\.weight .* name all classes"),
    ],
)
def test_weights_of_another_shape_than_the_configuration_says_are_named(tmp_path, labels, changes, message):
    folder = write_family(tmp_path, LlamaConfig(**SIZES), labels=labels)
    update_json(folder / "config.json", label2id=None, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(read_checkpoint(folder), torch.float32)


def test_code_that_a_model_names_is_not_run_and_the_log_says_so(tmp_path, caplog):
    checkpoint = read_checkpoint(write_family(tmp_path, LlamaConfig(**SIZES)))
    load_model(
        replace(checkpoint, config=checkpoint.config | {"auto_map": {"AutoModel": "m.M"}}), torch.float32
    )
    assert "names code of its own (auto_map), which is not run" in caplog.text


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_decoder_is_loaded_without_warnings(tmp_path, caplog, capfd, monkeypatch, name):
    """transformers would warn about the unused head and about unusual scaling of the angles."""
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    checkpoint = read_checkpoint(DECODERS[name].written(tmp_path))
    capfd.readouterr()
    caplog.clear()
    # transformers issues these warnings once per process, and writing the model may have issued them.
    transformers_logging.warning_once.cache_clear()
    load_model(checkpoint, torch.float32)
    TextTokenizer(checkpoint)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "reused"),
    [
        ("gemma2", (4, 4, 4)),
        ("qwen2-moe-dense-layer", (0, 0, 0)),
        ("deepseek-v3-query-latent-interleaved-yarn", (1, 2, 3)),
        ("deepseek", (1, 2, 3)),
    ],
)
def test_each_weight_is_in_memory_once(tmp_path, name, reused):
    checkpoint = read_checkpoint(DECODERS[name].written(tmp_path))
    needed = sum(weight.numel() for weight in AutoModel.from_pretrained(tmp_path).state_dict().values())
    with new_objects() as living:
        model = load_model(checkpoint, torch.float32, reused_heads=reused)
        held = {address_of(tensor): tensor.numel() for tensor in living(torch.Tensor)}
        padding = sum(map(padding_of, living(PackedMatrix)))
    assert len(model.layers) == 3
    # Beside the weights, a model holds only indices and frequencies.
    assert needed <= sum(held.values()) - padding <= 1.02 * needed


def padding_of(matrix):
    """Return how many numbers a packed matrix has beyond its weight and bias, up to whole panels."""
    bias = 0 if matrix._bias is None else matrix._bias.numel() - matrix.outputs
    return matrix._weights.numel() - matrix.outputs * matrix.inputs + bias


def address_of(tensor):
    """Return the address of a tensor's memory. A packed tensor has none, and shares memory with no other."""
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
