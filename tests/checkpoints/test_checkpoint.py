"""Reading a model folder: its description, what is refused, and the fingerprint of what decides its maps."""

import hashlib
import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
from core_models import (
    VOCABULARY,
    flip,
    list_modules,
    update_json,
    write_json,
    write_model,
    write_sentence_transformer,
    write_tokenizer,
)
from core_reference import FLOAT32
from embedding_models import write_dense
from sentence_transformers import SentenceTransformer
from transformers import AutoModel
from transformers.utils import logging

from attncache_core.checkpoints import checkpoint as checkpoint_module
from attncache_core.checkpoints import hugging_face
from attncache_core.checkpoints.checkpoint import Checkpoint, Pooling, Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import UnsupportedModel
from attncache_core.text.tokenizer import TextTokenizer


@pytest.fixture
def copied(tiny_checkpoint, tmp_path):
    """A copy of the tiny model's folder, for a test to change."""
    return shutil.copytree(tiny_checkpoint.folder, tmp_path / "copy")


def test_sentence_transformers_folder_is_described_completely(tmp_path):
    folder = write_sentence_transformer(
        tmp_path / "a-model",
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": False},
        settings={"max_seq_length": 40, "do_lower_case": True},
        prompts={"prompts": {"ask": "query: ", "none": ""}, "default_prompt_name": "ask"},
    )
    checkpoint = read_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert checkpoint == Checkpoint(
        name="a-model",
        folder=folder,
        source="folder",
        config=config,
        task="embed",
        pooling=Pooling(("cls",), include_prompt=False),
        normalize=True,
        max_tokens=40,
        lowercase=True,
        template=Template(prefix="query: "),
        prompts={"ask": "query: ", "none": ""},
        default_prompt="ask",
    )


def test_plain_encoder_has_mean_pooling_and_is_normalised(tmp_path, tiny_classifier_checkpoint):
    checkpoint = read_checkpoint(write_model(tmp_path))
    assert (checkpoint.task, checkpoint.pooling, checkpoint.normalize) == ("embed", Pooling(("mean",)), True)
    assert (checkpoint.max_tokens, checkpoint.template, checkpoint.prompts) == (None, Template(), {})
    assert tiny_classifier_checkpoint.task == "classify"


def test_less_usual_modules_prompts_and_settings_are_read(tmp_path):
    # The settings of calls name the longest text, a prompt that is null is empty, and nothing normalises.
    calls = {"processing_kwargs": {"text": {"max_length": 9, "truncation": True, "padding": True}}}
    folder = write_sentence_transformer(
        tmp_path,
        settings={"max_seq_length": 12.0, **calls},
        prompts={"prompts": {"document": None}},
        normalize=False,
    )
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.max_tokens, checkpoint.prompts) == (9, {"document": ""})
    assert checkpoint.normalize is False


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["max", "cls"]}, ("max", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_cls_token": False}, ("mean",)),
    ],
)
def test_pooling_is_read_from_new_names_and_from_old_flags(copied, config, modes):
    write_json(copied / "1_Pooling/config.json", config)
    assert read_checkpoint(copied).pooling == Pooling(modes)


def test_transformer_in_a_subfolder_is_found_there(tiny_checkpoint, copied):
    inner = copied / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (copied / name).rename(inner / name)
    modules = json.loads((copied / "modules.json").read_text(encoding="utf-8"))
    modules[0]["path"] = "0_Transformer"
    write_json(copied / "modules.json", modules)
    checkpoint = read_checkpoint(copied)
    assert checkpoint.folder == inner
    assert checkpoint.name == "copy"
    assert checkpoint.fingerprint() == tiny_checkpoint.fingerprint()
    # The modules decide what is computed, and not the class of the model.
    update_json(inner / "config.json", architectures=["BertForSequenceClassification"])
    assert read_checkpoint(copied).task == "embed"


SETTINGS, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
USUAL_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


def usual_outputs(named="token_embeddings", **modalities):
    """The settings of a Transformer module, as sentence-transformers 6 writes them, with changes."""
    return {"modality_config": {"text": USUAL_TEXT} | modalities, "module_output_name": named}


