"""The interface between the engine and a kind of reuse.

    rule_out  from the lengths of a batch: say why nothing can be reused, if nothing can
    prepare   before the batch: check which data may be reused
    plan      from the tokens of the batch: decide what is reused
    refine    from the hidden states before a layer, if the plan does not cover this layer: decide more
    commit    after the batch: take note that it was computed

The engine and its layer loop do not depend on any kind of reuse. A new kind of reuse is a new strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import numpy as np
import torch

from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import ReusePlan
from attncache_core.text.token_batch import TokenBatch


class ReuseStrategy(ABC):
    """A kind of reuse: decides what is reused for each batch.

    One thread at a time may call its methods; an engine makes sure of that. The methods may be called for one
    batch while the layers of another batch run, so what belongs to one batch is kept in its plan.
    """

    @property
    def mask(self) -> ReuseMask | None:
        """The heads whose maps may be given; None: no heads.

        The engine loads its model with the weights of these heads separate from the other heads.
        """
        return None

    def rule_out(self, lengths: np.ndarray, allowed: np.ndarray) -> np.ndarray | None:
        """Return why each sequence of a batch reuses nothing, if lengths alone decide that none does.

        lengths: int64 [sequences], tokens of each sequence. allowed: see `plan`. Returns an outcome_code for
        each sequence, int64 [sequences]; None if `plan` decides. No other method is called for a batch that
        is ruled out.
        """
        del lengths, allowed
        return None

    def prepare(self, lengths: Collection[int]) -> tuple[int, ...]:
        """Check the data that sequences of these lengths (in tokens) may reuse, before a batch is planned.

        Returns the lengths for which nothing can be reused any more, because their files were lost.
        """
        del lengths
        return ()

    @abstractmethod
    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        """Return the plan of a batch, as far as the tokens decide it.

        allowed: bool [sequences], whether each packed sequence may reuse anything.
        """

    def refine(self, plan: ReusePlan, batch: TokenBatch, hidden: torch.Tensor) -> ReusePlan:
        """Return a plan that covers more layers. Called only for plans that end before the last layer.

        hidden: input of the attention of layer `plan.until`, [tokens, hidden].
        """
        del batch, hidden
        return plan

    def commit(self, plan: ReusePlan, batch: TokenBatch) -> None:
        """Take note that the batch was computed by this plan; both are in the same packed order.

        Not called if the batch failed, or if records changed while they were used.
        """
        del plan, batch
