"""Tiny real decoders for the tests, made on the spot, with a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from core_models import PLAIN_WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Enough for bytes and whole words, each with its space before it.
VOCABULARY_SIZE = 420


def write_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny Llama with a language head, and its tokenizer, in `folder`: 3 layers of 4 heads."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 512,
            "attn_implementation": "eager",
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        # As for the tiny BERT: strong enough that maps differ from each other and labels' logits too.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "lm_head" in name else 0.25)
    model.save_pretrained(folder)
    write_decoder_tokenizer(folder)
    return folder


def write_decoder_tokenizer(
    folder: Path, closing: bool = False, longest: int = 512, words: Sequence[str] = PLAIN_WORDS
) -> None:
    """A byte-level BPE tokenizer that opens every text with <s> and, if `closing`, ends it with </s>.

    words: those of one token each, with a space before them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if closing else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)
