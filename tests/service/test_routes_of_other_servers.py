"""Routes of text-embeddings-inference, and those under /v1, answer in its shapes and OpenAI's, errors too."""

import numpy as np
import pytest
from core_models import write_model, write_sentence_transformer
from fake_engine import FAILING, NOT_FINITE, FakeEngine, embedding_of, serving, starting
from pair_models import write_ms_marco_minilm, write_qwen3_reranker
from queueing import full_queue
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from attncache_core import InvalidInput, PrefillEngine, Template, class_scores, normalize
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.engine.decisions import Decisions

BODIES = {
    "/": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
    "/rerank": {"query": "a", "texts": ["a"]},
    "/predict": {"inputs": "a"},
    "/tokenize": {"inputs": "a"},
    "/decode": {"ids": [7]},
}


def unit(text):
    return normalize(embedding_of([ord(letter) for letter in text])[None])[0]


def is_tei_error(response):
    return set(response.json()) == {"error", "error_type"} and isinstance(response.json()["error"], str)


async def test_similarity_is_the_cosine_to_each_sentence():
    body = {"inputs": {"source_sentence": "aab", "sentences": ["aab", "b", "c"]}}
    async with serving() as client:
        found = (await client.post("/similarity", json=body)).json()
        prompted = body | {"parameters": {"prompt_name": "b", "truncate": True}}
        with_prompt = (await client.post("/similarity", json=prompted)).json()
    np.testing.assert_allclose(found, [unit("aab") @ unit(text) for text in ("aab", "b", "c")], atol=1e-6)
    expected = [unit("b: aab") @ unit(f"b: {text}") for text in ("aab", "b", "c")]
    np.testing.assert_allclose(with_prompt, expected, atol=1e-6)


async def test_equal_texts_have_equal_scores_in_their_order_and_no_cosine_is_above_1(tiny_engine):
    async with serving(tiny_engine) as client:
        for count in range(2, 24):
            body = {
                "query": "my account was lost",
                "texts": ["where is my card", *["my account was lost"] * count],
            }
            ranked = (await client.post("/rerank", json=body)).json()
            assert [each["index"] for each in ranked] == [*range(1, count + 1), 0]
            assert len({each["score"] for each in ranked}) == 2
            assert max(each["score"] for each in ranked) <= 1


async def test_every_token_has_a_vector():
    async with serving() as client:
        of_texts = (await client.post("/embed_all", json={"inputs": ["ab", "c"]})).json()
        of_ids = (await client.post("/embed_all", json={"inputs": [[97, 98], [99]]})).json()
        prompted = (await client.post("/embed_all", json={"inputs": "a", "prompt_name": "b"})).json()
    assert (
        of_texts == of_ids == [[embedding_of([token]).tolist() for token in ids] for ids in ([97, 98], [99])]
    )
    assert [row.index(1.0) for row in prompted[0]] == [ord(letter) for letter in "b: a"]


async def test_vectors_of_many_tokens_are_refused_before_they_are_computed():
    engine = FakeEngine()
    engine.model.hidden_size = 2**23 // 100
    async with serving(engine) as client:
        allowed = await client.post("/embed_all", json={"inputs": [[7] * 50, [8] * 50]})
        refused = await client.post("/embed_all", json={"inputs": [[7] * 50, [8] * 51]})
    assert (allowed.status_code, refused.status_code) == (200, 422)
    assert "a request may have 100" in refused.json()["error"]


@pytest.mark.parametrize(
    ("inputs", "texts", "is_list"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], False),
        ([["a"]], ["a"], True),
        ([["a"], ["ab"]], ["a", "ab"], True),
    ],
    ids=str,
)
async def test_predictions_have_the_shape_of_the_inputs(inputs, texts, is_list):
    engine = FakeEngine(labels=("x", "y", "z"))
    async with serving(engine) as client:
        found = (await client.post("/predict", json={"inputs": inputs})).json()
        raw = (await client.post("/predict", json={"inputs": inputs, "raw_scores": True})).json()
    logits = engine.decisions.class_logits(np.stack([unit(text) * 0 + len(text) / 128 for text in texts]))
    for answers, rows in ((found, class_scores(logits)), (raw, logits)):
        for answer, row in zip(answers if is_list else [answers], rows, strict=True):
            assert [one["score"] for one in answer] == sorted((one["score"] for one in answer), reverse=True)
            by_label = {one["label"]: one["score"] for one in answer}
            np.testing.assert_allclose([by_label[label] for label in "xyz"], row, rtol=1e-6)