def modules(**paths):
    """A list of modules of sentence-transformers, each with its folder."""
    return [
        {"type": f"sentence_transformers.models.{kind.rstrip('_')}", "path": path}
        for kind, path in paths.items()
    ]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "config.json cannot be read as JSON"),
        ("config.json", b"\xff\xfe", "config.json cannot be read as JSON"),
        ("model.safetensors", None, "no model.safetensors; other weight formats are not read"),
        ("1_Pooling/config.json", None, "1_Pooling has no config.json"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling median of .* is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "config.json names no pooling_mode; name one"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "d"}], "Dense"),
        ("modules.json", [], "lists no module; list its modules, or remove the file"),
        ("modules.json", modules(Transformer=""), "has no Pooling"),
        ("modules.json", modules(Pooling="1_Pooling"), "in the order Pooling; supported are Transformer"),
        ("modules.json", modules(Transformer="", LogitScore="1", Dense="2"), "in the order .*, Dense; "),
        (
            "modules.json",
            modules(Transformer="", Pooling="1_Pooling", Pooling_="1_Pooling"),
            "only Dense more",
        ),
        (
            "modules.json",
            [{"type": "custom_st.Transformer", "path": ""}, {"type": "my.Pooling", "path": "1_Pooling"}],
            "not supported: custom_st.Transformer, my.Pooling",
        ),
        ("adapter_config.json", {}, "merge the adapter into the weights"),
        (
            PROMPTS,
            {"prompts": {"a": "b"}, "default_prompt_name": "c"},
            "default prompt .* not among its prompts",
        ),
        (PROMPTS, {"prompts": {"a": 7}}, "a prompt that is no string"),
        (PROMPTS, {"model_type": "SparseEncoder"}, "is a SparseEncoder of"),
        (SETTINGS, {"config_args": {"num_hidden_layers": 1}}, "config_args .* supported: num_hidden_layers"),
        (SETTINGS, {"processor_kwargs": {"truncation_side": "left"}}, "kwargs .* supported: truncation_side"),
        (SETTINGS, {"transformer_task": "fill-mask"}, "transformer_task fill-mask"),
        (
            SETTINGS,
            {"processing_kwargs": {"text": {"truncation": True, "add_special_tokens": False}}},
            "not supported: add_special_tokens; remove",
        ),
        (
            SETTINGS,
            {"processing_kwargs": {"text": {"truncation": True}, "common": {"truncation": False}}},
            "not supported: truncation; remove",
        ),
        (SETTINGS, {"processor_kwargs": {"model_max_length": None}}, "model_max_length .* a whole number"),
        (SETTINGS, {"newer": False, "max_seq_length": 8}, "not supported: newer; remove"),
        (SETTINGS, {"query_length": 8}, "not supported: query_length"),
        (SETTINGS, {"tokenizer_name_or_path": "other"}, "not supported: tokenizer_name_or_path"),
        *((SETTINGS, {"max_seq_length": no}, "max_seq_length .* a whole number") for no in ("64", 0, True)),
        (SETTINGS, usual_outputs(message=USUAL_TEXT), "into the tokenizer's chat template"),
        (
            SETTINGS,
            usual_outputs(text=USUAL_TEXT | {"method_output_name": ["hidden_states", -2]}),
            "supported are last_hidden_state of forward as token_embeddings",
        ),
        (SETTINGS, usual_outputs(named="sentence_embedding"), "take other outputs"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "not a plain one on pooled"),
        ("2_Normalize/config.json", {"use_residual": True}, "not a plain one on pooled"),
    ],
)
def test_folder_that_cannot_be_served_is_refused_in_one_line(copied, file, content, message):
    if content is None:
        (copied / file).unlink()
    else:
        (copied / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UnsupportedModel, match=message) as caught:
        read_checkpoint(copied)
    assert "\n" not in str(caught.value)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "file",
    [
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"),
        *("1_Pooling/config.json", "3_Dense/model.safetensors"),
    ],
)
def test_folder_that_was_cloned_without_lfs_is_refused_with_the_remedy(copied, file):
    write_dense(copied / "3_Dense", 32, 8)
    list_modules(copied, ["1_Pooling", "3_Dense", "2_Normalize"])
    (copied / "model.fp16.safetensors").write_bytes(LFS_POINTER)  # which nothing reads
    PrefillEngine.load(read_checkpoint(copied))
    (copied / file).write_bytes(LFS_POINTER)
    with pytest.raises(UnsupportedModel, match=rf"{file} is only a pointer of Git LFS .* git lfs pull"):
        PrefillEngine.load(read_checkpoint(copied))


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_seq_length": 9.0, "config_args": {"trust_remote_code": True}},
        {"tokenizer_args": {"model_max_length": 9}, "processor_kwargs": {"model_max_length": 5}},
        {"processor_kwargs": {"model_max_length": 9}},
    ],
)
def test_settings_are_read_under_the_names_of_sentence_transformers(copied, family, settings):
    (copied / "sentence_bert_config.json").unlink()
    write_json(copied / f"sentence_{family}_config.json", settings)
    assert read_checkpoint(copied).max_tokens == SentenceTransformer(str(copied)).max_seq_length == 9


