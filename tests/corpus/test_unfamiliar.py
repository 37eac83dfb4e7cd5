"""The generated unfamiliar texts are the same on every machine, of many kinds, and exist for any corpus."""

import hashlib
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from attncache_core.corpus import default_corpus, generate_corpus, unfamiliar, unfamiliar_texts
from attncache_core.corpus.unfamiliar import COMMON_WORDS, FITTED, MEASURED, MEASURED_PROSE, PROSE

ROOT = Path(__file__).parents[2]
KINDS = [*FITTED, *MEASURED]
SHORT = ("few_words", "short_questions", "short_remarks", "replies")
WORDS_OF_THE_CORPUS = (
    *("common_words", "short_words", "few_words", "begun_with_repetition"),
    *("interrupted", "stuttered", "interleaved", "words_sorted", "words_doubled", "parts_joined"),
)


@pytest.fixture(scope="module")
def corpus():
    return [sentence.text for sentence in default_corpus()]


@pytest.fixture(scope="module")
def texts(corpus):
    return unfamiliar_texts(corpus)


def by_kind(texts):
    kinds = defaultdict(list)
    for text in texts:
        kinds[text.kind].append(text.text)
    return kinds


def test_every_python_version_chooses_the_same_texts():
    corpus = ["Where is my parcel?", "i lost the red card two days ago", "wie geht es dir heute"]
    texts = "\n".join(f"{text.kind}\t{text.text}" for text in unfamiliar_texts(corpus, per_kind=20))
    # If no kind and no line of unfamiliar.txt changed, Python or the machine chose other texts.
    assert hashlib.sha256(texts.encode()).hexdigest() == (
        "af29c03f2fc6c57bbb87e99e7c96798c2604858e079623a62e543732506f5cd8"
    )


def test_another_seed_makes_other_texts(corpus, texts):
    others = {text.text for text in unfamiliar_texts(corpus, seed=1)}
    assert sum(text.text in others for text in texts if text.kind == "hex_hashes") == 0


def test_no_text_is_blank_occurs_twice_or_is_in_the_corpus(corpus, texts):
    distinct = {text.text for text in texts}
    assert len(distinct) == len(texts)
    assert not distinct & set(corpus)
    assert all(text == text.strip() != "" for text in distinct)


def test_kinds_for_fitting_and_for_measuring_are_disjoint_and_at_least_16_each(texts):
    assert not FITTED.keys() & MEASURED.keys()
    assert min(len(FITTED), len(MEASURED)) >= 16
    assert {text.kind for text in texts if text.fitted} == FITTED.keys()
    assert {text.kind for text in texts if not text.fitted} == MEASURED.keys()
    assert list(by_kind(texts)) == KINDS


def test_most_fitted_kinds_are_english_of_many_subjects_and_as_long_as_real_sentences(texts):
    assert len(PROSE) > len(FITTED) / 2
    assert set(MEASURED_PROSE) <= set(MEASURED)
    words = [len(text.text.split()) for text in texts if text.kind in PROSE]
    assert 12 <= np.median(words) <= 30
    assert min(words) <= 3


