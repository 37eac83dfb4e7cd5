"""Templates: parsing, truncation of the text inside a template, and exclusion of the prompt from pooling."""

from pathlib import Path

import numpy as np
import pytest
from core_decoders import write_decoder_tokenizer, write_llama
from core_models import PLAIN_WORDS, prefill, random_text, write_modules, write_sentence_transformer
from core_reference import FLOAT32
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from attncache_core.checkpoints.checkpoint import Pooling
from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template, characters_of
from attncache_core.engine.prefill import PrefillEngine
from attncache_core.errors import InputTooLong, InvalidInput
from attncache_core.text.tokenizer import TextTokenizer

ONE_WORD = Template('This sentence: "', '" means in one word:')
PROMPTS = {"prompts": {"ask": "query: my", "find": "the ", "none": ""}, "default_prompt_name": "ask"}


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return read_checkpoint(tiny_llama)


@pytest.fixture(scope="module")
def published(tiny_checkpoint, llama):
    """The models with their tokenizers by transformers, which are slow to load."""
    checkpoints = {"tiny": tiny_checkpoint, "llama": llama}
    return {name: (made, AutoTokenizer.from_pretrained(made.folder)) for name, made in checkpoints.items()}


def test_template_is_the_text_before_and_after_the_placeholder():
    template = Template.parse("Review: {}\nSentiment:")
    assert template == Template("Review: ", "\nSentiment:")
    assert template.around("good {}") == "Review: good {}\nSentiment:"
    assert str(template) == "Review: {}\nSentiment:"


def test_template_of_pairs_is_the_text_around_query_and_document():
    template = Template.parse("Find {instruction:answers}.\nQ: {query}\nD: {document}\nA:")
    assert template.is_for_pairs
    assert template.around(("who", "me {}")) == "Find answers.\nQ: who\nD: me {}\nA:"
    assert template.parts(("who", "me")) == ("Find answers.\nQ: who\nD: ", "me", "\nA:")
    assert template.characters == len(template.around(("", "")))
    assert characters_of(("who", "me")) == 5
    assert Template.parse(str(template)) == template
    other = template.instructed("a friend")
    assert other.around(("who", "me")) == "Find a friend.\nQ: who\nD: me\nA:"
    assert other.instructed("answers") == template
    with pytest.raises(InvalidInput, match="only by a template that holds") as refused:
        Template.parse("{query} {document}").instructed("friends")
    assert refused.value.field == "instruction"


MISPLACED = ("{instruction:a} {document}", "{document} {instruction:a}")
ONCE = r"must hold \{\}, .*, exactly once"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        *(
            (written, ONCE)
            for written in (
                *("", "no place", "{ }", "{text}", "{} or {}"),
                *("{} {query}", "{document} {}", "{} {query} {document}"),
            )
        ),
        ("{document} {query}", "in front of"),
        ("{query}", "exactly once"),
        ("{query} {document} {document}", "exactly once"),
        ("{instruction:a} {instruction:b} {query} {document}", "at most once"),
        *((written, "only in front of") for written in ("{instruction:a} {}", "{} {instruction:a}")),
        *((f"{{query}} {behind}", "only in front of") for behind in MISPLACED),
    ],
)
def test_template_that_does_not_hold_each_placeholder_once_is_refused(written, reason):
    with pytest.raises(InvalidInput, match=reason) as refused:
        Template.parse(written)
    assert refused.value.field == "template"


def test_only_the_document_is_cut_in_a_template_of_pairs(llama):
    template = Template.parse('my "{query}" is: {document} or not')
    tokenizer = TextTokenizer(llama.adapted(template=template, label_logits=True), 60)
    query, document = "card " * 8, "money " * 60
    whole = AutoTokenizer.from_pretrained(llama.folder)(template.around((query, document)))["input_ids"]
    (ids,) = tokenizer.tokenize([(query, document)], truncate=True)
    assert len(ids) == 60
    assert any(whole[:at] + whole[at + len(whole) - 60 :] == ids for at in range(61))
    with pytest.raises(InputTooLong, match="more than 60 tokens"):
        tokenizer.tokenize([("my", "card"), (query, document)], truncate=False)
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: the query leaves no room") as refused:
        tokenizer.tokenize([("my", "card"), ("card " * 80, "money")], truncate=True)
    assert refused.value.field == "inputs[1]"


def test_templates_of_this_package_are_read_by_name(tmp_path, monkeypatch):
    for name in ("qwen3-reranker", "mxbai-rerank-v2"):
        assert Template.read(Path(name)) == Template.named(name)
        assert Template.named(name).is_for_pairs
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-reranker").write_text("mine: {}")
    assert Template.read(Path("qwen3-reranker")) == Template("mine: ")
    with pytest.raises(InvalidInput, match="mxbai-rerank-v2, qwen3-reranker"):
        Template.read(Path("qwen4-reranker"))
    with pytest.raises(InvalidInput, match="mxbai-rerank-v2, qwen3-reranker"):
        Template.named("../templates/qwen3-reranker")


