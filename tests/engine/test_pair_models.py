"""Rerankers, zero-shot classifiers and guards give the scores of the libraries that publish them."""

import json
from dataclasses import replace
from itertools import product, takewhile

import numpy as np
import pytest
import torch
from core_models import COMPUTING, attention_by, needs_bfloat16, needs_int8, write_json, write_model
from pair_models import (
    CHAT_PADDING,
    GUARD,
    NLI,
    NLI_OF_TWO,
    NLI_REVERSED,
    write_bge_reranker_v2_m3,
    write_deberta_v3,
    write_gte_reranker_modernbert,
    write_ms_marco_minilm,
    write_mxbai_rerank_v2,
    write_qwen3_reranker,
)
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from attncache_core import KeyValueOptions, PrefillEngine, Template, class_scores
from attncache_core.checkpoints.checkpoint import Quantization
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.errors import InvalidInput, NoClassifier, UnsupportedModel
from attncache_core.reuse.kv.blocks import BLOCK_TOKENS
from attncache_core.reuse.mask import ReuseMask
from attncache_core.reuse.plan import no_reuse
from attncache_core.reuse.strategy import ReuseStrategy

# float32 sums in another order, in layers with large weights.
FLOAT32 = 2e-5
QUERY = "where is my parcel"
DOCUMENTS = [
    "the parcel was sent two weeks ago .",
    "",
    "reset the password of my account",
    "我的包裹在哪里？ the link has expired " * 20,
]
CROSS_ENCODERS = {
    "ms-marco-minilm": write_ms_marco_minilm,
    "bge-reranker-v2-m3": write_bge_reranker_v2_m3,
    "mxbai-rerank-v1": write_deberta_v3,
    "gte-reranker-modernbert": write_gte_reranker_modernbert,
}
DEBERTA_WITH_TYPES = {"type_vocab_size": 2, "position_biased_input": True}


def load(folder, **how):
    return PrefillEngine.load(read_checkpoint(folder), dtype="float32", **how)


def cross_encoder(folder, **how):
    # Without a dtype, sentence-transformers computes in that of config.json.
    return CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32}, **how)


@pytest.fixture(scope="module", params=CROSS_ENCODERS)
def published(request, tmp_path_factory):
    """The folder of a cross-encoder, and the scores of sentence-transformers by activation; None: its own."""
    folder = CROSS_ENCODERS[request.param](tmp_path_factory.mktemp("models") / request.param)
    theirs, pairs = cross_encoder(folder, max_length=40), [(QUERY, document) for document in DOCUMENTS]
    activations = {None: None, "identity": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid()}
    return folder, {name: theirs.predict(pairs, activation_fn=made) for name, made in activations.items()}


@pytest.mark.parametrize("computing", COMPUTING)
def test_cross_encoder_scores_pairs_as_sentence_transformers_does(published, computing):
    folder, expected = published
    with attention_by(computing):
        engine = load(folder, max_tokens=40)
        for name, scores in expected.items():
            found = engine.rerank(QUERY, DOCUMENTS, activation=name)
            np.testing.assert_allclose(found, scores, atol=FLOAT32)
        assert engine.rerank(QUERY, []).shape == (0,)
        with pytest.raises(InvalidInput, match="documents must be a list"):
            engine.rerank(QUERY, DOCUMENTS[0])
        with pytest.raises(InvalidInput, match="activation must be sigmoid or identity"):
            engine.rerank(QUERY, DOCUMENTS, activation="tanh")


@pytest.mark.parametrize("changes", [{"type_vocab_size": 2}, DEBERTA_WITH_TYPES], ids=str)
def test_types_of_deberta_reach_its_embeddings(tmp_path, changes):
    folder = write_deberta_v3(tmp_path, **changes)
    expected = cross_encoder(folder).predict([(QUERY, text) for text in DOCUMENTS])
    np.testing.assert_allclose(load(folder).rerank(QUERY, DOCUMENTS), expected, atol=FLOAT32)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    return load(write_ms_marco_minilm(tmp_path_factory.mktemp("minilm")))


