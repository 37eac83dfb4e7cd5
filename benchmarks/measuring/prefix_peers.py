"""Other engines on few-shot prompts, each with its own cache of the prefixes' keys and values.

Each engine is loaded by name in its own process (worker.py). It keeps every sequence that begins like none
before, and later computes only what stands behind the longest kept sequence.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attncache_core import Checkpoint
from benchmarks.measuring.gguf_file import write_gguf
from benchmarks.measuring.peers import Peer, Sequences, Shapes

# Kept with a prefix: what its engine needs to continue.
Kept = Any


class PrefixPeer(Peer):
    """An engine that keeps prefixes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Kept] = {}

    def embed_tokens(self, sequences: Sequences) -> np.ndarray:
        """Return one vector for each sequence, [sequences, d]; sequences that follow a kept one share it."""
        behind: dict[tuple[tuple[int, ...], int], list[int]] = {}
        results: list[np.ndarray | None] = [None] * len(sequences)
        for index, ids in enumerate(sequences):
            prefix = self._prefix_of(ids)
            if prefix is None:
                self._kept[tuple(ids)], results[index] = self.keep(ids)
            else:
                behind.setdefault((prefix, len(ids)), []).append(index)
        for (prefix, _), indices in behind.items():
            rest = [sequences[index][len(prefix) :] for index in indices]
            for index, result in zip(indices, self.follow(prefix, self._kept[prefix], rest), strict=True):
                results[index] = result
        return np.array(results, dtype=np.float32)

    def _prefix_of(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        """Return the longest kept sequence that these tokens begin with, and that leaves some to compute."""
        fitting = [kept for kept in self._kept if len(kept) < len(ids) and tuple(ids[: len(kept)]) == kept]
        return max(fitting, key=len, default=None)

    @abstractmethod
    def keep(self, ids: Sequence[int]) -> tuple[Kept, np.ndarray]:
        """Compute a sequence. Returns what continues it, and its vector."""

    @abstractmethod
    def follow(self, prefix: Sequence[int], kept: Kept, rest: Sequences) -> np.ndarray:
        """Compute what stands behind a kept sequence, all of one length. Returns the vectors, [n, d]."""


class TransformersCache(PrefixPeer):
    """The Hugging Face model with its own cache of keys and values, and mean pooling."""

    def __init__(self, checkpoint: Checkpoint, threads: int, dtype: torch.dtype) -> None:
        from transformers import AutoModel

        super().__init__()
        torch.set_num_threads(threads)
        model = AutoModel.from_pretrained(checkpoint.folder, attn_implementation="sdpa", dtype=dtype)
        self._model = model.eval()

    @torch.inference_mode()
    def keep(self, ids: Sequence[int]) -> tuple[Kept, np.ndarray]:
        """See PrefixPeer."""
        done = self._model(torch.tensor([ids]), use_cache=True)
        total = done.last_hidden_state.float().sum(1)
        return (done.past_key_values, total), (total[0] / len(ids)).numpy()

    @torch.inference_mode()
    def follow(self, prefix: Sequence[int], kept: Kept, rest: Sequences) -> np.ndarray:
        """See PrefixPeer."""
        cache, total = kept
        cache.batch_repeat_interleave(len(rest))
        done = self._model(torch.tensor(rest), past_key_values=cache, use_cache=True)
        cache.crop(-len(rest[0]))
        cache.batch_select_indices(torch.tensor([0]))
        mean = (done.last_hidden_state.float().sum(1) + total) / (len(prefix) + len(rest[0]))
        return np.asarray(mean.numpy())


class LlamaCpp(PrefixPeer):
    """llama.cpp on a GGUF file of the same weights. Returns the first logits of the last token."""

    _LOGITS = 64
    _CONTEXT = 4096  # tokens

    def __init__(self, checkpoint: Checkpoint, threads: int, dtype: torch.dtype) -> None:
        try:
            import llama_cpp
        except ModuleNotFoundError as error:
            raise RuntimeError(f"{error}; install it with: pip install llama-cpp-python gguf") from error
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(checkpoint, path, dtype)
            self._llama = llama_cpp.Llama(
                str(path),
                n_ctx=self._CONTEXT,
                n_threads=threads,
                n_threads_batch=threads,
                verbose=False,
            )
        self._loaded: Sequence[int] = ()  # the kept sequence whose keys and values are in the context

    def keep(self, ids: Sequence[int]) -> tuple[Kept, np.ndarray]:
        """See PrefixPeer."""
        self._llama.reset()
        self._llama.eval(ids)
        self._loaded = tuple(ids)
        return self._llama.save_state(), self._logits()

    def follow(self, prefix: Sequence[int], kept: Kept, rest: Sequences) -> np.ndarray:
        """See PrefixPeer."""
        if tuple(prefix) != tuple(self._loaded):
            self._llama.load_state(kept)
            self._loaded = prefix
        vectors = []
        for ids in rest:
            self._llama.n_tokens = len(prefix)  # `eval` removes what is behind
            self._llama.eval(ids)
            vectors.append(self._logits())
        return np.array(vectors)

    def _logits(self) -> np.ndarray:
        logits = self._llama._ctx.get_logits()  # waits until they are computed
        return np.array(np.ctypeslib.as_array(logits, shape=(self._LOGITS,)))


def short_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in the names of peers."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


LIBRARIES = ("transformers", "llama.cpp")
PREFIX_PEERS: dict[str, Callable[[Checkpoint, int, Shapes], Peer]] = {
    "transformers cache bf16": lambda model, threads, _: TransformersCache(model, threads, torch.bfloat16),
    "transformers cache fp32": lambda model, threads, _: TransformersCache(model, threads, torch.float32),
    "llama.cpp cache bf16": lambda model, threads, _: LlamaCpp(model, threads, torch.bfloat16),
    "llama.cpp cache fp32": lambda model, threads, _: LlamaCpp(model, threads, torch.float32),
}
