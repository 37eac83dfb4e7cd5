"""Tiny Llama models with random weights for the tests, with a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from core_models import PLAIN_WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Enough for all bytes and for whole words with a leading space.
VOCABULARY_SIZE = 420


def write_llama(folder: Path, **changes: Any) -> Path:
    """Write a tiny Llama of 3 layers and 4 heads, with language head and tokenizer, to `folder`."""
    config = LlamaConfig(
        **(
            {"vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "num_hidden_layers": 3}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
            | {"max_position_embeddings": 512, "attn_implementation": "eager"}
            | changes
        )
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        # Large weights, as for the tiny BERT, so that maps and the logits of labels differ from each other.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.0 if "lm_head" in name else 0.25)
    model.save_pretrained(folder)
    write_decoder_tokenizer(folder)
    return folder


def write_decoder_tokenizer(folder: Path, closing: bool = False, words: Sequence[str] = PLAIN_WORDS) -> None:
    """Write a byte-level BPE tokenizer that begins every text with <s> and, if `closing`, ends it with </s>.

    words: words that become one token each, with a leading space.
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
        model_max_length=512,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    ).save_pretrained(folder)
