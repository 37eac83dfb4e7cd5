"""Label scores from token logits equal the scores of Hugging Face's eager decoder in float32."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from core_decoders import VOCABULARY_SIZE, write_decoder_tokenizer, write_llama
from core_models import PLAIN_WORDS, prefill, random_text, write_model, write_sentence_transformer
from core_reference import FLOAT32
from families import write_family
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config

from attncache_core import AttentionDatabase, Outcome, class_scores
from attncache_core.build.builder import build_database
from attncache_core.build.options import BuildOptions, default_budget
from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.corpus import CorpusSentence
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InputTooLong, InvalidInput, NoClassifier, UnsupportedModel
from attncache_core.heads import language
from attncache_core.heads.comparator import Measure
from attncache_core.text.labels import LabelTokens
from attncache_core.text.pairs import truncated_sequences
from attncache_core.text.prompts import Prompt, SequencePlan
from attncache_core.text.tokenizer import TextTokenizer

# Tolerance for sums of a few log-probabilities. The tiny model's language head gives values of 10 to 40, and
# float32 has seven digits.
SUMMED = 2e-4
TEMPLATE = Template("my card: where?\nask: ", "\nanswer:")
# Labels of one token each.
SINGLE = ("bank", "card", "lost")
# " bank" and " card" are one token each. The others are several tokens, and some share a prefix.
SEVERAL = ("bank account lost", "bank account", "bank", "card", "zebra", "bank accounts")


class Oracle:
    """The plain model, which scores one label at a time, each label in its own sequence."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def summed(self, text, label):
        """Return the summed log-probability of a label's tokens after the text in its template."""
        prompt = self.tokenizer(TEMPLATE.around(text))["input_ids"]
        whole = self.tokenizer(TEMPLATE.around(text) + " " + label)["input_ids"]
        assert whole[: len(prompt)] == prompt
        logs = self.model(torch.tensor([whole])).logits[0].log_softmax(dim=1)
        return sum(float(logs[index - 1, whole[index]]) for index in range(len(prompt), len(whole)))

    def scores(self, texts, labels):
        return np.array([[self.summed(text, label) for label in labels] for text in texts])


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    return Oracle(tiny_llama)


def load(folder, labels=(), template=TEMPLATE, **options):
    checkpoint = read_checkpoint(folder).adapted(template=template, label_logits=True, labels=labels)
    return PrefillEngine.load(checkpoint, dtype="float32", **options)


@pytest.fixture(scope="module")
def engine(tiny_llama):
    return load(tiny_llama)


def summed(engine, texts, labels, reuse=False):
    """Return the engine's scores of all labels for all texts, computed in one batch."""
    label_tokens = engine.decisions.labels_in(None, labels)
    sequences = engine.tokenize(texts, prompt=label_tokens.prompt)
    plans = [label_tokens.prompt.sequence_plan(index) for index in range(len(sequences))]
    result = prefill(engine, sequences, reuse=reuse, plans=plans)
    return engine.decisions.label_logits(label_tokens, result.outputs, result.log_probabilities)


def some_texts(count=4):
    random = np.random.default_rng(2)
    return [random_text(random, int(words)) for words in random.integers(1, 9, size=count)]


INTENTS = [
    f"{first} {second} account{end}"
    for first in ("lost", "my", "zebra")
    for second in PLAIN_WORDS[:13]
    for end in ("", " transfer")
][:77]


def distinct_prefixes(sequences):
    return len({tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)})