def test_settings_and_prompts_of_a_folder_without_modules_are_not_read_as_in_sentence_transformers(tmp_path):
    folder = write_model(tmp_path / "plain")
    write_json(folder / SETTINGS, {"max_seq_length": 8, "do_lower_case": True})
    write_json(folder / PROMPTS, {"prompts": {"ask": "query: "}, "default_prompt_name": "ask"})
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.max_tokens, checkpoint.lowercase, checkpoint.prompts) == (None, False, {})
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length > 8
    expected = theirs.encode(["my card"], normalize_embeddings=True)
    found = PrefillEngine.load(checkpoint, dtype="float32").embed(["my card"])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_cross_encoder_with_a_prompt_for_queries_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", labels=["relevance"])
    described = {"model_type": "CrossEncoder", "prompts": {"ask": "query: "}, "default_prompt_name": "ask"}
    write_json(folder / PROMPTS, described)
    write_json(folder / "modules.json", modules(Transformer=""))
    checkpoint = read_checkpoint(folder)
    with pytest.raises(UnsupportedModel, match=r"default prompt .* for the first text of a pair"):
        PrefillEngine.load(checkpoint, dtype="float32")
    of_pairs = PrefillEngine.load(
        checkpoint.adapted(template=Template("ask: ", "", " about ")), dtype="float32"
    )
    assert of_pairs.rerank("a", ["b"]).shape == (1,)


@pytest.mark.parametrize("limit", ["64", 0, -1, True])
def test_limit_of_the_tokenizer_that_is_no_number_of_tokens_is_refused(tmp_path, limit):
    folder = write_model(tmp_path / "model")
    update_json(folder / "tokenizer_config.json", model_max_length=limit)
    with pytest.raises(UnsupportedModel, match=r"model_max_length in tokenizer_config\.json"):
        TextTokenizer(read_checkpoint(folder))


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_weights_are_never_opened(copied, tmp_path, tiny_checkpoint):
    sprung = tmp_path / "sprung"
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    engine = PrefillEngine.load(read_checkpoint(copied), dtype="float32")
    plain = PrefillEngine.load(tiny_checkpoint, dtype="float32")
    assert abs(engine.embed(["lost card"]) - plain.embed(["lost card"])).max() == 0
    (copied / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="other weight formats are not read"):
        read_checkpoint(copied)
    assert not sprung.exists()


def test_weights_in_several_files_are_one_model_and_all_of_them_count(copied, tiny_checkpoint):
    (copied / "model.safetensors").unlink()
    AutoModel.from_pretrained(tiny_checkpoint.folder).save_pretrained(copied, max_shard_size="40KB")
    shards = sorted(copied.glob("model-*.safetensors"))
    assert len(shards) > 1
    checkpoint = read_checkpoint(copied)
    ours, theirs = (
        PrefillEngine.load(each, dtype="float32").embed(["my card"]) for each in (checkpoint, tiny_checkpoint)
    )
    assert abs(ours - theirs).max() < FLOAT32
    before = checkpoint.fingerprint()
    for shard in shards:
        flip(shard, -1)
        assert checkpoint.fingerprint() != before
        flip(shard, -1)
    assert checkpoint.fingerprint() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / "model.safetensors", -1),
        lambda folder: write_tokenizer(folder, lowercase=False),
        lambda folder: update_json(folder / "config.json", layer_norm_eps=1e-5),
        lambda folder: update_json(folder / "config.json", hidden_act="relu"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["a-weight", "the-tokenizer", "the-norm", "the-activation", "the-name-of-the-weights"],
)
def test_fingerprint_changes_with_what_decides_the_maps(copied, change):
    checkpoint = read_checkpoint(copied)
    before = checkpoint.fingerprint()
    change(copied)
    assert Checkpoint.fingerprint(reread(checkpoint)) != before


