"""The engines of the benchmark: AttnCache in several configurations, and other engines.

Each engine is loaded by name in its own process (worker.py), and turns token sequences of one length into
pooled embeddings. AttnCache runs the checkpoint's variant; the other engines run the model on disk without
changes. A peer raises ImportError if its library is not installed.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from attncache_core import AttentionDatabase, Checkpoint, Fetch, PrefillEngine
from service.bench.synthetic import write_database

Sequences = Sequence[Sequence[int]]


class Peer(ABC):
    """A loaded engine."""

    @abstractmethod
    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """Return the embeddings, [sequences, d], of token sequences of one length."""

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Tokenise texts and return their embeddings, [texts, d]."""
        raise NotImplementedError


class AttnCache(Peer):
    """AttnCache without a database."""

    def __init__(self, checkpoint: Checkpoint, threads: int, dtype: Literal["bfloat16", "float32"]) -> None:
        self.engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads)

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        return self.engine.run(self.engine.requests(sequences)).outputs

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """See Peer."""
        return self.engine.embed(texts)


class AttnCacheHits(AttnCache):
    """AttnCache with all heads of every sequence reused, including search and fetch."""

    def __init__(
        self, checkpoint: Checkpoint, threads: int, shapes: Sequence[tuple[int, int]], fetch: str
    ) -> None:
        folder = tempfile.TemporaryDirectory(prefix="attncache-bench-")
        self._folder = folder  # removed when the peer is deleted
        write_database(Path(folder.name) / "db", checkpoint, sorted({length for _, length in shapes}))
        self.engine = PrefillEngine.load(
            checkpoint,
            database=AttentionDatabase.open(Path(folder.name) / "db"),
            threads=threads,
            fetch=Fetch(fetch),
        )


class AttnCacheMisses(AttnCacheHits):
    """AttnCache with the same database and a threshold that nothing reaches, to measure the search."""

    def __init__(self, checkpoint: Checkpoint, threads: int, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(checkpoint, threads, shapes, "auto")
        database = AttentionDatabase.open(Path(self._folder.name) / "db", threshold=2.0)
        self.engine = PrefillEngine.load(checkpoint, database=database, threads=threads)


class OnnxRuntime(Peer):
    """ONNX Runtime in float32 on the exported model, with all optimisations."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.onnx")
            names = ["input_ids", "attention_mask"]
            sizes = {name: {0: "sequences", 1: "length"} for name in names}
            torch.onnx.export(
                _pooled_model(checkpoint),
                _example(),
                path,
                input_names=names,
                dynamic_axes=sizes,
                dynamo=False,
                opset_version=17,
            )
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        ids = np.array(sequences, dtype=np.int64)
        (embeddings,) = self._session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        return embeddings


class OpenVino(Peer):
    """OpenVINO, compiled for each shape, which is its fastest configuration."""

    def __init__(self, checkpoint: Checkpoint, threads: int, precision: Literal["bf16", "f32"]) -> None:
        import openvino

        self._model = openvino.convert_model(_pooled_model(checkpoint), example_input=_example())
        self._core = openvino.Core()
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._requests: dict[tuple[int, ...], Any] = {}

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        ids = np.array(sequences, dtype=np.int64)
        if ids.shape not in self._requests:
            self._model.reshape({port: list(ids.shape) for port in self._model.inputs})
            compiled = self._core.compile_model(self._model, "CPU", self._settings)
            self._requests[ids.shape] = compiled.create_infer_request()
        found = self._requests[ids.shape].infer([ids, np.ones_like(ids)])
        return np.array(next(iter(found.values())))


class Transformers(Peer):
    """The Hugging Face model on torch in float32, eager or compiled by torch.compile."""

    def __init__(self, checkpoint: Checkpoint, threads: int, *, compiled: bool) -> None:
        torch.set_num_threads(threads)
        self._model = _pooled_model(checkpoint, attention="sdpa")
        if compiled:
            self._model.compile()

    @torch.inference_mode()
    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        ids = torch.tensor(sequences)
        return self._model(ids, torch.ones_like(ids)).numpy()


class SentenceTransformers(Peer):
    """sentence-transformers in float32, with its default settings."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(str(checkpoint.folder), device="cpu")

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        raise NotImplementedError("sentence-transformers takes texts")

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """See Peer."""
        return self._model.encode(list(texts), batch_size=len(texts))


Shapes = Sequence[tuple[int, int]]
PEERS: dict[str, Callable[[Checkpoint, int, Shapes], Peer]] = {
    "attncache bf16": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "bfloat16"),
    "attncache fp32": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "float32"),
    "attncache, all hit": lambda checkpoint, threads, shapes: AttnCacheHits(
        checkpoint, threads, shapes, "auto"
    ),
    "attncache, all miss": AttnCacheMisses,
    "onnxruntime fp32": lambda checkpoint, threads, _: OnnxRuntime(checkpoint, threads),
    "openvino bf16": lambda checkpoint, threads, _: OpenVino(checkpoint, threads, "bf16"),
    "openvino fp32": lambda checkpoint, threads, _: OpenVino(checkpoint, threads, "f32"),
    "transformers fp32": lambda checkpoint, threads, _: Transformers(checkpoint, threads, compiled=False),
    "torch.compile fp32": lambda checkpoint, threads, _: Transformers(checkpoint, threads, compiled=True),
    "sentence-transformers": lambda checkpoint, threads, _: SentenceTransformers(checkpoint, threads),
    "hits, gather": lambda checkpoint, threads, shapes: AttnCacheHits(checkpoint, threads, shapes, "gather"),
    "hits, views": lambda checkpoint, threads, shapes: AttnCacheHits(checkpoint, threads, shapes, "views"),
    "hits, mapped": lambda checkpoint, threads, shapes: AttnCacheHits(checkpoint, threads, shapes, "mapped"),
}


class _Pooled(torch.nn.Module):
    """A model with mean pooling."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[:, :, None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def _pooled_model(checkpoint: Checkpoint, attention: str = "eager") -> _Pooled:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint.folder, attn_implementation=attention, dtype=torch.float32)
    return _Pooled(model.eval())


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1000, 2000, (3, 16))
    return ids, torch.ones_like(ids)
