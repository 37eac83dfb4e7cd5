"""A verifier beside a fake engine, without a server."""

from attncache_core import PrefillRequest
from service.upkeep.verifier import Verifier

VERIFIED = "attncache_verify_cosine_count"
FAILURES = "attncache_verify_budget_failures_total"


class AnyText(frozenset[str]):
    """A set that contains every text."""

    def __contains__(self, _text):
        return True


def verifier_of(engine, metrics, rate=1.0, chance=None):
    return Verifier(engine, rate, metrics, chance)


def requests_of(engine, texts, reuse=True):
    (plan,) = engine.tokenizer.default_prompt.sequence_plans
    return [PrefillRequest(ids, reuse, plan) for ids in engine.tokenize(list(texts), truncate=True)]


def serve(engine, verifier, texts, reuse=True):
    """Run one batch and offer its hits, as the batcher does."""
    requests = requests_of(engine, texts, reuse)
    policy = verifier.policy
    verifier.offer(requests, engine.run(requests), policy)


def verify_all(verifier):
    while verifier.has_work:
        verifier.verify_some()


def serve_and_verify(engine, verifier, texts):
    serve(engine, verifier, texts)
    verify_all(verifier)