def test_labels_of_several_tokens_compute_each_distinct_prefix_once(engine):
    """The shape of banking77: 77 labels of several tokens, several texts in a batch."""
    label_tokens = engine.decisions.labels_in(None, INTENTS)
    prompt, texts = label_tokens.prompt, some_texts(3)
    sequences = engine.tokenize(texts, prompt=prompt)
    assert len(sequences) > 30 * len(texts)
    whole = sum(map(len, sequences))
    of_texts = len(sequences) // len(texts)
    of_each = [distinct_prefixes(sequences[at : at + of_texts]) for at in range(0, len(sequences), of_texts)]
    results = []
    for share in (True, False):
        sharing = replace(engine, share_prefixes=share)
        results.append(sharing.run(engine.requests(sequences, prompt, label_tokens)))
    shared, alone = results
    # Texts share the beginning of the template only if this saves enough.
    assert distinct_prefixes(sequences) <= shared.report.tokens <= sum(of_each) < whole / 3
    assert alone.report.tokens == whole
    for at, expected in zip(range(0, len(sequences), of_texts), of_each, strict=True):
        part = slice(at, at + of_texts)
        assert engine.run(engine.requests(sequences[part], prompt, label_tokens)).report.tokens == expected
    np.testing.assert_allclose(shared.outputs, alone.outputs, atol=SUMMED)
    for log_probability, expected in zip(shared.log_probabilities, alone.log_probabilities, strict=True):
        np.testing.assert_allclose(log_probability, expected, atol=SUMMED)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_logits_are_capped_as_the_family_does_and_by_no_key_of_another(tmp_path, family):
    if family == "llama":
        write_llama(tmp_path, final_logit_softcapping=2.0)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
        config = Gemma2Config(
            **sizes, vocab_size=VOCABULARY_SIZE, intermediate_size=64, final_logit_softcapping=2.0
        )
        write_family(tmp_path, config, saved_as=AutoModelForCausalLM)
        write_decoder_tokenizer(tmp_path)
    texts, oracle, engine = some_texts(), Oracle(tmp_path), load(tmp_path)
    expected = oracle.scores(texts, SEVERAL)
    np.testing.assert_allclose(summed(engine, texts, SEVERAL), expected, atol=SUMMED)
    logits, expected = summed(engine, texts, SINGLE), oracle.scores(texts, SINGLE)
    np.testing.assert_allclose(logits - logits[:, :1], expected - expected[:, :1], atol=SUMMED)


labels_of_words = st.lists(
    st.lists(st.sampled_from(PLAIN_WORDS[:6]), min_size=1, max_size=4).map(" ".join),
    min_size=2,
    max_size=12,
    unique=True,
)


