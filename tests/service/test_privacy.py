"""No text of a user reaches a log line or a metric, even when the text causes a failure."""

import asyncio

import pytest
from fake_engine import FAILING, SECRET, BrokenEngine, FakeEngine, serving, texts_of


def watch_the_server_s_log(caplog):
    """Capture all levels of the server's log, but not the log of the test client, which contains texts."""
    # The order matters, because each call also sets the least level that is captured at all.
    caplog.set_level("ERROR", logger="httpx")
    caplog.set_level("DEBUG")


@pytest.mark.parametrize("breaks", ["tokenize", "run", "class_logits"])
async def test_exception_is_logged_with_its_stack_and_without_its_message(breaks, caplog):
    caplog.set_level("DEBUG")
    async with serving(BrokenEngine(breaks)) as client:
        response = await client.post("/classify", json={"inputs": f"{SECRET}, open"})
        metrics = (await client.get("/metrics")).text
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert caplog.text.index("builtins.KeyError") < caplog.text.index("builtins.RuntimeError")
    assert "in _break" in caplog.text
    for visible in (response.text, caplog.text, metrics):
        assert SECRET not in visible


async def test_texts_labels_and_queries_are_not_logged_at_any_level(caplog):
    watch_the_server_s_log(caplog)
    async with serving() as client:
        await client.post("/classify", json={"inputs": SECRET, "labels": [SECRET, "other"]})
        await client.post(f"/embed?text={SECRET}", json={"inputs": [SECRET, FAILING]})
        await client.post("/embed", json={"inputs": "a", SECRET: SECRET})
        await client.get(f"/{SECRET}")
        metrics = (await client.get("/metrics")).text
    assert SECRET not in caplog.text
    assert SECRET not in metrics


class EmbarrassedEngine(FakeEngine):
    """The secret text hits with damage. The first verifications fail and quote the text."""

    def __init__(self, failures):
        super().__init__(stored={SECRET}, damage=0.5)
        self.failures = failures

    def run(self, requests):
        if not any(request.reuse for request in requests) and self.failures:
            self.failures -= 1
            raise RuntimeError(f"cannot compute {texts_of(requests)}")
        return super().run(requests)


async def test_verification_logs_no_text_and_keeps_no_text(caplog):
    watch_the_server_s_log(caplog)
    async with serving(EmbarrassedEngine(failures=2), verify_rate=1) as client:
        metrics = ""
        while "attncache_verify_budget_failures_total 1.0" not in metrics:
            await client.post("/embed", json={"inputs": [SECRET] * 20})
            metrics = (await client.get("/metrics")).text
        verifier = client._transport.app.state.service.serving().batcher.verifier
        while verifier._pending:
            await asyncio.sleep(0.001)
    # The failures and the tightening were logged without a text.
    assert caplog.text.count("verifying hits failed") == 2
    assert "is below the budget" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in metrics


@pytest.mark.parametrize(
    ("path", "body"), [("/embed", {}), ("/classify", {"labels": ["a", "b"]})], ids=["embed", "classify"]
)
async def test_headers_about_reuse_are_sent_unless_the_server_withholds_them(path, body):
    hits = {"x-attncache-hits": "1/2", "x-attncache-prototype-hits": "0/2"}
    names = {}
    for sent in (True, False):
        async with serving(FakeEngine(stored={SECRET}), reuse_headers=sent) as client:
            answer = await client.post(path, json={"inputs": [SECRET, "new"], **body})
        assert answer.status_code == 200
        names[sent] = {name: value for name, value in answer.headers.items() if "hits" in name}
    assert names == {True: hits, False: {}}
