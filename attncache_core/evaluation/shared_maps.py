"""LazyFormer and SAN: neighbouring layers share the attention maps of one sentence.

    layers in blocks -> the first layer of a block computes its maps, which are kept
                     -> the others have V, maps @ V and the rest only: no Q, no K, no softmax

LazyFormer (Ying et al. 2021) has blocks of two layers. SAN (Xiao et al. 2019) lets neighbours share where the
Jensen-Shannon divergence of their maps, measured on a sample, is small. Both train models that share maps;
here a model that was trained without is run like that, as it is with reuse from records.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from attncache_core import Outcome, PrefillResult, native
from attncache_core.attention_maps.substitution import token_passes, traced_forward
from attncache_core.checkpoint import Checkpoint
from attncache_core.devices import Dtype, resolve_dtype
from attncache_core.memory import keep_freed_memory
from attncache_core.models import AttentionLayer, PackedModel, load_model, model_shape
from attncache_core.models.attention import apply_maps
from attncache_core.models.blocks import PlainAttention
from attncache_core.outputs import finite_sequences
from attncache_core.threads import limit_threads
from attncache_core.tokenizer import TextTokenizer
from attncache_core.tokens import Group, TokenBatch, by_sequence, pack


def lazyformer_blocks(layers: int, size: int = 2) -> list[range]:
    """Blocks of `size` layers, the last one perhaps shorter. Blocks of one layer are the full model."""
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


def san_blocks(divergences: np.ndarray, threshold: float) -> list[range]:
    """Blocks whose neighbouring layers diverge by less than `threshold`.

    divergences: [layers - 1], of each layer's maps from the next one's (`layer_divergences`). A layer joins
    the block of the layer before it by their divergence alone, as the AttnCache papers describe SAN: in a
    long block the last layer may be further than that from the first, whose maps it gets. Threshold 0 is the
    full model.
    """
    starts = [0, *(np.flatnonzero(~(np.asarray(divergences) < threshold)) + 1).tolist()]
    ends = [*starts[1:], len(divergences) + 1]
    return [range(first, end) for first, end in zip(starts, ends, strict=True)]


def layer_divergences(model: PackedModel, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """How far each layer's maps are from the next one's: float64 [layers - 1], in nats, from 0 to ln 2.

    The Jensen-Shannon divergence of their rows, head by head as the model numbers them: the mean over the
    heads and rows of a sequence, and then over sequences, so that a long one counts no more than a short one.
    The model must have no reuse mask of its own.
    """
    compared = _NeighbouringLayers(len(model.layers))
    for indices in token_passes([len(sequence) for sequence in sequences]):
        traced_forward(model, pack([sequences[index] for index in indices]), compared)
    return compared.totals / len(sequences)


class _NeighbouringLayers:
    """Sees the maps of a full run layer by layer, and keeps those of one layer at a time."""

    def __init__(self, layers: int) -> None:
        self.totals = np.zeros(layers - 1)  # over sequences
        self._before: dict[Group, torch.Tensor] = {}

    def __call__(self, layer: int, group: Group, maps: torch.Tensor) -> None:
        if layer > 0:
            divergences = jensen_shannon(self._before.pop(group), maps)  # [n, heads, L]
            self.totals[layer - 1] += float(divergences.mean(dim=(1, 2)).sum())
        if layer < len(self.totals):
            self._before[group] = maps


def jensen_shannon(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The Jensen-Shannon divergence of distributions along the last axis, in nats: float64 [...].

    H((P + Q) / 2) - (H(P) + H(Q)) / 2. Rows in 16 bits do not quite sum to 1: they are brought to it.
    """
    left, right = (rows.double() / rows.double().sum(dim=-1, keepdim=True) for rows in (left, right))
    mixed = _entropy((left + right) / 2)
    return (mixed - (_entropy(left) + _entropy(right)) / 2).clamp(min=0)


