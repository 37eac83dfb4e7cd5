"""Published embedding models, from their own files, give the embeddings of sentence-transformers."""

import json
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from core_models import COMPUTING, attention_by, flip, list_modules, update_json, write_json
from core_reference import FLOAT32
from embedding_models import EMBEDDING_MODELS, GEMMA_PROMPTS, QWEN_QUERY, write_dense
from published_tokenizers import CORPUS
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InvalidInput, UnsupportedModel
from attncache_core.heads.embedding import load_embedding_head
from attncache_core.models.families import is_causal
from attncache_core.native import products
from attncache_core.reuse.kv.opening import KeyValueOptions
from attncache_core.runtime.devices import CPU

# Lengths from one token to several windows, in several languages, with characters outside the vocabulary.
TEXTS = [*CORPUS, "Hi", "🙂 ÅÄÖ x\ty", " ".join(CORPUS), "the parcel " * 40, "a", " ".join(CORPUS * 4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the models by name, written when they are first used."""
    written = {}

    def folder(name):
        if name not in written:
            written[name] = EMBEDDING_MODELS[name](tmp_path_factory.mktemp(name))
        return written[name]

    return folder


@pytest.fixture
def copied(folders, tmp_path):
    """Return a function that copies a model's folder, for a test to change."""
    return lambda name: shutil.copytree(folders(name), tmp_path / name)


@cache
def oracle(folder):
    return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})


def loaded(folder, **options):
    return PrefillEngine.load(read_checkpoint(folder), dtype="float32", **options)


@pytest.fixture(scope="module", params=EMBEDDING_MODELS)
def engine(request, folders):
    """Each model in turn. Do not change it."""
    return loaded(folders(request.param))


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    # Rounding grows with the numbers: embeddings that are not normalised reach 2.
    np.testing.assert_allclose(ours, theirs, atol=FLOAT32 * max(1.0, np.abs(theirs).max()))


@cache
def encoded(folder):
    """Return the oracle's embeddings of all texts."""
    return oracle(folder).encode(TEXTS)


@pytest.mark.parametrize("computing", COMPUTING)
def test_embeddings_are_those_of_sentence_transformers(engine, computing):
    assert (engine.model.stack is None) == (products.library() is None)
    with attention_by(computing):
        assert_same(engine.embed(TEXTS), encoded(engine.checkpoint.folder))


def test_tokens_and_embeddings_with_every_prompt_are_those_of_sentence_transformers(engine):
    theirs = oracle(engine.checkpoint.folder)
    assert engine.tokenize(TEXTS) == theirs.tokenizer(TEXTS, truncation=True)["input_ids"]
    for prompt in engine.checkpoint.prompts:
        expected = theirs.encode(TEXTS[:4], prompt_name=prompt)
        assert_same(engine.embed(TEXTS[:4], prompt_name=prompt), expected)


def test_first_dimensions_are_those_of_sentence_transformers_at_unit_length(engine):
    theirs = oracle(engine.checkpoint.folder)
    for dimensions in (1, 12, engine.dimensions):
        expected = theirs.encode(TEXTS[:4], truncate_dim=dimensions, normalize_embeddings=True)
        assert_same(engine.embed(TEXTS[:4], dimensions=dimensions, normalize=True), expected)


def test_a_folder_that_sentence_transformers_saved_again_gives_the_same_embeddings(engine, tmp_path):
    oracle(engine.checkpoint.folder).save(str(tmp_path))
    assert_same(loaded(tmp_path).embed(TEXTS), encoded(engine.checkpoint.folder))


def test_prefixes_of_e5_are_text_of_the_request(folders):
    texts = ["query: where is my parcel", "passage: parcels arrive within two weeks"]
    ours = loaded(folders("multilingual-e5-base"))
    assert ours.checkpoint.prompts == {}
    assert_same(ours.embed(texts), oracle(folders("multilingual-e5-base")).encode(texts))


def test_only_qwen_is_causal_and_stores_keys_and_values(folders):
    causal = [name for name in EMBEDDING_MODELS if is_causal(read_checkpoint(folders(name)))]
    assert causal == ["qwen3-embedding"]
    for name in EMBEDDING_MODELS:
        engine = loaded(folders(name), key_values=KeyValueOptions(memory_bytes=2**20))
        assert (engine.key_values is not None) == (name in causal)
        assert engine.shares_prefixes(reuse=False) == (name in causal)


def test_qwen_ends_each_text_with_the_token_that_is_pooled(folders):
    engine = loaded(folders("qwen3-embedding"), max_tokens=10)
    end = json.loads((folders("qwen3-embedding") / "tokenizer.json").read_text(encoding="utf-8"))
    (expected,) = (added["id"] for added in end["added_tokens"] if added["content"] == "<|endoftext|>")
    sequences = engine.tokenize(["a", *TEXTS])
    assert {ids[-1] for ids in sequences} == {expected}
    assert max(map(len, sequences)) == 10