def test_fingerprint_differs_between_quantisations_and_the_plain_model(tiny_checkpoint):
    checkpoints = [replace(tiny_checkpoint, quantization=kind) for kind in (None, *Quantization)]
    assert len({checkpoint.fingerprint() for checkpoint in checkpoints}) == 4
    assert len({checkpoint.embedding_fingerprint() for checkpoint in checkpoints}) == 4


def test_fingerprint_of_int8_alone_changes_with_the_texts_it_is_calibrated_with(tiny_checkpoint):
    texts = [(), ("a card", "b"), ("a card",), ("b", "a card"), ("a cardb",)]
    for kind in (None, *Quantization):
        checkpoints = [replace(tiny_checkpoint, quantization=kind, quantization_texts=text) for text in texts]
        expected = len(texts) if kind is Quantization.INT8 else 1
        for fingerprint in (Checkpoint.fingerprint, Checkpoint.use_fingerprint):
            assert len(set(map(fingerprint, checkpoints))) == expected


def test_fingerprint_of_int8_alone_changes_with_what_is_done_to_its_calibration_texts(tiny_checkpoint):
    templates = [Template(), Template("query: "), Template("", "!"), Template("", "", " or "), Template("q ")]
    for kind in (None, *Quantization):
        checkpoint = replace(tiny_checkpoint, quantization=kind, quantization_texts=("A card", "b"))
        found = {replace(checkpoint, template=template).fingerprint() for template in templates}
        found.add(replace(checkpoint, lowercase=True).fingerprint())
        assert len(found) == (len(templates) + 1 if kind is Quantization.INT8 else 1)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "vocab.txt"])
def test_checkpoint_that_was_loaded_is_not_loaded_again_from_other_files(copied, name):
    loaded = PrefillEngine.load(reread(read_checkpoint(copied)), dtype="float32").checkpoint
    named = loaded.fingerprint()
    (copied / name).write_bytes((copied / name).read_bytes() + b" " if (copied / name).exists() else b"{}")
    with pytest.raises(UnsupportedModel, match="were changed since they were first read"):
        PrefillEngine.load(loaded)
    assert loaded.fingerprint() == named


def test_configuration_that_was_changed_before_the_model_is_loaded_is_refused(copied):
    checkpoint = read_checkpoint(copied)
    update_json(copied / "config.json", hidden_act="relu")
    with pytest.raises(UnsupportedModel, match="were changed since they were first read"):
        PrefillEngine.load(checkpoint)


def test_file_of_a_model_that_cannot_be_read_is_named(copied, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_module, "digest_of", refuse)
    with pytest.raises(UnsupportedModel, match=r"the files of model .* cannot be read .*Permission denied"):
        PrefillEngine.load(reread(read_checkpoint(copied)))


def test_fingerprint_of_embeddings_changes_with_each_setting_that_decides_them(tiny_checkpoint):
    changes = [{}, {"max_tokens": 7}, {"lowercase": True}, {"truncate_dim": 8}]
    changes += [{"pooling": Pooling(("max",))}, {"pooling": Pooling(("max",), include_prompt=False)}]
    around = [("a", ""), ("", "a"), ("", "", ""), ("", "", "a")]
    changes += [{"template": Template(*parts)} for parts in around]
    found = {replace(tiny_checkpoint, **change).embedding_fingerprint() for change in changes}
    assert len(found) == len(changes)


def test_classes_are_in_the_order_of_their_numbers(tiny_classifier_checkpoint):
    names = {str(number): f"class {number}" for number in reversed(range(12))}
    checkpoint = replace(tiny_classifier_checkpoint, config={"id2label": names})
    assert checkpoint.classes == tuple(f"class {number}" for number in range(12))


def test_fingerprint_of_the_use_changes_with_each_setting_that_decides_answers(tiny_checkpoint):
    changes = [{}, {"normalize": not tiny_checkpoint.normalize}, {"activation": "identity"}]
    changes += [{"prompts": {"a": "b"}}, {"task": "label-logits"}, {"labels": ("a", "b")}]
    checkpoints = [replace(tiny_checkpoint, **change) for change in changes]
    assert len({checkpoint.use_fingerprint() for checkpoint in checkpoints}) == len(changes)
    # Classifiers bring embeddings to unit length themselves.
    assert len({checkpoint.embedding_fingerprint() for checkpoint in checkpoints}) == 1


