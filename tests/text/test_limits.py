"""Texts are cut before they are tokenised, and their first tokens stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_models import write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from published_tokenizers import (
    CORPUS,
    write_gemma_tokenizer,
    write_modernbert_tokenizer,
    write_qwen_tokenizer,
    write_xlm_roberta_tokenizer,
)
from tokenizers import Tokenizer

from attncache_core.errors import InputTooLong
from attncache_core.text.limits import max_characters, shortened

WRITERS = {
    "bert": write_tokenizer,
    "qwen": write_qwen_tokenizer,
    "gemma": write_gemma_tokenizer,
    "modernbert": write_modernbert_tokenizer,
    "xlm-roberta": lambda folder: write_xlm_roberta_tokenizer(folder, 512),
}
TOKENS = 12


@pytest.fixture(params=WRITERS, scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    WRITERS[request.param](folder)
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


pieces = st.one_of(
    st.sampled_from(
        [*CORPUS, " ", "\n\n", "a" * 40, "!?" * 20, "中文" * 10, "e\u0301" * 9, "[SEP]", "</s>", "1234"]
    ),
    st.text(max_size=20),
)
texts = st.builds(
    lambda parts, times: "".join(parts) * times, st.lists(pieces, min_size=1, max_size=8), st.integers(1, 60)
)


@settings(max_examples=40)
@given(text=texts)
@example(text="a" * 5000)
@example(text="!?" * 5000)
@example(text="中" * 5000)
@example(text="word " * 1000)
def test_first_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    try:
        part = shortened(tokenizer, text, TOKENS, 0)
    except InputTooLong:
        assert len(text) > max_characters(TOKENS)
        return
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    alone = tokenizer.encode(part, add_special_tokens=False).ids
    assert text.startswith(part)
    assert alone[:TOKENS] == whole[:TOKENS]
    assert len(alone) > TOKENS or part == text


def test_work_is_bounded_by_tokens_and_not_by_the_text(tokenizer: Tokenizer) -> None:
    part = shortened(tokenizer, "!? " * 10**6, TOKENS, 0)
    assert len(part) < 1000


def test_long_text_of_few_tokens_is_refused_by_its_field(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputTooLong) as refused:
        shortened(_FewTokens(tokenizer), "a" * 10**6, TOKENS, 3)  # type: ignore[arg-type]
    assert refused.value.field == "inputs[3]"
    longest = "a" * max_characters(TOKENS)
    assert shortened(_FewTokens(tokenizer), longest, TOKENS, 3) == longest  # type: ignore[arg-type]
    with pytest.raises(InputTooLong):
        shortened(_FewTokens(tokenizer), longest + "a", TOKENS, 3)  # type: ignore[arg-type]


class _FewTokens:
    """A tokenizer that makes one token of any text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, _text: str, *, add_special_tokens: bool) -> object:
        return self._tokenizer.encode("a", add_special_tokens=add_special_tokens)
