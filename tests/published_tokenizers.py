"""Tiny tokenizers with the parts and files of published tokenizers: Qwen, Gemma, XLM-RoBERTa, ModernBERT.

Each function writes tokenizer.json and tokenizer_config.json as a publisher does, and returns the size of the
vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core_models import write_json
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# What the vocabularies are trained on.
CORPUS = [
    "Where is my parcel? I ordered it two weeks ago, and the shop says it was sent.",
    "How do I reset the password of my account? The link in the message has expired.",
    "Wo ist mein Paket? Die Lieferung sollte gestern ankommen.",
    "Le colis n'est pas arrivé, même après deux semaines d'attente.",
    "我的包裹在哪里？ 商店说已经寄出了。",
    "task: search result | query: title: none | text: passage: Instruct: Given a web search query",
]
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def qwen_tokenizer(first_words: list[str], size: int) -> Tokenizer:
    """Train a tokenizer like Qwen's: byte-level BPE, without special tokens.

    first_words: become whole tokens. size: of the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(first_words * 50 + CORPUS, _byte_level_trainer(size))
    # The special tokens of Qwen stand behind the vocabulary.
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


# The settings of Qwen's tokenizers, whatever stands around a text.
QWEN_SETTINGS = (
    {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False}
    | {"bos_token": None, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 131072}
    | {"pad_token": "<|endoftext|>", "split_special_tokens": False, "unk_token": None}
)


def write_qwen_tokenizer(folder: Path) -> int:
    """Write a tokenizer like Qwen3-Embedding's: byte-level BPE that ends each text with <|endoftext|>."""
    tokenizer = qwen_tokenizer([], 400)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="$A:0 <|endoftext|>:0",
                pair="$A:0 <|endoftext|>:0 $B:1 <|endoftext|>:1",
                special_tokens=[("<|endoftext|>", end)],
            ),
        ]
    )
    settings = (
        QWEN_SETTINGS
        | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
        | {"clean_up_tokenization_spaces": False}
    )
    return _write(folder, tokenizer, settings)


def write_gemma_tokenizer(folder: Path) -> int:
    """Write a tokenizer like EmbeddingGemma's: BPE with byte fallback, between <bos> and <eos>."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0 <eos>:0",
        pair="<bos>:0 $A:0 <eos>:0 <bos>:1 $B:1 <eos>:1",
        special_tokens=[("<bos>", 2), ("<eos>", 1)],
    )
    settings = (
        {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": True}
        | {"bos_token": "<bos>", "clean_up_tokenization_spaces": False, "eos_token": "<eos>"}
        | {"mask_token": "<mask>", "model_max_length": 2048, "pad_token": "<pad>", "padding_side": "right"}
        | {"sp_model_kwargs": None, "spaces_between_special_tokens": False, "unk_token": "<unk>"}
        | {"use_default_system_prompt": False}
    )
    return _write(folder, tokenizer, settings)


def write_xlm_roberta_tokenizer(folder: Path, longest: int) -> int:
    """Write a tokenizer like XLM-RoBERTa's: Unigram, between <s> and </s>. longest: in tokens."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s>:0 $A:0 </s>:0",
        pair="<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    settings = (
        {"tokenizer_class": "XLMRobertaTokenizer", "bos_token": "<s>"}
        | {"clean_up_tokenization_spaces": True, "cls_token": "<s>", "eos_token": "</s>"}
        | {"mask_token": "<mask>", "model_max_length": longest, "pad_token": "<pad>", "sep_token": "</s>"}
        | {"sp_model_kwargs": {}, "unk_token": "<unk>"}
    )
    return _write(folder, tokenizer, settings)


def write_modernbert_tokenizer(folder: Path) -> int:
    """Write a tokenizer like ModernBERT's: byte-level BPE, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, _byte_level_trainer(400))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"])
    edges = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", special_tokens=edges
    )
    settings = (
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
        | {"cls_token": "[CLS]", "mask_token": "[MASK]"}
        | {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 8192}
        | {"pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    )
    return _write(folder, tokenizer, settings)


def _byte_level_trainer(size: int) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
    tokens = tokenizer.get_added_tokens_decoder().items()
    added = {str(number): {"content": token.content} | flags for number, token in tokens}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added} | settings)
    return tokenizer.get_vocab_size()
