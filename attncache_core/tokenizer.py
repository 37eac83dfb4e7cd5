"""Texts to token sequences, as the checkpoint's own library would make them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from attncache_core.checkpoint import Checkpoint
from attncache_core.errors import InputTooLong, UnsupportedModel

# A tokenizer without a limit of its own says 10^30.
_NO_LIMIT = 10**9


class TextTokenizer:
    """A fast tokenizer with the checkpoint's prompt, case and longest sequence. Thread safe."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int | None = None) -> None:
        """max_tokens: cut texts to so many, if that is fewer than the model takes."""
        loaded = AutoTokenizer.from_pretrained(checkpoint.folder)
        if not loaded.is_fast:
            raise UnsupportedModel(
                f"model {checkpoint.name} has no fast tokenizer (tokenizer.json)", field="model"
            )
        limits = [
            checkpoint.max_tokens or loaded.model_max_length,
            checkpoint.position_limit or _NO_LIMIT,
            max_tokens or _NO_LIMIT,
        ]
        self.max_tokens = int(min(limits))
        self._prompt = checkpoint.default_prompt
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        if checkpoint.lowercase:
            # In the tokenizer, which leaves special tokens in a text alone.
            own = [self._tokenizer.normalizer] if self._tokenizer.normalizer else []
            self._tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        self._tokenizer.no_padding()
        # The special tokens at the end stay when a text is cut; what was cut off comes as `overflowing`.
        self._tokenizer.enable_truncation(self.max_tokens)

    def tokenize(self, texts: Sequence[str], *, truncate: bool) -> list[list[int]]:
        """Token ids of each text, at most `max_tokens` each.

        Raises InputTooLong, naming the text, if one is longer and `truncate` is False.
        """
        encodings = self._tokenizer.encode_batch_fast([self._prompt + text for text in texts])
        if not truncate:
            for index, encoding in enumerate(encodings):
                if encoding.overflowing:
                    raise InputTooLong(
                        f"the text has more than {self.max_tokens} tokens; shorten it or allow truncation",
                        field=f"inputs[{index}]",
                    )
        return [encoding.ids for encoding in encodings]

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prompt takes at the front of a sequence, leading special tokens included."""
        if not self._prompt:
            return 0
        encoded = self._tokenizer.encode(self._prompt)
        # The token that closes every sequence is not the prompt's.
        return len(encoded.ids) - encoded.special_tokens_mask[-1]
