"""Compute the input of the first layer's attention once for each sequence of the corpus.

Damage, clusters, training pairs, features and probes all need these hidden states. A temporary file in the
folder of the build holds the hidden states in the model's dtype. The file disappears when the process ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch

from attncache_core.errors import BuildFailed
from attncache_core.models import PackedModel
from attncache_core.text.token_batch import pack

_SEQUENCES_PER_PASS = 256


class FirstInputs:
    """The inputs of the first layer's attention, by token sequence."""

    def __init__(self, model: PackedModel, folder: Path) -> None:
        """folder: where the temporary file is created. Its size is tokens * hidden size * 2 or 4 bytes."""
        self._model = model
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as this object
        self._offsets: dict[tuple[int, ...], int] = {}  # in bytes
        self._dtype = torch.float32

    def close(self) -> None:
        """Remove the temporary file; nothing can be asked for afterwards."""
        self._file.close()

    def of(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the inputs of sequences of one length, float32 [n, L, hidden].

        Missing inputs are computed first. `sequences` may be empty. Raises BuildFailed if the model computes
        NaN or infinity.
        """
        if not sequences:
            return torch.empty(0, 1, self._model.hidden_size)
        keys = [tuple(ids) for ids in sequences]
        missing = [ids for ids in dict.fromkeys(keys) if ids not in self._offsets]
        for at in range(0, len(missing), _SEQUENCES_PER_PASS):
            self._compute(missing[at : at + _SEQUENCES_PER_PASS])
        content = np.memmap(self._file, dtype=np.uint8, mode="r")
        size = len(keys[0]) * self._model.hidden_size * self._dtype.itemsize
        rows = np.stack([content[start : start + size] for start in map(self._offsets.__getitem__, keys)])
        inputs = torch.from_numpy(rows).view(self._dtype).float()
        return inputs.view(len(keys), len(keys[0]), self._model.hidden_size)

    @torch.inference_mode()
    def _compute(self, sequences: Sequence[tuple[int, ...]]) -> None:
        hidden = self._model.search_input(self._model.embed(pack(sequences))).cpu()
        require_finite([hidden], len(sequences[0]))
        self._dtype = hidden.dtype
        content = hidden.contiguous().view(len(sequences), -1).view(torch.uint8).numpy()
        start = self._file.seek(0, 2)
        self._file.write(content.tobytes())
        self._file.flush()
        for row, ids in enumerate(sequences):
            self._offsets[ids] = start + row * content.shape[1]


def require_finite(computed: Sequence[torch.Tensor], length: int) -> None:
    """Raise BuildFailed if a tensor that the model computed for texts of `length` tokens is not finite."""
    if not all(x.isfinite().all() for x in computed):
        raise BuildFailed(
            f"the model computes NaN or infinity for a text of {length} tokens in the corpus; remove the "
            "text, or check the model's weights",
            field="corpus",
        )
