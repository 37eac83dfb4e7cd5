"""The language head of a decoder, applied to the few positions that somebody reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attncache_core.loading import declared

# Logits are held for so many numbers at a time: 64 MB of them.
_MOST_LOGITS = 2**24


class LanguageHead:
    """From hidden states to logits over the vocabulary."""

    def __init__(
        self, norm: Callable[[torch.Tensor], torch.Tensor], linear: nn.Linear, cap: float | None = None
    ) -> None:
        """norm: the model's last; cap: logits are c tanh(logit / c), as Gemma 2's."""
        self._norm, self._linear, self._cap = norm, linear, cap

    def token_logits(self, representations: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [n, tokens] of these tokens from hidden states after the last norm [n, hidden]; float32."""
        chosen = torch.as_tensor(tokens, device=self._linear.weight.device)
        bias = None if self._linear.bias is None else self._linear.bias[chosen].float()
        weight = self._linear.weight[chosen].float()
        return self._capped(nn.functional.linear(representations.to(weight), weight, bias))

    def log_probabilities(
        self, hidden: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """log softmax of the logits at `places` of the last layer's output [rows, hidden], at `tokens`.

        places, tokens: int64 [n], in any order and with repetitions. Returns float32 [n]. The head sees
        every place once and no other row, a few at a time, so that [places, vocabulary] stays small.
        """
        distinct, row_of = places.unique(return_inverse=True)
        rows = self._norm(hidden[distinct])
        step = max(1, _MOST_LOGITS // self._linear.out_features)
        normalizers = torch.cat(
            [self._capped(self._linear(part).float()).logsumexp(dim=1) for part in rows.split(step)]
        )
        # Again, in float32: rounded to the compute dtype, near logits would be equal.
        weight = self._linear.weight[tokens].float()
        logits = torch.einsum("nd,nd->n", rows[row_of].float(), weight)
        if self._linear.bias is not None:
            logits = logits + self._linear.bias[tokens].float()
        return self._capped(logits) - normalizers[row_of]

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._cap is None else (logits / self._cap).tanh() * self._cap


def language_head(model: Any, norm: nn.Module) -> LanguageHead | None:
    """The language head of a Hugging Face decoder with this last norm; None if it was loaded without."""
    linear = model.get_output_embeddings()
    return linear and LanguageHead(norm, linear, declared(model.config, "final_logit_softcapping"))