async def test_pair_of_a_classifier_is_two_texts_between_separators(tmp_path):
    folder = write_model(tmp_path / "classifier", labels=["x", "y", "z"])
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    [ids] = engine.tokenize([("where", "the card")])
    expected = class_scores(engine.run(engine.requests([ids])).outputs)[0]
    async with serving(engine) as client:
        alone = (await client.post("/predict", json={"inputs": ["where", "the card"]})).json()
        listed = (await client.post("/predict", json={"inputs": [["where"], ["where", "the card"]]})).json()
    found = {entry["label"]: entry["score"] for entry in alone}
    np.testing.assert_allclose([found[label] for label in "xyz"], expected, atol=1e-6)
    assert {entry["label"]: pytest.approx(entry["score"], abs=1e-6) for entry in listed[1]} == found


async def test_reranker_names_its_own_routes_and_bodies(tmp_path):
    engine = PrefillEngine.load(read_checkpoint(write_ms_marco_minilm(tmp_path / "model")), dtype="float32")
    pair = {"text": "my card", "text_pair": "was stolen"}
    async with serving(engine) as client:
        embedded = await client.post("/embed", json={"inputs": "my card"})
        of_transformers = await client.post("/", json={"inputs": pair})
        cut = await client.post("/rerank", json={"query": "a", "texts": ["b"], "max_tokens_per_doc": 1})
    assert "is a reranker and has no embeddings; use /rerank" in embedded.json()["error"]["message"]
    assert "inputs must be a text, a pair" in of_transformers.json()["error"]
    assert "to which documents are cut; leave it out" in cut.json()["error"]


async def test_rerank_orders_texts_and_documents_by_their_score():
    texts = ["b", "aab", "ab"]
    async with serving(model="fake") as client:
        of_texts = (await client.post("/rerank", json={"query": "aab", "texts": texts})).json()
        body = {"query": "aab", "texts": texts, "return_text": True, "top_n": 2}
        with_texts = (await client.post("/rerank", json=body)).json()
        mixed = [{"text": "b", "title": "b", "year": 1999}, {"text": "aab"}, "ab"]
        body = {"query": "aab", "documents": mixed, "return_documents": True}
        unused = {"priority": 7, "max_tokens_per_doc": 4096, "raw_scores": None, "return_text": None}
        of_vllm = {"top_n": 0, "max_tokens_per_doc": 0, "user": "somebody"}
        documents = {
            path: (await client.post(path, json=body | more)).json()
            for path, more in (("/rerank", unused), ("/v1/rerank", of_vllm), ("/v2/rerank", unused))
        }
        cut = await client.post("/v2/rerank", json=body | {"max_tokens_per_doc": 10})
    scores = {entry["index"]: entry["score"] for entry in of_texts}
    assert list(scores) == [1, 2, 0]
    np.testing.assert_allclose(
        list(scores.values()), [unit("aab") @ unit(texts[index]) for index in scores], atol=1e-6
    )
    assert [(entry["index"], entry["text"]) for entry in with_texts] == [(1, "aab"), (2, "ab")]
    assert (cut.status_code, "max_tokens_per_doc must be at least 64" in cut.text) == (400, True)
    for answer in documents.values():
        assert (answer["model"], answer["usage"]["total_tokens"]) == ("fake", 9)
        assert [result["document"]["text"] for result in answer["results"]] == ["aab", "ab", "b"]
        assert {result["index"]: result["relevance_score"] for result in answer["results"]} == scores


