"""The engines of the benchmark: AttnCache in several configurations, and other engines.

Each engine is loaded by name in its own process (worker.py), and turns token sequences of one length into
pooled embeddings. AttnCache runs the checkpoint's variant; the other engines run the model on disk without
changes. A peer raises ModuleNotFoundError if its library is not installed.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from attncache_core import AttentionDatabase, Checkpoint, PrefillEngine, Quantization
from attncache_core.checkpoints.checkpoint import Device
from attncache_core.corpus import default_corpus
from attncache_core.reuse.maps.map_reuse import MapReuse
from attncache_core.text.tokenizer import TextTokenizer
from benchmarks.measuring.synthetic import write_database
from benchmarks.papers.mapped import MapsSideBySide

Sequences = Sequence[Sequence[int]]
# Token ids of one shape, int64 [sequences, length], or texts -> embeddings, float32 [sequences, d].
Run = Callable[[Any], np.ndarray]

_CALIBRATION_TEXTS = 300
_TRIALS = 7
_GPU_BATCHES = (128, 256, 512)


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

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        dtype: Literal["auto", "bfloat16", "float32"],
        device: Device = "cpu",
    ) -> None:
        self.engine = PrefillEngine.load(checkpoint, dtype=dtype, threads=threads, device=device)

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        return self.engine.run(self.engine.requests(sequences)).outputs

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """See Peer."""
        return self.engine.embed(texts)


class AttnCacheHits(AttnCache):
    """AttnCache with all heads of every sequence reused, including search and fetch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        shapes: Sequence[tuple[int, int]],
        strategy: type[MapReuse] = MapReuse,
    ) -> None:
        folder = tempfile.TemporaryDirectory(prefix="attncache-bench-")
        self._folder = folder  # removed when the peer is deleted
        write_database(Path(folder.name) / "db", checkpoint, sorted({length for _, length in shapes}))
        self.engine = PrefillEngine.load(
            checkpoint,
            strategy=strategy(AttentionDatabase.open(Path(folder.name) / "db")),
            threads=threads,
        )


