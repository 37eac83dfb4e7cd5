"""Responses name the model, and a request that requires another model is not computed."""

import pytest
from fake_engine import FAILING, FakeEngine, serving

OWN = FakeEngine.fingerprint
OTHER = OWN[::-1]
ROUTES = [("/embed", {"inputs": "a"}), ("/classify", {"inputs": "a", "labels": ["a", "b"]})]


async def ask(client, path, body, required):
    return await client.post(path, json=body, headers={"X-AttnCache-Require-Model": required})


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_answer_names_the_model_as_info_does_and_a_required_model_answers(path, body):
    async with serving() as client:
        answer = await client.post(path, json=body)
        info = (await client.get("/info")).json()
        assert answer.headers["X-AttnCache-Model"] == info["fingerprint"] == OWN
        for required in (OWN, OWN[:8], OWN.upper(), f" {OWN[:12]} "):
            assert (await ask(client, path, body, required)).status_code == 200, required


async def test_error_names_the_model_too():
    async with serving() as client:
        for inputs, status in (("", 400), (FAILING, 500), (["a"] * 1025, 422)):
            answer = await client.post("/embed", json={"inputs": inputs})
            assert (answer.status_code, answer.headers["X-AttnCache-Model"]) == (status, OWN)


async def test_error_for_another_name_of_the_model_names_the_model_too():
    async with serving() as client:
        answer = await client.get("/v1/models/another")
        assert (answer.status_code, answer.headers["X-AttnCache-Model"]) == (404, OWN)
        required = {"X-AttnCache-Require-Model": OTHER}
        assert (await client.get("/v1/models/another", headers=required)).status_code == 409


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_other_model_refuses_with_409_and_computes_nothing(path, body):
    engine = FakeEngine()
    async with serving(engine) as client:
        for required in (OTHER, OTHER[:8], OWN[:-1] + "0", OWN[1:]):
            answer = await ask(client, path, body, required)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "model_mismatch")
            assert error["field"] == "X-AttnCache-Require-Model"
            assert answer.headers["X-AttnCache-Model"] == OWN
            assert OWN[:12] in error["message"]
            assert required not in answer.text
        metrics = (await client.get("/metrics")).text
    assert engine.batches == []
    assert f'attncache_requests_total{{route="{path}",status="409"}} 4.0' in metrics


async def test_malformed_fingerprint_is_a_400_that_says_where_to_find_one():
    async with serving() as client:
        for required in ("", OWN[:7], "all-MiniLM-L6-v2", OWN + "0", f"{OWN},{OTHER}"):
            answer = await ask(client, "/embed", {"inputs": "a"}, required)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_input"), required
            assert error["field"] == "X-AttnCache-Require-Model"
            assert "/info" in error["message"]


async def test_required_model_is_checked_before_the_body_and_before_the_task():
    async with serving(FakeEngine(task="classify", labels=("a", "b"))) as client:
        assert (await client.post("/embed", content=b"{")).status_code == 400
        refused = await client.post(
            "/embed", content=b"{", headers={"X-AttnCache-Require-Model": OTHER, "Content-Length": "9" * 12}
        )
    assert refused.status_code == 409