async def test_reranker_in_its_template_shares_instruction_and_query(tmp_path):
    query, documents = "where is my parcel", ["the parcel was sent", "reset my password"]
    checkpoint = read_checkpoint(write_qwen3_reranker(tmp_path / "reranker")).adapted(
        template=Template.named("qwen3-reranker"), label_logits=True, labels=["no", "yes"]
    )
    engine = PrefillEngine.load(checkpoint, dtype="float32", max_tokens=300)
    body = {"query": query, "texts": documents}
    async with serving(engine) as client:
        found = (await client.post("/rerank", json=body)).json()
        raw = (await client.post("/rerank", json=body | {"raw_scores": True})).json()
        instructed = (await client.post("/rerank", json=body | {"instruction": "Find the sender."})).json()
        metrics = (await client.get("/metrics")).text
        too_long = await client.post("/rerank", json=body | {"query": query * 100})
        pairs = [[query, documents[0]], [query * 100, documents[0]]]
        of_pairs = await client.post("/predict", json={"inputs": pairs})
    for answer, how in (
        (found, {}),
        (raw, {"activation": "identity"}),
        (instructed, {"instruction": "Find the sender."}),
    ):
        expected = engine.rerank(query, documents, **how)
        ordered = [entry["score"] for entry in sorted(answer, key=lambda entry: entry["index"])]
        np.testing.assert_allclose(ordered, expected, atol=1e-5)
    counted = {
        state: float(line.split()[-1])
        for line in metrics.splitlines()
        for state in ("asked", "computed")
        if line.startswith(f'attncache_tokens_total{{state="{state}"}}')
    }
    assert counted["computed"] < 0.7 * counted["asked"]
    assert (too_long.status_code, too_long.json()["error_type"]) == (400, "Validation")
    assert too_long.json()["error"].startswith("query: the query leaves no room")
    assert of_pairs.json()["error"].startswith("inputs[1]: the query leaves no room")


async def test_better_document_comes_first_also_where_both_scores_are_1(tmp_path, monkeypatch):
    checkpoint = read_checkpoint(write_ms_marco_minilm(tmp_path))
    logits = Decisions.pair_logits
    monkeypatch.setattr(Decisions, "pair_logits", lambda *arguments: logits(*arguments) + 40)
    body = {"query": "a card", "texts": [f"{word} card" for word in ("help", "no", "this", "the", "my")]}
    async with serving(PrefillEngine.load(checkpoint, dtype="float32")) as client:
        found = (await client.post("/rerank", json=body)).json()
        raw = (await client.post("/rerank", json=body | {"raw_scores": True})).json()
    assert {entry["score"] for entry in found} == {1.0}
    assert [entry["index"] for entry in found] == [entry["index"] for entry in raw] != [0, 1, 2, 3, 4]