@pytest.fixture(scope="module")
def tokenizer(default_checkpoint):
    tokenizer = Tokenizer.from_file(str(default_checkpoint.folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def test_every_kind_has_40_texts_of_mixed_lengths_and_most_kinds_of_5_to_35_tokens(texts, tokenizer):
    for kind, of_kind in by_kind(texts).items():
        encoded = tokenizer.encode_batch(of_kind, add_special_tokens=False)
        lengths = np.sort([len(text.ids) for text in encoded])
        assert len(lengths) == 40, kind
        assert np.mean((lengths >= 5) & (lengths <= 35)) > 0.5 or kind in SHORT, kind
        assert lengths[-1] <= (8 if kind in SHORT else 128), kind
        assert lengths[30] >= 1.3 * lengths[10], kind
        # Texts in other scripts share the token for unknown characters, so some have equal tokens.
        assert len({tuple(text.ids) for text in encoded}) >= 30, kind


def test_kinds_of_unusual_composition_are_what_their_names_say(corpus, texts):
    kinds, known = by_kind(texts), {word for text in corpus for word in text.split()}
    for kind in WORDS_OF_THE_CORPUS:
        for text in kinds[kind]:
            assert set(text.split()[:-1]) <= known, kind  # a long text is cut, maybe within a word
    assert {len(text.split()) for text in kinds["few_words"]} == {2, 3, 4, 5}
    assert max(len(word) for text in kinds["short_words"] for word in text.split()) == 3
    counts = Counter(word for text in corpus for word in text.split())
    frequent = {word for word, _ in counts.most_common(200)}
    share = np.mean([word in frequent for text in kinds["common_words"] for word in text.split()])
    assert share > 0.9
    assert all(text.split() == sorted(text.split()) for text in kinds["words_sorted"])
    common = {word.lower() for words in COMMON_WORDS.values() for word in words}
    for text in kinds["short_questions"] + kinds["short_remarks"] + kinds["common_sentences"]:
        assert {word.lower() for word in text.strip("?.!").split()} <= common
    for text in kinds["words_doubled"]:
        words = text.split()
        assert len(set(words)) <= (len(words) + 1) / 2
    for text in kinds["punctuated"]:
        without = re.sub(r"[,;.]| [-/](?= |$)", "", text)
        assert any(re.sub(r"[,;.]| [-/](?= |$)", "", each).startswith(without) for each in corpus)
    repeated = [max(Counter(text.split()).values()) for text in kinds["begun_with_repetition"]]
    assert np.mean(np.array(repeated) >= 3) > 0.5


def test_every_heading_of_the_file_is_a_kind_of_at_least_10_templates():
    file = ROOT / "attncache_core/corpus/unfamiliar.txt"
    sources = {sentence.source for sentence in generate_corpus(file.read_text(encoding="utf-8"), slots="")}
    templates = Counter(source.rpartition("-")[0] for source in sources)
    assert templates.keys() <= set(KINDS)
    assert all(count >= 10 for kind, count in templates.items() if kind != "emoji")


def test_error_in_the_file_is_reported_with_its_name_and_line(tmp_path, monkeypatch):
    (tmp_path / "unfamiliar.txt").write_text("# german\nWo ist {der Bus", encoding="utf-8")
    monkeypatch.setattr(unfamiliar.resources, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=r"^unfamiliar\.txt:2: a brace"):
        unfamiliar._written_texts.__wrapped__()  # without the cache


def test_signs_of_the_file_are_replaced(texts):
    assert not any(sign in text.text for text in texts for sign in "‹›¶")
    assert {text.text for text in texts if text.kind == "stack_traces" and "\n" in text.text}
    digits = Counter("".join(by_kind(texts)["sums"]))
    assert min(digits[digit] for digit in "0123456789") > 0


def test_kind_with_fewer_texts_gives_fewer():
    kinds = by_kind(unfamiliar_texts(["lost card"], per_kind=300))
    assert 20 <= len(kinds["chinese"]) < 300
    assert len(kinds["words_shuffled"]) == 1
    assert len(kinds["hex_hashes"]) == 300


def test_text_that_is_in_the_corpus_is_left_out(corpus, texts):
    german = by_kind(texts)["german"]
    recorded = [f"  {german[0]}\n", *german[1:]]
    others = by_kind(unfamiliar_texts(corpus + recorded))["german"]
    assert others
    assert not set(others) & set(german)


@pytest.mark.parametrize(
    "corpus", [[], [""], [" ", "\n\t"], ["hi"], ["hi", "lost card"], ["我的包裹在哪里"], ["x" * 100_000] * 3]
)
def test_tiny_and_odd_corpora_still_give_every_kind_that_is_not_made_from_the_corpus(corpus):
    kinds = by_kind(unfamiliar_texts(corpus))
    assert sum(len(texts) == 40 for texts in kinds.values()) >= 25


@given(st.lists(st.text(max_size=60), max_size=4), st.integers(0, 3), st.integers())
def test_any_corpus_gives_distinct_texts_that_are_not_in_it(corpus, per_kind, seed):
    texts = unfamiliar_texts(corpus, per_kind, seed)
    distinct = {text.text for text in texts}
    assert len(distinct) == len(texts)
    assert not distinct & {"", *corpus}
    assert all(len(of_kind) <= per_kind for of_kind in by_kind(texts).values())