def _entropy(rows: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(rows).sum(dim=-1)


class SharedMapsEngine:
    """A model whose layers share maps in blocks. `run` is for one thread at a time."""

    def __init__(self, model: PackedModel, blocks: Sequence[range]) -> None:
        """model: with all heads reused in every layer of a block but the first, and none in the first."""
        self.model = model
        self.blocks = blocks

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        blocks: Sequence[range],
        *,
        dtype: Dtype = "auto",
        threads: int | None = None,
    ) -> SharedMapsEngine:
        """Load and pack the checkpoint's weights; dtype and threads as PrefillEngine.load has them.

        Raises ValueError if the blocks are not the checkpoint's layers in their order, UnsupportedModel as
        load_model does.
        """
        layers, heads = model_shape(checkpoint)
        if not all(blocks) or [layer for block in blocks for layer in block] != list(range(layers)):
            raise ValueError(f"the blocks are not the model's {layers} layers in their order")
        keep_freed_memory()
        limit_threads(threads)
        first_of_block = {block.start for block in blocks}
        model = load_model(
            checkpoint,
            resolve_dtype(dtype),
            prompt_tokens=TextTokenizer(checkpoint).prompt_tokens,
            # What a layer shares it never computes: Q and K belong to the misses, which there are none of.
            reused_heads=[0 if layer in first_of_block else heads for layer in range(layers)],
        )
        return cls(model, blocks)

    @torch.inference_mode()
    def run(self, sequences: Sequence[Sequence[int]]) -> PrefillResult:
        """Run token sequences through the model, as PrefillEngine.run does; nothing is searched."""
        started = time.perf_counter()
        batch = pack(sequences).filled()
        hidden, attention_seconds = self._forward(batch, self.model.embed(batch))
        outputs = self.model.outputs(hidden, batch).rows.cpu().numpy()
        return PrefillResult(
            outputs=batch.in_callers_order(outputs),
            finite=batch.in_callers_order(finite_sequences(batch, hidden, outputs)),
            outcomes=(Outcome.NOT_SEARCHED,) * len(sequences),
            similarities=np.full(len(sequences), np.nan, dtype=np.float32),
            tokens=int(batch.offsets[-1]),
            search_seconds=0.0,
            forward_seconds=time.perf_counter() - started,
            attention_seconds=attention_seconds,
            corrupt_records=0,
        )

    def _forward(self, batch: TokenBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The last layer's output [tokens, hidden], and the seconds that attention took in all layers."""
        maps = _block_maps(batch, hidden, self.model.layers[0])
        attention_seconds = 0.0
        for block in self.blocks:
            for number in block:
                layer = self.model.layers[number]
                started = time.perf_counter()
                context = _context(layer, layer.attention_input(hidden), batch, maps, len(block))
                attention_seconds += time.perf_counter() - started
                hidden = layer.finish(hidden, context)
        return hidden, attention_seconds


def _context(
    layer: AttentionLayer, x: torch.Tensor, batch: TokenBatch, maps: BlockMaps, block: int
) -> torch.Tensor:
    """maps @ V [tokens, heads, head_dim] of a layer in a block of so many layers, for x [tokens, hidden]."""
    value, query, key = layer.project(x, batch.positions)
    context = batch.context_like(value)
    if layer.reused_heads:
        maps.apply(value, context)
    elif block > 1:
        maps.attend(layer, query, key, value, context)
    else:
        layer.attend(query, key, value, batch.offsets, slice(layer.heads), context)
    return context


class BlockMaps(Protocol):
    """A batch's maps, kept for the layers of a block. All tensors are [tokens, heads, head_dim]."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: torch.Tensor,
    ) -> None:
        """Compute the maps, keep them until the next call, and write maps @ V to `context`."""
        ...

    def apply(self, value: torch.Tensor, context: torch.Tensor) -> None:
        """Write the kept maps @ V to `context`."""
        ...


class KernelMaps:
    """The kernel writes maps down in the dtype of V, and reads them where they lie."""

    def __init__(
        self, kernel: native.AttentionKernel, batch: TokenBatch, heads: int, dtype: torch.dtype
    ) -> None:
        self._kernel = kernel
        self._offsets = batch.offsets
        self._sequences = np.arange(len(batch.lengths) + 1)  # each has maps of its own
        starts = np.concatenate(([0], np.cumsum(heads * batch.lengths**2)))
        self._maps = torch.empty(int(starts[-1]), dtype=dtype)
        self._addresses = self._maps.data_ptr() + starts[:-1] * self._maps.element_size()

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: torch.Tensor,
    ) -> None:
        """See BlockMaps."""
        self._kernel.attend(
            query,
            key,
            value,
            self._offsets,
            layer.pattern.scale,
            context,
            kept=self._addresses,
            before=layer.pattern.before,
            after=layer.pattern.after,
        )

    def apply(self, value: torch.Tensor, context: torch.Tensor) -> None:
        """See BlockMaps."""
        self._kernel.apply_maps(
            self._addresses, self._maps.dtype, self._sequences, value, self._offsets, context
        )


class OperatorMaps:
    """The same by torch's operators, for neighbours of one length at a time."""

    def __init__(self, batch: TokenBatch) -> None:
        self._groups = batch.groups()
        self._maps: list[torch.Tensor] = []  # of each group, [n, heads, L, L]

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: torch.Tensor,
    ) -> None:
        """See BlockMaps."""
        self._maps = [
            layer.attention_maps(by_sequence(query, group), by_sequence(key, group), slice(layer.heads))
            for group in self._groups
        ]
        self.apply(value, context)

    def apply(self, value: torch.Tensor, context: torch.Tensor) -> None:
        """See BlockMaps."""
        for group, maps in zip(self._groups, self._maps, strict=True):
            by_sequence(context, group).copy_(apply_maps(maps, by_sequence(value, group)))


def _block_maps(batch: TokenBatch, hidden: torch.Tensor, layer: AttentionLayer) -> BlockMaps:
    """By the kernel where it computes what the layers do, on the dtype and device of the hidden states."""
    kernel = native.kernel()
    products = isinstance(layer, PlainAttention) and layer.scores_are_products
    if kernel and kernel.takes(hidden) and products:
        return KernelMaps(kernel, batch, layer.heads, hidden.dtype)
    return OperatorMaps(batch)