async def test_tokens_of_a_text_and_back(tmp_path):
    prompts = {"prompts": {"ask": "my "}, "default_prompt_name": None}
    folder = write_sentence_transformer(tmp_path / "model", prompts=prompts)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "Where is  the card?"
    async with serving(engine) as client:
        [tokens] = (await client.post("/tokenize", json={"inputs": text})).json()
        body = {"inputs": [text], "add_special_tokens": False}
        [plain] = (await client.post("/tokenize", json=body)).json()
        [prompted] = (await client.post("/tokenize", json={"inputs": text, "prompt_name": "ask"})).json()
        ids = [token["id"] for token in tokens]
        one = (await client.post("/decode", json={"ids": ids})).json()
        both = (
            await client.post("/decode", json={"ids": [ids, ids[:2]], "skip_special_tokens": False})
        ).json()
        from_ids = (await client.post("/embed", json={"inputs": ids})).json()
        from_text = (await client.post("/embed", json={"inputs": text})).json()
    assert ids == theirs(text)["input_ids"]
    assert [token["special"] for token in tokens] == [True] + [False] * (len(ids) - 2) + [True]
    assert tokens[0] == {"id": ids[0], "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert plain == tokens[1:-1]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in plain)
    assert [token["id"] for token in prompted] == theirs(f"my {text}")["input_ids"]
    assert one == [theirs.decode(ids, skip_special_tokens=True)]
    assert both == [theirs.decode(part) for part in (ids, ids[:2])]
    assert from_ids == from_text


async def test_info_has_what_clients_of_tei_read(tiny_engine, tiny_checkpoint, tmp_path):
    limits = {"max_request_inputs": 7, "max_batch_tokens": 2048}
    async with serving(tiny_engine, model=str(tiny_checkpoint.folder), **limits) as client:
        info = (await client.get("/info")).json()
    assert (info["max_batch_tokens"], info["max_batch_requests"]) == (2048, 128)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_id"], info["model_dtype"], info["model_sha"]) == ("tiny-bert", "float32", None)
    assert (info["max_input_length"], info["max_client_batch_size"]) == (512, 7)
    assert info["auto_truncate"] is True
    reranker = PrefillEngine.load(read_checkpoint(write_ms_marco_minilm(tmp_path / "ce")), dtype="float32")
    async with serving(reranker) as client:
        info = (await client.get("/info")).json()
        long = {"query": "query " * 600, "texts": ["a"], "truncate": False}
        refused = [
            await client.post("/rerank", json=long | {"query": query}) for query in ("a", long["query"])
        ]
        documents = await client.post("/rerank", json=long | {"query": "a", "texts": ["a", long["query"]]})
    assert info["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert [answer.status_code for answer in refused] == [200, 422]
    assert "query has 512 tokens or more" in refused[1].json()["error"]
    assert "texts[1] has more than 512 tokens" in documents.json()["error"]
    async with serving(FakeEngine(task="classify", labels=("a", "b"))) as client:
        info = (await client.get("/info")).json()
    assert info["model_type"]["classifier"]["label2id"] == {"a": 0, "b": 1}


# path -> bodies, and what the refusal says
BAD = {
    "/embed_all": [
        ({"inputs": ""}, "inputs[0] must not be empty"),
        ({"inputs": [[1], [10**7]]}, "inputs[1] has a number that is no token id"),
        ({"inputs": [1], "prompt_name": "a"}, "prompt_name is accepted with texts only"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction must be left or right"),
    ],
    "/similarity": [
        ({"inputs": "a"}, "inputs must be an object"),
        ({"inputs": {"source_sentence": "a"}}, "inputs.sentences is required"),
        ({"inputs": {"source_sentence": "", "sentences": ["a"]}}, "inputs.source_sentence must not"),
        ({"inputs": {"source_sentence": "a", "sentences": ["a", 7]}}, "inputs.sentences[1] must be a"),
        ({"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences must not be empty"),
        ({**BODIES["/similarity"], "parameters": {"Sesam": 1}}, "parameters has an unknown field; the"),
    ],
    "/rerank": [
        ({"query": "a"}, "give one of texts, documents and segments"),
        ({"query": "a", "texts": ["a"], "documents": ["a"]}, "give one of texts, documents and segments"),
        ({"query": "a", "segments": ["a"], "raw_scores": True}, "raw_scores is not accepted with segments"),
        ({"query": "a", "segments": ["a"]}, "a decoder that scores labels"),
        ({"query": "", "texts": ["a"]}, "query must not be empty"),
        ({"query": "a", "texts": ["a", ""]}, "texts[1] must not be empty"),
        ({"query": "a", "texts": []}, "texts must not be empty"),
        (
            {"query": "a", "documents": ["a", {"txt": "a"}]},
            "documents[1] must be a string, or an object with a string in the field text",
        ),
        ({"query": "a", "documents": [7]}, "documents[0] must be a string, or an object"),
        ({"query": "a", "documents": [{"text": ""}]}, "documents[0] must not be empty"),
        ({"query": "a", "texts": ["a"], "top_n": -1}, "top_n must be 0 or more"),
        ({"query": "a", "texts": ["a"], "return_documents": True}, "return_documents belongs to"),
        ({"query": "a", "documents": ["a"], "return_text": True}, "return_text belongs to texts"),
        ({"query": "a", "texts": ["a"], "instruction": "b"}, "instruction is accepted only by"),
        ({"query": "a", "texts": ["a"], "model": "another"}, "model is not the model of this server"),
        ({"query": "a", "texts": ["a"] * 1025}, "texts must have at most 1024 texts"),
    ],
    "/predict": [
        ({"inputs": ["a", "b", "c"]}, "inputs must be a text, a pair"),
        ({"inputs": [["a"], ["a", "b", "c"]]}, "element [1] is neither"),
        ({"inputs": [["a"], "b"]}, "element [1] is neither"),
        ({"inputs": []}, "inputs must be a text, a pair"),
        ({"inputs": 7}, "inputs must be a text, a pair"),
        ({"inputs": ""}, "inputs must not be empty"),
        ({"inputs": ["a", ""]}, "inputs[1] must not be empty"),
        ({"inputs": [["a"], ["\0", "b"]]}, "inputs[1][0] must not hold null bytes"),
        ({"inputs": [["a"], *[["b", ""]] * 200]}, "inputs[1][1] must not be empty"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, "parameters.top_k must be greater than 0"),
        ({"inputs": ["a", "b"], "parameters": {"top_k": 1}}, "send [[text], [text]] for two texts"),
        ({"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "must be 'sigmoid', 'softmax' or"),
        (
            {"inputs": "a", "raw_scores": True, "parameters": {"function_to_apply": "softmax"}},
            "raw_scores is not accepted with another function_to_apply than none",
        ),
    ],
    "/tokenize": [
        ({"inputs": [7]}, "inputs[0] must be a string"),
        ({"inputs": ["a" * 2**18, "b"]}, "at most 262144 are accepted"),
    ],
    "/decode": [
        ({"ids": "a"}, "ids must be a list of token ids, or"),
        ({"ids": []}, "ids must not be empty"),
        ({"ids": [[7], [10**7]]}, "ids[1] has a number that is no token id"),
        ({"ids": [7, "a"]}, "ids[0] must be a list of token ids"),
        ({"ids": [7] * (2**18 + 1)}, "at most 262144 are accepted"),
    ],
    "/": [
        ({"inputs": "a", "Sesam": 1}, "the body has an unknown field"),
        ({"inputs": "a", "parameters": {"top_k": 1}}, "the server has no labels of its own; use /classify"),
        ({"inputs": "a", "parameters": {"Sesam": 1}}, "to embed, send its fields beside inputs"),
        ({"inputs": "a", "parameters": "Sesam"}, "to embed, send its fields beside inputs"),
        (
            {"inputs": "a", "parameters": {"candidate_labels": []}},
            "parameters.candidate_labels must not be empty",
        ),
        (
            {"inputs": "a", "parameters": {"candidate_labels": ["a", "a"]}},
            "parameters.candidate_labels[1] repeats an earlier",
        ),
        (
            {"inputs": "a", "parameters": {"candidate_labels": ["a"], "multi_label": True}},
            "parameters.multi_label is accepted only",
        ),
    ],
}


@pytest.mark.parametrize("path", BODIES)
async def test_bad_body_is_refused_with_the_field_and_the_remedy(path):
    async with serving() as client:
        for body, message in BAD[path]:
            response = await client.post(path, json=body)
            assert response.status_code in (400, 404, 422)
            assert is_tei_error(response)
            assert message in response.json()["error"]
            assert response.json()["error_type"] == "Validation"
            assert "Sesam" not in response.text
        for content in (b"", b"{", b"[]", b'"a"', b"7", b"\xff"):
            response = await client.post(path, content=content)
            assert (response.status_code, is_tei_error(response)) == (400, True), content


async def test_failures_name_the_text_of_the_request():
    async with serving() as client:
        for text in (NOT_FINITE, FAILING):
            for path, body, name in (
                (
                    "/similarity",
                    {"inputs": {"source_sentence": "a", "sentences": ["b", text]}},
                    "inputs.sentences[1]",
                ),
                ("/rerank", {"query": "a", "texts": ["b", text]}, "texts[1]"),
                ("/rerank", {"query": text, "texts": ["b"]}, "query"),
            ):
                response = await client.post(path, json=body)
                assert (response.status_code, response.json()["error_type"]) == (500, "Backend")
                if text == NOT_FINITE:
                    assert f"NaN or infinity for {name};" in response.json()["error"]


@pytest.mark.parametrize(
    "prompts", [{}, {"query": "my "}, {"document": "the "}, {"query": "my ", "document": "the "}]
)
async def test_queries_and_documents_get_no_default_prompt_as_in_sentence_transformers(tmp_path, prompts):
    described = {"prompts": {"ask": "where is ", **prompts}, "default_prompt_name": "ask"}
    folder = write_sentence_transformer(tmp_path / "model", prompts=described)
    theirs = SentenceTransformer(str(folder))
    documents = ["my card ?", "the bank"]
    expected = theirs.encode_document(documents) @ theirs.encode_query("the card")
    async with serving(PrefillEngine.load(read_checkpoint(folder), dtype="float32")) as client:
        ranked = (await client.post("/rerank", json={"query": "the card", "texts": documents})).json()
        long = await client.post("/rerank", json={"query": "the card", "texts": ["my bank " * 400, "card"]})
        assert long.headers["X-AttnCache-Truncated"] == "1/3"
    scores = {entry["index"]: entry["score"] for entry in ranked}
    np.testing.assert_allclose([scores[0], scores[1]], expected, atol=1e-5)
    # The operator's template stands around both, also if it is one of the prompts.
    checkpoint = read_checkpoint(folder).adapted(template=Template("where is "))
    async with serving(engine := PrefillEngine.load(checkpoint, dtype="float32")) as client:
        [best] = (await client.post("/rerank", json={"query": "my", "texts": ["my"]})).json()
    if not prompts:
        assert best["score"] == pytest.approx(1, abs=1e-6)
        assert engine.checkpoint.default_prompt is None


async def test_token_that_the_model_does_not_have_is_refused_with_its_text(tmp_path):
    folder = write_sentence_transformer(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    with pytest.raises(InvalidInput, match="whose ids are 0 to") as refused:
        engine.embed(["my card", "where [NEW] is"])
    assert refused.value.field == "inputs[1]"
    async with serving(engine) as client:
        for path, body, field in (
            ("/embed", {"inputs": ["my card", "where [NEW] is"]}, "inputs[1]"),
            ("/embed", {"session_id": "a", "transcript": ["my card", "[NEW]"]}, "transcript"),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
        assert (await client.post("/embed", json={"inputs": "my card"})).status_code == 200
    reranker = write_ms_marco_minilm(tmp_path / "reranker")
    tokenizer.save(str(reranker / "tokenizer.json"))
    async with serving(PrefillEngine.load(read_checkpoint(reranker), dtype="float32")) as client:
        refusal = await client.post("/rerank", json={"query": "my", "texts": ["card", "[NEW]"]})
    assert (refusal.status_code, refusal.json()["error"].split()[0]) == (400, "texts[1]")


async def test_root_answers_as_the_route_for_the_body_and_the_model_does():
    bodies = {
        "/embed": {"inputs": ["a", "b"], "normalize": True},
        "/similarity": {**BODIES["/similarity"], "parameters": {}},
        "/rerank": BODIES["/rerank"],
    }
    async with serving() as client:
        chunks = await client.post("/", json={"segments": ["a", "b"], "query": "c"})
        empty = await client.post("/", json={"inputs": ["a", "b"], "normalize": False, "parameters": {}})
        same = await client.post("/embed", json={"inputs": ["a", "b"], "normalize": False})
        assert empty.json() == same.json()
        assert chunks.json()["error"].startswith(
            "segments are not accepted by this server: the engine is fake"
        )
        for path, body in bodies.items():
            assert (await client.post("/", json=body)).json() == (await client.post(path, json=body)).json()
        labels = {"parameters": {"candidate_labels": ["a", "c"]}}
        zero_shot = await client.post("/", json={"inputs": "ab", **labels})
        listed = await client.post("/", json={"inputs": ["ab"], **labels})
        [expected] = (await client.post("/classify", json={"inputs": "ab", "labels": ["a", "c"]})).json()
    assert (zero_shot.json(), listed.json()) == (expected, [expected])
    async with serving(FakeEngine(task="classify", labels=("a", "b"))) as client:
        body = {"inputs": "ab"}
        assert (await client.post("/", json=body)).json() == (await client.post("/predict", json=body)).json()


# Routes in the shapes of OpenAI and vLLM.

OPENAI_BODIES = {
    "/v1/embeddings": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
}


def is_openai_error(response):
    error = response.json()["error"]
    return set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)


async def test_embeddings_have_unit_length_also_if_the_model_s_have_not(tmp_path):
    folder = write_sentence_transformer(tmp_path / "model", normalize=False)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    async with serving(engine, model=str(folder)) as client:
        vector = (await client.post("/embed", json={"inputs": "where"})).json()[0]
        [found] = (await client.post("/v1/embeddings", json={"input": "where"})).json()["data"]
    assert abs(np.linalg.norm(vector) - 1) > 0.01
    np.testing.assert_allclose(found["embedding"], np.array(vector) / np.linalg.norm(vector), atol=1e-6)


async def test_check_of_token_ids_can_be_switched_off(tiny_engine):
    async with serving(tiny_engine) as client, serving(tiny_engine, check_token_ids=False) as unchecked:
        for ids in ([2, 5], [5, 3], [5], [3, 2]):
            body = {"input": [[2, 5, 3], ids]}
            refused = await client.post("/v1/embeddings", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, "input[1]", "invalid_input")
            assert "/tokenize" in error["message"]
            assert (await unchecked.post("/v1/embeddings", json=body)).status_code == 200


async def test_usage_says_nothing_about_reuse_without_the_headers_of_reuse():
    async with serving(reuse_headers=False) as client:
        response = await client.post("/v1/embeddings", json={"input": "abc"})
    assert response.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize(
    ("served", "asked", "status"),
    [
        (None, "org/model", 200),
        (None, None, 200),
        (None, "default", 200),
        (None, "model", 404),
        ("small,large", "default", 404),
        (None, "", 400),
        ("small,large", "small", 200),
        ("small, large", "large", 200),
        ("small,large", "org/model", 404),
        ("small,*", "gpt-4", 200),
        ("*", "gpt-4", 200),
    ],
    ids=str,
)
async def test_names_by_which_a_model_may_be_called(served, asked, status):
    async with serving(model="org/model", served_model_name=served) as client:
        response = await client.post("/v1/embeddings", json={"input": "a", "model": asked})
        listed = (await client.get("/v1/models")).json()["data"]
        retrieved = await client.get(f"/v1/models/{asked or 'org/model'}")
    name = "org/model" if served in (None, "*") else "small"
    assert response.status_code == status
    assert [model["id"] for model in listed] == [name]
    if status == 200:
        assert response.json()["model"] == name
    if asked:
        assert retrieved.status_code == status
        assert status == 200 or is_openai_error(retrieved)


async def test_classes_are_shaped_as_by_vllm():
    engine = FakeEngine(labels=("x", "y", "z"))
    async with serving(engine, model="fake") as client:
        answer = (await client.post("/v1/classify", json={"input": ["a", "ab"], "model": "fake"})).json()
        body = {"input": ["a", "ab"], "use_activation": False}
        raw = (await client.post("/v1/classify", json=body)).json()
    logits = engine.decisions.class_logits(np.stack([embedding_of([1]), embedding_of([1, 2])]))
    assert (answer["object"], answer["model"], answer["usage"]["prompt_tokens"]) == ("list", "fake", 3)
    assert answer["id"].startswith("classify-")
    for index, entry in enumerate(answer["data"]):
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        assert entry["label"] == "xyz"[int(logits[index].argmax())]
        np.testing.assert_allclose(entry["probs"], class_scores(logits)[index], rtol=1e-6)
    np.testing.assert_allclose([entry["probs"] for entry in raw["data"]], logits, rtol=1e-6)


# path -> bodies, and the code and the field of the refusal
OPENAI_BAD = {
    "/v1/embeddings": [
        (b"{", "malformed_body", None),
        (b"[]", "invalid_input", None),
        (b'{"input": 7}', "invalid_input", "input"),
        (b'{"input": [null]}', "invalid_input", "input[0]"),
        (b'{"input": ["a", 7]}', "invalid_input", "input[1]"),
        (b'{"input": ""}', "invalid_input", "input[0]"),
        (b'{"input": []}', "invalid_input", "input"),
        (b'{"input": [[1], "a"]}', "invalid_input", "input[1]"),
        (b'{"input": [[1], []]}', "invalid_input", "input[1]"),
        (b'{"input": [[1, -1]]}', "invalid_input", "input[0]"),
        (b'{"input": [1, 2.5]}', "invalid_input", "input[0]"),
        (b'{"input": [1, true]}', "invalid_input", "input[0]"),
        (b'{"input": [[1114112]]}', "invalid_input", "input[0]"),
        (b'{"input": [[123456789012345678901234567890]]}', "invalid_input", "input[0]"),
        (b'{"input": "a", "model": 7}', "invalid_input", "model"),
        (b'{"input": "a", "dimensions": "7"}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 7.5}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 129}', "invalid_input", "dimensions"),
        (b'{"input": "a", "dimensions": 0}', "invalid_input", "dimensions"),
        (b'{"input": "a", "encoding_format": 7}', "invalid_input", "encoding_format"),
        (b'{"input": "a", "encoding_format": "hex"}', "invalid_input", "encoding_format"),
        (b'{"input": "a", "user": 7}', "invalid_input", "user"),
        (b'{"input": "a", "Sesam": 7}', "invalid_input", None),
        (b"{}", "invalid_input", "input"),
    ],
    "/v1/classify": [
        (b'{"input": [1]}', "invalid_input", "input[0]"),
        (b'{"input": []}', "invalid_input", "input"),
        (b'{"input": "a", "use_activation": "no"}', "invalid_input", "use_activation"),
        (b'{"input": "a", "model": "another"}', "model_not_found", "model"),
    ],
}


@pytest.mark.parametrize("path", OPENAI_BAD)
async def test_bad_body_is_refused_with_the_field_as_by_openai(path):
    async with serving(FakeEngine(labels=("a", "b"))) as client:
        for content, code, param in OPENAI_BAD[path]:
            response = await client.post(path, content=content)
            status = 404 if code == "model_not_found" else 400
            assert (response.status_code, is_openai_error(response)) == (status, True), content
            error = response.json()["error"]
            assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
            assert "Sesam" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_clients_of_jina_find_the_message_of_an_error_in_its_detail(path):
    async with serving() as client:
        for response in (await client.post(path, json={"documents": ["a"]}), await client.get(path)):
            assert is_openai_error(response)
            assert response.json()["detail"] == response.json()["error"]["message"]
        others = await client.post("/v1/embeddings", json={})
        assert "detail" not in others.json()


@pytest.mark.parametrize(
    ("texts", "status", "code", "param"),
    [
        (["a", NOT_FINITE], 500, "not_finite", "input[1]"),
        (["a", FAILING], 500, "internal_error", None),
        (["a", "long" * 20], 422, "context_length_exceeded", "input[1]"),
        (["a"] * 1025, 422, "too_many_inputs", "input"),
    ],
    ids=["not finite", "failing", "too long", "too many"],
)
async def test_failures_name_the_field_of_the_request_as_by_openai(texts, status, code, param):
    async with serving(truncate=False) as client:
        response = await client.post("/v1/embeddings", json={"input": texts})
    assert response.status_code == status
    assert is_openai_error(response)
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert "inputs" not in error["message"].replace("--max-request-inputs", "")
    assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")


async def test_unknown_paths_and_methods_have_the_shape_of_openai():
    async with serving() as client:
        for method, path, status in (
            ("GET", "/v1/embeddings", 405),
            ("GET", "/v1", 404),
            ("POST", "/v1/chat/completions", 404),
            ("DELETE", "/v1/models/fake", 405),
            ("GET", "/v1/models/", 404),
            ("GET", "/v2/nothing", 404),
        ):
            response = await client.request(method, path)
            assert (response.status_code, is_openai_error(response)) == (status, True)
            code = "not_found" if status == 404 else "method_not_allowed"
            assert response.json()["error"]["code"] == code


# Refusals of both.


async def test_every_refusal_has_the_shape_of_the_server_that_has_the_route():
    key = {"Authorization": "Bearer " + "k" * 20}
    async with (
        serving(FakeEngine(labels=("a", "b")), max_body_bytes=1000, api_key="k" * 20) as client,
        starting(lambda: iter([])) as loading,
        full_queue(FakeEngine(labels=("a", "b"))) as full,
    ):
        for path, body in (BODIES | OPENAI_BODIES).items():
            answers = {
                401: await client.post(path, json=body),
                413: await client.post(path, content=b"[" * 1001, headers=key),
                409: await client.post(path, json=body, headers=key | {"X-AttnCache-Require-Model": "f" * 8}),
                503: await loading.post(path, json=body),
            }
            if path not in ("/tokenize", "/decode"):
                answers[429] = await full.post(path, json=body)
                assert int(answers[429].headers["Retry-After"]) >= 1
            if path in OPENAI_BODIES:
                wrong = key | {"X-AttnCache-Reuse": "maybe"}
                answers[400] = await client.post(path, json=body, headers=wrong)
            assert [answer.status_code for answer in answers.values()] == list(answers), path
            found = {status: answer.json() for status, answer in answers.items()}
            if path in BODIES:
                assert all(map(is_tei_error, answers.values()))
                assert found[503]["error_type"] == "Unhealthy"
                assert 429 not in found or found[429]["error_type"] == "Overloaded"
                continue
            assert all(map(is_openai_error, answers.values()))
            assert found[401]["error"]["code"] == "invalid_api_key"
            assert answers[401].headers["WWW-Authenticate"].startswith("Bearer")
            error = found[429]["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert found[503]["error"]["type"] == "server_error"
        models = await loading.get("/v1/models")
        assert (models.status_code, is_openai_error(models)) == (503, True)
