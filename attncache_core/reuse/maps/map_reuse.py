"""Reuse attention maps from a database: the reuse strategy of an engine.

A MapReuse owns the state that changes while serving: the policy, which servers tighten, and the length groups
in which reuse pays.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from attncache_core.reuse.maps.database import AttentionDatabase
from attncache_core.reuse.maps.gain import MeasuredGain
from attncache_core.reuse.maps.info import DatabaseInfo
from attncache_core.reuse.maps.policy import ReusePolicy
from attncache_core.reuse.maps.policy_state import ServedPolicy, SharedFindings, Tightened
from attncache_core.reuse.maps.search import SearchEngine
from attncache_core.reuse.maps.verification import Window
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import Outcome, ReusePlan, outcome_code
from attncache_core.reuse.strategy import ReuseStrategy
from attncache_core.text.token_batch import TokenBatch

_COLD = outcome_code(Outcome.COLD)


class MapReuse(ReuseStrategy):
    """The reuse strategy of a database, with the steps that all servers on the database found necessary.

    Any thread may change what is reused, while others plan with what was valid before.
    """

    def __init__(self, database: AttentionDatabase) -> None:
        self.database = database
        self.gain: MeasuredGain | None = None  # None: not measured
        self.awaits_gain = False  # nothing is reused until it is measured whether reuse saves time
        self._cold_hits = 0
        self._changing = threading.Lock()  # held from the look at `search` or `_served` until its change
        self.search: SearchEngine = database.search  # with the current policy
        self._served = ServedPolicy(database.folder, database.search.policy)
        self.reuse_off = self._served.reuse_off  # reasons why reuse is off although a database is set
        with self._changing:
            self._adopt(self._served.policy)

    @property
    def mask(self) -> ReuseMask:
        """The database's reuse mask."""
        return self.database.mask

    @property
    def policy(self) -> ReusePolicy:
        """The current policy."""
        return self.search.policy

    @property
    def lasting_policy(self) -> ReusePolicy:
        """See ServedPolicy.lasting."""
        return self._served.lasting

    def rule_out(self, lengths: np.ndarray, allowed: np.ndarray) -> np.ndarray | None:
        """See ReuseStrategy.rule_out."""
        return self.search.rule_out(lengths, allowed)

    def prepare(self, lengths: Collection[int]) -> tuple[int, ...]:
        """Check the files of these lengths, and drop lost segments; see ReuseStrategy.prepare."""
        return self.search.store.drop_lost(lengths)

    def plan(self, batch: TokenBatch, allowed: np.ndarray) -> ReusePlan:
        """See ReuseStrategy.plan."""
        return self.search.plan(batch, allowed)

    def refine(self, plan: ReusePlan, batch: TokenBatch, hidden: torch.Tensor) -> ReusePlan:
        """See ReuseStrategy.refine."""
        return self.search.refine(plan, batch, hidden)

    def commit(self, plan: ReusePlan, batch: TokenBatch) -> None:
        """Count the sequences that did not hit because the maps of their record were not in memory."""
        del batch
        self._cold_hits += int(np.count_nonzero((plan.reasons == _COLD) & ~plan.hits))

    @property
    def approximates(self) -> bool:
        """Whether any text may reuse maps of other texts under the current policy."""
        policy = self.policy
        if policy.limit and policy.limit.is_off:
            return False
        return any(self.reuses(index) and group.approximates for index, group in enumerate(policy.groups))

    def reuses(self, index: int) -> bool:
        """Return whether sequences of the policy's length group `index` may hit."""
        paying = self.search.paying
        if paying is not None and index not in paying:
            return False
        return not self.policy.groups[index].is_off

    def tighten(self, index: int | None) -> None:
        """Make length group `index` one step tighter from the next batch on; None: the limit of strangeness.

        `keep_verified` writes the step to the database.
        """
        with self._changing:
            self._adopt(self._served.tighten(index))

    def keep_verified(
        self, new: Mapping[Window, Sequence[float]], patience_seconds: float = 0.0
    ) -> Tightened | None:
        """Write new findings to the database, and adopt the findings of other servers.

        See ServedPolicy.keep for arguments and result. If the findings cannot be written, reuse is off from
        the next batch on, until the database is opened again; `reuse_off` then says why.
        """
        with self._changing:
            kept = self._served.keep(new, patience_seconds)
            self._adopt(self._served.policy)
        return kept

    def adopt_findings(self) -> None:
        """Adopt what another server on this folder has found since the last call; see ServedPolicy.look."""
        with self._changing:
            if self._served.look():
                self._adopt(self._served.policy)

    def share_findings(self, shared: SharedFindings) -> None:
        """Let `keep_verified` merge the findings with those of servers on other machines, from now on."""
        with self._changing:
            self._served.shared = shared

    def reuse_in(self, paying: Collection[int] | None, gain: MeasuredGain | None = None) -> None:
        """Reuse maps only in the length groups with these indices from now on; None: in all length groups.

        gain: the measurement from which the groups were chosen, and the batches that are large enough; None:
        batches of any size reuse.
        """
        self.gain = gain
        self.awaits_gain = False
        with self._changing:
            self.search = replace(
                self.search,
                paying=None if paying is None else frozenset(paying),
                least_tokens=gain.least_tokens if gain else 0,
                saved_per_token={
                    index: group.saved_per_token
                    for index, group in gain.groups.items()
                    if group.saved_per_token
                }
                if gain
                else {},
            )

    def info(self) -> DatabaseInfo:
        """Return what the database holds and the policy that holds at present, for people and /info."""
        policy = self.policy.info()
        groups = [replace(group, reuses=self.reuses(index)) for index, group in enumerate(policy.groups)]
        info = replace(self.database.info(), policy=replace(policy, groups=groups))
        return replace(info, cold_hits=self._cold_hits)

    def _adopt(self, policy: ReusePolicy) -> None:
        """Search with a policy from now on. The caller must hold the lock."""
        paying = self.search.paying
        if paying is not None:
            # A tightened group hits less often, so its measured gain no longer holds.
            before = self.search.policy.groups
            paying = frozenset(
                index for index in paying if policy.groups[index].tightened == before[index].tightened
            )
        self.search = replace(self.search, policy=policy, paying=paying)