def test_a_pair_is_not_the_text_with_the_same_token_ids(minilm):
    (pair,) = minilm.tokenize([("my card", "was stolen")])
    of_pair, of_text = minilm.run(minilm.requests([pair, pair.ids])).outputs[:, 0]
    assert abs(of_pair - of_text) > 1e-2


def test_a_pair_alone_is_the_pair_in_a_batch_with_texts(minilm):
    sequences = minilm.tokenize(["my card", ("my card", "was lost"), "when", ("", "the bank ?")])
    together = minilm.run(minilm.requests(sequences)).outputs
    alone = [minilm.run(minilm.requests([ids])).outputs[0] for ids in sequences]
    np.testing.assert_allclose(together, alone, atol=FLOAT32)


@needs_bfloat16
@needs_int8
def test_sixteen_bit_and_eight_bit_scores_are_near(minilm):
    checkpoint, exact = minilm.checkpoint, minilm.rerank(QUERY, DOCUMENTS)
    half = PrefillEngine.load(checkpoint, dtype="bfloat16").rerank(QUERY, DOCUMENTS)
    quantized = replace(checkpoint, quantization=Quantization.INT8)
    eighth = PrefillEngine.load(quantized, dtype="float32").rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(half, exact, atol=0.1)
    np.testing.assert_allclose(eighth, exact, atol=0.3)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"version": "4.0.1"}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "own.module.Function"}}, "sigmoid"),
    ],
    ids=str,
)
def test_activation_is_the_one_that_config_json_names(tmp_path, config, activation):
    folder = write_ms_marco_minilm(tmp_path, **{"sentence_transformers": None} | config)
    described = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {k: v for k, v in described.items() if v is not None})
    assert read_checkpoint(folder).activation == activation
    expected = cross_encoder(folder).predict([(QUERY, text) for text in DOCUMENTS])
    np.testing.assert_allclose(load(folder).rerank(QUERY, DOCUMENTS), expected, atol=FLOAT32)


def test_activation_that_is_not_supported_is_refused(tmp_path):
    activation = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    folder = write_ms_marco_minilm(tmp_path, sentence_transformers=activation)
    with pytest.raises(UnsupportedModel, match="activation_fn Tanh is not supported"):
        read_checkpoint(folder)


@pytest.mark.parametrize("write", [write_ms_marco_minilm, write_bge_reranker_v2_m3])
def test_cross_encoder_saved_by_sentence_transformers_is_a_classifier(tmp_path, write):
    cross_encoder(write(tmp_path / "published")).save_pretrained(str(tmp_path / "saved"))
    published, saved = (read_checkpoint(tmp_path / name) for name in ("published", "saved"))
    assert (saved.task, saved.activation) == ("classify", published.activation)
    found = load(tmp_path / "saved").rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, load(tmp_path / "published").rerank(QUERY, DOCUMENTS), atol=FLOAT32)


def test_model_without_a_single_class_scores_no_pairs(tmp_path):
    for labels in (None, ["a", "b"]):
        engine = load(write_model(tmp_path / str(labels), labels))
        assert not engine.decisions.scores_pairs
        with pytest.raises(InvalidInput, match="scores no pairs"):
            engine.rerank(QUERY, DOCUMENTS)
    # Its pairs have class logits all the same.
    ids = engine.tokenize([(QUERY, text) for text in DOCUMENTS])
    expected = cross_encoder(tmp_path / str(labels)).predict([(QUERY, text) for text in DOCUMENTS])
    logits = engine.decisions.class_logits(engine.run(engine.requests(ids)).outputs)
    np.testing.assert_allclose(logits, expected, atol=FLOAT32)


# Qwen3-Reranker, as its model card computes scores.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MXBAI = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\nquery: {}\ndocument: {}\nYou are a search relevance expert who evaluates how well "
    "documents match search queries. For each query-document pair, carefully analyze the semantic "
    "relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
    "relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)


