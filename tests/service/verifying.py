"""A verifier beside a fake engine, without a server."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fake_engine import FakeEngine

from attncache_core import PrefillRequest
from service.observability.metrics import Metrics
from service.upkeep.verifier import Verifier

VERIFIED = "attncache_verify_cosine_count"
FAILURES = "attncache_verify_budget_failures_total"


class AnyText(frozenset[str]):
    """A set that contains every text."""

    def __contains__(self, _text: object) -> bool:
        return True


def verifier_of(
    engine: FakeEngine, metrics: Metrics, rate: float = 1.0, chance: random.Random | None = None
) -> Verifier:
    return Verifier(engine, rate, metrics, chance)


def requests_of(engine: FakeEngine, texts: Sequence[str], reuse: bool = True) -> list[PrefillRequest]:
    (plan,) = engine.default_prompt.sequence_plans
    return [PrefillRequest(ids, reuse, plan) for ids in engine.tokenize(list(texts), truncate=True)]


def serve(engine: FakeEngine, verifier: Verifier, texts: Sequence[str], reuse: bool = True) -> None:
    """Run one batch and offer its hits, as the batcher does."""
    requests = requests_of(engine, texts, reuse)
    policy = verifier.policy
    verifier.offer(requests, engine.run(requests), policy)


def verify_all(verifier: Verifier) -> None:
    while verifier.has_work:
        verifier.verify_some()