def test_info_shows_dimensions_and_prompts(folders):
    info = loaded(folders("embedding-gemma")).info()
    assert (info.dimensions, info.matryoshka_dimensions, info.prompts) == (48, (), GEMMA_PROMPTS)
    assert loaded(folders("qwen3-embedding")).info().prompts == {"query": QWEN_QUERY, "document": ""}


def dense_modules(folder, *dense, normalize=True):
    """Give a folder Dense modules between its Pooling and its Normalize."""
    paths = [f"{number}_Dense" for number in range(2, 2 + len(dense))]
    for path, (sizes, options) in zip(paths, dense, strict=True):
        write_dense(folder / path, *sizes, **options)
    list_modules(folder, ["1_Pooling", *paths, *["9_Normalize"] * normalize])
    return folder


BIASED = {"bias": True}
ACTIVATIONS = {
    name: {"activation": f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"}
    for name in ("GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh")
}


@pytest.mark.parametrize(
    ("dense", "normalize"),
    [
        *(([((64, 40), BIASED | activation)], False) for activation in ACTIVATIONS.values()),
        ([((64, 256), BIASED), ((256, 64), BIASED)], True),
        ([((64, 8), BIASED), ((8, 96), BIASED | ACTIVATIONS["Tanh"]), ((96, 20), {})], True),
        ([((64, 32), {}), ((32, 16), BIASED), ((16, 24), ACTIVATIONS["ReLU"]), ((24, 24), BIASED)], False),
    ],
    ids=lambda value: "-".join(f"{outputs}" for (_, outputs), _ in value) if isinstance(value, list) else "",
)
def test_dense_modules_are_those_of_sentence_transformers(copied, dense, normalize):
    folder = dense_modules(copied("bge-m3"), *dense, normalize=normalize)
    engine = loaded(folder)
    assert engine.dimensions == dense[-1][0][1]
    assert engine.embed([]).shape == (0, engine.dimensions)
    assert_same(engine.embed(TEXTS[:6]), oracle(folder).encode(TEXTS[:6]))


def test_layers_without_an_activation_between_them_are_merged_if_their_product_is_smaller(copied):
    dense = [((64, 256), BIASED), ((256, 64), {}), ((64, 4), {}), ((4, 80), {})]
    folder = dense_modules(copied("bge-m3"), *dense)
    head = load_embedding_head(read_checkpoint(folder), 64, CPU)
    assert [tuple(layer.weight.shape) for layer in head._layers] == [(4, 64), (80, 4)]


def test_dense_modules_follow_pooling_that_continues(copied):
    folder = dense_modules(copied("qwen3-embedding"), ((64, 40), BIASED | ACTIVATIONS["Tanh"]))
    described = {"pooling_mode": "mean", "word_embedding_dimension": 64}
    write_json(folder / "1_Pooling/config.json", described)
    engine = loaded(folder, key_values=KeyValueOptions(memory_bytes=2**22))
    expected = oracle(folder).encode(TEXTS)
    first, second = (engine.run(engine.requests(engine.tokenize(TEXTS))) for _ in range(2))
    assert second.cached_tokens.sum() > first.cached_tokens.sum()
    for result in (first, second):
        assert_same(engine.embeddings(result.outputs), expected)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"activation_function": "torch.nn.Softsign"}, "the activation_function of .* is not supported"),
        ({"activation_function": "os.Tanh"}, "the activation_function of .* is not supported"),
        ({"activation_function": None}, "the activation_function of .* is not supported"),
        ({"use_residual": True}, "not a plain one on pooled vectors"),
        ({"module_input_name": "token_embeddings"}, "not a plain one on pooled vectors"),
        ({"module_output_name": "other"}, "not a plain one on pooled vectors"),
        ({"in_features": 63}, "takes vectors of 63 numbers, and gets vectors of 64"),
        ({"out_features": 41}, r"are linear.weight \[40, 64\], and must be linear.weight \[41, 64\] by"),
        ({"bias": True}, r"must be linear.bias \[40\], linear.weight \[40, 64\] by .* bias"),
        ({"in_features": "many"}, "cannot be read"),
    ],
    ids=str,
)
def test_dense_module_that_cannot_be_served_is_refused(copied, entries, message):
    folder = dense_modules(copied("bge-m3"), ((64, 40), {}))
    update_json(folder / "2_Dense/config.json", **entries)
    with pytest.raises(UnsupportedModel, match=message):
        loaded(folder)


def test_dense_module_with_more_weights_than_described_is_refused_as_in_sentence_transformers(copied):
    folder = dense_modules(copied("bge-m3"), ((64, 40), BIASED))
    write_json(folder / "2_Dense/config.json", {"in_features": 64, "out_features": 40, "bias": False})
    with pytest.raises(UnsupportedModel, match=r"are linear.bias .*; correct .* bias"):
        loaded(folder)
    with pytest.raises(RuntimeError, match=r"linear\.bias"):
        oracle(folder)