@torch.inference_mode()
def last_logits(folder, sequences, names):
    """Return the logits of some tokens behind each sequence, as transformers computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = [tokenizer.convert_tokens_to_ids(name) for name in names]
    return torch.stack([model(torch.tensor([ids])).logits[0, -1, tokens] for ids in sequences])


def qwen3_scores(folder, query, documents, longest, instruction=INSTRUCTION):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}" for text in documents]
    room = longest - len(before) - len(after)
    encoded = tokenizer(texts, truncation="longest_first", max_length=room)["input_ids"]
    logits = last_logits(folder, [[*before, *ids, *after] for ids in encoded], ("no", "yes"))
    return logits.log_softmax(dim=1)[:, 1].exp().numpy()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = write_qwen3_reranker(tmp_path_factory.mktemp("qwen3") / "reranker")
    return read_checkpoint(folder).adapted(
        template=Template.named("qwen3-reranker"), label_logits=True, labels=["no", "yes"]
    )


@pytest.mark.parametrize("longest", [300, 2000])
@pytest.mark.parametrize("instruction", [None, "Find the sender of a parcel."])
def test_qwen3_reranker_scores_as_its_model_card_does(qwen3, longest, instruction):
    engine = PrefillEngine.load(qwen3, dtype="float32", max_tokens=longest)
    found = engine.rerank(QUERY, DOCUMENTS, instruction=instruction)
    expected = qwen3_scores(qwen3.folder, QUERY, DOCUMENTS, longest, instruction or INSTRUCTION)
    np.testing.assert_allclose(found, expected, atol=FLOAT32)
    assert np.ptp(expected) > 0.01
    logits = engine.rerank(QUERY, DOCUMENTS, instruction=instruction, activation="identity")
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_documents_of_a_query_share_instruction_and_query(qwen3):
    engine = PrefillEngine.load(qwen3, dtype="float32", key_values=KeyValueOptions())
    prompt = engine.decisions.pair_prompt()
    expected = qwen3_scores(qwen3.folder, QUERY, DOCUMENTS, 10_000)

    def tokens(query):
        return engine.tokenize([(query, text) for text in DOCUMENTS], prompt=prompt)

    def shared(sequences):
        columns = zip(*sequences, strict=False)
        return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))

    def run(query):
        return engine.run(engine.requests(tokens(query), prompt, engine.decisions.label_tokens))

    first, again, other = run(QUERY), run(QUERY), run("how do I reset it")
    assert first.report.tokens <= first.all_asked_tokens - 3 * shared(tokens(QUERY))
    # What is stored ends at the end of a block.
    assert (again.cached_tokens > shared(tokens(QUERY)) - BLOCK_TOKENS).all()
    instructed = shared([*tokens(QUERY), *tokens("how do I reset it")])
    assert (other.cached_tokens > instructed - BLOCK_TOKENS).all()
    for result in (first, again):
        np.testing.assert_allclose(engine.decisions.pair_scores(result.outputs), expected, atol=FLOAT32)


def test_labels_of_several_tokens_score_pairs_too(qwen3):
    checkpoint = replace(qwen3, labels=("never ever", "always"))
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    assert len(engine.decisions.pair_prompt().sequence_plans) > 1
    labels = engine.decisions.label_tokens
    sequences = engine.tokenize([(QUERY, text) for text in DOCUMENTS], prompt=labels.prompt)
    result = engine.run(engine.requests(sequences, labels.prompt, labels))
    both = class_scores(engine.decisions.label_logits(labels, result.outputs, result.log_probabilities))
    np.testing.assert_allclose(engine.rerank(QUERY, DOCUMENTS), both[:, 1], atol=FLOAT32)


def test_mxbai_rerank_v2_scores_the_text_of_its_template(tmp_path):
    folder = write_mxbai_rerank_v2(tmp_path)
    checkpoint = read_checkpoint(folder).adapted(
        template=Template.named("mxbai-rerank-v2"), label_logits=True, labels=["0", "1"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = [tokenizer(MXBAI.format(QUERY, document))["input_ids"] for document in DOCUMENTS]
    no, yes = last_logits(folder, sequences, ("0", "1")).T.numpy()
    found = PrefillEngine.load(checkpoint, dtype="float32").rerank(QUERY, DOCUMENTS, activation="identity")
    np.testing.assert_allclose(found, yes - no, atol=5 * FLOAT32)


def test_sequence_classification_conversion_of_qwen3_scores_pairs_with_and_without_template(tmp_path):
    folder = write_qwen3_reranker(
        tmp_path,
        architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "LABEL_0"},
        label2id={"LABEL_0": 0},
        pad_token_id=CHAT_PADDING,
    )
    query = f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n"
    documents = [f"<Document>: {text}{SUFFIX}" for text in DOCUMENTS]
    expected = cross_encoder(folder).predict([(query, text) for text in documents])
    np.testing.assert_allclose(load(folder).rerank(query, documents), expected, atol=FLOAT32)
    template = read_checkpoint(folder).adapted(template=Template.named("qwen3-reranker"))
    in_template = PrefillEngine.load(template, dtype="float32").rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(in_template, expected, atol=FLOAT32)


def test_instruction_that_leaves_no_room_is_refused(qwen3):
    engine = PrefillEngine.load(qwen3, dtype="float32", max_tokens=400)
    with pytest.raises(InvalidInput, match="instruction: there is no room left") as refused:
        engine.rerank(QUERY, DOCUMENTS, instruction="find my parcel " * 100)
    assert refused.value.field == "instruction"


def test_single_text_is_refused_in_a_template_of_pairs(qwen3):
    engine = PrefillEngine.load(qwen3, dtype="float32")
    with pytest.raises(InvalidInput, match=r"inputs\[1\] must be a pair") as refused:
        engine.tokenize([(QUERY, "text"), "text"])
    assert refused.value.field == "inputs[1]"


def test_embedding_model_takes_no_template_of_pairs(tmp_path):
    checkpoint = read_checkpoint(write_model(tmp_path))
    with pytest.raises(InvalidInput, match="gives embeddings") as refused:
        checkpoint.adapted(template=Template.named("qwen3-reranker"))
    assert refused.value.field == "template"


def test_decoder_that_sentence_transformers_scores_by_tokens_needs_only_template_and_labels(qwen3, tmp_path):
    theirs = cross_encoder(qwen3.folder)
    theirs.save_pretrained(str(tmp_path))
    saved = read_checkpoint(tmp_path)
    assert saved.task == "label-logits"
    checkpoint = saved.adapted(template=Template.named("qwen3-reranker"), labels=["no", "yes"])
    found = PrefillEngine.load(checkpoint, dtype="float32").rerank(QUERY, DOCUMENTS)
    expected = PrefillEngine.load(qwen3, dtype="float32").rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(found, expected, atol=FLOAT32)


TEXTS = ["where is my parcel ?", "reset the password of my account " * 30, "the shop"]
LABELS = ["delivery", "access", "money"]
ZERO_SHOT = {
    "deberta-three-classes": (write_deberta_v3, NLI),
    "deberta-entailment-last": (write_deberta_v3, NLI_REVERSED),
    "deberta-two-classes": (write_deberta_v3, NLI_OF_TWO),
    "modernbert-two-classes": (write_gte_reranker_modernbert, NLI_OF_TWO),
}


@pytest.mark.parametrize(("write", "classes"), ZERO_SHOT.values(), ids=ZERO_SHOT)
def test_zero_shot_scores_are_those_of_transformers_pipeline(tmp_path, write, classes):
    folder = write(tmp_path, **classes)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=60)
    theirs = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer, device="cpu")
    template, engine = "The customer asks about {}.", load(folder, max_tokens=60)
    for labels, multi_label in product((LABELS, LABELS[:1]), (False, True)):
        asked = {"candidate_labels": labels, "hypothesis_template": template, "multi_label": multi_label}
        expected = [dict(zip(row["labels"], row["scores"], strict=True)) for row in theirs(TEXTS, **asked)]
        choice = engine.decisions.zero_shot(labels, template)
        sequences = engine.tokenize(choice.pairs(TEXTS), prompt=choice.prompt)
        logits = engine.decisions.class_logits(engine.run(engine.requests(sequences, choice.prompt)).outputs)
        found = choice.scores(logits, multi_label)
        assert found.dtype == np.float32
        np.testing.assert_allclose(
            found, [[row[label] for label in labels] for row in expected], atol=FLOAT32
        )


def test_model_without_entailment_takes_no_labels(tmp_path):
    engine = load(write_deberta_v3(tmp_path, **GUARD))
    with pytest.raises(NoClassifier, match="no class named entailment") as refused:
        engine.decisions.zero_shot(LABELS)
    assert refused.value.field == "labels"


def test_one_text_one_label_and_a_repeated_label_are_no_choice(tmp_path):
    decisions = load(write_deberta_v3(tmp_path, **NLI)).decisions
    with pytest.raises(InvalidInput, match="labels must be a list"):
        decisions.zero_shot(LABELS[0])
    with pytest.raises(InvalidInput, match="texts must be a list"):
        decisions.zero_shot(LABELS).pairs("my parcel")
    with pytest.raises(InvalidInput, match=r"labels\[1\] repeats an earlier label"):
        decisions.zero_shot(["money", "money"])
    assert decisions.zero_shot(iter(LABELS)) == decisions.zero_shot(LABELS)


def test_hypothesis_template_without_exactly_one_place_or_without_room_for_the_text_is_refused(tmp_path):
    engine = load(write_deberta_v3(tmp_path, **NLI), max_tokens=40)
    for template in ("no place", "{} and {}", "{query} {document}", "{0}"):
        with pytest.raises(InvalidInput, match="hypothesis_template must hold") as refused:
            engine.decisions.zero_shot(LABELS, template)
        assert refused.value.field == "hypothesis_template"
    choice = engine.decisions.zero_shot(["money", "delivery " * 30])
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: there is no room left"):
        engine.tokenize(choice.pairs(["my parcel"]), prompt=choice.prompt)


@pytest.mark.parametrize("write", [write_deberta_v3, write_gte_reranker_modernbert])
def test_guard_classifies_texts_as_transformers_pipeline_does(tmp_path, write):
    folder = write(tmp_path, **GUARD)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    theirs = pipeline(
        "text-classification",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        top_k=None,
        device="cpu",
    )
    texts = [*DOCUMENTS[:3], "where is my account ?"]
    expected = [{entry["label"]: entry["score"] for entry in found} for found in theirs(texts)]
    engine = load(folder)
    assert engine.decisions.labels == ("BENIGN", "INJECTION", "JAILBREAK")
    scores = class_scores(
        engine.decisions.class_logits(engine.run(engine.requests(engine.tokenize(texts))).outputs)
    )
    np.testing.assert_allclose(
        scores, [[row[label] for label in engine.decisions.labels] for row in expected], atol=FLOAT32
    )


class Asked(ReuseStrategy):
    """A strategy that reuses nothing, and notes for which sequences it might."""

    def __init__(self):
        self.allowed = []

    @property
    def mask(self):
        return ReuseMask(order=(tuple(range(4)),) * 3, reused=(0, 0, 0))

    def plan(self, batch, allowed):
        self.allowed = batch.in_callers_order(allowed).tolist()
        return no_reuse(len(batch.lengths))


def test_pairs_take_no_attention_maps(tmp_path):
    engine = load(write_ms_marco_minilm(tmp_path), strategy=Asked())
    sequences = engine.tokenize(["my card was stolen", ("my card", "was stolen"), "my card"])
    engine.run(engine.requests(sequences))
    assert engine.strategy.allowed == [True, False, True]
