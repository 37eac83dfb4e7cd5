"""The tokenizer's work and memory for a request are limited, and the limits are checked before the work."""

from __future__ import annotations

import tracemalloc

import pytest
from core_decoders import write_llama
from core_models import PLAIN_WORDS, write_json
from hypothesis import given, settings
from hypothesis import strategies as st

from attncache_core.checkpoints.description import read_checkpoint
from attncache_core.checkpoints.template import Template
from attncache_core.errors import InputTooLong, InvalidInput
from attncache_core.text import tokenizer as module
from attncache_core.text.labels import LabelTokens
from attncache_core.text.tokenizer import TextTokenizer

LONGEST = 32768


class Counting:
    """A wrapper of the real tokenizer that records the number of characters of each call."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.given = []

    def encode(self, text, **options):
        self.given.append(len(text))
        return self._tokenizer.encode(text, **options)

    def encode_batch_fast(self, texts, **options):
        self.given.append(sum(map(len, texts)))
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_llama(tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=LONGEST)
    settings = read_checkpoint(folder)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return settings.folder


@pytest.fixture
def tokenizer(folder):
    """A tokenizer with a limit of 32,768 tokens that counts the characters it is given."""
    tokenizer = TextTokenizer(read_checkpoint(folder))
    assert tokenizer.max_tokens == LONGEST
    tokenizer._tokenizer = Counting(tokenizer._tokenizer)
    return tokenizer


def given_to(tokenizer):
    return sum(tokenizer._tokenizer.given)


def test_template_with_too_many_characters_is_refused_before_it_is_tokenised(tokenizer):
    prompt = tokenizer.prompt(Template("my card " * 2500, " is"))
    before = given_to(tokenizer)
    with pytest.raises(InputTooLong, match=r"20003 characters.*256 inputs at most 6250.*shorter") as refused:
        tokenizer.tokenize(["card"] * 256, truncate=True, prompt=prompt, max_total_tokens=100_000)
    assert refused.value.field == "inputs"
    with pytest.raises(InputTooLong) as refused:
        tokenizer.tokenize(["card"], truncate=True, prompt=prompt, max_total_tokens=1000)
    assert refused.value.field == "template"
    with pytest.raises(InvalidInput, match="prompt_name: there is no room left") as refused:
        tokenizer.prompt(Template("my card " * 100_000), field="prompt_name")
    assert refused.value.field == "prompt_name"
    assert given_to(tokenizer) == before
    assert len(tokenizer.tokenize(["card"] * 5, truncate=True, prompt=prompt, max_total_tokens=100_000)) == 5


def test_tokenising_stops_at_the_first_text_that_exceeds_the_limit(tokenizer):
    texts = ["money " * 40_000] * 100  # each has 240,000 characters and more tokens than the model accepts
    with pytest.raises(InputTooLong, match="may have 100000") as refused:
        tokenizer.tokenize(texts, truncate=True, max_total_tokens=100_000)
    assert refused.value.field == "inputs"
    # Each text is tokenised twice, the second time to cut it.
    assert given_to(tokenizer) == 4 * 2 * 240_000


def test_tokenizer_is_given_a_few_texts_at_a_time(tokenizer):
    tokenizer.tokenize(["money " * 1000] * 200, truncate=True)
    assert given_to(tokenizer) == 1_200_000
    assert max(tokenizer._tokenizer.given) <= module._CHARACTERS_AT_ONCE
    tokenizer.tokenize(["card", "money " * 50_000, "card"], truncate=True)
    # The long text stands alone, without its end, and is tokenised a second time to cut it.
    assert tokenizer._tokenizer.given[-4:] == [4, 262_400, 262_400, 4]


@pytest.fixture(scope="module")
def plain(folder):
    return TextTokenizer(read_checkpoint(folder))


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from(PLAIN_WORDS), min_size=1, max_size=12).map(" ".join), max_size=12),
    st.integers(1, 80),
)
def test_texts_have_the_same_tokens_however_many_are_given_at_a_time(plain, texts, characters):
    tokenizer = plain
    expected = [tokenizer.tokenize([text], truncate=True)[0] for text in texts]
    labels = [f"{text} {number}" for number, text in enumerate(texts)]
    template = Template("", "\nanswer:")
    alone = [tokenizer.continuations(template, [label])[0] for label in labels]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHARACTERS_AT_ONCE", characters)
        assert tokenizer.tokenize(texts, truncate=True) == expected
        assert tokenizer.continuations(template, labels) == alone


@pytest.mark.parametrize(
    ("template", "labels", "field", "remedy"),
    [
        (Template("", " my card" * 25_000), [f"label {n}" for n in range(256)], "template", "after {}"),
        (Template("", " my card" * 600), [f"label {n}" for n in range(256)], "template", "fewer"),
        (Template(), [f"{n} " + "account " * 650 for n in range(256)], "labels", "shorter labels"),
        (Template(), ["card", "bank " * 200_000 + "lost"], "labels[1]", "shorten"),
        (Template("", " my card" * 80_000), ["card", "bank"], "template", "shorten"),
    ],
)
def test_labels_with_too_many_characters_are_refused_before_they_are_tokenised(
    tokenizer, template, labels, field, remedy
):
    labels = [label.strip() for label in labels]
    with pytest.raises(InvalidInput) as refused:
        LabelTokens.of(tokenizer, template, labels)
    assert refused.value.field == field
    assert remedy in str(refused.value)
    assert given_to(tokenizer) == 0


def test_labels_of_too_many_tokens_are_refused_before_their_tree_is_built(tokenizer):
    # Each letter is a token. The tree of 40 labels with 50,000 letters would take 260 MB.
    labels = [f"{number}" + "xyz" * 800 for number in range(40)]
    tracemalloc.start()
    with pytest.raises(InputTooLong, match="labels have more than 65536 tokens in total") as refused:
        LabelTokens.of(tokenizer, Template(), labels)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.value.field == "labels"
    assert most < 20e6


def test_the_largest_accepted_labels_take_little_memory(tokenizer):
    labels = [f"{number}" + "xyz" * 540 for number in range(40)]
    tracemalloc.start()
    label_tokens = LabelTokens.of(tokenizer, Template(), labels)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 60_000 < sum(map(len, label_tokens.tokens)) <= 65_536
    assert held < 20e6
    assert most < 50e6