def test_front_of_a_template_of_pairs_ends_before_the_query(llama):
    template = Template.parse("the bank: {query}, {document}")
    tokenizer = TextTokenizer(llama)
    (query,) = tokenizer.tokenize([("my", "card")], truncate=True, prompt=tokenizer.prompt(template))
    front = tokenizer.front(template)
    assert query[: len(front)] == front
    assert 3 < len(front) < len(query) - 2


def test_fingerprint_covers_the_text_between_query_and_document(llama):
    prints = {
        llama.adapted(template=template, label_logits=True).embedding_fingerprint()
        for template in (Template("a", "b"), Template("a", "b", ""), Template("a", "b", "c"))
    }
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        (b"A: {}\nB:", "\nB:"),
        (b"A: {}\nB:\n", "\nB:"),
        (b"A: {}\r\nB:\r\n", "\r\nB:"),
        (b"A: {}\nB:\n\n", "\nB:\n"),
        ("A: {}\nß".encode(), "\nß"),
    ],
)
def test_line_break_at_the_end_of_the_file_is_not_part_of_the_template(tmp_path, content, suffix):
    (tmp_path / "template.txt").write_bytes(content)
    assert Template.read(tmp_path / "template.txt") == Template("A: ", suffix)


def test_missing_file_and_file_that_is_not_utf_8_are_refused_with_their_names(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"{} \xff")
    for name in ("absent.txt", "latin.txt"):
        with pytest.raises(InvalidInput, match=rf"{name} cannot be read"):
            Template.read(tmp_path / name)


# Some tokenizers merge a space, a quote or a line break next to the text into a token of the text.
templates = st.builds(
    Template,
    st.sampled_from(["", "my ", 'the "', "query: my\n"]),
    st.sampled_from(["", '" is:', "\nis:", " is"]),
)
texts_of_words = st.lists(st.sampled_from([*PLAIN_WORDS, "ß", " "]), max_size=40).map(" ".join)


@settings(max_examples=40)
@given(templates, texts_of_words, st.integers(24, 60), st.sampled_from(["tiny", "llama"]))
def test_cut_text_keeps_its_first_tokens_and_its_whole_template(published, template, text, longest, model):
    checkpoint, theirs = published[model]
    whole = theirs(template.around(text))["input_ids"]
    (ids,) = TextTokenizer(checkpoint.adapted(template=template), longest).tokenize([text], truncate=True)
    gone = max(0, len(whole) - longest)
    assert len(ids) == len(whole) - gone
    # One run of tokens is missing. The suffix and the closing token follow this run.
    closing = len(theirs(template.suffix)["input_ids"]) - 1
    kept = [at for at in range(len(ids) + 1) if whole[:at] + whole[at + gone :] == ids]
    assert kept
    if gone:
        assert min(len(ids) - at for at in kept) <= closing <= max(len(ids) - at for at in kept) + 1


def test_template_that_leaves_no_room_is_refused_before_any_text(llama):
    checkpoint = llama.adapted(template=ONE_WORD)
    alone = len(AutoTokenizer.from_pretrained(llama.folder)(ONE_WORD.around(""))["input_ids"])
    TextTokenizer(checkpoint, alone + 1)
    with pytest.raises(
        InvalidInput, match=f"template: there is no room left for a text within {alone} tokens"
    ):
        TextTokenizer(checkpoint, alone)


def theirs(checkpoint, texts, **how):
    return SentenceTransformer(str(checkpoint.folder), device="cpu").encode(texts, batch_size=1, **how)


def some_texts():
    random = np.random.default_rng(5)
    return [random_text(random, words) for words in (2, 3, 5, 7, 20)]


@pytest.mark.parametrize(
    ("mode", "include_prompt"), [("lasttoken", True), ("mean", False), ("weightedmean", False)]
)
def test_decoders_embeddings_are_those_of_sentence_transformers_for_every_prompt(
    tmp_path, mode, include_prompt
):
    folder = write_llama(tmp_path)
    prompts = {**PROMPTS, "prompts": {**PROMPTS["prompts"], "closed": "the [SEP]"}}
    write_modules(folder, {"pooling_mode": mode, "include_prompt": include_prompt}, prompts=prompts)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    texts, published = some_texts(), SentenceTransformer(str(folder), device="cpu")
    for name in ("ask", "find", "none", "closed", None):
        expected = published.encode(texts, batch_size=1, prompt_name=name)
        np.testing.assert_allclose(engine.embed(texts, prompt_name=name), expected, atol=FLOAT32)


@pytest.mark.parametrize("mode", [None, "lasttoken"])
def test_plain_decoder_has_mean_pooling_or_the_given_pooling(tmp_path, llama, mode):
    """sentence-transformers gets the same template in the text and the same pooling in its pooling folder."""
    engine = PrefillEngine.load(llama.adapted(template=ONE_WORD, pooling=mode), dtype="float32")
    write_modules(write_llama(tmp_path), {"pooling_mode": mode or "mean"}, normalize=False)
    texts = some_texts()
    expected = theirs(read_checkpoint(tmp_path), [ONE_WORD.around(text) for text in texts])
    np.testing.assert_allclose(engine.embed(texts, normalize=False), expected, atol=FLOAT32)


