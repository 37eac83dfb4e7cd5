"""Smoothing of 8-bit products (SmoothQuant, Xiao et al. 2022): scales between activations and weights.

A few inputs of a linear layer are many times as large as the others. A row of x is rounded to steps of one
size, which these few inputs decide, so most of the other inputs are rounded coarsely. Smoothing multiplies
each input j by a factor f_j before rounding, and divides column j of the weight by f_j:

    x @ weight.T = (x * f) @ (weight / f).T        f_j = max|weight_j| ^ (1 - alpha) / max|x_j| ^ alpha

The product stays the same, and the range of x is divided between x and the weight. The maxima of x are
recorded while a model is loaded: the Hugging Face module runs over the checkpoint's calibration texts. The
factors take no time afterwards, because x is multiplied while it is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.corpus.reading import spread
from attncache_core.text.tokenizer import TextTokenizer

# The share of the range of x that moves into the weight. Measured with all-MiniLM-L6-v2 on STSB_test: 0.5 is
# the best share for the feed-forward halves, and Q, K and V hardly depend on theirs from 0.5 to 0.8.
_ALPHA = 0.5
# Least maximum of an input, as a share of the mean of all maxima. An input that is zero in every calibration
# text may be large in another text, so its factor must stay small.
_MIN_SHARE = 0.01
# Bounds on the time and on the memory of a calibration.
_MAX_TOKENS = 4000
_MAX_TOKENS_AT_ONCE = 1024  # in batches of more than one sequence


def smoothing_of(module: nn.Module) -> torch.Tensor | None:
    """Return the factors of a module's inputs, float32 [inputs]; None if the module is not smoothed."""
    smoothing: torch.Tensor | None = getattr(module, "smoothing", None)
    return smoothing


def calibration_sequences(checkpoint: Checkpoint) -> list[Sequence[int]]:
    """Return the tokens of equally spaced calibration texts, at most 4,000 tokens in total.

    Texts are cut to what the model takes, and not to a limit that its folder sets, because the fingerprint
    does not cover this limit. In a template of pairs, each text is query and document. Texts with a token
    that the model does not have are left out. Raises as TextTokenizer does.
    """
    texts = [checkpoint.template.sample(text) for text in checkpoint.calibration_texts]
    tokenizer = TextTokenizer(replace(checkpoint, max_tokens=None))
    tokenized = tokenizer.tokenize(texts, truncate=True)
    chosen = tokenized = [ids[:_MAX_TOKENS] for ids in tokenized if ids and max(ids) < tokenizer.known_ids]
    while sum(map(len, chosen)) > _MAX_TOKENS:
        chosen = spread(tokenized, len(chosen) - 1)
    return chosen


@torch.no_grad()
def smooth(model: nn.Module, sequences: Sequence[Sequence[int]]) -> None:
    """Give the linear layers of a Hugging Face module their factors, which smoothing_of returns.

    sequences: the token ids of the calibration texts. Layers that read the same tensor get the same factors.
    A layer that not every token reaches (a routed expert) is not smoothed, and nothing is smoothed without
    sequences.
    """
    # The model without its head, which is not quantised.
    base = getattr(model, "base_model", model)
    peaks = {module: _Peaks() for module in base.modules() if type(module) is nn.Linear}
    with ExitStack() as hooks:
        for module, peak in peaks.items():
            hooks.enter_context(module.register_forward_pre_hook(peak.note))
        for ids in _batches(sequences):
            for peak in peaks.values():
                peak.is_noted = False
            base(ids)
    tokens = sum(map(len, sequences))
    reached = [module for module, peak in peaks.items() if peak.tokens == tokens > 0]
    while reached:
        # Layers with equal maxima read the same tensor.
        x = peaks[reached[0]].largest
        readers = [module for module in reached if torch.equal(peaks[module].largest, x)]
        factors = _factors(x, torch.stack([_largest(module.weight) for module in readers]).amax(dim=0))
        for module in readers:
            module.smoothing = factors
            reached.remove(module)


class _Peaks:
    """The largest absolute value of each input of a layer."""

    def __init__(self) -> None:
        self.largest = torch.zeros(1, dtype=torch.float32)  # float32 [inputs], once noted
        self.tokens = 0  # number of rows that were noted
        self.is_noted = False  # in this pass

    def note(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Note the first input of a layer in a pass. DeBERTa's layers then read the relative positions."""
        if self.is_noted:
            return
        rows = inputs[0].flatten(0, -2)
        if not len(rows):
            return
        self.largest = torch.maximum(self.largest, _largest(rows))
        self.tokens += len(rows)
        self.is_noted = True


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Yield the sequences in batches of one length, int64 [sequences, length]."""
    for _, equal in groupby(sorted(sequences, key=len), key=len):
        ids = torch.tensor(list(equal))
        yield from ids.split(max(1, _MAX_TOKENS_AT_ONCE // ids.shape[1]))


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each column, float32; NaN and infinities count as 0."""
    low, high = rows.aminmax(dim=0)
    largest = torch.maximum(-low, high).float()
    if largest.isfinite().all():
        return largest
    return rows.abs().nan_to_num(0, 0, 0).amax(dim=0).float()


def _factors(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the factors of x from the maxima of x and of the weights that multiply x, each [inputs]."""
    x, weight = (part.clamp(min=_MIN_SHARE * float(part.mean()) or 1.0) for part in (x, weight))
    return weight ** (1 - _ALPHA) / x**_ALPHA