@settings(max_examples=12)
@given(labels_of_words, st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_label_has_the_same_score_alone_and_among_any_other_labels(engine, oracle, labels, lengths):
    random = np.random.default_rng(len(labels))
    texts = [random_text(random, words) for words in lengths]
    expected = oracle.scores(texts, labels)
    logits = summed(engine, texts, labels)
    if all(" " not in label for label in labels):
        logits, expected = (scores - scores[:, :1] for scores in (logits, expected))
    np.testing.assert_allclose(logits, expected, atol=SUMMED)


@given(labels_of_words)
def test_every_token_of_every_label_is_read_once_from_the_fewest_possible_sequences(engine, labels):
    label_tokens = engine.decisions.labels_in(None, labels)
    if label_tokens.one_token_each:
        assert [plan.targets for plan in label_tokens.prompt.sequence_plans] == [()]
        return
    prefixes = {tokens[:-1] for tokens in label_tokens.tokens}
    read = [
        (*plan.continuation[: len(plan.continuation) - back], token)
        for plan in label_tokens.prompt.sequence_plans
        for back, token in plan.targets
    ]
    assert sorted(read) == sorted(
        {tokens[: at + 1] for tokens in label_tokens.tokens for at in range(len(tokens))}
    )
    ends = [plan.continuation for plan in label_tokens.prompt.sequence_plans]
    assert len(ends) == len(set(ends))
    for end in ends:
        assert end in prefixes
        assert not any(other != end and other[: len(end)] == end for other in prefixes)


def test_language_head_sees_the_positions_that_are_read_and_no_others(engine, monkeypatch):
    seen, head = [], engine.model.language_head
    normalizers = head._normalizers
    monkeypatch.setattr(head, "_normalizers", lambda x: seen.append(len(x)) or normalizers(x))
    # Three texts, each with three positions: after the text, after " bank" and after " bank account".
    labels, texts = ("bank account lost", "bank account", "card"), ["my card", "my", "the bank was closed"]
    summed(engine, texts, labels)
    assert seen == [3 * 3]
    summed(engine, texts, SINGLE)
    assert seen == [3 * 3]


@pytest.mark.parametrize("most", [1, 1000, 10**9])
def test_logits_are_held_for_a_few_positions_at_a_time(engine, oracle, monkeypatch, most):
    monkeypatch.setattr(language, "_MAX_LOGITS", most)
    monkeypatch.setattr(engine.model.language_head, "_packed", None)  # compiled code holds no logits
    texts = some_texts(2)
    np.testing.assert_allclose(summed(engine, texts, SEVERAL), oracle.scores(texts, SEVERAL), atol=SUMMED)


def test_head_with_a_bias_adds_it(engine):
    head = engine.model.language_head
    linear = torch.nn.Linear(32, 9)
    biased = language.LanguageHead(head._norm, linear)
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = linear(head._norm(hidden))
        np.testing.assert_allclose(
            biased.log_probabilities(hidden, torch.tensor([1, 0]), torch.tensor([3, 8])),
            logits.log_softmax(dim=1)[[1, 0], [3, 8]].numpy(),
            atol=FLOAT32,
        )
        np.testing.assert_allclose(biased.token_logits(head._norm(hidden), [3]), logits[:, [3]], atol=FLOAT32)


@pytest.mark.parametrize(
    "template", [Template(), Template("", ": "), Template("", "\n"), Template("my ", '"')]
)
def test_label_follows_a_space_or_the_templates_own_white_space(tiny_llama, template):
    tokenizer = TextTokenizer(read_checkpoint(tiny_llama))
    if template.suffix == ": ":
        # The space and the label would be one token, but the template already contains the space.
        with pytest.raises(InvalidInput, match="remove the space") as refused:
            tokenizer.continuations(template, ["card"])
        assert refused.value.field == "labels[0]"
        return
    plain = AutoTokenizer.from_pretrained(tiny_llama)
    written = template.around("where") + ("" if template.suffix == "\n" else " ")
    prompt = plain(template.around("where"))["input_ids"]
    for label, continuation in zip(SEVERAL, tokenizer.continuations(template, SEVERAL), strict=True):
        assert [*prompt, *continuation] == plain(written + label)["input_ids"]


def test_label_with_the_same_tokens_as_another_is_refused_with_its_index(tmp_path):
    write_llama(tmp_path)
    tokenizer = TextTokenizer(replace(read_checkpoint(tmp_path), lowercase=True))
    with pytest.raises(InvalidInput, match="same tokens as another label") as refused:
        LabelTokens.of(tokenizer, TEMPLATE, ["bank", "card", "Card"])
    assert refused.value.field == "labels[2]"


def test_tokenizer_that_ends_a_text_with_a_special_token_is_refused(tmp_path):
    write_llama(tmp_path)
    write_decoder_tokenizer(tmp_path, closing=True)
    with pytest.raises(UnsupportedModel, match="ends every text with a special token"):
        load(tmp_path)


def test_text_is_cut_so_that_template_and_label_stay_whole(tiny_llama):
    engine = load(tiny_llama, max_tokens=40)
    label_tokens = engine.decisions.labels_in(None, SEVERAL)
    text = "my card " * 30
    sequences = engine.tokenize([text], prompt=label_tokens.prompt)
    assert max(map(len, sequences)) == 40
    assert truncated_sequences(sequences) == len(sequences)
    ends = [plan.continuation for plan in label_tokens.prompt.sequence_plans]
    plain = AutoTokenizer.from_pretrained(tiny_llama)
    closing = plain(TEMPLATE.suffix, add_special_tokens=False)["input_ids"]
    for ids, end in zip(sequences, ends, strict=True):
        assert tuple(ids[len(ids) - len(end) :]) == end
        assert ids[: len(ids) - len(end)][-len(closing) :] == closing
    with pytest.raises(InputTooLong):
        engine.tokenize([text], truncate=False, prompt=label_tokens.prompt)


@pytest.mark.parametrize(
    ("labels", "room", "field"),
    [(("bank " * 9 + "lost", "card"), 5, "labels"), (("bank lost", "card"), 0, "template")],
)
def test_labels_that_leave_no_room_are_refused(tiny_llama, labels, room, field):
    alone = len(AutoTokenizer.from_pretrained(tiny_llama)(TEMPLATE.around(""))["input_ids"])
    with pytest.raises(InvalidInput, match="no room left for a text") as refused:
        load(tiny_llama, labels, max_tokens=alone + room)
    assert refused.value.field == field


class GivenTokens:
    """A stand-in for a tokenizer that gives each label (a number) the tokens with that index."""

    def __init__(self, tokens):
        self.tokens = tokens

    def continuations(self, _template, labels):
        return [self.tokens[int(label)] for label in labels]

    def prompt(self, template, continuation_tokens):  # noqa: ARG002
        return Prompt(template, (SequencePlan(0),))


def test_memory_for_long_labels_grows_with_their_tokens_and_not_with_the_square():
    random = np.random.default_rng(0)
    tokens = [tuple(random.integers(0, 9, 1500).tolist()) for _ in range(20)]
    tracemalloc.start()
    label_tokens = LabelTokens.of(GivenTokens(tokens), Template(), [str(label) for label in range(20)])
    logs = [np.ones(len(plan.targets), np.float32) for plan in label_tokens.prompt.sequence_plans]
    assert label_tokens.logits(logs).tolist() == [[1500] * 20]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 30,000 tokens. Twenty times the square of a label's tokens would take 360 MB.
    assert most < 40e6


def test_texts_whose_sequences_have_too_many_tokens_are_refused(engine):
    texts = some_texts(3)
    for prompt, field in ((engine.decisions.labels_in(None, SEVERAL).prompt, "labels"), (None, "inputs")):
        sequences = engine.tokenize(texts, prompt=prompt)
        tokens = sum(map(len, sequences))
        assert engine.tokenize(texts, prompt=prompt, max_total_tokens=tokens) == sequences
        with pytest.raises(
            InputTooLong, match=rf"{tokens} tokens.*may have {tokens - 1}: send fewer"
        ) as refused:
            engine.tokenize(texts, prompt=prompt, max_total_tokens=tokens - 1)
        assert refused.value.field == field


def test_outputs_alone_do_not_decide_among_labels_of_several_tokens(tiny_llama):
    engine = load(tiny_llama, SEVERAL)
    with pytest.raises(InvalidInput, match=r"labels of several tokens .* call label_logits") as refused:
        engine.decisions.class_logits(np.zeros((1, 32), np.float32))
    assert type(refused.value) is InvalidInput  # and not NoClassifier: there are labels


def test_own_labels_of_one_token_are_classes_to_agree_on(tiny_llama, oracle):
    engine = load(tiny_llama, SINGLE)
    texts = some_texts()
    assert engine.decisions.labels == SINGLE
    assert default_budget(engine, BuildOptions()).measure is Measure.AGREEMENT
    outputs = prefill(engine, engine.tokenize(texts), reuse=False).outputs
    expected = oracle.scores(texts, SINGLE)
    np.testing.assert_allclose(
        class_scores(engine.decisions.class_logits(outputs)), class_scores(expected), atol=SUMMED
    )
    comparator = engine.decisions.comparator(Measure.AGREEMENT)
    decided = expected.argmax(axis=1)
    assert comparator.fidelity(outputs, outputs[::-1]).tolist() == (decided == decided[::-1]).tolist()
    assert engine.info().labels == list(SINGLE)


def test_own_labels_of_several_tokens_leave_outputs_to_be_compared_as_embeddings(tiny_llama):
    engine = load(tiny_llama, SEVERAL)
    assert engine.decisions.labels is None
    assert engine.info().labels == list(SEVERAL)
    assert default_budget(engine, BuildOptions()).measure is Measure.COSINE
    with pytest.raises(NoClassifier):
        engine.decisions.comparator(Measure.AGREEMENT)
    np.testing.assert_array_equal(
        engine.decisions.labels_in().prompt.sequence_plans,
        engine.decisions.labels_in(TEMPLATE, SEVERAL).prompt.sequence_plans,
    )


def with_database(plain, texts, folder):
    """Return the model with a database of its prompts with these texts."""
    options = BuildOptions(heads="all", threshold=0.0, prototypes=0, training_steps=3)
    build_database(plain, [CorpusSentence(text, text) for text in texts], folder, options)
    database = AttentionDatabase.open(folder)
    return PrefillEngine.load(plain.checkpoint, database=database, dtype="float32")


def test_self_hits_score_as_the_full_model_does(tiny_llama, tmp_path):
    """The database holds records of the prompts alone, from which labels of one token are read."""
    plain = load(tiny_llama, SINGLE)
    random = np.random.default_rng(4)
    texts = sorted({random_text(random, words) for words in np.repeat([2, 3, 4], 12)})
    engine = with_database(plain, texts, tmp_path / "a.db")
    sequences = engine.tokenize(texts[:5])
    result = prefill(engine, sequences)
    assert result.outcomes == (Outcome.HIT,) * 5
    full = summed(plain, texts[:5], SINGLE)
    np.testing.assert_allclose(engine.decisions.class_logits(result.outputs), full, atol=0.05)
    assert (engine.decisions.class_logits(result.outputs).argmax(axis=1) == full.argmax(axis=1)).all()
    # Longer sequences reuse maps of other texts, so their targets are approximate but finite.
    reused, computed = (summed(engine, texts[:3], SEVERAL, reuse=reuse) for reuse in (True, False))
    np.testing.assert_allclose(computed, summed(plain, texts[:3], SEVERAL), atol=SUMMED)
    assert np.isfinite(reused).all()


def test_sequences_that_reuse_and_sequences_that_share_prefixes_keep_their_order(tiny_llama, tmp_path):
    texts = some_texts(24)
    engine = with_database(load(tiny_llama, SINGLE), texts, tmp_path / "a.db")
    several = engine.decisions.labels_in(None, SEVERAL).prompt
    # Sequences with targets, which share prefixes, between sequences without targets, which may reuse maps.
    sequences = engine.tokenize(texts[:4], prompt=several)
    reuse = [index % 3 == 1 for index in range(len(sequences))]
    plans = [None if reused else several.sequence_plan(index) for index, reused in enumerate(reuse)]
    found = prefill(engine, sequences, reuse=reuse, plans=plans)
    assert any(outcome.is_hit for outcome in found.outcomes)
    assert found.report.tokens < sum(map(len, sequences))
    for index, (ids, reused, plan) in enumerate(zip(sequences, reuse, plans, strict=True)):
        alone = prefill(engine, [ids], reuse=reused, plans=[plan])
        assert (found.outcomes[index],) == alone.outcomes
        assert found.finite[index]
        np.testing.assert_allclose(found.similarities[index], alone.similarities[0], atol=FLOAT32)
        np.testing.assert_allclose(found.outputs[index], alone.outputs[0], atol=SUMMED)
        expected = alone.log_probabilities[0] if plan and plan.targets else []
        np.testing.assert_allclose(found.log_probabilities[index], expected, atol=SUMMED)


def test_a_result_has_log_probabilities_where_a_sequence_plan_has_targets(engine):
    label_tokens = engine.decisions.labels_in(None, SEVERAL)
    sequences = [*engine.tokenize(["card"], prompt=label_tokens.prompt), *engine.tokenize(["card"])]
    plans = [*label_tokens.prompt.sequence_plans, *engine.tokenizer.default_prompt.sequence_plans]
    result = prefill(engine, sequences, reuse=False, plans=plans)
    assert [len(part) for part in result.log_probabilities] == [len(plan.targets) for plan in plans]
    assert prefill(engine, sequences, reuse=False).log_probabilities is None


def test_decoder_for_labels_is_read_at_its_last_token(tiny_llama):
    adapted = read_checkpoint(tiny_llama).adapted(label_logits=True)
    assert (adapted.task, adapted.pooling, adapted.normalize) == (
        "label-logits",
        Pooling(("lasttoken",)),
        False,
    )


def test_what_a_model_is_not_served_for_is_refused(engine, tiny_engine):
    with pytest.raises(NoClassifier, match="give labels"):
        engine.decisions.labels_in(TEMPLATE)
    with pytest.raises(NoClassifier):
        engine.decisions.comparator(Measure.AGREEMENT)
    with pytest.raises(InvalidInput, match="load it without task label-logits"):
        engine.embed(["card"])
    with pytest.raises(InvalidInput, match="task label-logits only"):
        tiny_engine.decisions.labels_in(TEMPLATE, SINGLE)


def test_model_that_predicts_no_next_token_is_refused_with_what_helps(tmp_path, tiny_classifier_checkpoint):
    for folder in (write_model(tmp_path / "encoder"), write_llama(tmp_path / "llama", is_causal=False)):
        checkpoint = read_checkpoint(folder).adapted(label_logits=True)
        with pytest.raises(UnsupportedModel, match=r"to later tokens.*without it, give /classify labels"):
            PrefillEngine.load(checkpoint)
    with pytest.raises(InvalidInput, match="classes of its own"):
        tiny_classifier_checkpoint.adapted(label_logits=True)
    with pytest.raises(InvalidInput, match="labels of its own"):
        tiny_classifier_checkpoint.adapted(labels=["a", "b"])


def test_decoder_without_its_head_is_refused(tmp_path):
    folder = write_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match="no weights for lm_head"):
        load(folder)


def test_labels_of_an_embedding_model_are_compared_by_embedding(tmp_path):
    checkpoint = read_checkpoint(write_sentence_transformer(tmp_path)).adapted(labels=["my card", "help"])
    engine = PrefillEngine.load(checkpoint, dtype="float32")
    texts = some_texts()
    cosines = engine.embed(texts) @ engine.embed(["my card", "help"]).T
    assert engine.decisions.labels == ("my card", "help")
    logits = engine.decisions.class_logits(engine.embed(texts))
    np.testing.assert_allclose(class_scores(logits), class_scores(cosines, 0.05), atol=1e-5)
    with pytest.raises(InvalidInput, match="classifier or labels"):
        PrefillEngine.load(checkpoint, classifier=engine.classifier)


@pytest.mark.parametrize("labels", [["one"], ["a", "a"], ["a", ""], "label", [("a", "b"), ("c", "d")]])
def test_labels_that_are_no_choice_are_refused(tiny_llama, labels):
    with pytest.raises(InvalidInput, match="two or more different names"):
        read_checkpoint(tiny_llama).adapted(label_logits=True, labels=labels)
