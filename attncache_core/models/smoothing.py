"""Smoothing of 8-bit products (SmoothQuant, Xiao et al. 2022): factors between activations and weights.

A few inputs of a linear layer are many times as large as the others. The row of x is rounded with one scale,
so these few inputs decide the step, and the others lose most of their levels. Smoothing divides each input j
by s_j before rounding and multiplies column j of the weight by s_j:

    x @ weight.T = (x / s) @ (weight * s).T        s_j = max|x_j| ^ alpha / max|weight_j| ^ (1 - alpha)

The product is the same, and the range of x is shared out between x and the weight. The maxima of x are
recorded once, while a model is loaded: the float model runs on some texts. The factors cost no time later,
because x is multiplied while it is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attncache_core.checkpoints.checkpoint import Checkpoint
from attncache_core.corpus import default_corpus
from attncache_core.corpus.reading import spread
from attncache_core.text.tokenizer import TextTokenizer

ALPHA_QKV, ALPHA = 0.6, 0.5
# The most tokens that a model runs to be calibrated, so that a large model does not take minutes, and the
# most tokens of one text.
_MOST_TOKENS = 8000
_MOST_TOKENS_OF_TEXT = 500
_LEAST_SHARE = 0.01


def default_texts():
    return spread([s.text for s in default_corpus()], 300)


def calibration_sequences(checkpoint: Checkpoint) -> list[list[int]]:
    """Return the tokens of the checkpoint's calibration texts, at most 8,000 in all, sorted by length."""
    tokenizer = TextTokenizer(checkpoint, _MOST_TOKENS_OF_TEXT)
    tokenized = tokenizer.tokenize(checkpoint.quantization_texts or default_texts(), truncate=True)
    counts = range(len(tokenized), 0, -1)
    fitting = (spread(tokenized, count) for count in counts)
    return sorted(next(chosen for chosen in fitting if sum(map(len, chosen)) <= _MOST_TOKENS), key=len)


@torch.inference_mode()
def smooth(model: nn.Module, sequences: Sequence[Sequence[int]]) -> None:
    """Set `smoothing`"""
    base = getattr(model, "base_model", model)
    linears = {name: m for name, m in base.named_modules() if type(m) is nn.Linear}
    peaks: dict[nn.Module, torch.Tensor] = {}
    rows: dict[nn.Module, int] = {}
    seen: set = set()

    def note(module, inputs):
        if module in seen:
            return
        seen.add(module)
        (x,) = inputs
        x = x.flatten(0, -2)
        rows[module] = rows.get(module, 0) + len(x)
        peak = x.float().abs().nan_to_num(0, 0, 0).amax(0)
        peaks[module] = torch.maximum(peaks[module], peak) if module in peaks else peak

    handles = [m.register_forward_pre_hook(note) for m in linears.values()]
    total = 0
    i = 0
    while i < len(sequences):
        j = i
        while j < len(sequences) and len(sequences[j]) == len(sequences[i]) and (j - i) * len(sequences[i]) < 1024:
            j += 1
        seen.clear()
        ids = torch.tensor(sequences[i:j])
        total += ids.numel()
        base(ids)
        i = j
    for h in handles:
        h.remove()
    groups: list[list[tuple[str, nn.Linear]]] = []
    for name, m in linears.items():
        if m not in peaks or rows[m] != total:
            continue
        for g in groups:
            if torch.equal(peaks[g[0][1]], peaks[m]) :
                g.append((name, m))
                break
        else:
            groups.append([(name, m)])
    FOUND.clear()
    for g in groups:
        x = peaks[g[0][1]]
        w = torch.stack([m.weight.float().abs().nan_to_num(0, 0, 0).amax(0) for _, m in g]).amax(0)
        alpha = ALPHA_QKV if len(g) == 3 else ALPHA
        FOUND.append(([n for n, _ in g], alpha))
        x = x.clamp(min=_LEAST_SHARE * x.mean())
        w = w.clamp(min=_LEAST_SHARE * w.mean())
        s = w ** (1 - alpha) / x ** alpha
        for _, m in g:
            m.smoothing = s

FOUND = []


def smoothing_of(module: nn.Module) -> torch.Tensor | None:
    """Return the factors."""
    return getattr(module, "smoothing", None)
