"""Rerankers and classifiers of pairs as they are published, at reduced size and with random weights.

config.json has the keys and values of the published repositories, except for sizes, and the tokenizer is of
the published class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core_models import VOCABULARY, update_json, write_json, write_tokenizer
from embedding_models import bert, modernbert, qwen3, write_weights, xlm_roberta
from published_tokenizers import CORPUS, QWEN_SETTINGS, qwen_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

ONE_CLASS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
NLI = {
    "id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"},
    "label2id": {"entailment": 0, "neutral": 1, "contradiction": 2},
}
NLI_REVERSED = {
    "id2label": {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"},
    "label2id": {"CONTRADICTION": 0, "ENTAILMENT": 2, "NEUTRAL": 1},
}
NLI_OF_TWO = {
    "id2label": {"0": "entailment", "1": "not_entailment"},
    "label2id": {"entailment": 0, "not_entailment": 1},
}
CHAT_PADDING = 420  # the id of <|endoftext|> in the chat tokenizer
GUARD = {
    "id2label": {"0": "BENIGN", "1": "INJECTION", "2": "JAILBREAK"},
    "label2id": {"BENIGN": 0, "INJECTION": 1, "JAILBREAK": 2},
}


def write_ms_marco_minilm(folder: Path, **changes: Any) -> Path:
    """Write a model like cross-encoder/ms-marco-MiniLM-L6-v2: BERT, whose score is the logit."""
    write_bert_tokenizer(folder)
    published = {
        "gradient_checkpointing": False,
        "sentence_transformers": {
            "activation_fn": "torch.nn.modules.linear.Identity",
            "version": "4.1.0.dev0",
        },
        "transformers_version": "4.52.0.dev0",
    }
    described = bert("BertForSequenceClassification", len(VOCABULARY)) | ONE_CLASS
    return _write(folder, described | published | changes)


def write_bge_reranker_v2_m3(folder: Path, **changes: Any) -> Path:
    """Write a model like BAAI/bge-reranker-v2-m3: XLM-RoBERTa."""
    config = xlm_roberta(folder, "XLMRobertaForSequenceClassification", "BAAI/bge-m3", "4.38.1")
    return _write(folder, config | ONE_CLASS | changes)


def write_deberta_v3(folder: Path, **changes: Any) -> Path:
    """Write a model like mixedbread-ai/mxbai-rerank-large-v1, or with other classes: DeBERTa-v3."""
    config = (
        {"architectures": ["DebertaV2ForSequenceClassification"], "attention_probs_dropout_prob": 0.1}
        | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 48}
        | ONE_CLASS
        | {"initializer_range": 0.02, "intermediate_size": 96, "layer_norm_eps": 1e-07}
        | {"max_position_embeddings": 512, "max_relative_positions": -1, "model_type": "deberta-v2"}
        | {"norm_rel_ebd": "layer_norm", "num_attention_heads": 4, "num_hidden_layers": 3}
        | {"pad_token_id": 0, "pooler_dropout": 0, "pooler_hidden_act": "gelu", "pooler_hidden_size": 48}
        | {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "position_buckets": 8}
        | {"relative_attention": True, "share_att_key": True, "torch_dtype": "float16"}
        | {"transformers_version": "4.38.1", "type_vocab_size": 0}
        | {"vocab_size": write_deberta_tokenizer(folder)}
        | changes
    )
    return _write(folder, config)


def write_gte_reranker_modernbert(folder: Path, **changes: Any) -> Path:
    """Write a model like Alibaba-NLP/gte-reranker-modernbert-base, or with other classes: ModernBERT."""
    return _write(folder, modernbert(folder, "ModernBertForSequenceClassification") | ONE_CLASS | changes)


def write_qwen3_reranker(folder: Path, **changes: Any) -> Path:
    """Write a model like Qwen/Qwen3-Reranker-0.6B: a causal language model that answers yes or no."""
    published = {"max_position_embeddings": 40960, "transformers_version": "4.51.0"}
    return _write(folder, qwen3(write_chat_tokenizer(folder)) | published | changes)


def write_mxbai_rerank_v2(folder: Path) -> Path:
    """Write a model like mixedbread-ai/mxbai-rerank-base-v2: a causal language model that answers 0 or 1."""
    config = (
        {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 0}
        | {"eos_token_id": 0, "hidden_act": "silu", "hidden_size": 56, "initializer_range": 0.02}
        | {"intermediate_size": 96, "max_position_embeddings": 32768, "max_window_layers": 24}
        | {"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 3}
        | {"num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0}
        | {"sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
        | {"transformers_version": "4.49.0", "use_cache": False, "use_sliding_window": False}
        | {"vocab_size": write_chat_tokenizer(folder)}
    )
    return _write(folder, config)


def write_bert_tokenizer(folder: Path) -> None:
    """Write BERT's tokenizer with the tiny vocabulary. It gives the second text of a pair type 1."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    update_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))


def write_deberta_tokenizer(folder: Path) -> int:
    """Write a tokenizer like DeBERTa-v3's, and return the size of its vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="[UNK]", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    settings = (
        {"tokenizer_class": "DebertaV2Tokenizer", "bos_token": "[CLS]", "cls_token": "[CLS]"}
        | {"do_lower_case": False, "eos_token": "[SEP]", "mask_token": "[MASK]", "model_max_length": 512}
        | {"pad_token": "[PAD]", "sep_token": "[SEP]", "sp_model_kwargs": {}, "split_by_punct": False}
        | {"unk_token": "[UNK]", "vocab_type": "spm"}
    )
    return _write_tokenizer(folder, tokenizer, settings)


def write_chat_tokenizer(folder: Path) -> int:
    """Write a tokenizer like Qwen's: byte-level BPE without special tokens around a text.

    yes, no, 0 and 1 are tokens. Returns the size of the vocabulary.
    """
    tokenizer = qwen_tokenizer(["yes", "no"], 420)
    assert tokenizer.token_to_id("<|endoftext|>") == CHAT_PADDING
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return _write_tokenizer(folder, tokenizer, QWEN_SETTINGS)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size()


def _write(folder: Path, config: dict[str, Any]) -> Path:
    """Write config.json and large random weights."""
    is_causal = config["architectures"][0].endswith("ForCausalLM")
    return write_weights(
        folder, config, AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    )
