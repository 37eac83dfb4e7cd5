"""The language head of a decoder, computed only at the positions and tokens that a request needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from attncache_core.checkpoints.hugging_face import declared_cap
from attncache_core.native.products import PackedMatrix, packed_products
from attncache_core.runtime.threads import compiled_threads

# `log_probabilities` holds at most this many logits at a time: 64 MB in float32.
_MAX_LOGITS = 2**24


class LanguageHead:
    """The last norm and the linear layer that map hidden states to logits over the vocabulary."""

    def __init__(
        self, norm: Callable[[torch.Tensor], torch.Tensor], linear: nn.Linear, cap: float | None = None
    ) -> None:
        """norm: the model's last norm. cap: if set, logits become c tanh(logit / c), as in Gemma 2."""
        self._norm, self._linear, self._cap = norm, linear, cap

    def token_logits(self, representations: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of the given tokens, float32 [n, tokens].

        representations: hidden states after the last norm, [n, hidden].
        """
        chosen = torch.as_tensor(tokens, device=self._linear.weight.device)
        bias = None if self._linear.bias is None else self._linear.bias[chosen].float()
        weight = self._linear.weight[chosen].float()
        return self._capped(nn.functional.linear(representations.to(weight), weight, bias))

    def log_probabilities(
        self, hidden: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the log probability of tokens[i] after row rows[i], float32 [n].

        hidden: the last layer's output before the last norm, [tokens, hidden]. rows, tokens: int64 [n], in
        any order and with repetitions. The head computes each distinct row once, in slices, because logits
        [rows, vocabulary] are large.
        """
        distinct, index = rows.unique(return_inverse=True)
        states = self._norm(hidden[distinct].to(self._linear.weight.dtype))
        normalizers = self._normalizers(states)
        # These logits are computed again in float32, because rounding to the compute dtype makes close logits
        # equal.
        weight = self._linear.weight[tokens].float()
        logits = torch.einsum("nd,nd->n", states[index].float(), weight)
        if self._linear.bias is not None:
            logits = logits + self._linear.bias[tokens].float()
        return self._capped(logits) - normalizers[index]

    def _normalizers(self, states: torch.Tensor) -> torch.Tensor:
        """Return the log-sum-exp of all logits of each row of states [rows, hidden], float32 [rows]."""
        if self._packed is not None:
            return self._packed.log_normalizers(states, compiled_threads())
        step = max(1, _MAX_LOGITS // self._linear.out_features)
        return torch.cat(
            [self._capped(self._linear(part).float()).logsumexp(dim=1) for part in states.split(step)]
        )

    @cached_property
    def _packed(self) -> PackedMatrix | None:
        """The linear layer for compiled code, packed at first use, because most models never score labels."""
        return None if self._cap is not None else packed_products(self._linear.weight, self._linear.bias)

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._cap is None else (logits / self._cap).tanh() * self._cap


def language_head(model: Any, norm: nn.Module) -> LanguageHead | None:
    """Return the language head of a Hugging Face decoder; None if the decoder was loaded without one."""
    linear = model.get_output_embeddings()
    return linear and LanguageHead(norm, linear, declared_cap(model.config, "final_logit_softcapping"))
