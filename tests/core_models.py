"""Make tiny real models for the tests, and run engines with them.

The weights are larger than in a freshly initialised model. So attention maps are far from uniform and outputs
depend on them, and a wrong map, head or position changes outputs long before the fifth digit.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from attncache_core import native
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.engine.layers import reused_by, run_layers
from attncache_core.engine.request import PrefillRequest
from attncache_core.models import PackedModel
from attncache_core.native import products
from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.policy import Steps
from attncache_core.reuse.maps.policy_state import Tightened, merge_tightened
from attncache_core.reuse.plan import no_reuse
from attncache_core.reuse.storage.seal import Seal
from attncache_core.text.token_batch import pack

# The seal of segments that do not belong to a database.
SEAL = Seal(key=bytes(range(32)), fingerprint="ab" * 32)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("my", "your", "the", "a", "card", "bank", "money", "account", "transfer", "payment", "lost", "stolen"),
    *("late", "wrong", "new", "old", "where", "how", "when", "why", "is", "was", "can", "do", "send", "get"),
    *("find", "change", "close", "open", "cancel", "help", "need", "want", "please", "today", "tomorrow"),
    *("abroad", "online", "query", ":", "?", ".", ",", "##s", "##ing"),
)
VOCABULARY = SPECIAL + WORDS
CLS, SEP = VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")

needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor does not multiply bfloat16"
)

needs_int8 = pytest.mark.skipif(products.library() is None, reason="nothing was compiled for this processor")

# The supported quantisations of weights, and the compute dtypes.
QUANTIZATIONS = [
    None,
    pytest.param(Quantization.INT8, marks=needs_int8),
    Quantization.INT8_WEIGHT_ONLY,
    Quantization.INT4,
]
DTYPES = ["float32", pytest.param("bfloat16", marks=needs_bfloat16)]

# Layers are run by the compiled stack, or one by one, with attention by the compiled kernel or by torch.
COMPUTING = ["stack", "kernel", "operators"]
# Who reads or computes maps in what does not run whole layers, so that there is no stack.
READERS = ["kernel", "operators"]


@contextmanager
def attention_by(computing: str) -> Iterator[None]:
    """Run layers by one of COMPUTING in this context; skip without a kernel."""
    if computing != "operators" and native.kernel() is None:
        pytest.skip("no kernel was built for this processor")
    with ExitStack() as patches:
        if computing != "stack":
            for name in ("stack", "compiled_outputs"):
                patches.enter_context(mock.patch.object(PackedModel, name, property(lambda _: None)))
        if computing == "operators":
            patches.enter_context(mock.patch.object(native, "kernel", return_value=None))
        yield


@dataclass
class CountedLayer:
    """A layer that notes the sizes (rows, heads) of its computations."""

    layer: Any
    values: list[tuple[int, int]] = field(default_factory=list)  # of each projection of V
    computed: list[tuple[int, int]] = field(default_factory=list)  # of each projection of computed Q and K
    reused: list[tuple[int, int]] = field(default_factory=list)  # of each projection of reused Q and K
    reused_inputs: list[torch.Tensor] = field(default_factory=list)
    attended: list[tuple[int, int]] = field(default_factory=list)  # rows of the sequences, without others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def project(self, x, positions):
        value, query, key = projection = self.layer.project(x, positions)
        self.values.append(tuple(value.shape[:2]))
        self.computed.append(tuple(query.shape[:2]))
        assert query.shape == key.shape
        return projection

    def project_reused(self, x, positions):
        query, key = self.layer.project_reused(x, positions)
        self.reused.append(tuple(query.shape[:2]))
        self.reused_inputs.append(x.clone())
        return query, key

    def attend(self, query, key, value, offsets, heads, context, tree=None):
        rows = int(offsets[-1] - offsets[0])
        assert len(query) == len(key) == len(value) == len(context) >= rows
        self.attended.append((rows, query.shape[1]))
        self.layer.attend(query, key, value, offsets, heads, context, tree)


@contextmanager
def new_objects() -> Iterator[Callable[[type], list[Any]]]:
    """Yield a function that returns the living objects of a type that were made in this context."""

    def living(kind: type) -> list[Any]:
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), kind)]

    gc.collect()
    gc.freeze()  # what exists already is looked at no more, here and later, which would take a second
    yield living


# The words of random texts, without pieces and punctuation, which would merge with their neighbours.
PLAIN_WORDS = tuple(word for word in WORDS if word.isalpha())


def write_model(folder: Path, labels: Sequence[str] | None = None, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny BERT with its tokenizer to `folder`: an encoder, or a classifier if there are labels."""
    config = BertConfig(
        **(
            {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 3}
            | {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512}
            | {"hidden_act": "gelu", "attn_implementation": "eager"}
            | changes
        )
    )
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(seed)
    model = BertForSequenceClassification(config) if labels else BertModel(config)
    for parameter in model.parameters():
        # With this deviation, a matrix keeps the scale of its input, and scores are in about ± 3.
        torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data += 1
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, lowercase: bool = True, longest: int = 512) -> None:
    """Write a WordPiece tokenizer like BERT's with the tiny vocabulary."""
    ids = {piece: number for number, piece in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)


