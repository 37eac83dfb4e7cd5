"""Encoders of every family, with the family's kind of tokenizer: embeddings, classes and limits."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from core_models import (
    PLAIN_WORDS,
    SPECIAL,
    WORDS,
    attention_by,
    new_objects,
    prefill,
    random_sequences,
    random_text,
)
from core_reference import reference_logits
from families import CASES, ENCODERS, FAMILIES, FULL, SIZES, write_family
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    BertConfig,
    DebertaV2Config,
    DebertaV2Tokenizer,
    DistilBertConfig,
    DistilBertTokenizer,
    ModernBertConfig,
    MPNetConfig,
    MPNetTokenizer,
    RobertaConfig,
    RobertaTokenizer,
    XLMRobertaConfig,
    XLMRobertaTokenizer,
)

from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import UnsupportedModel
from attncache_core.models import load, load_model
from attncache_core.native import products
from attncache_core.text.tokenizer import TextTokenizer

# float32 sums in another order, in layers with large weights and intermediate values of magnitude 10.
FLOAT32 = 1e-4
SENTENCES = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")  # the special tokens of RoBERTa and XLM-RoBERTa


def byte_pairs():
    """Make a tokenizer like RoBERTa's: byte-level BPE."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SENTENCES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"my {word}" for word in PLAIN_WORDS], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    return RobertaTokenizer(
        trained["vocab"], [tuple(merge) for merge in trained["merges"]], unk_token="[UNK]"
    )


def pieces(special):
    """Make a vocabulary of scored pieces, as SentencePiece has."""
    scored = [(f"▁{word}", -2.0 - number / 10) for number, word in enumerate(PLAIN_WORDS)]
    return [(token, 0.0) for token in special] + scored + [("▁", -5.0), ("s", -6.0)]


def numbered(special):
    """Make a WordPiece vocabulary."""
    return {piece: number for number, piece in enumerate((*special, *WORDS))}


# The ids of special tokens in the tiny vocabulary; the default ids are beyond its end.
SPECIAL_IDS = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
# Model type -> its configuration class and a function that makes its kind of tokenizer.
TOKENIZED = {
    "roberta": (RobertaConfig, byte_pairs),
    "deberta-v2": (DebertaV2Config, lambda: DebertaV2Tokenizer(pieces(SPECIAL))),
    "distilbert": (DistilBertConfig, lambda: DistilBertTokenizer(numbered(SPECIAL))),
    "modernbert": (partial(ModernBertConfig, local_attention=6, **SPECIAL_IDS), byte_pairs),
    "mpnet": (MPNetConfig, lambda: MPNetTokenizer(numbered(SENTENCES))),
    "xlm-roberta": (XLMRobertaConfig, lambda: XLMRobertaTokenizer(pieces(SENTENCES), unk_token="[UNK]")),
}


def write_tokenized(folder, family, longest, **changes):
    """Write a plain folder with a family's model and the family's kind of tokenizer."""
    config, make_tokenizer = TOKENIZED[family]
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    write_family(folder, config(**SIZES | sizes | changes))
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(folder)
    return read_checkpoint(folder)