def test_pickled_weights_of_a_dense_module_are_never_opened(copied):
    folder = dense_modules(copied("bge-m3"), ((64, 40), {}))
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="2_Dense has no model"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "paths", [["2_Dense"], ["1_Pooling", "9_Normalize", "2_Dense"], ["2_Dense", "1_Pooling"]], ids="+".join
)
def test_modules_in_another_order_are_refused(copied, paths):
    folder = dense_modules(copied("bge-m3"), ((64, 40), {}))
    list_modules(folder, paths)
    with pytest.raises(UnsupportedModel, match="in this order"):
        read_checkpoint(folder)


def test_dense_modules_change_the_fingerprint_of_embeddings_and_not_of_maps(copied):
    folder = copied("bge-m3")
    plain = read_checkpoint(folder)
    changes = {
        "none": [],
        "a layer": [((64, 40), {})],
        "an activation": [((64, 40), ACTIVATIONS["Tanh"])],
        "a bias": [((64, 40), BIASED)],
        "another layer": [((64, 40), {}), ((40, 40), {})],
    }
    prints = set()
    for dense in changes.values():
        checkpoint = read_checkpoint(dense_modules(folder, *dense))
        assert checkpoint.fingerprint() == plain.fingerprint()
        prints.add((checkpoint.embedding_fingerprint(), checkpoint.use_fingerprint()))
    flip(folder / "2_Dense/model.safetensors", -1)
    prints.add((checkpoint.embedding_fingerprint(), checkpoint.use_fingerprint()))
    assert len(prints) == len(changes) + 1
    assert replace(checkpoint, truncate_dim=20).embedding_fingerprint() not in {one for one, _ in prints}


def test_labels_are_compared_with_embeddings_behind_dense_modules(folders):
    checkpoint = read_checkpoint(folders("embedding-gemma")).adapted(labels=CORPUS[:3])
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    result = engine.run(engine.requests(engine.tokenize(CORPUS[:3])))
    assert engine.decisions.class_logits(result.outputs).argmax(axis=1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_dimensions_out_of_range_are_refused(folders, dimensions):
    engine = loaded(folders("bge-m3"))
    with pytest.raises(InvalidInput, match="dimensions must be 1 to 64") as caught:
        engine.embeddings(np.ones((1, 64), np.float32), dimensions=dimensions)
    assert caught.value.field == "dimensions"
    with pytest.raises(InvalidInput, match="dimensions must be 1 to 64"):
        engine.require_dimensions(dimensions)


@pytest.mark.parametrize("key", ["matryoshka_dimensions", "matryoshka_dims"])
def test_a_model_that_lists_its_dimensions_has_only_these(copied, key):
    folder = copied("bge-m3")
    update_json(folder / "config.json", **{key: [32, 16, 128]})
    engine = loaded(folder)
    assert engine.info().matryoshka_dimensions == (16, 32)
    for dimensions in (16, 32, 64):
        assert engine.embed(["a"], dimensions=dimensions).shape == (1, dimensions)
    for dimensions in (0, 20, 128):
        with pytest.raises(InvalidInput, match="dimensions must be one of 16, 32, 64 for this model"):
            engine.require_dimensions(dimensions)


def test_embeddings_are_truncated_as_the_folder_says(copied):
    folder = copied("bge-m3")
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 20})
    engine = loaded(folder)
    assert engine.dimensions == engine.info().dimensions == 20
    # sentence-transformers truncates behind Normalize, which leaves vectors shorter than 1.
    assert_same(engine.embed(TEXTS), oracle(folder).encode(TEXTS, normalize_embeddings=True))
    with pytest.raises(InvalidInput, match="dimensions must be 1 to 20"):
        engine.require_dimensions(21)


@pytest.mark.parametrize("dimensions", [0, "20", True], ids=repr)
def test_truncation_that_is_no_number_of_dimensions_is_refused(copied, dimensions):
    folder = copied("bge-m3")
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": dimensions})
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        read_checkpoint(folder)


def test_weights_have_the_published_names(folders):
    names = {name: set(load_file(folders(name) / "model.safetensors")) for name in EMBEDDING_MODELS}
    assert "layers.0.self_attn.q_norm.weight" in names["qwen3-embedding"]
    assert "layers.0.pre_feedforward_layernorm.weight" in names["embedding-gemma"]
    assert "encoder.layer.0.attention.self.query.weight" in names["bge-m3"]
    assert "layers.0.attn.Wqkv.weight" in names["gte-modernbert"]
    assert "encoder.layers.0.mlp.fc11.weight" in names["nomic-embed"]
    assert "encoder.layer.0.attention.qkv_proj.weight" in names["arctic-embed-m-v2"]


@pytest.mark.parametrize(
    "changed",
    [{"rotary_emb_base": 10000}, {"n_head": 8}, {"rotary_scaling_factor": 2}, {"prenorm": True}],
    ids=str,
)
def test_published_names_that_transformers_does_not_read_may_say_nothing_else(copied, changed):
    folder, (name,) = copied("nomic-embed"), changed
    update_json(folder / "config.json", **changed)
    with pytest.raises(
        UnsupportedModel, match=f"{name} in config.json is {changed[name]}; models of the family"
    ):
        loaded(folder)