def write_sentence_transformer(
    folder: Path,
    pooling: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
    normalize: bool = True,
    **model: Any,
) -> Path:
    """Write a tiny BERT as a sentence-transformers folder with module list, settings, prompts and pooling."""
    write_model(folder, **model)
    write_modules(folder, pooling, settings, prompts, normalize, model.get("hidden_size", 32))
    return folder


def write_modules(
    folder: Path,
    pooling: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
    normalize: bool = True,
    dimensions: int = 32,
) -> None:
    """Write the files that make a model's folder a sentence-transformers folder."""
    list_modules(folder, ["1_Pooling", "2_Normalize"] if normalize else ["1_Pooling"])
    flags = {"word_embedding_dimension": dimensions}
    write_json(folder / "1_Pooling/config.json", flags | (pooling or {"pooling_mode_mean_tokens": True}))
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": 512, "do_lower_case": False} | (settings or {}),
    )
    write_json(
        folder / "config_sentence_transformers.json", prompts or {"prompts": {}, "default_prompt_name": None}
    )


def list_modules(folder: Path, paths: list[str]) -> None:
    """Write modules.json. paths: of the modules behind the Transformer, as in "1_Pooling"."""
    listed = [("", "Transformer"), *((path, path.split("_", 1)[1]) for path in paths)]
    write_json(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(listed)
        ],
    )
    for path in paths:
        (folder / path).mkdir(exist_ok=True)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def update_json(path: Path, **entries: Any) -> None:
    """Change these entries of the JSON object in a file, or add them."""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | entries)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of the byte at `offset` of a file. A negative offset counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def contents_of(database: Path) -> dict[str, object]:
    """Return the bytes of every file, and the manifest without the time and duration of the build."""
    files = {str(path.relative_to(database)): path for path in database.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json").read_bytes())
    del manifest["build"]["seconds"], manifest["build"]["created"]
    return {name: path.read_bytes() for name, path in files.items()} | {"manifest": manifest}


def tighten(root: Path) -> None:
    """Let nothing of the present generation hit, as verification does in the end."""
    database = AttentionDatabase.open(root)
    policy = database.search.policy
    steps = Steps((6,) * len(policy.groups), 6 if policy.limit else 0)
    merge_tightened(database.folder, policy, Tightened(steps))


def random_sequence(random: np.random.Generator, length: int) -> list[int]:
    """Return [CLS] words [SEP] with `length` tokens in total; below 3 tokens only words."""
    words = random.integers(len(SPECIAL), len(VOCABULARY), size=length).tolist()
    return words if length < 3 else [CLS, *words[1:-1], SEP]


def random_sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return a random sequence of each length."""
    random = np.random.default_rng(seed)
    return [random_sequence(random, length) for length in lengths]


def random_text(random: np.random.Generator, words: int) -> str:
    return " ".join(random.choice(PLAIN_WORDS, size=words))


# The ends of the names of the word embeddings in the families.
WORD_EMBEDDINGS = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")


def damage_weights(
    folder: Path, rows: Any, number: float = float("nan"), names: tuple[str, ...] = WORD_EMBEDDINGS
) -> Path:
    """Replace the numbers in these rows of one weight in the file of a model.

    names: possible ends of the weight's name; exactly one weight must match.
    """
    weights = load_file(folder / "model.safetensors")
    (weight,) = (weight for name, weight in weights.items() if name.endswith(names))
    weight[rows] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prefill(engine, sequences, reuse=True, plans=None):
    """Run token sequences. reuse: one value for all sequences, or a list with one value per sequence."""
    reuses = [reuse] * len(sequences) if isinstance(reuse, bool) else reuse
    requests = zip(sequences, reuses, plans or [None] * len(sequences), strict=True)
    return engine.run([PrefillRequest(*request) for request in requests])


def planned(strategy, batch, hidden, allowed):
    """Return the finished plan of a batch. hidden: input of the first layer's attention, [tokens, hidden]."""
    plan = strategy.plan(batch, allowed)
    return strategy.refine(plan, batch, hidden) if plan.until == 0 else plan


def layers_output(model, batch, hidden, plan=None):
    """Return the last layer's output [tokens, hidden]. plan: with hits first; None: no reuse."""
    reused_maps = reused_by(plan or no_reuse(len(batch.lengths)), model, batch)
    return run_layers(model, batch, hidden, reused_maps)[0]


@torch.inference_mode()
def last_hidden(model, sequences):
    """Return the last hidden states of each sequence, in the given order, without reuse."""
    batch = pack(sequences)
    hidden = layers_output(model, batch, model.embed(batch))
    parts = torch.split(hidden, batch.lengths.tolist())
    return [parts[index] for index in batch.order.argsort()]