@pytest.mark.parametrize("family", TOKENIZED)
def test_embeddings_of_a_plain_folder_are_those_of_sentence_transformers(tmp_path, family):
    checkpoint = write_tokenized(tmp_path, family, longest=30)
    random = np.random.default_rng(5)
    texts = [random_text(random, int(words)) for words in random.integers(1, 50, size=12)]
    padding = TextTokenizer(checkpoint)._tokenizer.id_to_token(checkpoint.config["pad_token_id"])
    texts += ["", f"my {padding} card zebra {padding}", f"{padding} lost é"]
    theirs = SentenceTransformer(str(checkpoint.folder), device="cpu").encode(texts)
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    assert max(map(len, engine.tokenize(texts))) == engine.tokenizer.max_tokens == 30
    np.testing.assert_allclose(engine.embed(texts, normalize=False), theirs, atol=FLOAT32)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES, hidden_act="prelu"),
        ModernBertConfig(**SIZES, hidden_activation="prelu", pad_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_activation_with_weights_takes_those_of_the_checkpoint(tmp_path, config):
    folder, sequences = write_family(tmp_path, config, ["a", "b"]), random_sequences([9, 30])
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    logits = prefill(engine, sequences, reuse=False).outputs
    np.testing.assert_allclose(logits, reference_logits(folder, sequences), atol=FLOAT32)


@pytest.mark.parametrize(
    ("family", "entries", "longest"),
    [
        ("bert", {}, 512),
        ("llama", {}, None),
        ("bert", {"max_position_embeddings": 514}, 514),
        ("roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("roberta", {"max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ("xlm-roberta", {"max_position_embeddings": 8194, "pad_token_id": 1}, 8192),
        ("nomic_bert", {"n_positions": 8192}, 8192),
        ("camembert", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("mpnet", {"max_position_embeddings": 514, "pad_token_id": 0}, 512),
        ("distilbert", {"max_position_embeddings": 512, "pad_token_id": 0}, 512),
    ],
)
def test_position_limit_excludes_the_positions_before_the_first(tiny_checkpoint, family, entries, longest):
    config = {"model_type": family} | entries
    assert replace(tiny_checkpoint, config=config).position_limit == longest


@pytest.mark.parametrize(("positions", "limit"), [(4, 2), (3, 1), (2, None), (1, None)])
def test_model_without_a_position_for_a_token_is_refused(tiny_checkpoint, positions, limit):
    config = {"model_type": "roberta", "max_position_embeddings": positions, "pad_token_id": 1}
    checkpoint = replace(tiny_checkpoint, config=config)
    with nullcontext() if limit else pytest.raises(UnsupportedModel, match="leaves no position for a token"):
        assert checkpoint.position_limit == limit


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_text_is_cut_at_the_number_of_positions(tmp_path, family):
    checkpoint = write_tokenized(tmp_path, family, longest=10**30, max_position_embeddings=34)
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    assert engine.tokenizer.max_tokens == 32
    texts = ["my card " * 40]
    theirs = SentenceTransformer(str(checkpoint.folder), device="cpu")
    theirs.max_seq_length = 32
    found = engine.embed(texts, normalize=False)
    np.testing.assert_allclose(found, theirs.encode(texts), atol=FLOAT32)


def test_deberta_with_a_convolution_is_refused_by_the_name_of_the_option(tmp_path):
    changes = {"relative_attention": True, "conv_kernel_size": 3}
    checkpoint = write_tokenized(tmp_path, "deberta-v2", longest=30, **changes)
    with pytest.raises(UnsupportedModel, match="conv_kernel_size") as refused:
        load_model(checkpoint, torch.float32)
    assert refused.value.field == "model"


@pytest.mark.parametrize(("labels", "computing"), [((), "operators"), (("a", "b"), "stack")])
@pytest.mark.parametrize(
    ("name", "quantization"),
    [(name, None) for name in (*FULL, "distilbert-relu", "mpnet")]
    + [("roberta", Quantization.INT8_WEIGHT_ONLY), ("roberta", Quantization.INT4)],
)
def test_a_weight_file_that_is_rewritten_changes_no_answer(
    tmp_path, name, quantization, labels, computing, monkeypatch
):
    if computing == "operators":
        monkeypatch.setattr(products, "library", lambda: None)  # weights are kept, and not packed
    checkpoint = read_checkpoint(CASES[name].written(tmp_path, labels))
    checkpoint = replace(checkpoint, quantization=quantization)
    sequences = random_sequences([3, 9, 12])
    with attention_by(computing):
        expected = prefill(PrefillEngine.load(checkpoint, dtype="float32"), sequences).outputs
        engine = PrefillEngine.load(checkpoint, dtype="float32")
        path = tmp_path / "model.safetensors"
        with path.open("r+b") as file:
            file.seek(8 + int.from_bytes(file.read(8), "little"))
            file.write(bytes(path.stat().st_size - file.tell()))
        # Not to the last bit, because torch's sums may depend on where its memory begins.
        np.testing.assert_allclose(prefill(engine, sequences).outputs, expected, atol=FLOAT32)


@pytest.mark.skipif(products.library() is None, reason="no compiled products on this processor")
@pytest.mark.parametrize("labels", [(), ("a", "b")], ids=["embed", "classify"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ENCODERS])
def test_only_the_packed_weights_of_a_layer_stay_in_memory(tmp_path, name, labels):
    checkpoint = read_checkpoint(ENCODERS[name].written(tmp_path, labels))
    read, rows = load._read_weights, []

    def noted(*arguments):
        model = read(*arguments)
        layers = next(
            module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList)
        )
        # One row identifies a weight.
        rows.extend(
            part.weight.detach()[3].clone() for part in layers.modules() if isinstance(part, torch.nn.Linear)
        )
        return model

    with mock.patch.object(load, "_read_weights", noted), new_objects() as living:
        model = load_model(checkpoint, torch.float32, reused_heads=[2, 0, 4])
        held = [
            tensor for tensor in living(torch.Tensor) if tensor.layout is torch.strided and tensor.dim() == 2
        ]
    assert len(rows) >= 4 * len(model.layers)
    assert not [
        row
        for row in rows
        for tensor in held
        if tensor.shape[1:] == row.shape and (tensor == row).all(dim=1).any()
    ]