class AttnCacheMisses(AttnCacheHits):
    """AttnCache with the same database and a threshold that nothing reaches, to measure the search."""

    def __init__(self, checkpoint: Checkpoint, threads: int, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__(checkpoint, threads, shapes)
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
    """OpenVINO, compiled for each shape with the faster performance hint, which is its fastest configuration.

    The model in int8 is quantised by NNCF after training, calibrated on the shipped corpus. What is not
    quantised runs in bfloat16 or float32, whichever is faster.
    """

    def __init__(
        self, checkpoint: Checkpoint, threads: int, precision: Literal["bf16", "f32", "int8"]
    ) -> None:
        # With this package, OpenVINO and NNCF report each use to their maker, from threads of their own.
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        import openvino

        self._core = openvino.Core()
        supported = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if precision == "bf16" and "BF16" not in supported:
            raise RuntimeError(
                "this processor has no bfloat16 products, and OpenVINO would compute in float32"
            )
        self._precisions: Sequence[str] = [precision]
        self._model = openvino.convert_model(_pooled_model(checkpoint), example_input=_example())
        if precision == "int8":
            self._precisions = ["f32", "bf16"] if "BF16" in supported else ["f32"]
            self._model = _quantized(self._model, calibration_sequences(checkpoint))
        self._threads = threads
        self._runs: dict[tuple[int, ...], Run] = {}

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        ids = np.array(sequences, dtype=np.int64)
        if ids.shape not in self._runs:
            self._runs[ids.shape] = fastest(self._compiled(*ids.shape), ids)
        return self._runs[ids.shape](ids)

    def _compiled(self, sequences: int, length: int) -> list[Run]:
        """Return the model compiled with each hint and precision.

        LATENCY gives all threads to the whole batch. THROUGHPUT computes equal parts of the batch side by
        side, so a batch of one sequence has no THROUGHPUT.
        """
        runs = []
        parts = math.gcd(sequences, self._threads)
        for precision in self._precisions:
            settings = {
                "INFERENCE_NUM_THREADS": self._threads,
                "INFERENCE_PRECISION_HINT": precision,
            }
            latency = {**settings, "PERFORMANCE_HINT": "LATENCY"}
            runs.append(self._run(sequences, length, 1, latency))
            if parts > 1:
                throughput = {**settings, "PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": parts}
                runs.append(self._run(sequences, length, parts, throughput))
        return runs

    def _run(self, sequences: int, length: int, parts: int, settings: dict[str, Any]) -> Run:
        shape = [sequences // parts, length]
        self._model.reshape(dict.fromkeys(self._model.inputs, shape))
        compiled = self._core.compile_model(self._model, "CPU", settings)
        requests = [compiled.create_infer_request() for _ in range(parts)]
        mask = np.ones(shape, dtype=np.int64)

        def run(ids: np.ndarray) -> np.ndarray:
            for request, part in zip(requests, np.split(ids, parts), strict=True):
                request.start_async([part, mask], share_inputs=True)
            for request in requests:
                request.wait()
            return np.concatenate([request.get_output_tensor().data for request in requests])

        return run


class CTranslate2(Peer):
    """CTranslate2 with int8 weights and activations, and mean pooling in NumPy."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            converted = str(Path(folder) / "model")
            converter = ctranslate2.converters.TransformersConverter(str(checkpoint.folder))
            converter.convert(converted, quantization="int8")
            self._encoder = ctranslate2.Encoder(
                converted, device="cpu", compute_type="int8", intra_threads=threads
            )

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        found = self._encoder.forward_batch([list(ids) for ids in sequences])
        return np.asarray(found.last_hidden_state).mean(axis=1)


class Transformers(Peer):
    """The Hugging Face model on torch, eager or compiled by torch.compile."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        threads: int,
        dtype: torch.dtype = torch.float32,
        device: Device = "cpu",
        *,
        compiled: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        # None is torch's fused attention, or eager attention for a family without it, such as DeBERTa.
        self._model = _pooled_model(checkpoint, attention=None).to(device, dtype)
        self._device = device
        if compiled:
            self._model.compile()

    @torch.inference_mode()
    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        ids = torch.tensor(sequences, device=self._device)
        return self._model(ids, torch.ones_like(ids)).float().cpu().numpy()


class SentenceTransformers(Peer):
    """sentence-transformers with its default settings. On a GPU, its fastest batch size is taken."""

    def __init__(
        self, checkpoint: Checkpoint, threads: int, dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> None:
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(
            str(checkpoint.folder), device=device, model_kwargs={"dtype": dtype}
        )
        self._sizes = _GPU_BATCHES if device == "cuda" else ()
        self._runs: dict[int, Run] = {}  # number of texts -> run

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """See Peer."""
        raise NotImplementedError("sentence-transformers takes texts")

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """See Peer."""
        if len(texts) not in self._runs:
            sizes = [size for size in self._sizes if size < len(texts)] + [len(texts)]
            runs = [partial(self._model.encode, batch_size=size) for size in sizes]
            self._runs[len(texts)] = fastest(runs, texts)
        return self._runs[len(texts)](texts)


Shapes = Sequence[tuple[int, int]]
PEERS: dict[str, Callable[[Checkpoint, int, Shapes], Peer]] = {
    "attncache bf16": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "bfloat16"),
    "attncache fp32": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "float32"),
    "attncache int8": lambda checkpoint, threads, _: AttnCache(
        replace(checkpoint, quantization=Quantization.INT8), threads, "auto"
    ),
    "attncache, all hit": AttnCacheHits,
    "attncache, all miss": AttnCacheMisses,
    "onnxruntime fp32": lambda checkpoint, threads, _: OnnxRuntime(checkpoint, threads),
    "openvino bf16": lambda checkpoint, threads, _: OpenVino(checkpoint, threads, "bf16"),
    "openvino fp32": lambda checkpoint, threads, _: OpenVino(checkpoint, threads, "f32"),
    "openvino int8": lambda checkpoint, threads, _: OpenVino(checkpoint, threads, "int8"),
    "ctranslate2 int8": lambda checkpoint, threads, _: CTranslate2(checkpoint, threads),
    "transformers fp32": lambda checkpoint, threads, _: Transformers(checkpoint, threads),
    "torch.compile fp32": lambda checkpoint, threads, _: Transformers(checkpoint, threads, compiled=True),
    "sentence-transformers": lambda checkpoint, threads, _: SentenceTransformers(checkpoint, threads),
    "hits, mapped": lambda checkpoint, threads, shapes: AttnCacheHits(
        checkpoint, threads, shapes, MapsSideBySide
    ),
}
GPU_PEERS: dict[str, Callable[[Checkpoint, int, Shapes], Peer]] = {
    "attncache bf16, cuda": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "bfloat16", "cuda"),
    "attncache fp32, cuda": lambda checkpoint, threads, _: AttnCache(checkpoint, threads, "float32", "cuda"),
    "transformers fp32, cuda": lambda checkpoint, threads, _: Transformers(
        checkpoint, threads, torch.float32, "cuda"
    ),
    "transformers bf16, cuda": lambda checkpoint, threads, _: Transformers(
        checkpoint, threads, torch.bfloat16, "cuda"
    ),
    "sentence-transformers bf16, cuda": lambda checkpoint, threads, _: SentenceTransformers(
        checkpoint, threads, torch.bfloat16, "cuda"
    ),
}


def fastest(runs: Sequence[Run], inputs: Any) -> Run:
    """Return the run with the least time for these inputs. The runs alternate."""
    if len(runs) == 1:
        return runs[0]
    best = [math.inf] * len(runs)
    for trial in range(_TRIALS + 1):
        for number, run in enumerate(runs):
            started = time.perf_counter()
            run(inputs)
            if trial:  # the first pass of a compiled model also prepares its kernels
                best[number] = min(best[number], time.perf_counter() - started)
    return runs[int(np.argmin(best))]


def calibration_sequences(checkpoint: Checkpoint) -> Sequences:
    """Return the tokens of 300 texts of the shipped corpus, taken at equal distances, so from all topics."""
    texts = [sentence.text for sentence in default_corpus()]
    chosen = [texts[number * len(texts) // _CALIBRATION_TEXTS] for number in range(_CALIBRATION_TEXTS)]
    return TextTokenizer(checkpoint).tokenize(chosen, truncate=True)


def _quantized(model: Any, sequences: Sequences) -> Any:
    """Return an OpenVINO model in int8, quantised by NNCF with the sequences as calibration data."""
    import nncf

    def inputs(ids: Sequence[int]) -> list[np.ndarray]:
        batch = np.array([ids], dtype=np.int64)
        return [batch, np.ones_like(batch)]

    return nncf.quantize(
        model,
        nncf.Dataset(sequences, inputs),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(sequences),
    )


class _Pooled(torch.nn.Module):
    """A model with mean pooling."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[:, :, None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def _pooled_model(checkpoint: Checkpoint, attention: str | None = "eager") -> _Pooled:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint.folder, attn_implementation=attention, dtype=torch.float32)
    return _Pooled(model.eval())


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((3, 16), 2)  # a token that every vocabulary has
    return ids, torch.ones_like(ids)