def test_each_sequence_of_a_batch_leaves_its_own_prompt_out_of_the_pooling(tmp_path):
    folder = write_sentence_transformer(
        tmp_path, {"pooling_mode": "mean", "include_prompt": False}, prompts=PROMPTS
    )
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    prompts = [
        engine.tokenizer.default_prompt,
        engine.tokenizer.named_prompt("find"),
        engine.tokenizer.named_prompt("none"),
    ]
    sequences = [engine.tokenize(["card lost"], prompt=prompt)[0] for prompt in prompts]
    # Sequences of equal length are pooled together.
    sequences[2] += sequences[0][: len(sequences[0]) - len(sequences[2])]
    sequences[1] += sequences[0][: len(sequences[0]) - len(sequences[1])]
    plans = [prompt.sequence_plans[0] for prompt in prompts]
    together = prefill(engine, sequences, reuse=False, plans=plans).outputs
    alone = [
        prefill(engine, [ids], reuse=False, plans=[plan]).outputs[0]
        for ids, plan in zip(sequences, plans, strict=True)
    ]
    np.testing.assert_allclose(together, alone, atol=FLOAT32)
    default = prefill(engine, sequences, reuse=False).outputs
    np.testing.assert_allclose(default[0], together[0], atol=FLOAT32)
    assert abs(default[1:] - together[1:]).max(axis=1).min() > 0.01


def test_text_that_adds_no_token_to_its_prompt_has_a_finite_embedding(tmp_path):
    folder = write_llama(tmp_path)
    write_modules(folder, {"pooling_mode": "mean", "include_prompt": False}, prompts=PROMPTS)
    engine = PrefillEngine.load(read_checkpoint(folder), dtype="float32")
    assert np.isfinite(engine.embed([""])).all()


def test_unknown_prompt_name_is_refused_with_the_known_names(tiny_engine, tmp_path):
    engine = PrefillEngine.load(read_checkpoint(write_sentence_transformer(tmp_path, prompts=PROMPTS)))
    with pytest.raises(InvalidInput, match="its prompts are ask, find, none") as refused:
        engine.embed(["card"], prompt_name="zanzibar")
    assert refused.value.field == "prompt_name"
    assert "zanzibar" not in str(refused.value)
    with pytest.raises(InvalidInput, match="it has no prompts"):
        tiny_engine.embed(["card"], prompt_name="ask")


def test_template_and_pooling_change_the_embedding_fingerprint_but_not_the_map_fingerprint(
    llama, tiny_classifier_checkpoint
):
    checkpoints = [
        llama,
        llama.adapted(template=ONE_WORD),
        llama.adapted(template=Template(ONE_WORD.prefix)),
        llama.adapted(pooling="lasttoken"),
    ]
    assert len({checkpoint.embedding_fingerprint() for checkpoint in checkpoints}) == 4
    assert len({checkpoint.fingerprint() for checkpoint in checkpoints}) == 1
    assert llama.adapted() == llama
    assert checkpoints[3].pooling == Pooling(("lasttoken",))
    with pytest.raises(InvalidInput, match="pooling is for embeddings"):
        tiny_classifier_checkpoint.adapted(pooling="mean")


@pytest.fixture(scope="module")
def tokenizer(llama):
    return TextTokenizer(llama)


@pytest.mark.parametrize("prefix", ["the bank: ", "the bank:", "ask\n", "\n\n", 'This "'])
@settings(max_examples=30)
@given(text=st.lists(st.sampled_from([*PLAIN_WORDS, "zebra", "7", "("]), min_size=1).map(" ".join))
def test_front_of_a_template_begins_every_text_in_it(tokenizer, prefix, text):
    template = Template(prefix, " means")
    front = tokenizer.front(template)
    assert (
        tokenizer.tokenize([text], truncate=True, prompt=tokenizer.prompt(template))[0][: len(front)] == front
    )
    # The first token <s>, and all tokens of the prefix but one that may span its end.
    assert len(front) >= max(1, len(tokenizer.tokenize([prefix], truncate=True)[0]) - 1)


def test_front_does_not_hold_the_special_token_at_the_end(tmp_path):
    folder = write_llama(tmp_path)
    write_decoder_tokenizer(folder, closing=True)
    tokenizer = TextTokenizer(read_checkpoint(folder))
    *prefix, closing = tokenizer.tokenize(["the bank:"], truncate=True)[0]
    assert tokenizer.front(Template("the bank:")) == prefix
    assert closing not in prefix
    with pytest.raises(InvalidInput, match=r"no text in front of \{\}") as refused:
        tokenizer.front(Template("", " means"))
    assert refused.value.field == "template"
