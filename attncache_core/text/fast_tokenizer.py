"""Read the fast tokenizer of a model folder, and refuse one that would not do what its library does."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass

import transformers
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.checkpoints.hugging_face import loading
from attncache_core.errors import UnsupportedModel

logger = logging.getLogger(__name__)

# What the classes of transformers read otherwise than some files tokenizer.json, and a text that shows it.
_SAMPLES = {
    "capital letters": "The CAPITAL Letters",
    "accents": "café Éclair e\u0301",
    "letters with a compatible form, such as \ufb01 or \uff41": "\ufb01 \u00bd \uff41\uff42 \u2460",
    "spaces at their ends or in a row": " two  spaces ",
    "line breaks or tabs": "a\nb\r\nc\td",
    "Chinese characters": "日本語",
    "digits and signs": "don't pay $12,345.67 (now)!",
}
# The classes of transformers that read tokenizer.json as it is.
_AS_THE_FILE_SAYS = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True, slots=True)
class FastTokenizer:
    """A tokenizer that neither pads nor truncates, and what its files say beside it."""

    tokenizer: Tokenizer
    special: frozenset[int]  # ids of special tokens
    vocabulary: int  # the highest id that a text can have, plus one
    max_tokens: float  # transformers reports 10^30 for a tokenizer without a limit
    has_types: bool  # whether the model gets the types of tokens


def read_fast_tokenizer(checkpoint: Checkpoint) -> FastTokenizer:
    """Return the tokenizer of a checkpoint. Raises UnsupportedModel, which says why it cannot be used."""
    if not checkpoint.vocabularies:
        # transformers would create a tokenizer with an empty vocabulary.
        raise UnsupportedModel(f"model folder {checkpoint.folder} has no tokenizer.json", field="model")
    try:
        with loading(f"config.json or the tokenizer of model {checkpoint.name}"):
            loaded = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
            special = frozenset(loaded.all_special_ids)
    except UnsupportedModel as error:
        if (checkpoint.folder / "tokenizer.json").is_file():
            raise
        raise UnsupportedModel(
            f"{error}; the folder has no tokenizer.json, and files of SentencePiece are read only if the "
            "packages sentencepiece and protobuf are installed: install them, or save the tokenizer with "
            "transformers, which writes tokenizer.json",
            field="model",
        ) from error
    if not loaded.is_fast:
        raise UnsupportedModel(
            f"model {checkpoint.name} has no fast tokenizer (tokenizer.json)", field="model"
        )
    if loaded.truncation_side != "right":
        raise UnsupportedModel(
            f"the tokenizer of model {checkpoint.name} cuts the beginning of texts that are too long "
            "(truncation_side in tokenizer_config.json), and AttnCache cuts their end; set truncation_side "
            "to right, and send truncation_direction left where a text must lose its beginning",
            field="model",
        )
    if not (type(loaded.model_max_length) in (int, float) and loaded.model_max_length >= 1):
        raise UnsupportedModel(
            f"model_max_length in tokenizer_config.json of model {checkpoint.name} must be a number of "
            "tokens, at least 1",
            field="model",
        )
    tokenizer: Tokenizer = loaded.backend_tokenizer
    known = set(tokenizer.get_vocab().values())
    if known <= special:
        raise UnsupportedModel(
            f"the tokenizer of model {checkpoint.name} has special tokens only, because its class reads no "
            "file of the folder; save the tokenizer with transformers, which writes tokenizer.json",
            field="model",
        )
    _set_up(tokenizer, lowercase=checkpoint.lowercase)
    _warn_if_unlike_its_file(tokenizer, checkpoint)
    has_types = checkpoint.token_types > 1 and "token_type_ids" in loaded.model_input_names
    return FastTokenizer(tokenizer, special, max(known) + 1, loaded.model_max_length, has_types)


def _warn_if_unlike_its_file(tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Warn if tokens are not those of tokenizer.json.

    Version 5 of transformers builds the normaliser of most classes anew, whatever the file says, so texts can
    have other tokens than in training. They have the same in every library that uses transformers.
    """
    # Some folders have no such files, and transformers reads files that this class cannot read.
    with suppress(Exception):
        settings = checkpoint.folder / "tokenizer_config.json"
        named = json.loads(settings.read_bytes()).get("tokenizer_class") if settings.is_file() else None
        if named in _AS_THE_FILE_SAYS:
            return  # what the warning proposes is there, and transformers ignores it for this family
        file = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
        _set_up(file, lowercase=checkpoint.lowercase)
        unlike = [what for what, text in _SAMPLES.items() if _tokens(file, text) != _tokens(tokenizer, text)]
        if unlike:
            logger.warning(
                "transformers %s gives model %s other tokens than its tokenizer.json, for texts with %s. "
                "If the model was trained with the tokens of the file, set tokenizer_class to "
                "PreTrainedTokenizerFast in tokenizer_config.json",
                transformers.__version__,
                checkpoint.name,
                ", ".join(unlike),
            )


def _tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def _set_up(tokenizer: Tokenizer, *, lowercase: bool) -> None:
    if getattr(tokenizer.model, "dropout", None):
        # BPE-dropout (Provilkov et al. 2020) is for training: equal texts would have different tokens.
        tokenizer.model.dropout = None
    if lowercase:
        # The tokenizer lowercases, because str.lower() would also change special tokens in a text.
        existing = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *existing])
    tokenizer.no_padding()
    # TextTokenizer truncates texts, because this one would cut off the template's end.
    tokenizer.no_truncation()