@pytest.mark.parametrize("form", [tuple, iter, np.array])
def test_labels_may_have_any_form(tiny_checkpoint, form):
    names = ["delivery", "refund"]
    expected = tiny_checkpoint.adapted(labels=names)
    assert tiny_checkpoint.adapted(labels=form(names)).use_fingerprint() == expected.use_fingerprint()
    assert tiny_checkpoint.adapted(labels=form([])).labels == ()


def test_corpus_is_read_for_the_fingerprint_of_int8_only(tiny_checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint_module, "_default_texts", lambda: asked.append(True) or ("text",))
    for kind in (None, Quantization.INT8_WEIGHT_ONLY, Quantization.INT4):
        replace(tiny_checkpoint, quantization=kind).fingerprint()
    replace(tiny_checkpoint, quantization=Quantization.INT8, quantization_texts=("own",)).fingerprint()
    assert not asked
    replace(tiny_checkpoint, quantization=Quantization.INT8).fingerprint()
    assert asked


def reread(checkpoint):
    """Return the checkpoint with its config.json read again, even if its weights are missing."""
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    return Checkpoint(**{**vars(checkpoint), "config": config})


@pytest.mark.parametrize(
    "entries",
    [
        {"_name_or_path": "/elsewhere"},
        {"transformers_version": "9.9"},
        {"torch_dtype": "float16"},
        {"dtype": "bfloat16"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_fingerprint_stays_when_the_same_model_is_saved_again(copied, entries):
    before = read_checkpoint(copied).fingerprint()
    update_json(copied / "config.json", **entries)
    assert read_checkpoint(copied).fingerprint() == before


@pytest.mark.parametrize(
    ("config", "is_other"),
    [
        ({"model_type": "mixtral", "layer_types": ["sliding_attention", "full_attention"]}, True),
        ({"model_type": "mixtral", "layer_types": None}, False),
        ({"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, True),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": None}, False),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, False),
        ({"model_type": "gemma3_text", "is_causal": False}, True),
        ({"model_type": "deepseek_v3", "rope_interleave": None}, True),
        ({"model_type": "deepseek_v3", "rope_interleave": True}, False),
        ({"model_type": "deepseek_v3"}, False),
        ({"model_type": "bert", "hidden_act": "prelu"}, True),
        ({"model_type": "llama", "hidden_act": "xielu"}, True),
        ({"model_type": "modernbert", "hidden_activation": "gelu"}, False),
    ],
    ids=str,
)
def test_fingerprint_is_another_than_before_a_mend_that_changed_answers(
    tmp_path, tiny_checkpoint, config, is_other
):
    # The digest of before: names and digests of files, and the architecture.
    write_json(tmp_path / "config.json", config)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = hashlib.sha256(b"model.safetensors" + hashlib.sha256(b"weights").digest())
    before.update(json.dumps(config, sort_keys=True).encode())
    checkpoint = replace(tiny_checkpoint, folder=tmp_path, config=config)
    assert (checkpoint.fingerprint() != before.hexdigest()) == is_other


def test_fingerprint_ignores_pooling_prompt_and_other_files(copied):
    before = read_checkpoint(copied).fingerprint()
    write_json(copied / "1_Pooling/config.json", {"pooling_mode": "cls"})
    write_json(copied / PROMPTS, {"prompts": {"a": "my "}, "default_prompt_name": "a"})
    for name in ("README.md", "training_args.json", "eval_results.txt"):
        (copied / name).write_text("{}", encoding="utf-8")
    assert read_checkpoint(copied).template.prefix == "my "
    assert read_checkpoint(copied).fingerprint() == before


def test_fingerprint_changes_with_a_vocabulary_outside_tokenizer_json(copied):
    (copied / "tokenizer.json").unlink()
    write_json(copied / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
    prints = set()
    for words in (VOCABULARY, [*VOCABULARY[:5], *reversed(VOCABULARY[5:])]):
        (copied / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
        prints.add(read_checkpoint(copied).fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"),
    ],
)
def test_fingerprint_changes_with_each_file_of_tokenizer_settings(copied, name):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).unlink(missing_ok=True)
    prints = {read_checkpoint(copied).fingerprint()}
    for content in ("{}", '{"a": 1}'):
        (copied / name).write_text(content, encoding="utf-8")
        prints.add(read_checkpoint(copied).fingerprint())
    assert len(prints) == 3


def test_loading_leaves_the_settings_of_transformers_as_they_are():
    logging.enable_progress_bar()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with hugging_face.loading("nothing"):
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
